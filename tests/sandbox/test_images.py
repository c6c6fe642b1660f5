"""Environment images: built once, found again, a real virtual environment inside; unsuitable bases are refused."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from aiodocker import Docker

from harness.errors import ImageError
from harness.guest import ENV, LIB
from harness.sandbox import bootstrap
from harness.sandbox.base import SandboxSettings, SandboxSpec
from harness.sandbox.docker import DockerProvider, images
from harness.sandbox.docker.pull import DEFAULT_IMAGE
from harness.sandbox.owner import this_process
from tests.sandbox.test_docker import make_lock
from tests.support.workspace import ROOT

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

PACKAGE = """\
[project]
name = "small"
version = "1.0"
[project.scripts]
small-tool = "small:main"
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
BACKEND = '''\
"""Makes a wheel with nothing but the standard library, so that a test needs no network."""
import zipfile

FILES = {
    "small.py": "def main():\\n    print('small works')\\n",
    "small_start.pth": "import sys; sys.small_started = True\\n",
    "small-1.0.dist-info/METADATA": "Metadata-Version: 2.1\\nName: small\\nVersion: 1.0\\n",
    "small-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\\nGenerator: t\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    "small-1.0.dist-info/entry_points.txt": "[console_scripts]\\nsmall-tool = small:main\\n",
}


def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "small-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        for path, text in FILES.items():
            wheel.writestr(path, text)
        wheel.writestr("small-1.0.dist-info/RECORD", "".join(f"{path},,\\n" for path in FILES))
    return name
'''


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "rollout"
    (folder / "small").mkdir(parents=True)
    (folder / "pyproject.toml").write_text('[project]\nname = "rollout"\nversion = "1"\n')
    (folder / "small" / "pyproject.toml").write_text(PACKAGE)
    (folder / "small" / "backend.py").write_text(BACKEND)
    return folder


async def tags_there() -> set[str]:
    async with DockerProvider() as provider:
        return {tag for image in await provider.engine.images("") for tag in image.get("RepoTags") or ()}


async def remove(tags: set[str]) -> None:
    async with DockerProvider() as provider:
        for tag in sorted(tags, key=lambda tag: not tag.startswith("harness-env:")):
            await provider.engine.remove_image(tag)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache of this module's tests. The images that they made, and no others, are removed at the end."""
    before = anyio.run(tags_there)
    folder = tmp_path_factory.mktemp("cache")
    yield folder
    anyio.run(remove, {record.read_text() for record in (folder / "docker" / "used").glob("*")} - before)


@pytest.fixture
async def provider(cache: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DockerProvider]:
    monkeypatch.setenv("HARNESS_CACHE", str(cache))
    async with DockerProvider() as made:
        yield made


def quiet(line: str) -> None:
    pass


async def run_inside(provider: DockerProvider, environment: Any, *command: str) -> str:
    inside = DockerProvider(command=lambda python, lib, boot: list(command))
    spec = SandboxSpec(
        name=f"test-{secrets.token_hex(4)}",
        owner=this_process("test"),
        environment=environment,
        settings=SandboxSettings(),
    )
    async with inside, await inside.create(spec) as sandbox:
        with anyio.fail_after(30):
            output = b"".join([chunk async for chunk in sandbox.stream])
        outcome = await sandbox.outcome()
        assert outcome.code == 0, outcome
        return output.decode()


async def test_an_environment_is_built_once_and_is_a_real_one(provider: DockerProvider, project: Path) -> None:
    lock = make_lock(project, requirements="small @ ./small\n", digest=secrets.token_hex(8))
    lines: list[str] = []
    environment = await provider.prepare(lock, SandboxSettings(), lines.append)
    assert any(line.startswith("Step ") for line in lines)
    lines.clear()
    assert await provider.prepare(lock, SandboxSettings(), lines.append) == environment
    assert lines == []

    assert environment.python == f"{ENV}/bin/python"
    look = (
        "import sys, small, os, pwd; print(sys.prefix, sys.base_prefix != sys.prefix, sys.small_started, "
        "os.path.exists(small.__cached__), pwd.getpwuid(1000).pw_dir)"
    )
    assert (await run_inside(provider, environment, environment.python, "-c", look)).split() == [
        ENV, "True", "True", "True", "/sandbox/home"
    ]  # fmt: skip
    assert await run_inside(provider, environment, f"{ENV}/bin/small-tool") == "small works\n"
    listing = await run_inside(provider, environment, "find", LIB, "-name", "*.pyc")
    assert "harness_guest/__pycache__/wire" in listing

    (stored,) = [image for image in await images.stored(provider.engine) if image.id == environment.handle]
    assert stored.kind == "environment"
    assert stored.tag == f"harness-env:{environment.key}"
    assert stored.size < 20e6


async def test_the_real_guest_says_hello(provider: DockerProvider, project: Path) -> None:
    environment = await provider.prepare(make_lock(project), SandboxSettings(), quiet)
    spec = SandboxSpec(
        name=f"test-{secrets.token_hex(4)}",
        owner=this_process("test"),
        environment=environment,
        settings=SandboxSettings(),
    )
    async with await provider.create(spec) as sandbox:
        with anyio.fail_after(30):
            try:
                hello = await sandbox.stream.receive()
            except anyio.EndOfStream:
                pytest.fail(str(await sandbox.outcome()))
        assert b'"type": "hello"' in hello


async def test_the_key_covers_the_lock_and_the_base(provider: DockerProvider, project: Path) -> None:
    first = await provider.prepare(make_lock(project), SandboxSettings(), quiet)
    assert await provider.prepare(make_lock(project), SandboxSettings(), quiet) == first
    (project / "image").mkdir()
    (project / "image" / "Dockerfile").write_text(f"FROM {DEFAULT_IMAGE}\nVOLUME /data\n")
    other_base = await provider.prepare(make_lock(project), SandboxSettings(image="image"), quiet)
    other_lock = await provider.prepare(make_lock(project, digest="another"), SandboxSettings(), quiet)
    assert len({first.key, other_lock.key, other_base.key}) == 3
    # A volume that the image declares is in memory, with the limits of the rest, and no volume of the engine's.
    mounts = await run_inside(provider, other_base, "cat", "/proc/mounts")
    assert "tmpfs /data tmpfs" in mounts


async def test_many_who_ask_at_once_wait_for_one_build(provider: DockerProvider, project: Path) -> None:
    lock = make_lock(project, digest=secrets.token_hex(8))
    handles: list[str] = []
    steps: list[str] = []

    async def ask() -> None:
        async with DockerProvider() as own:
            found = await own.prepare(lock, SandboxSettings(), steps.append)
            handles.append(found.handle)

    async with anyio.create_task_group() as tasks:
        for _ in range(6):
            tasks.start_soon(ask)
    assert len(set(handles)) == 1
    assert len([line for line in steps if line.startswith("Step 1/")]) == 1


PREPARE = """
import sys
from pathlib import Path

import anyio
from harness.sandbox.base import SandboxSettings
from harness.sandbox.docker import DockerProvider
from tests.sandbox.test_docker import make_lock

async def main():
    async with DockerProvider() as provider:
        lock = make_lock(Path(sys.argv[1]), digest=sys.argv[2])
        found = await provider.prepare(lock, SandboxSettings(), lambda line: print(line, flush=True))
        print(found.handle)

anyio.run(main)
"""


def prepare_elsewhere(project: Path, digest: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PREPARE, str(project), digest]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


async def test_processes_that_ask_at_once_wait_for_one_build(provider: DockerProvider, project: Path) -> None:
    digest = secrets.token_hex(8)
    asking = [prepare_elsewhere(project, digest) for _ in range(2)]
    said = [(await anyio.to_thread.run_sync(process.communicate))[0].splitlines() for process in asking]
    assert [process.returncode for process in asking] == [0, 0]
    assert said[0][-1] == said[1][-1]
    assert len([line for line in [*said[0], *said[1]] if line.startswith("Step 1/")]) == 1


async def test_a_build_whose_process_is_killed_leaves_nothing_and_the_next_one_builds(
    provider: DockerProvider, project: Path
) -> None:
    lock = make_lock(project, digest=secrets.token_hex(8))
    killed = prepare_elsewhere(project, lock.digest)
    assert killed.stdout is not None
    with killed, killed.stdout:
        await anyio.to_thread.run_sync(lambda: next(line for line in killed.stdout or () if line.startswith("Step 5/")))
        killed.kill()
    # What the engine made of it is the next one's cache; otherwise it would stay.
    environment = await provider.prepare(lock, SandboxSettings(), quiet)
    assert [image["Id"] for image in await provider.engine.images(f"harness.lock={lock.digest}")] == [
        environment.handle
    ]
    with anyio.fail_after(10):
        while await provider.engine.containers(f"harness.lock={lock.digest}"):
            await anyio.sleep(0.1)


@pytest.mark.parametrize(
    ("dockerfile", "message"),
    [
        pytest.param("FROM scratch\nCOPY Dockerfile /x\n", "no python3", id="no-python"),
        pytest.param(
            f"FROM {DEFAULT_IMAGE}\nRUN printf '#!/bin/sh\\necho broken here; exit 3\\n' > /usr/local/bin/python3"
            " && chmod +x /usr/local/bin/python3\n",
            "it said 'broken here'",
            id="broken-python",
        ),
        pytest.param(
            f"FROM {DEFAULT_IMAGE}\nRUN printf '#!/bin/sh\\nexec yes\\n' > /usr/local/bin/python3"
            " && chmod +x /usr/local/bin/python3\n",
            "does not work",
            id="says-too-much",
        ),
        pytest.param(f"FROM {DEFAULT_IMAGE}\nRUN false\n", "returned a non-zero code: 1", id="build-fails"),
    ],
)
async def test_a_base_that_does_not_suit_is_refused_with_the_reason(
    provider: DockerProvider, project: Path, dockerfile: str, message: str
) -> None:
    (project / "image").mkdir()
    (project / "image" / "Dockerfile").write_text(dockerfile)
    with pytest.raises(ImageError, match=message) as caught:
        await provider.prepare(make_lock(project), SandboxSettings(image="./image"), quiet)
    assert caught.value.hint
    assert "harness-probe" not in str(await provider.list())


async def test_a_base_with_another_python_than_the_rollout_requires_is_refused(
    provider: DockerProvider, project: Path
) -> None:
    with pytest.raises(ImageError, match=r"has Python 3\.\d+\.\d+; rollout requires ==3\.99"):
        await provider.prepare(make_lock(project, requires_python="==3.99.*"), SandboxSettings(), quiet)


async def test_a_folder_without_a_dockerfile_is_refused(provider: DockerProvider, project: Path) -> None:
    with pytest.raises(ImageError, match="no Dockerfile"):
        await provider.prepare(make_lock(project), SandboxSettings(image="./nothing"), quiet)


async def test_a_name_that_is_none_is_refused(provider: DockerProvider, project: Path) -> None:
    with pytest.raises(ImageError, match="no image's name") as caught:
        await provider.prepare(make_lock(project), SandboxSettings(image="NOT valid!!"), quiet)
    assert "folder with a Dockerfile" in caught.value.hint


async def test_an_image_that_cannot_be_pulled_names_the_way_without_a_registry(
    provider: DockerProvider, project: Path
) -> None:
    reference = "127.0.0.1:9/no/such:1"
    with pytest.raises(ImageError, match=f"Image {reference} could not be pulled") as caught:
        await provider.prepare(make_lock(project), SandboxSettings(image=reference), quiet)
    assert "python -m harness images bootstrap" in caught.value.hint


async def test_pruning_takes_the_least_recently_used_but_nothing_that_is_used_or_not_ours(
    provider: DockerProvider, project: Path, cache: Path
) -> None:
    kept = await provider.prepare(make_lock(project), SandboxSettings(), quiet)
    locks = [make_lock(project, digest=secrets.token_hex(8)) for _ in range(2)]
    used, old = [await provider.prepare(lock, SandboxSettings(), quiet) for lock in locks]
    for age, made in enumerate((used, old), 1):
        (record,) = [path for path in (cache / "docker" / "used").iterdir() if path.read_text().endswith(made.key)]
        os.utime(record, (age, age))
    other, container = f"test-other:{old.key}", f"test-{secrets.token_hex(4)}"
    await provider.engine.create(container, {"Image": used.handle, "Cmd": ["true"]})
    try:
        async with Docker() as docker:
            await docker.images.tag(old.handle, "test-other", tag=old.key)
        stored = await images.stored(provider.engine)
        assert [image.id for image in stored[:2]] == [used.handle, old.handle]
        assert other not in {image.tag for image in stored}
        total = sum(image.size for image in stored if image.kind != "default")
        assert await images.prune(provider.engine, total, quiet) == []
        removed = await images.prune(provider.engine, total - 1, quiet)
        assert [image.id for image in removed] == [old.handle]
        there = await tags_there()
        assert f"harness-env:{old.key}" not in there
        assert {f"harness-env:{kept.key}", f"harness-env:{used.key}", other, DEFAULT_IMAGE} <= there
    finally:
        await provider.engine.remove(container)
        await provider.engine.remove_image(other)


async def test_a_build_that_fails_leaves_no_image(
    provider: DockerProvider, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = make_lock(project, digest=secrets.token_hex(8))
    monkeypatch.setattr("harness.sandbox.docker.context.FINISH", "raise SystemExit(5)")
    with pytest.raises(ImageError, match="returned a non-zero code: 5"):
        await provider.prepare(lock, SandboxSettings(), quiet)
    assert await provider.engine.images(f"harness.lock={lock.digest}") == []


async def test_the_bootstrap_says_what_it_needs_and_does_nothing_twice(
    provider: DockerProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    there = await provider.engine.image(DEFAULT_IMAGE)
    assert there is not None
    assert await bootstrap.bootstrap(provider.engine, lines.append) == there["Id"]
    assert lines == []
    monkeypatch.setattr(bootstrap, "DEFAULT_IMAGE", f"harness-python:{secrets.token_hex(4)}")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ImageError, match="mmdebstrap") as caught:
        await bootstrap.bootstrap(provider.engine, lines.append)
    assert "apt-get install mmdebstrap" in caught.value.hint
