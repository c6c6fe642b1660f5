from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from harness.config import RolloutSettings, Workspace, load_settings, settings
from harness.errors import ConfigError
from harness.models import Resources


def load(root: Path, own: str | None = None, shared: str | None = None) -> RolloutSettings:
    rollout = root / "rollouts" / "r"
    rollout.mkdir(parents=True, exist_ok=True)
    if own is not None:
        (rollout / "pyproject.toml").write_text(own)
    if shared is not None:
        (root / "harness.toml").write_text(shared)
    return load_settings(Workspace(root=root), rollout)


def test_without_files_the_defaults_hold(tmp_path: Path) -> None:
    assert load(tmp_path) == RolloutSettings()
    assert load(tmp_path, '[project]\nname = "r"\n', "") == RolloutSettings()


def test_every_key(tmp_path: Path) -> None:
    found = load(
        tmp_path,
        """
        [tool.harness]
        secrets = ["SEARCH_KEY"]
        [tool.harness.sandbox]
        provider = "docker"
        image = "python:3.13-slim"
        cpus = 2
        memory_mib = 4096
        disk_mib = 100
        file_mib = 10
        processes = 64
        open_files = 256
        env = { LANG = "C.UTF-8", tmp_dir = "/tmp" }
        allow = ["Example.org", "a.example.org:8443", "*.example.com", "10.0.0.1", "[::1]:8080"]
        writable_root = true
        runtime = "runsc"
        [tool.harness.grader]
        workers = 4
        env = { A = "1" }
        [tool.harness.artifacts]
        max_mib = 10
        max_files = 20
        """,
    )
    assert found.provider == "docker"
    assert found.secrets == ("SEARCH_KEY",)
    assert found.sandbox.image == "python:3.13-slim"
    assert found.sandbox.resources == Resources(
        cpus=2.0, memory_mib=4096, disk_mib=100, file_mib=10, processes=64, open_files=256
    )
    assert found.sandbox.env == {"LANG": "C.UTF-8", "tmp_dir": "/tmp"}
    assert found.sandbox.allow == ("example.org", "a.example.org:8443", "*.example.com", "10.0.0.1", "[::1]:8080")
    assert (found.sandbox.writable_root, found.sandbox.runtime) == (True, "runsc")
    assert (found.grader.workers, found.grader.env) == (4, {"A": "1"})
    assert (found.artifacts.max_mib, found.artifacts.max_files) == (10, 20)


def test_the_rollouts_own_settings_win(tmp_path: Path) -> None:
    found = load(
        tmp_path,
        '[tool.harness.sandbox]\ncpus = 2\nallow = ["a.org"]\nenv = {B = "own", C = "own"}\n',
        'secrets = ["S"]\n[sandbox]\ncpus = 4\nmemory_mib = 512\nallow = ["b.org"]\n'
        'env = {A = "shared", B = "shared"}\n',
    )
    assert (found.sandbox.resources.cpus, found.sandbox.resources.memory_mib) == (2.0, 512)
    assert found.sandbox.allow == ("a.org",)
    assert found.sandbox.env == {"A": "shared", "B": "own", "C": "own"}
    assert found.secrets == ("S",)


def test_all_problems_of_both_files(tmp_path: Path) -> None:
    own = '[tool.harness]\nfoo = 1\n[tool.harness.sandbox]\nmemory_mib = "2GiB"\nprovider = "vm"\nallow = ["https://a.org/"]\n'
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, own, "[sandbox]\ncpu = 1\nprocesses = 1\n[tool.harness]\n")
    lines = caught.value.message.splitlines()
    assert f"Invalid settings in {tmp_path / 'harness.toml'}:" in lines
    assert "  - sandbox.cpu: Unrecognized key" in lines
    assert "  - sandbox.processes: is invalid: Input should be greater than or equal to 8" in lines
    assert "  - tool: Unrecognized key" in lines
    assert f"Invalid settings in {tmp_path / 'rollouts' / 'r' / 'pyproject.toml'}:" in lines
    assert "  - tool.harness.foo: Unrecognized key" in lines
    assert "  - tool.harness.sandbox.memory_mib: must be an integer, got '2GiB'" in lines
    assert any(
        line.startswith("  - tool.harness.sandbox.provider: is invalid: Input should be 'docker'") for line in lines
    )
    assert any(
        "tool.harness.sandbox.allow: must hold host names" in line and "'https://a.org/'" in line for line in lines
    )
    assert len(lines) == 9


@pytest.mark.parametrize(
    "text",
    [
        'secrets = ["lower"]',
        'secrets = "A"',
        "sandbox = 1",
        "sandbox = {cpus = true}",
        "sandbox = {cpus = 0}",
        "sandbox = {cpus = inf}",
        "sandbox = {memory_mib = 2048.0}",
        "sandbox = {env = {A = 1}}",
        "sandbox = {env = {'A=B' = '1'}}",
        "sandbox = {env = {_OSMOSIS_X = '1'}}",
        "sandbox = {writable_root = 1}",
        "grader = {workers = 0}",
        "artifacts = {max_mib = -1}",
        *(
            f"sandbox = {{allow = ['{host}']}}"
            for host in ("*", "a..org", "a.org:0", "a.org:70000", "*.", "a b", "", "a/b")
        ),
    ],
)
def test_wrong_values_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"Invalid settings in .*harness\.toml"):
        load(tmp_path, shared=text)


def test_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Invalid TOML in .*pyproject\.toml: .*line 1"):
        load(tmp_path, "[tool.harness\n")
    with pytest.raises(ConfigError, match=r"\[tool\.harness\] must be a table in .*pyproject\.toml"):
        load(tmp_path, "[tool]\nharness = 1\n")


def test_the_documented_example_names_the_defaults(tmp_path: Path) -> None:
    assert settings.__doc__ is not None
    example = settings.__doc__.partition("::\n")[2]
    found = load(tmp_path, example)
    tables = tomllib.loads(example)["tool"]["harness"]
    assert set(tables["sandbox"]) == set(settings._Sandbox.model_fields)
    defaults = RolloutSettings()
    assert (found.provider, found.sandbox.resources) == (defaults.provider, defaults.sandbox.resources)
    assert (found.grader, found.artifacts) == (defaults.grader, defaults.artifacts)
