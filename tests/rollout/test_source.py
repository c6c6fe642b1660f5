"""Rollouts on disk, held against the platform's own source scan."""

from __future__ import annotations

import io
import os
import tarfile
import warnings
from pathlib import Path

import pytest
from osmosis_ai.eval.local.runner import compute_source_digest

from harness.config import Workspace
from harness.errors import ConfigError, EntryPointError, RolloutError
from harness.rollout import source
from harness.rollout.source import Rollout

KEPT = """
    a.py a/b.py a-b.py a/.hidden é/ü.txt pkg/__init__.py dist.py build.txt pkg/uv.lock.txt
    Venv/kept.py empty
    x.pyc
"""
LEFT_OUT = """
    __pycache__/a.pyc pkg/__pycache__/b.pyc .git/config .venv/lib/x.py pkg/venv/x.py dist/a
    build/a/b node_modules/a.js .pytest_cache/a .ruff_cache/a uv.lock pkg/uv.lock
    r.egg-info/PKG-INFO pkg/build
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "rollouts" / "r"
    folder.mkdir(parents=True)
    (folder / "main.py").write_text("print('never executed')\nraise SystemExit(3)\n")
    (folder / "pyproject.toml").write_text('[project]\nname = "r"\n')
    return folder


def open_rollout(folder: Path, entrypoint: str = "main.py") -> Rollout:
    return Rollout.open(Workspace(root=folder.parents[1]), folder.name, entrypoint)


def put(folder: Path, name: str, data: bytes = b"x") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def names(tar: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(tar)) as opened:
        return {entry.name: entry for entry in opened}


@pytest.fixture
def full(folder: Path) -> Path:
    """A folder with everything that matters to the scan."""
    for name in KEPT.split():
        put(folder, name, name.encode())
    for name in LEFT_OUT.split():
        put(folder, name)
    (folder / "link.py").symlink_to("a.py")
    (folder / ".venv" / "broken").symlink_to("nowhere")
    (folder / ".venv" / "dir").symlink_to("lib")
    os.mkfifo(folder / "fifo")
    return folder


def test_digest_equals_the_platforms(full: Path) -> None:
    before = open_rollout(full).source_digest()
    assert before == compute_source_digest(full)
    put(full, "a/b.py", b"changed")
    after = open_rollout(full).source_digest()
    assert after == compute_source_digest(full)
    assert after != before


def test_digest_without_the_runs_own_output(full: Path) -> None:
    before = open_rollout(full).source_digest()
    output = put(full, "runs/one/index.jsonl").parent.parent
    (output / "link").symlink_to("one")
    rollout = open_rollout(full)
    assert rollout.source_digest(output) == before == compute_source_digest(full, exclude=output)


@pytest.mark.parametrize("target", ["a", "nowhere"])
def test_links_that_a_digest_cannot_describe(full: Path, target: str) -> None:
    (full / "bad").symlink_to(target)
    with pytest.raises(ValueError, match="symlink") as theirs:
        compute_source_digest(full)
    rollout = open_rollout(full)
    for work in (rollout.source_digest, rollout.code_tar):
        with pytest.raises(RolloutError) as ours:
            work()
        assert ours.value.message == str(theirs.value)


def test_tar_holds_the_source(full: Path) -> None:
    (full / "a.py").chmod(0o755)
    entries = names(open_rollout(full).code_tar())
    assert list(entries) == [str(path) for path in sorted(map(Path, entries))]
    assert set(entries) == {*KEPT.split(), "main.py", "pyproject.toml", "link.py"} - {"x.pyc"}
    assert all(entry.isreg() for entry in entries.values())
    assert entries["a.py"].mode == 0o755
    assert entries["link.py"].size == len(b"a.py")


def test_tar_is_the_same_for_the_same_source(full: Path) -> None:
    rollout = open_rollout(full)
    before = rollout.code_tar()
    os.utime(full / "a.py", (1, 1))
    put(full, "pkg/__pycache__/c.pyc")
    assert rollout.code_tar() == before


def test_code_that_is_too_big(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_CODE_MIB", 2)
    put(full, "data/big.bin", bytes(3 << 20))
    put(full, "data/.venv/bigger.bin", bytes(4 << 20))
    with pytest.raises(RolloutError, match=r"has 3 MiB, more than 2\.") as caught:
        open_rollout(full).code_tar()
    assert "  - data/big.bin: 3.0 MiB" in caught.value.message
    assert "bigger" not in caught.value.message


def test_file_that_cannot_be_read(folder: Path) -> None:
    path = put(folder, os.fsdecode(b"\xff.py"))
    with pytest.raises(RolloutError, match="not UTF-8"):
        open_rollout(folder).source_digest()
    path.unlink()
    if os.geteuid():
        put(folder, "secret").chmod(0)
        with pytest.raises(RolloutError, match="Cannot read the source"):
            open_rollout(folder).source_digest()


def test_open(folder: Path) -> None:
    put(folder, "sub/run.py", b"pass")
    rollout = open_rollout(folder, "./sub/../sub/run.py")
    assert (rollout.name, rollout.path, rollout.entrypoint) == ("r", folder, "sub/run.py")
    assert rollout.pyproject == folder / "pyproject.toml"


def test_rollout_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Rollout.open(Workspace(root=tmp_path), "r", "main.py")
    assert (
        caught.value.message
        == f"Rollout directory not found: rollouts/r/\n  Expected at: {tmp_path / 'rollouts' / 'r'}"
    )
    for name in ("..", "", "../configs"):
        with pytest.raises(ConfigError, match="Rollout must stay within rollouts/"):
            Rollout.open(Workspace(root=tmp_path), name, "main.py")


@pytest.mark.parametrize(
    ("entrypoint", "text"),
    [
        ("nope.py", r"Entrypoint file not found in rollouts/r/: nope\.py\n  Expected at: /"),
        ("main.txt", r"Entrypoint must point to a Python file ending in \.py, got: main\.txt"),
        ("/main.py", r"Entrypoint must be a path relative to rollouts/r/, got: /main\.py"),
        ("../x.py", r"Entrypoint must stay within rollouts/r/, got: \.\./x\.py"),
        ("build/main.py", r"Entrypoint must be part of the source, got: build/main\.py"),
    ],
)
def test_entry_points_that_cannot_be(folder: Path, entrypoint: str, text: str) -> None:
    put(folder, "build/main.py", b"pass")
    with pytest.raises(EntryPointError, match=text):
        open_rollout(folder, entrypoint)


def test_syntax_error_is_shown_where_it_is(folder: Path) -> None:
    put(folder, "main.py", b"x = 1\ndef run(:\n    pass\n")
    with pytest.raises(EntryPointError) as caught:
        open_rollout(folder)
    first, code, caret = caught.value.message.splitlines()
    assert first == "rollouts/r/main.py:2: SyntaxError: invalid syntax"
    assert code.strip() == "def run(:"
    assert caret.index("^") == code.index(":")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"if x:\npass\n", r"main\.py:2: IndentationError: expected an indented block"),
        (b"return 1\n", r"main\.py:1: SyntaxError: 'return' outside function"),
        (b"x = 'a\0b'\n", r"main\.py.* null bytes"),
        (b"x = '\xff'\n", r"main\.py:\d: SyntaxError: .*utf-8"),
        (b"# coding: nope\n", r"main\.py:\d: SyntaxError: .*encoding"),
        (b"x = " + b"(" * 5000, r"main\.py"),
        (b"-" * 200_000 + b"1", r"main\.py"),
    ],
    ids=["indent", "compile", "nul", "utf-8", "coding", "brackets", "nesting"],
)
def test_files_that_do_not_compile(folder: Path, data: bytes, text: str) -> None:
    put(folder, "main.py", data)
    with pytest.raises(EntryPointError, match=text):
        open_rollout(folder)


def test_warnings_of_the_rollout_are_not_ours(folder: Path) -> None:
    put(folder, "main.py", b"\xef\xbb\xbfx = '\\d'\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_rollout(folder)
