from __future__ import annotations

import asyncio
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import leaks

Undo = Callable[[], object]


def process() -> Undo:
    child = subprocess.Popen(["sleep", "60"])

    def end() -> None:
        child.kill()
        child.wait()

    return end


def orphan() -> Undo:
    printed = subprocess.run(
        ["sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True
    )
    return lambda: subprocess.run(["kill", "-KILL", printed.stdout.strip()], check=True)


def descriptor() -> Undo:
    return socket.socket().close


def folder() -> Undo:
    return Path(tempfile.mkdtemp(prefix="harness-")).rmdir


@pytest.mark.parametrize("leak", [process, orphan, descriptor, folder])
def test_what_is_left_behind_is_named(leak: Callable[[], Undo], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "GRACE_S", 0.1)
    undo: list[Undo] = []
    try:
        with (
            pytest.raises(AssertionError, match=r"(process|descriptor|temporary) .*"),
            leaks.nothing_left(leaks.children, leaks.descriptors, leaks.folders),
        ):
            undo.append(leak())
    finally:
        undo[0]()


@pytest.mark.anyio
async def test_a_task_left_behind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "GRACE_S", 0.1)
    left: list[asyncio.Task[None]] = []
    with pytest.raises(AssertionError, match="sleep"):
        async with leaks.no_task_left():
            left.append(asyncio.create_task(asyncio.sleep(60)))
    left[0].cancel()
