"""Environments on Daytona: recipes, and the builds of the stand-in service, which really run."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

pytest.importorskip("daytona")
from obstore.store import S3Store

from harness.errors import DependencyError, ImageError, ProviderUnavailable, QuotaError, SandboxError
from harness.models import Resources
from harness.rollout.lock import Lock
from harness.sandbox.base import SandboxSettings
from harness.sandbox.daytona import DaytonaProvider, recipe
from tests.sandbox.test_daytona import account, spec, until
from tests.support.daytona import DaytonaStandIn, Quota

if TYPE_CHECKING:
    from obstore.store import ClientConfig

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


async def test_an_environment_is_built_with_what_travels_and_activated_again_after_long(
    here: tuple[DaytonaStandIn, DaytonaProvider], tmp_path: Path
) -> None:
    service, daytona = here
    package(tmp_path, "homemade")
    wanted = lock(tmp_path, "./homemade\n")
    settings = SandboxSettings(resources=Resources(cpus=2, memory_mib=1500))
    lines: list[str] = []
    environment = await daytona.prepare(wanted, settings, lines.append)
    assert any("harness: installing packages" in line for line in lines)
    [made] = [each for each in service.snapshots.values() if each.name == environment.handle]
    assert (made.state, made.cpu, made.memory, made.disk) == ("active", 2, 2, 3)
    await service.clock.advance(15 * 24 * 3600)
    with pytest.raises(ProviderUnavailable, match="is inactive"):  # a run stops: the next one activates it
        await daytona.create(spec(environment=environment))
    async with DaytonaProvider() as other, anyio.create_task_group() as tasks:
        for each in (daytona, other):
            tasks.start_soon(each.prepare, wanted, settings, lines.append)
    assert service.builder.runs == 1
    async with await daytona.create(spec(environment=environment)) as sandbox:
        show = f"{environment.python} -I -c 'import homemade; print(homemade.ANSWER, homemade.__cached__)'"
        said = await sandbox._remote.process.exec(
            f"{show}; ls $({environment.python} -I -c 'import homemade; print(homemade.__cached__)'); "
            "/opt/harness/env/bin/homemade-run",
            timeout=20,
        )
        assert said.exit_code == 0, said.result
        assert said.result.split()[0] == said.result.split()[-1] == "42"


def own_image(folder: Path, *lines: str) -> str:
    """An image setting."""
    (folder / "own/src/deep").mkdir(parents=True, exist_ok=True)
    (folder / "own/src/deep/file").write_text("deep")
    (folder / "own/one.txt").write_text("one")
    (folder / "own/Dockerfile").write_text("\n".join(["FROM python:3.13-slim", "WORKDIR /srv", *lines]))
    return "./own"


async def test_files_beside_an_own_dockerfile_are_in_its_sandboxes(
    here: tuple[DaytonaStandIn, DaytonaProvider], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, daytona = here

    def without_tls(client_options: ClientConfig, **options: Any) -> S3Store:
        return S3Store(client_options={**client_options, "allow_http": True}, **options)

    monkeypatch.setattr("daytona._async.object_storage.S3Store", without_tls)
    wanted = lock(tmp_path)
    settings = SandboxSettings(image=own_image(tmp_path, "COPY *.txt notes/", 'COPY ["src", "/srv/src"]'))
    environment = await daytona.prepare(wanted, settings, lambda _: None)
    async with await daytona.create(spec(environment=environment)) as sandbox:
        said = await sandbox._remote.process.exec("cat /srv/notes/one.txt /srv/src/deep/file", timeout=20)
        assert said.result == "onedeep"
    assert await daytona.prepare(wanted, settings, lambda _: None) == environment
    _, before = await recipe.make(wanted, settings.image, lambda _: None)
    (tmp_path / "own/src/deep/file").write_text("changed")
    _, after = await recipe.make(wanted, settings.image, lambda _: None)
    assert before != after


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("ADD one.txt /srv/", "Write COPY instead"),
        ("ADD --chown=1:1 one.txt /srv/", "Write COPY instead"),
        ("COPY ../secret /srv/", "outside the build context"),
        ("COPY none.txt /srv/", "none.txt"),
    ],
)
async def test_files_that_cannot_be_sent_are_named(
    here: tuple[DaytonaStandIn, DaytonaProvider], tmp_path: Path, line: str, says: str
) -> None:
    service, daytona = here
    settings = SandboxSettings(image=own_image(tmp_path, line))
    with pytest.raises(ImageError) as refused:
        await daytona.prepare(lock(tmp_path), settings, lambda _: None)
    assert says in str(refused.value)
    assert len(service.snapshots) == 1


async def test_what_the_organisation_may_not_have_is_told_with_what_to_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with account(monkeypatch, quota=Quota(snapshots=0)) as (service, daytona):
        asked = len(service.requests)
        with pytest.raises(SandboxError, match="at most 10") as refused:
            await daytona.prepare(lock(tmp_path), SandboxSettings(resources=Resources(disk_mib=4609)), lambda _: None)
        assert "4608" in refused.value.hint
        assert len(service.requests) == asked
        for large in (Resources(cpus=4.5), Resources(memory_mib=8193)):
            with pytest.raises(SandboxError, match="exceeds maximum allowed per sandbox") as refused:
                await daytona.prepare(lock(tmp_path), SandboxSettings(resources=large), lambda _: None)
            assert "Lower cpus, memory_mib or disk_mib" in refused.value.hint
        with pytest.raises(QuotaError, match="Snapshot quota exceeded") as full:
            await daytona.prepare(lock(tmp_path), SandboxSettings(), lambda _: None)
        assert "images prune" in full.value.hint
        assert len(service.snapshots) == 1


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
        for wrong in ("a b:1", "python", "registry:5000/python", "python:"):
            with pytest.raises(ImageError, match="no reference with a tag"):
                await daytona.prepare(lock(tmp_path), SandboxSettings(image=wrong), lambda _: None)
        for right in ("registry:5000/a/python:3.13", f"python@sha256:{'0' * 64}"):
            await recipe.make(lock(tmp_path), right, print)


def test_what_an_index_of_its_own_has_travels_and_the_rest_does_not(tmp_path: Path) -> None:
    hashed = "public==1.0 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n"
    elsewhere = (
        "Mine_Too==2 \\\n    --hash=sha256:cc\n./local\nother @ git+https://example.org/x@1 ; python_version > '3'\n"
    )
    pyproject = '[tool.uv.sources]\nmine-too = { index = "ours" }\n'
    assert recipe.split(lock(tmp_path, hashed + elsewhere, pyproject)) == (hashed, elsewhere)


async def test_a_recipe_depends_on_nothing_but_its_content(tmp_path: Path) -> None:
    many = lock(tmp_path, "".join(f"name{n}==1 \\\n    --hash=sha256:{n:064x}\n" for n in range(5000)))
    recipes = [(await recipe.make(many, "", print))[0].dockerfile() for _ in "ab"]
    assert recipes[0] == recipes[1]
    assert max(map(len, recipes[0].splitlines())) < 65_536
