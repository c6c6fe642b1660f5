"""Templates, the scaffold and ``harness validate``: the platform's layout, conflict rule and checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from osmosis_ai.platform.cli.eval_config import load_eval_submit_config
from osmosis_ai.platform.cli.training_config import load_train_submit_config

from harness.errors import UsageError
from harness.platform.templates import apply_template, init_rollout, list_templates

ROOT = Path(__file__).parent.parent.parent


def test_every_template_is_whole(tmp_path: Path) -> None:
    assert {"multiply", "multiply-local-strands", "multiply-local-openai", "shell-agent"} <= set(list_templates())
    for name in list_templates():
        written = apply_template(name, tmp_path / name)
        assert f"rollouts/{name}/main.py" in written.files
        assert not [file for file in written.files if "/." in file]
        for file in (f"configs/eval/{name}.toml", f"configs/training/{name}.toml"):
            assert file in written.files
        load_eval_submit_config(tmp_path / name / f"configs/eval/{name}.toml")
        load_train_submit_config(tmp_path / name / f"configs/training/{name}.toml")


def test_the_conflict_rule_is_the_platforms(tmp_path: Path) -> None:
    apply_template("multiply-local-strands", tmp_path)
    apply_template("multiply-local-openai", tmp_path)  # shares data/multiply.jsonl, which is the same
    with pytest.raises(UsageError) as refused:
        apply_template("multiply-local-openai", tmp_path)
    assert refused.value.message == (
        "Refusing to overwrite existing files in the workspace directory:\n"
        "  configs/eval/multiply-local-openai.toml\n"
        "  configs/training/multiply-local-openai.toml\n"
        "  rollouts/multiply-local-openai/\n"
        "\nRe-run with `harness templates apply multiply-local-openai --force` to replace them."
    )
    (tmp_path / "data/multiply.jsonl").write_text("{}\n")
    (tmp_path / "rollouts/multiply-local-openai/mine.py").touch()
    with pytest.raises(UsageError, match=r"data/multiply\.jsonl"):
        apply_template("multiply-local-openai", tmp_path)
    apply_template("multiply-local-openai", tmp_path, force=True)
    assert (tmp_path / "data/multiply.jsonl").read_text() == (ROOT / "data/multiply.jsonl").read_text()
    assert not (tmp_path / "rollouts/multiply-local-openai/mine.py").exists()


def test_nothing_is_written_outside_of_the_workspace_or_over_a_link(tmp_path: Path) -> None:
    workspace, elsewhere = tmp_path / "ws", tmp_path / "elsewhere"
    workspace.mkdir()
    elsewhere.mkdir()
    (workspace / "rollouts").symlink_to(elsewhere)
    with pytest.raises(UsageError, match="outside the workspace"):
        apply_template("multiply", workspace)
    with pytest.raises(UsageError, match="not found"):
        apply_template("../multiply", workspace)
    (workspace / "rollouts").unlink()
    (workspace / "rollouts").mkdir()
    (workspace / "rollouts/multiply").symlink_to(workspace)
    with pytest.raises(UsageError, match="Refusing"):
        apply_template("multiply", workspace, force=True)
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("name", ["", "Upper", "1st", "a/b", "default", "../x"])
def test_a_name_that_is_none(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        init_rollout(name, tmp_path)
    assert not list(tmp_path.iterdir())


def harness(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harness", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
        timeout=150,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.namespaces
def test_what_init_writes_is_valid_and_what_is_broken_is_named(tmp_path: Path) -> None:
    made = harness("init", "my-rollout", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    again = harness("init", "my-rollout", cwd=tmp_path)
    assert (again.returncode, "Refusing to overwrite existing rollout paths" in again.stderr) == (2, True)

    checked = harness("validate", "configs/eval/my-rollout.toml", "--sandbox", "local", "--json", cwd=tmp_path)
    checks = json.loads(checked.stdout)["checks"]
    assert checked.returncode == 0, checks
    assert {check["name"] for check in checks} >= {"config", "data", "dependencies", "entry point", "grader dry run"}

    main = tmp_path / "rollouts/my-rollout/main.py"
    main.write_text(main.read_text().replace("import uvicorn", "import uvicorn_of_mine"))
    broken = harness("validate", "my-rollout", "--sandbox", "local", cwd=tmp_path)
    assert broken.returncode == 2
    assert "uvicorn_of_mine" in broken.stdout
