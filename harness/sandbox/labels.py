"""Whose a sandbox is, written on it as labels: how every provider that has labels finds its own again."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from pydantic import ValidationError

from harness.sandbox.base import Owner

PREFIX = "harness."
_OWNER = f"{PREFIX}owner."
OWNED = f"{_OWNER}host"
"""The label that every sandbox of ours has."""


def labels(owner: Owner, *, trial: str = "", attempt: int = 0, lease_s: float = 0.0) -> dict[str, str]:
    """Whose a sandbox is and which trial's. No secrets: anyone who may list sandboxes can read labels."""
    return {
        OWNED: owner.host,
        f"{_OWNER}machine": owner.machine,
        f"{_OWNER}boot": owner.boot_id,
        f"{_OWNER}namespace": owner.namespace,
        f"{_OWNER}pid": str(owner.pid),
        f"{_OWNER}started": owner.started,
        f"{PREFIX}run": owner.run,
        f"{PREFIX}trial": trial,
        f"{PREFIX}attempt": str(attempt),
        # When a guest that never hears from its host ends by itself. One that does hear renews its lease and goes on.
        f"{PREFIX}expires": str(math.ceil(time.time() + lease_s)),
    }


def owner_of(found: Mapping[str, str]) -> Owner | None:
    """The owner that labels name; null for labels that another program made up."""
    try:
        return Owner(
            host=found[OWNED],
            machine=found[f"{_OWNER}machine"],
            boot_id=found[f"{_OWNER}boot"],
            namespace=found[f"{_OWNER}namespace"],
            pid=int(found[f"{_OWNER}pid"]),
            started=found[f"{_OWNER}started"],
            run=found[f"{PREFIX}run"],
        )
    except (KeyError, ValueError, ValidationError):
        return None
