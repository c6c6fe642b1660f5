"""Environments with the SDK in them, and rollouts written down in tests."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from uv import find_uv_bin

PYTHON_0_3 = Path(sys.executable)
"""The tests' own environment has SDK 0.3."""


def write_rollout(folder: Path, main: str, **files: str) -> Path:
    """A rollout folder with this main.py; further files by module name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {"main": main, **files}.items():
        (folder / f"{name}.py").write_text(dedent(text))
    return folder


def environment_0_2(cache: Path) -> Path:
    """The interpreter of an environment with SDK 0.2."""
    return environment(cache, "osmosis-ai==0.2.31")


def environment(cache: Path, requirement: str) -> Path:
    """The interpreter of an environment with what is required: built once, by one process, and kept in the cache."""
    python = cache / "env" / "bin" / "python"
    done = cache / "done"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            uv = find_uv_bin()
            subprocess.run([uv, "venv", "-q", "--clear", "--python", sys.executable, str(cache / "env")], check=True)
            install = [uv, "pip", "install", "-q", "--python", str(python), requirement]
            built = subprocess.run(install, capture_output=True, text=True, check=False)
            if built.returncode:
                pytest.skip(f"no environment with {requirement} can be built here: {built.stderr[-300:]}")
            # Compiles what a rollout imports, which is a tenth of what is installed.
            subprocess.run([python, "-c", "import osmosis_ai.rollout"], check=True, env=worker_env())
            done.touch()
    return python


def worker_env(**more: str) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": os.environ["HOME"],
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        **more,
    }
