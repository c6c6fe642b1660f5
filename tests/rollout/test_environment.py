from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from harness.errors import DependencyError
from harness.rollout.environment import HostEnvironment, host_environment, site_packages
from harness.rollout.lock import Lock, own_python, resolve
from harness.sandbox import bwrap
from tests.rollout import packages

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "uv-cache"))
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")  # nothing is fetched from anywhere else
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pth = {"first.pth": "import sys; sys.from_pth = True\n"}
    packages.wheel(tmp_path / "wheels", "first", files=pth)
    packages.wheel(tmp_path / "wheels", "second")
    with packages.index(tmp_path / "wheels") as url:
        monkeypatch.setenv("UV_DEFAULT_INDEX", url)
        yield url


def _quiet(line: str) -> None:
    pass


async def _lock(folder: Path, dependencies: list[str], **more: str) -> Lock:
    return await resolve(packages.project(folder, dependencies, **more), _quiet)


async def _run(*argv: str | Path) -> str:
    done = await anyio.run_process([str(word) for word in argv])
    return done.stdout.decode().strip()


async def test_is_a_real_virtual_environment(tmp_path: Path, index: str) -> None:
    before = os.umask(0o077)
    try:
        built = await host_environment(await _lock(tmp_path / "p", ["first"]), _quiet)
    finally:
        os.umask(before)
    assert built.python == built.path / "bin" / "python"
    assert built.version == ".".join(map(str, sys.version_info[:3]))
    assert built.base_prefix == own_python().parents[1]
    assert await _run(built.python, "-c", "import first, sys; print(sys.from_pth, sys.prefix)") == f"True {built.path}"
    assert (await _run(built.path / "bin" / "first-tool")).startswith(str(built.path))
    files = [path for path in built.path.rglob("*") if not path.is_symlink()]
    assert [path for path in files if path.name.startswith("first.cpython")]
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in files)
    assert all(path.stat().st_nlink == 1 for path in files if path.is_file())  # nothing shared with uv's cache
    # Wherever it is mounted, it works.
    moved = shutil.copytree(built.path, tmp_path / "elsewhere", symlinks=True)
    assert (await _run(moved / "bin" / "first-tool")).startswith(str(moved))


async def test_is_found_again_without_uv_or_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages.wheel(tmp_path / "wheels", "first")
    with packages.index(tmp_path / "wheels") as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("UV_DEFAULT_INDEX", url)
        lock = await _lock(tmp_path / "p", ["first"])
        built = await host_environment(lock, _quiet)
        packed = await site_packages(lock, "3.12", "x86_64-unknown-linux-gnu", _quiet)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.setattr("harness.rollout.uv.find_uv_bin", lambda: "/nonexistent")
    said: list[str] = []
    assert await host_environment(lock, said.append) == built
    assert await site_packages(lock, "3.12", "x86_64-unknown-linux-gnu", said.append) == packed
    assert said == []


async def test_is_built_once_for_many(tmp_path: Path, index: str) -> None:
    lock = await _lock(tmp_path / "p", ["first"])
    said: list[str] = []
    found: list[HostEnvironment] = []

    async def one() -> None:
        found.append(await host_environment(lock, said.append))

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(one)
    assert len([line for line in said if line.startswith("building")]) == 1
    assert found == [found[0]] * 4


async def test_path_dependencies_are_installed_not_linked(tmp_path: Path) -> None:
    packages.local_dependency(tmp_path / "dep")
    source = '[tool.uv.sources]\nlocal-dep = { path = "../dep", editable = true }\n'
    values = []
    for value in (1, 2):
        (tmp_path / "dep" / "local_dep.py").write_text(f"VALUE = {value}\n")
        built = await host_environment(await _lock(tmp_path / "p", ["local-dep"], more=source), _quiet)
        values.append(await _run(built.python, "-c", "import local_dep as d; print(d.VALUE, d.__file__)"))
        assert str(built.path) in values[-1]
    assert [value[0] for value in values] == ["1", "2"]


async def test_explicit_private_index(tmp_path: Path, index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packages.wheel(tmp_path / "private", "hidden")
    with packages.index(tmp_path / "private", password="hunter2") as url:
        monkeypatch.setenv("UV_INDEX_CORP_USERNAME", "u")
        monkeypatch.setenv("UV_INDEX_CORP_PASSWORD", "hunter2")
        more = f'[[tool.uv.index]]\nname = "corp"\nurl = "{url}"\nexplicit = true\n'
        more += '[tool.uv.sources]\nhidden = { index = "corp" }\n'
        lock = await _lock(tmp_path / "p", ["hidden", "first"], more=more)
        built = await host_environment(lock, _quiet)
        assert await _run(built.python, "-c", "import hidden, first; print(1)") == "1"
        assert "hunter2" not in lock.model_dump_json()
        assert not [p for p in built.path.rglob("*") if p.is_file() and b"hunter2" in p.read_bytes()]


async def test_packages_for_another_python(tmp_path: Path, index: str) -> None:
    lock = await _lock(tmp_path / "p", ["first", "second; python_version < '3.13'"])
    old = await site_packages(lock, "3.12", "aarch64-unknown-linux-gnu", _quiet)
    new = await site_packages(lock, "3.13", "aarch64-unknown-linux-gnu", _quiet)
    assert (old / "second.py").exists()
    assert not (new / "second.py").exists()
    assert (new / "bin" / "first-tool").exists()


@pytest.mark.parametrize("python", [">=3.99", "<3.5"])
async def test_a_python_that_is_not_there(tmp_path: Path, python: str) -> None:
    lock = await _lock(tmp_path / "p", [], python=python)
    with pytest.raises(DependencyError) as caught:
        await host_environment(lock, _quiet)
    assert python in caught.value.message
    assert ".".join(map(str, sys.version_info[:3])) in caught.value.message


async def test_a_build_that_fails_or_is_cancelled_leaves_nothing(tmp_path: Path, index: str) -> None:
    lock = await _lock(tmp_path / "p", ["first"])
    with anyio.move_on_after(0.05):
        await host_environment(lock, _quiet)
    (tmp_path / "wheels" / "first-1.0-py3-none-any.whl").write_bytes(b"not a wheel")
    with pytest.raises(DependencyError, match="cannot build the environment"):
        await host_environment(lock, _quiet)
    assert {path.suffix for path in (tmp_path / "cache" / "environments").iterdir()} == {".lock"}


FULL = """
import anyio, os, sys
from pathlib import Path
from harness.errors import HarnessError
from harness.rollout.lock import resolve
from harness.rollout.environment import host_environment
async def main():
    lock = await resolve(Path(sys.argv[1]), lambda _: None)
    try:
        await host_environment(lock, lambda _: None)
    except HarnessError as error:
        print(error)
    print(sorted(os.path.splitext(n)[1] for n in os.listdir(os.environ["HARNESS_CACHE"] + "/environments")))
anyio.run(main)
"""


@pytest.mark.namespaces
async def test_a_full_disk_is_a_clear_error(tmp_path: Path, index: str) -> None:
    found = bwrap.find()
    assert found is not None
    packages.wheel(tmp_path / "wheels", "first", files={"big.bin": "x" * (8 << 20)})
    packages.project(tmp_path / "p", ["first"])
    full = tmp_path / "full"
    full.mkdir()
    argv = [found.path, "--dev-bind", "/", "/", "--size", str(4 << 20), "--tmpfs", str(full)]
    argv += ["--setenv", "HARNESS_CACHE", str(full), sys.executable, "-c", FULL, str(tmp_path / "p")]
    done = await anyio.run_process(argv, stderr=subprocess.STDOUT, cwd=Path(__file__).parents[2], check=False)
    output = done.stdout.decode()
    assert "No space left on device" in output
    assert "Free some space" in output
    assert output.splitlines()[-1] == "['.lock']"
