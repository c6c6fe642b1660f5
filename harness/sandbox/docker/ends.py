"""How containers end, as the engine tells it: they remove themselves, so that afterwards there is nothing to ask.

One stream of events serves all sandboxes of a provider. Where it was interrupted, what was missed is asked for again.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import anyio

from harness.errors import SandboxError
from harness.sandbox.docker.engine import Engine

_AGAIN_S = 0.5


@dataclass
class End:
    """What is known of one container."""

    code: int | None = None
    oom: bool = False
    died: anyio.Event = field(default_factory=anyio.Event)
    removed: anyio.Event = field(default_factory=anyio.Event)
    interruptions: int = 0
    """How often the stream had been interrupted when the container was made."""


class Ends:
    """:param label: ``name=value`` of the containers to hear of."""

    def __init__(self, engine: Engine, label: str) -> None:
        self._engine = engine
        self._label = label
        self._known: dict[str, End] = {}
        self._since = ""
        self.interruptions = 0
        self.listening = anyio.Event()

    def expect(self, id: str) -> End:
        """Remember what comes of a container, until ``forget``."""
        return self._known.setdefault(id, End(interruptions=self.interruptions))

    def forget(self, id: str) -> None:
        self._known.pop(id, None)

    async def follow(self) -> None:
        """Listen until cancelled."""
        while True:
            with suppress(SandboxError):
                await self._engine.events(self._label, self._since, self.listening.set, self._take)
            self.interruptions += 1
            await anyio.sleep(_AGAIN_S)

    def _take(self, event: dict[str, Any]) -> None:
        if nanoseconds := int(event.get("timeNano") or 0):
            self._since = f"{nanoseconds // 10**9}.{nanoseconds % 10**9:09d}"
        actor = event.get("Actor") or {}
        end = self._known.get(str(actor.get("ID")))
        if end is None:
            return
        if event.get("Action") == "oom":
            end.oom = True
        elif event.get("Action") == "die":
            attributes = actor.get("Attributes") or {}
            code = str(attributes.get("exitCode") or attributes.get("containerExitCode"))  # the latter is Podman's
            end.code = int(code) if code.isdecimal() else None
            end.died.set()
        elif event.get("Action") in ("destroy", "remove"):
            end.removed.set()
