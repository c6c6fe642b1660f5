"""A rollout's dependencies, resolved once: the lock that every environment is built from."""

from __future__ import annotations

from pathlib import Path

from harness.models import Record


class Lock(Record):
    """Resolved dependencies of one rollout."""

    project: Path
    """The rollout's folder (holds pyproject.toml)."""
    requirements: str
    """Pinned requirements with hashes, as ``uv export`` writes them; without the project itself."""
    requires_python: str
    """Specifier from pyproject.toml; ``>=3.12`` when it names none."""
    sdk: str
    """Version of osmosis-ai in the lock; empty when it is not there."""
    digest: str
    """Content address of everything above but the path, sources and index settings included."""
