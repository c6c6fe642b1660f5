"""The worker's own program: loads the rollout and grades. Standard library and the rollout's SDK only.

Run by path in the rollout's environment: ``python worker.py LIB FD FOLDER ENTRYPOINT``, where LIB holds the guest's
modules and FD is the socket to the pool.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import importlib.util
import math
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.guest import control, failures, rollout, samples

_GOODBYE_S = 1.0
_hung_up = threading.Event()


def main() -> None:
    lib, descriptor, folder, entrypoint = sys.argv[1:]
    sock = socket.socket(fileno=int(descriptor))
    sock.set_inheritable(False)
    os.register_at_fork(after_in_child=sock.close)
    atexit.register(_kill_group, os.getpid())  # registered first, runs last
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _import_guest(Path(lib))
    try:
        wiring = rollout.load(Path(folder), entrypoint)
    except rollout.LoadError as exc:
        _send(sock, {"ok": False, "error": exc.error})
        return
    _send(sock, {"ok": True, "info": wiring.names()})
    asyncio.run(_serve(sock, wiring))


def _import_guest(lib: Path) -> None:
    """The guest's modules as ``harness_guest``, as in a sandbox; nothing of them is on sys.path."""
    spec = importlib.util.spec_from_file_location(
        "harness_guest", lib / "__init__.py", submodule_search_locations=[str(lib)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["harness_guest"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    for name in ("control", "failures", "rollout", "samples"):
        globals()[name] = importlib.import_module(f"harness_guest.{name}")
    failures.OURS.append(__file__)


async def _serve(sock: socket.socket, wiring: rollout.Wiring) -> None:
    """One loop for all grades, as on the platform: what a grader keeps at module level may be bound to it."""
    requests: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    threading.Thread(target=_read, args=(sock, loop, requests), daemon=True).start()
    last = False
    while not last and (request := await requests.get()) is not None:
        reply = await _grade(wiring, request)
        last = reply["last"]
        _send(sock, reply)


def _read(sock: socket.socket, loop: asyncio.AbstractEventLoop, requests: asyncio.Queue[Any]) -> None:
    """In a thread, so that the host's end is noticed while a grader holds up the loop."""
    message: dict[str, Any] | None = {}
    while message is not None:
        try:
            message = control.receive(sock)
        except ValueError:
            message = None
        if message is None:
            _hung_up.set()
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            loop.call_soon_threadsafe(requests.put_nowait, message)
    time.sleep(_GOODBYE_S)
    os.killpg(0, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    """When the host is gone, nobody else ends the processes that graders left."""
    if os.getpid() == pid and _hung_up.is_set():
        os.killpg(0, signal.SIGKILL)


def _send(sock: socket.socket, message: dict[str, Any]) -> None:
    failures.flush()
    try:
        data = control.encode(message)
    except ValueError as exc:
        data = control.encode({"samples": [], "error": failures.error_info(exc), "last": False})
    sock.sendall(data)


async def _grade(wiring: rollout.Wiring, request: dict[str, Any]) -> dict[str, Any]:
    types: Any = importlib.import_module("osmosis_ai.rollout.types")
    given: dict[str, Any] = {}
    try:
        for sample in request["samples"]:
            given[sample["name"]] = rebuilt = types.RolloutSample.model_validate({**sample["data"], "reward": None})
            if request["labelled"]:
                rebuilt.label = request["label"]
    except ValueError as exc:
        return {"samples": request["samples"], "error": failures.error_info(exc), "party": "rollout", "last": False}
    try:
        graded, error = await _run_grader(wiring, request, given), None
    except Exception as exc:
        graded, error = given, failures.reported(exc)
    except BaseException as exc:  # sys.exit and its like: the process must not go on
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # the loop is ending: a task of the grader's called sys.exit
            raise
        return _reply(given, {**failures.reported(exc), "message": _exit_text(exc)}, last=True)
    return _reply(graded, error, last=False)


def _reply(graded: dict[str, Any], error: dict[str, Any] | None, *, last: bool) -> dict[str, Any]:
    data = [{"name": name, "data": samples.sample_data(sample)} for name, sample in graded.items()]
    return {"samples": data, "error": error, "last": last}


def _exit_text(exc: BaseException) -> str:
    if isinstance(exc, SystemExit):
        return f"grader called sys.exit({exc.code!r})"
    return f"grader raised {type(exc).__name__}: {failures.text_of(exc)}"


async def _run_grader(wiring: rollout.Wiring, request: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """As the SDK's ``LocalBackend`` does it; the graded samples by name.

    :raises Exception: what the grader raised, or that it exceeded its deadline or gave no reward.
    """
    context: Any = importlib.import_module("osmosis_ai.rollout.context")
    folder = request["artifacts_dir"]
    ctx = context.GraderContext(
        label=request["label"],
        metadata=request["metadata"],
        artifacts_dir=None if folder is None else Path(folder),
        **({"samples": given} if wiring.generation == "0.2" else {"sample": next(iter(given.values()), None)}),
    )
    budget: float | None = request["timeout_s"]
    started = time.monotonic()
    deadline = asyncio.timeout(budget)
    too_late = f"grader exceeded its {budget}s deadline"
    try:
        async with deadline:
            grader = wiring.grader(wiring.grader_config)
            await grader.grade(ctx)
            graded = _graded_0_2(ctx) if wiring.generation == "0.2" else _graded_0_3(ctx)
    except Exception as exc:
        if deadline.expired():
            raise TimeoutError(too_late) from exc
        raise
    if budget is not None and (deadline.expired() or time.monotonic() - started > budget):
        raise TimeoutError(too_late)
    return graded


def _graded_0_3(ctx: Any) -> dict[str, Any]:
    importlib.import_module("osmosis_ai.rollout.utils.rewards").validate_sample_has_reward(ctx.sample)
    types: Any = importlib.import_module("osmosis_ai.rollout.types")
    result = types.ExecutionResult(status=types.RolloutStatus.SUCCESS, sample=ctx.sample)
    _check_finite("Sample", result.sample)
    return {"": result.sample}


def _graded_0_2(ctx: Any) -> dict[str, Any]:
    types: Any = importlib.import_module("osmosis_ai.rollout.types")
    result = types.ExecutionResult(status=types.RolloutStatus.SUCCESS, samples=ctx.get_samples())
    if not result.samples:
        raise ValueError("No samples after grading")
    for name, sample in result.samples.items():
        if not sample.remove_sample:
            if sample.reward is None:
                raise ValueError(f"Sample {name} has no reward after grading")
            sample.reward = float(sample.reward)  # this generation takes anything
        _check_finite(f"Sample {name}", sample)
    graded: dict[str, Any] = result.samples
    return graded


def _check_finite(what: str, sample: Any) -> None:
    if sample.reward is not None and not math.isfinite(sample.reward):
        raise ValueError(f"{what} has the reward {sample.reward!r}, which is not a finite number")


if __name__ == "__main__":
    main()
