"""Environments on Daytona: recipes, and the builds of the stand-in service, which really run."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

pytest.importorskip("daytona")
from harness.errors import DependencyError, ImageError, ProviderUnavailable
from harness.models import Resources
from harness.rollout.lock import Lock
from harness.sandbox.base import SandboxSettings
from harness.sandbox.daytona import DaytonaProvider, snapshots
from tests.sandbox.test_daytona import account, spec, until
from tests.support.daytona import DaytonaStandIn

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.namespaces,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="Linux only"),
]


def lock(folder: Path, requirements: str = "", pyproject: str = "") -> Lock:
    (folder / "pyproject.toml").write_text(f'[project]\nname = "x"\nversion = "1"\n{pyproject}')
    return Lock(project=folder, requirements=requirements, requires_python=">=3.12", sdk="", digest=requirements)


def package(folder: Path, name: str) -> Path:
    """A package that no index has."""
    made = folder / name
    (made / name).mkdir(parents=True)
    (made / name / "__init__.py").write_text("ANSWER = 42\n\ndef main() -> None:\n    print(ANSWER)\n")
    (made / "pyproject.toml").write_text(
        f'[project]\nname = "{name}"\nversion = "1"\n[project.scripts]\n{name}-run = "{name}:main"\n'
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
    )
    return made


@pytest.fixture
async def here(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[DaytonaStandIn, DaytonaProvider]]:
    async with account(monkeypatch) as both:
        yield both


async def test_an_environment_is_built_once_and_its_travelling_packages_are_in_it(
    here: tuple[DaytonaStandIn, DaytonaProvider], tmp_path: Path
) -> None:
    service, daytona = here
    package(tmp_path, "homemade")
    wanted = lock(tmp_path, "./homemade\n")
    settings = SandboxSettings(resources=Resources(cpus=2, memory_mib=1500))
    lines: list[str] = []
    async with DaytonaProvider() as other, anyio.create_task_group() as tasks:
        for each in (daytona, other):
            tasks.start_soon(each.prepare, wanted, settings, lines.append)
    environment = await daytona.prepare(wanted, settings, lines.append)
    assert service.builder.runs == 1
    assert any("harness: installing packages" in line for line in lines)
    [made] = [each for each in service.snapshots.values() if each.name == environment.handle]
    assert (made.state, made.cpu, made.memory, made.disk) == ("active", 2, 2, 3)
    async with await daytona.create(spec(environment=environment)) as sandbox:
        show = f"{environment.python} -I -c 'import homemade; print(homemade.ANSWER, homemade.__cached__)'"
        said = await sandbox._remote.process.exec(
            f"{show}; ls $({environment.python} -I -c 'import homemade; print(homemade.__cached__)'); "
            "/opt/harness/env/bin/homemade-run",
            timeout=20,
        )
        assert said.exit_code == 0, said.result
        assert said.result.split()[0] == said.result.split()[-1] == "42"
    [stored] = await snapshots.stored(daytona.client)
    assert stored.tag == environment.handle
    assert await snapshots.prune(daytona.client, 2**40, lines.append) == []
    assert [each.tag for each in await snapshots.prune(daytona.client, 0, lines.append)] == [environment.handle]


async def test_a_package_that_nobody_has_is_a_dependency_error_and_leaves_nothing(
    here: tuple[DaytonaStandIn, DaytonaProvider], tmp_path: Path
) -> None:
    service, daytona = here
    wanted = lock(tmp_path, f"no-such-package-{tmp_path.name.replace('_', '-')}==1.0\n")
    with pytest.raises(DependencyError) as failed:
        await daytona.prepare(wanted, SandboxSettings(), lambda _: None)
    assert "no-such-package" in failed.value.message
    await until(lambda: len(service.snapshots) == 1)


async def test_an_image_that_does_not_exist_is_an_image_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with account(monkeypatch, images=("python:*",)) as (_, daytona):
        with pytest.raises(ImageError, match="pull access denied"):
            await daytona.prepare(lock(tmp_path), SandboxSettings(image="nobody/has:this"), lambda _: None)
        with pytest.raises(ImageError, match="no Dockerfile"):
            await daytona.prepare(lock(tmp_path), SandboxSettings(image="./folder"), lambda _: None)


async def test_an_unknown_region_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with account(monkeypatch):
        monkeypatch.setenv("DAYTONA_TARGET", "moon")
        async with DaytonaProvider() as daytona:
            with pytest.raises(ProviderUnavailable, match="moon"):
                await daytona.prepare(lock(tmp_path), SandboxSettings(), lambda _: None)


def test_what_an_index_of_its_own_has_travels_and_the_rest_does_not(tmp_path: Path) -> None:
    hashed = "public==1.0 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n"
    elsewhere = (
        "Mine_Too==2 \\\n    --hash=sha256:cc\n./local\nother @ git+https://example.org/x@1 ; python_version > '3'\n"
    )
    pyproject = '[tool.uv.sources]\nmine-too = { index = "ours" }\n'
    assert snapshots.split(lock(tmp_path, hashed + elsewhere, pyproject)) == (hashed, elsewhere)


async def test_a_recipe_depends_on_nothing_but_its_content(tmp_path: Path) -> None:
    many = "".join(f"name{n}==1 \\\n    --hash=sha256:{n:064x}\n" for n in range(5000))
    recipes = [(await snapshots._recipe(lock(tmp_path, many), SandboxSettings(), print)).dockerfile() for _ in "ab"]
    assert recipes[0] == recipes[1]
    assert max(map(len, recipes[0].splitlines())) < 65_536
