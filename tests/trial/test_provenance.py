"""What a manifest says of git, and when the platform would run other code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from harness.trial.provenance import provenance, will_differ


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one commit, pushed to a remote."""
    root = tmp_path / "ws"
    (root / "configs/eval").mkdir(parents=True)
    (root / "configs/eval/x.toml").write_text("")
    git(tmp_path, "init", "-q", "--bare", "remote.git")
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "one")
    git(root, "remote", "add", "origin", str(tmp_path / "remote.git"))
    git(root, "push", "-q", "origin", "main")
    return root


def test_clean_and_pushed(root: Path) -> None:
    head = git(root, "rev-parse", "HEAD")
    found = provenance(root / "configs/eval/x.toml", root)
    assert found == {
        "config_path": "configs/eval/x.toml",
        "git_head": head,
        "git_branch": "main",
        "git_dirty": False,
        "git_pushed": True,
    }
    assert will_differ(found) == []
    assert will_differ(provenance(root / "configs/eval/x.toml", root, commit_sha=head[:8])) == []
    assert will_differ(provenance(root / "configs/eval/x.toml", root, branch="main")) == []


def test_uncommitted_changes_have_a_digest_that_follows_them(root: Path) -> None:
    config = root / "configs/eval/x.toml"
    config.write_text("a = 1")
    first = provenance(config, root)
    (root / "new.py").write_text("x")
    second = provenance(config, root)
    (root / "new.py").write_text("y")
    third = provenance(config, root)
    digests = {found["git_diff_sha256"] for found in (first, second, third)}
    assert len(digests) == 3
    assert "uncommitted" in " ".join(will_differ(third))


def test_a_pin_that_is_elsewhere_and_a_commit_that_was_not_pushed(root: Path) -> None:
    config = root / "configs/eval/x.toml"
    first = git(root, "rev-parse", "HEAD")
    config.write_text("a = 1")
    git(root, "commit", "-q", "-a", "-m", "two")
    assert "no remote branch" in " ".join(will_differ(provenance(config, root)))
    assert first[:12] in " ".join(will_differ(provenance(config, root, branch="main")))
    assert "the platform runs the former" in " ".join(will_differ(provenance(config, root, commit_sha=first)))
    assert "does not know" in " ".join(will_differ(provenance(config, root, commit_sha="abcdef1234")))
    assert "does not know" in " ".join(will_differ(provenance(config, root, branch="nowhere")))


def test_without_git_there_is_nothing_to_say(tmp_path: Path) -> None:
    found = provenance(tmp_path / "x.toml", tmp_path)
    assert found == {"config_path": "x.toml"}
    assert will_differ(found) == []
