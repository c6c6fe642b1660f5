from __future__ import annotations

from pathlib import Path

import pytest

from harness.config import Workspace
from harness.errors import ConfigError


def test_root_is_the_folder_that_holds_configs(tmp_path: Path) -> None:
    for config in ("configs/eval/a.toml", "configs/training/a.toml", "configs/eval/deep/er/a.toml"):
        workspace = Workspace.of(tmp_path / config)
        assert workspace.root == tmp_path
    assert workspace.rollouts == tmp_path / "rollouts"
    assert workspace.data == tmp_path / "data"
    assert workspace.settings_file == tmp_path / "harness.toml"


def test_the_innermost_workspace_counts(tmp_path: Path) -> None:
    inner = tmp_path / "configs" / "eval" / "ws"
    assert Workspace.of(inner / "configs" / "eval" / "a.toml").root == inner


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Workspace.of(Path("configs/eval/a.toml")).root == tmp_path


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("a.toml", "must live under `configs/eval/`"),
        ("configs/a.toml", "must live under `configs/eval/`"),
        ("configs/training/a.toml", "must live under `configs/eval/`"),
        ("configs/eval/../a.toml", "must live under `configs/eval/`"),
        ("configs/eval/a.json", "must be a .toml file under `configs/eval/`"),
    ],
)
def test_files_elsewhere_are_refused(tmp_path: Path, config: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Workspace.of(tmp_path / config, "eval")


def test_rollout_link_out_of_the_workspace(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "r").symlink_to(tmp_path.parent)
    with pytest.raises(ConfigError, match="Evaluation rollout must resolve under the current workspace"):
        Workspace(root=tmp_path).check_rollout("r", "main.py", "Evaluation")
