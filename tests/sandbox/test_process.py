from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

import harness.guest
from harness.sandbox import hostproc
from harness.sandbox.base import Environment
from harness.sandbox.process import ProcessProvider
from tests.sandbox import standin
from tests.sandbox.standin import ask, spec

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(platform.system() != "Linux", reason="it looks into /proc"),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    path = standin.build_environment(tmp_path_factory.mktemp("process"))
    return Environment(key="k", handle=str(path), python=str(path / "bin" / "python"))


@pytest.fixture
async def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ProcessProvider]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(harness.guest, "command", standin.command)
    async with ProcessProvider() as made:
        yield made
        assert await standin.listed(made) == []
    assert os.listdir(tmp_path) == []  # noqa: PTH208


async def test_runs_in_a_folder_of_its_own(provider: ProcessProvider, environment: Environment) -> None:
    os.environ["HARNESS_TEST_SECRET"] = "x"
    async with standin.sandbox(provider, spec(environment)) as made:
        root = await ask(made, "r = boot['root']")
        assert await ask(made, "import os; r = os.getcwd()") == root
        assert "HARNESS_TEST_SECRET" not in await ask(made, "import os; r = dict(os.environ)")
        assert await ask(made, "import sys; r = sys.prefix") == environment.handle
        lib = str(Path(root).parent / "lib")
        assert await ask(
            made, f"import sys; sys.path.insert(0, {lib!r}); import harness_guest; r = harness_guest.PROTOCOL"
        )
        assert (await made.outcome()).state == "running"
        assert os.access(root, os.R_OK)
    assert not os.access(root, os.F_OK)


async def test_destroy_ends_the_whole_tree(provider: ProcessProvider, environment: Environment) -> None:
    made = await provider.create(spec(environment))
    # One stays below its parent; one is a daemon whose parent is gone.
    tree = (
        "import os, time\nr = []\nfor daemon in (0, 1):\n  pid = os.fork()\n  if not pid:\n    os.setsid()\n"
        "    if not daemon or not os.fork(): time.sleep(600)\n    os._exit(0)\n  r.append(pid)\nos.waitpid(r[1], 0)"
    )
    await ask(made, tree)
    pids = _marked()
    assert len(pids) == 3
    (info,) = await standin.listed(provider)
    assert (info.name, info.state, info.owner) == (made.name, "running", standin.owner())
    await made.destroy()
    await made.destroy()
    assert not any(map(hostproc.alive, pids))


async def test_exit_status_and_last_words(provider: ProcessProvider, environment: Environment) -> None:
    for code, state, status in (("os._exit(7)", "exited", 7), ("os.abort()", "killed", -6)):
        async with standin.sandbox(provider, spec(environment)) as made:
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await ask(made, f"import os, sys; print('bye', file=sys.stderr, flush=True); {code}")
            outcome = await made.outcome()
            assert (outcome.state, outcome.code, outcome.last_lines) == (state, status, "bye\n")


async def test_what_a_dead_harness_left_is_listed_and_removed(
    provider: ProcessProvider, environment: Environment
) -> None:
    made = await provider.create(spec(environment))
    await made.stream.aclose()  # all that the guest sees of a dead harness
    await standin.until(lambda: not _marked())
    (info,) = await standin.listed(provider)
    assert info.state == "exited"
    assert info.labels == {"trial": "t", "attempt": "2"}
    await provider.remove(info)
    await provider.remove(info)
    assert await standin.listed(provider) == []
    await made.destroy()


async def test_cancelled_create_leaves_nothing(provider: ProcessProvider, environment: Environment) -> None:
    for delay in (0.0, 0.001, 0.005):
        with anyio.move_on_after(delay) as scope:
            async with standin.sandbox(provider, spec(environment)):
                await anyio.sleep_forever()
        assert scope.cancelled_caught
    assert not _marked()


def _marked() -> list[int]:
    return [pid for pid, marker in hostproc.marked("process") if marker.owner == standin.owner()]
