"""The managed platform's side: execution backend, server, templates, checks, uploads. Needs the ``platform`` extra."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.platform.backend import SandboxBackend as SandboxBackend

__all__ = ["SandboxBackend"]


def __getattr__(name: str) -> Any:
    if name == "SandboxBackend":
        from harness.platform.backend import SandboxBackend

        return SandboxBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
