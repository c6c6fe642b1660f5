from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

WriteConfig = Callable[..., Path]


@pytest.fixture
def write_config(tmp_path: Path) -> WriteConfig:
    """Writes ``configs/<kind>/x.toml`` into a workspace at ``tmp_path``."""

    def write(text: str | bytes, kind: str = "eval") -> Path:
        path = tmp_path / "configs" / kind / "x.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write
