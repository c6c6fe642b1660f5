from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.errors import DependencyError
from harness.rollout.lock import Lock, allows, resolve
from tests.rollout import packages

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _caches(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "uv-cache"))
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")  # nothing is fetched from anywhere else
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    packages.wheel(
        tmp_path / "wheels", "first", requires="Provides-Extra: big\nRequires-Dist: second; extra == 'big'\n"
    )
    packages.wheel(tmp_path / "wheels", "second")
    packages.wheel(tmp_path / "wheels", "osmosis_ai", "0.3.8")
    return tmp_path / "wheels"


@pytest.fixture
def index(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with packages.index(wheels) as url:
        monkeypatch.setenv("UV_DEFAULT_INDEX", url)
        yield url


def _quiet(line: str) -> None:
    pass


async def _resolve(project: Path) -> Lock:
    return await resolve(project, _quiet)


def _tree(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


async def test_without_a_lock_it_resolves_and_writes_nothing_there(tmp_path: Path, index: str) -> None:
    project = packages.project(tmp_path / "p", ["first[big]", "osmosis-ai>=0.3"])
    before = _tree(project)
    lock = await _resolve(project)
    assert _tree(project) == before
    assert (lock.project, lock.requires_python, lock.sdk) == (project, ">=3.12", "0.3.8")
    pinned = {line.split("==")[0] for line in lock.requirements.splitlines() if "==" in line}
    assert pinned == {"first[big]", "osmosis-ai", "second"}
    assert lock.requirements.count("--hash=sha256:") == 3
    assert "rollout" not in lock.requirements


async def test_a_resolution_is_remembered_until_its_inputs_change(tmp_path: Path, wheels: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, packages.index(wheels) as url:
        patch.setenv("UV_DEFAULT_INDEX", url)
        lock = await _resolve(packages.project(tmp_path / "p", ["first"]))
    with pytest.MonkeyPatch.context() as patch:  # the index is gone
        patch.setenv("UV_DEFAULT_INDEX", url)
        assert await _resolve(tmp_path / "p") == lock
        with pytest.raises(DependencyError, match="cannot resolve"):
            await _resolve(packages.project(tmp_path / "p", ["first", "second"]))


async def test_with_a_lock_it_is_what_the_lock_says(tmp_path: Path, wheels: Path, index: str) -> None:
    project = packages.project(tmp_path / "p", ["first"], more='[dependency-groups]\ndev = ["second"]\n')
    packages.uv_lock(project)
    packages.wheel(wheels, "first", "2.0")
    before = _tree(project)
    lock = await _resolve(project)
    assert lock.requirements.startswith("first==1.0")
    assert "second" not in lock.requirements
    assert _tree(project) == before
    packages.project(project, ["first", "second"])
    with pytest.raises(DependencyError, match=r"uv\.lock does not match") as caught:
        await _resolve(project)
    assert "uv lock" in caught.value.hint
    assert _tree(project).keys() == before.keys()


async def test_a_member_of_a_uv_workspace_uses_its_lock(tmp_path: Path, wheels: Path, index: str) -> None:
    root = packages.project(tmp_path / "w", [], more='[tool.uv.workspace]\nmembers = ["rollouts/*"]\n')
    (root / "rollouts").mkdir()
    member = packages.project(root / "rollouts" / "a", ["first"])
    (member / "pyproject.toml").write_text((member / "pyproject.toml").read_text().replace('"rollout"', '"a"'))
    packages.uv_lock(root)
    packages.wheel(wheels, "first", "2.0")
    assert (await _resolve(member)).requirements.startswith("first==1.0")


@pytest.mark.parametrize("locked", [True, False])
async def test_the_content_of_path_dependencies_counts(tmp_path: Path, locked: bool) -> None:
    dependency = packages.local_dependency(tmp_path / "dep")
    source = '[tool.uv.sources]\nlocal-dep = { path = "../dep", editable = true }\n'
    project = packages.project(tmp_path / "p", ["local-dep"], more=source)
    if locked:
        packages.uv_lock(project)
    first = await _resolve(project)
    (dependency / "local_dep.egg-info").mkdir()
    (dependency / "local_dep.egg-info" / "PKG-INFO").write_text("what a build leaves")
    assert await _resolve(project) == first
    (dependency / "local_dep.py").write_text("VALUE = 2\n")
    second = await _resolve(project)
    assert second.digest != first.digest
    assert second.requirements == first.requirements


async def test_private_index(tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with packages.index(wheels, password="hunter2") as url:
        monkeypatch.setenv("UV_DEFAULT_INDEX", url.replace("//", "//u:hunter2@"))
        lock = await _resolve(packages.project(tmp_path / "p", ["first"]))
        assert "hunter2" not in lock.model_dump_json()
        monkeypatch.setenv("UV_DEFAULT_INDEX", url.replace("//", "//u:wrong@"))
        with pytest.raises(DependencyError) as caught:
            await _resolve(packages.project(tmp_path / "p", ["second"]))
        assert "wrong" not in str(caught.value)
        assert "second" in str(caught.value)


async def test_credentials_in_a_requirement_are_refused(tmp_path: Path, wheels: Path) -> None:
    with packages.index(wheels, password="hunter2") as url:
        file = url.replace("//", "//u:hunter2@").replace("simple", "files/first-1.0-py3-none-any.whl")
        with pytest.raises(DependencyError, match="carries credentials") as caught:
            await _resolve(packages.project(tmp_path / "p", [f"first @ {file}"]))
        assert "hunter2" not in str(caught.value)


async def test_what_does_not_resolve_is_said_in_uvs_words(tmp_path: Path, index: str) -> None:
    said: list[str] = []
    with pytest.raises(DependencyError, match=r"first==9.* unsatisfiable") as caught:
        await resolve(packages.project(tmp_path / "p", ["first==9"]), said.append)
    assert str(tmp_path / "p") in caught.value.message
    assert len(str(caught.value)) < 4000
    assert said


@pytest.mark.parametrize(
    ("text", "match"),
    [
        pytest.param(None, r"has no pyproject\.toml", id="missing"),
        pytest.param("[project", r"pyproject\.toml: ", id="broken"),
        pytest.param("[tool.x]\na = 1\n", r"no \[project\] table", id="no-project"),
        pytest.param(
            "[project]\nname = 'x'\nversion = '1'\ndependencies = ['a b c']\n", "cannot resolve", id="requirement"
        ),
    ],
)
async def test_bad_pyproject(tmp_path: Path, text: str | None, match: str) -> None:
    if text is not None:
        (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(DependencyError, match=match):
        await _resolve(tmp_path)


@pytest.mark.parametrize(
    ("specifier", "version", "expected"),
    [
        (">=3.12", (3, 12, 0), True),
        (">=3.12", (3, 13, 5), True),
        (">=3.12,<3.13", (3, 13, 0), False),
        (">3.12", (3, 12, 1), True),
        (">3.12.1", (3, 12, 1), False),
        ("<=3.13", (3, 13, 1), False),
        ("~=3.12", (3, 14, 0), True),
        ("~=3.12.1", (3, 13, 0), False),
        ("==3.13.*", (3, 13, 7), True),
        ("==3.13.*", (3, 12, 7), False),
        ("!=3.13.*", (3, 13, 7), False),
        ("!=3.13.0", (3, 13, 7), True),
        ("", (3, 13, 0), True),
    ],
)
def test_requires_python(specifier: str, version: tuple[int, ...], expected: bool) -> None:
    assert allows(specifier, version) is expected
