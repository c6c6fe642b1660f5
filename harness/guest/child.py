"""The forked child in a sandbox: becomes the rollout's interpreter, loads its entry point, runs it once."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import os
import site
import socket
import sys
import time
import traceback
import types
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

from . import control, rollout
from .failures import error_info, flush, say
from .workflow import exited, run_workflow

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PR_SET_DUMPABLE = 4


def main(connection: socket.socket, load: dict[str, Any], root: str, port: int) -> NoReturn:
    """Serve one ``load`` and at most one ``run``, then end the process, whatever threads and tasks the rollout left.

    The supervisor calls this right after the fork, with descriptors, limits and session in order. ``connection``, a
    blocking socket, carries ``control`` messages: ``loaded`` and ``ended`` out, ``run`` in.

    :param load: the ``load`` message; of the keys of its own, ``proxy`` asks for the proxy variables.
    :param port: the loopback port where model calls go.
    """
    status = 1
    try:
        os.register_at_fork(after_in_child=connection.close)  # only this process speaks for the rollout
        _make_ordinary()
        _become_environment(load, Path(root), port)
        status = _serve(connection, load, Path(root), port)
    except ConnectionError:
        pass  # the supervisor is gone
    except BaseException:
        traceback.print_exc()
    finally:
        flush()
        os._exit(status)


def _serve(connection: socket.socket, load: dict[str, Any], root: Path, port: int) -> int:
    started = time.monotonic()
    gc.disable()  # imports make no garbage, and looking for it takes a tenth of their time
    try:
        wiring = rollout.load(root / "rollout", load["entrypoint"])
    except rollout.LoadError as exc:
        loaded = {"ok": False, "sdk": "", "workflow": None, "grader": None, "error": exc.error}
        connection.sendall(control.encode({"type": "loaded", **loaded, "import_s": time.monotonic() - started}))
        return 0
    gc.freeze()
    gc.enable()
    loaded = {"ok": True, "error": None, **wiring.names()}
    connection.sendall(control.encode({"type": "loaded", **loaded, "import_s": time.monotonic() - started}))

    message = control.receive(connection)
    if message is None:
        return 0
    rollout_id = message["rollout_id"]
    url = f"http://127.0.0.1:{port}/v1/rollouts/{quote(rollout_id, safe='')}"
    os.environ.update(OSMOSIS_CHAT_COMPLETIONS_URL=url, OSMOSIS_ROLLOUT_ID=rollout_id)
    started = time.monotonic()
    try:
        # Not closed: closing waits for the tasks and threads that the rollout left.
        ended = asyncio.Runner(debug=False).run(
            run_workflow(
                wiring,
                prompt=message["prompt"],
                metadata=message["metadata"],
                artifacts_dir=_artifacts_dir(root),
                rollout_id=rollout_id,
                url=url,
                token=load["token"],
                timeout_s=message["timeout_s"],
            )
        )
    except SystemExit as exc:  # raised in a task of its own
        ended = {**exited(exc), "agent_s": time.monotonic() - started}
    except BaseException as exc:
        ended = {"how": "raised", "error": error_info(exc), "agent_s": time.monotonic() - started}
    flush()
    connection.sendall(_bounded({"type": "ended", **ended}))
    return 0


def _bounded(ended: dict[str, Any]) -> bytes:
    """The message without what makes it too large: first the trajectory's copy of the messages, then the success."""
    for dropped in ((), ("trajectory_messages",), ("trajectory_messages", "messages", "metrics", "extra_fields")):
        for sample in ended.get("samples", ()):
            sample["data"].update({name: [] if name == "messages" else {} for name in dropped})
            if dropped:
                sample["data"]["trajectory_messages"] = None
        if "messages" in dropped:
            error = error_info(
                ValueError(f"the workflow's sample is too large: over {control.MAX_MESSAGE} bytes as JSON")
            )
            ended.update(how="raised", error=error)
        try:
            return control.encode(ended)
        except ValueError as exc:
            say(f"the sample is cut down: {exc}")
    raise AssertionError("a message of bounded parts is too large")


def _artifacts_dir(root: Path) -> Path | None:
    folder = root / "artifacts"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def _make_ordinary() -> None:
    with contextlib.suppress(OSError, AttributeError):
        # The supervisor hides its memory; the workflow's own process must see /proc/self. And it is the one to kill.
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
        Path("/proc/self/oom_score_adj").write_text("1000")


def _become_environment(load: dict[str, Any], root: Path, port: int) -> None:
    """The supervisor runs isolated and without ``site``; the rollout sees what its own ``bin/python`` would show it."""
    prefix = Path(sys.executable).parent.parent
    home, tmp = root / "home", root / "tmp"
    home.mkdir(exist_ok=True)
    given: dict[str, str] = load["env"]
    proxy = f"http://127.0.0.1:{port}"
    variables = {
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "TMPDIR": str(tmp) if tmp.is_dir() else "/tmp",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        **given,
        "PATH": f"{prefix / 'bin'}:{given.get('PATH', _PATH)}",
        "VIRTUAL_ENV": str(prefix),
        "OSMOSIS_CHAT_COMPLETIONS_URL": f"{proxy}/v1",
        "OSMOSIS_API_KEY": load["token"],
        "OPENAI_BASE_URL": f"{proxy}/v1",
        "OPENAI_API_KEY": load["token"],
    }
    if load.get("proxy"):
        variables |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), proxy)
        variables |= dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
    os.environ.clear()
    os.environ.update(variables)
    os.umask(0o022)

    lib = str(Path(__file__).parent.parent)
    sys.path[:] = [path for path in sys.path if path != lib]
    site.main()  # prefixes, site-packages and .pth files; -S had left them out
    sys.path[:0] = [path for path in given.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.dont_write_bytecode = True  # one run, one process: nothing would read it
    # Interpreters that the rollout starts itself (multiprocessing) take their flags from here.
    flags = {name: value for name in dir(sys.flags) if isinstance(value := getattr(sys.flags, name), int)}
    flags |= {"isolated": 0, "no_site": 0, "ignore_environment": 0, "safe_path": False}
    sys.flags = types.SimpleNamespace(**flags)  # type: ignore[assignment]

    sys.stdin = _line_buffered(0, "r")
    sys.stdout = sys.__stdout__ = _line_buffered(1, "w")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _line_buffered(2, "w")  # type: ignore[misc]
    faulthandler.enable(2)


def _line_buffered(descriptor: int, mode: str) -> Any:
    """Text that nothing a rollout prints can break."""
    return open(descriptor, mode, buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
