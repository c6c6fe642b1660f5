"""A ``main.py`` that names the harness: where it serves, where a sandbox loads it, and where the name is its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest

from harness.grading import GraderPool
from harness.rollout.source import Rollout
from tests.platform.support import body, free_port, result, write_rollout
from tests.sdk import worker_env

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]
ROOT = Path(__file__).parent.parent.parent


@asynccontextmanager
async def process(command: list[str], cwd: Path, port: int) -> AsyncIterator[httpx.AsyncClient]:
    """A server of its own; ended with SIGTERM, and expected to end well."""
    env = {**os.environ, "_OSMOSIS_ROLLOUT_PORT": str(port), "PYTHONPATH": str(ROOT)}
    async with await anyio.open_process(command, cwd=cwd, env=env, stdout=None, stderr=None) as server:
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
                with anyio.fail_after(60):
                    while True:
                        try:
                            await http.get("/health")
                            break
                        except httpx.TransportError:
                            await anyio.sleep(0.2)
                yield http
        finally:
            server.send_signal(signal.SIGTERM)
            with anyio.fail_after(60, shield=True):
                code = await server.wait()
    assert code in (0, -signal.SIGTERM)  # uvicorn raises the signal again when all is down


def sandboxed(root: Path) -> Rollout:
    return write_rollout(
        root, backend="SandboxBackend", imports="from harness import SandboxBackend", options=', sandbox="local"'
    )


@pytest.mark.namespaces
async def test_the_program_serves_itself_with_sandboxes(tmp_path: Path) -> None:
    rollout = sandboxed(tmp_path / "ws")
    port = free_port()
    async with process([sys.executable, "main.py"], rollout.path, port) as http:
        health = (await http.get("/health")).json()
        assert (health["backend"], health["concurrency"]["max_concurrent"]) == ("harness", 2)
        done = await result(http, body("a", label="cwd"))
    assert (done["status"], done["sample"]["reward"]) == ("success", 1.0)


@pytest.mark.namespaces
async def test_harness_serve_leaves_the_program_as_it_is(tmp_path: Path) -> None:
    rollout = write_rollout(tmp_path / "ws")
    port = free_port()
    command = [sys.executable, "-m", "harness", "serve", "x", "--sandbox", "local"]
    async with process(command, rollout.path.parent.parent, port) as http:
        assert (await result(http, body("a")))["status"] == "success"


async def test_serving_what_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "harness", "serve", "nothing"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = await anyio.run_process(command, cwd=tmp_path, env=env, check=False, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert b"there is no rollout 'nothing'" in done.stderr


async def test_a_module_of_the_rollouts_own_may_be_called_harness(tmp_path: Path) -> None:
    rollout = write_rollout(tmp_path / "ws", imports="from harness.inner import VALUE\nassert VALUE == 7")
    (rollout.path / "harness").mkdir()
    (rollout.path / "harness/__init__.py").touch()
    (rollout.path / "harness/inner.py").write_text("VALUE = 7\n")
    async with GraderPool(Path(sys.executable), rollout.path, "main.py", worker_env(), workers=1) as pool:
        assert (await pool.check()).workflow == "Workflow"


async def test_in_a_worker_its_backend_is_a_placeholder_that_says_what_is_wired(tmp_path: Path) -> None:
    rollout = sandboxed(tmp_path / "ws")
    async with GraderPool(Path(sys.executable), rollout.path, "main.py", worker_env(), workers=1) as pool:
        info = await pool.check()
    assert (info.workflow, info.grader) == ("Workflow", "Judge")
