from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import anyio
import pytest

from harness.errors import StoreError
from harness.rollout.cache import build_once, cache_dir

pytestmark = pytest.mark.anyio


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def _write(part: Path) -> None:
    await anyio.Path(part / "file").write_text("x")


async def test_builds_once_however_many_ask(tmp_path: Path) -> None:
    builds: list[Path] = []

    async def build(part: Path) -> None:
        builds.append(part)
        await anyio.sleep(0.1)
        await _write(part)

    async def one() -> None:
        assert await build_once("key", tmp_path / "things", build) == tmp_path / "things" / "key"

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(one)
    await one()
    assert len(builds) == 1
    assert (tmp_path / "things" / "key" / "file").read_text() == "x"
    assert _names(tmp_path / "things") == ["key", "key.lock"]


async def test_a_failed_build_leaves_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    async def fail(part: Path) -> None:
        await _write(part)
        raise RuntimeError("no")

    async def hang(part: Path) -> None:
        await _write(part)
        await anyio.sleep_forever()

    with pytest.raises(RuntimeError):
        await build_once("key", tmp_path, fail)
    with anyio.move_on_after(0.05):
        await build_once("key", tmp_path, hang)
    assert _names(tmp_path) == ["key.lock"]
    await build_once("key", tmp_path, _write)
    assert (tmp_path / "key" / "file").exists()


BUILDER = """
import anyio, sys
from pathlib import Path
from harness.rollout.cache import build_once
async def build(part):
    (part / "half").write_text("x")
    print("building", flush=True)
    await anyio.sleep_forever()
anyio.run(build_once, sys.argv[1], Path(sys.argv[2]), build)
"""


async def test_waits_for_another_process_and_clears_up_after_its_death(tmp_path: Path) -> None:
    async with await anyio.open_process([sys.executable, "-c", BUILDER, "key", str(tmp_path)], stderr=None) as builder:
        assert builder.stdout is not None
        await builder.stdout.receive()
        with anyio.move_on_after(0.2) as waiting:
            await build_once("key", tmp_path, _write)
        assert waiting.cancelled_caught
        os.kill(builder.pid, signal.SIGKILL)
        await builder.wait()
    assert any(name.endswith(".part") for name in _names(tmp_path))
    await build_once("key", tmp_path, _write)
    assert not any(name.endswith(".part") for name in _names(tmp_path))
    assert _names(tmp_path / "key") == ["file"]


def test_cache_dir_that_cannot_be_made_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(StoreError, match="file/cache") as caught:
        cache_dir()
    assert "HARNESS_CACHE" in caught.value.hint
