"""The records of what exists: sandboxes, snapshots, the connections into a sandbox, the organisation's quota."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from . import schema
from .builds import Build
from .machine import Machine
from .schema import ApiError
from .sessions import Sessions

PUBLIC_SNAPSHOT = "daytona-small"


@dataclass(frozen=True)
class Quota:
    """What the organisation's sandboxes may use together, and each alone. vCPU, GiB, GiB."""

    cpu: int = 500
    memory: int = 1000
    disk: int = 5000
    sandboxes: int | None = None
    snapshots: int | None = None
    cpu_each: int = 4
    memory_each: int = 8
    disk_each: int = 10


class Link:
    """An open connection through the proxy."""

    def __init__(self, links: set[Link], cut: Callable[[], None]) -> None:
        self.silent = False
        self._links = links
        self.cut = cut
        links.add(self)

    def close(self) -> None:
        self._links.discard(self)


@dataclass(eq=False)
class Snapshot:
    name: str
    build: Build
    cpu: int
    memory: int
    disk: int
    gpu: int
    created_at: float
    image_name: str | None
    entrypoint: list[str] | None
    region: str
    general: bool = False
    removing: bool = False
    aside: str = ""
    """``inactive`` once nobody used it for long, ``pending`` while it comes back."""
    used_at: float | None = None
    id: str = field(default_factory=lambda: str(uuid.uuid4()))

    @property
    def state(self) -> str:
        return "removing" if self.removing else self.aside or self.build.state

    @property
    def command(self) -> list[str]:
        return self.entrypoint or self.build.command


@dataclass(eq=False)
class Sandbox:
    """``state`` and ``desired`` differ while a change is under way."""

    name: str
    build: Build
    command: list[str]
    asked: schema.CreateSandbox
    target: str
    cpu: int
    memory: int
    disk: int
    created_at: float
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    state: str = "creating"
    desired: str = "started"
    error_reason: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    network: schema.NetworkSettings = field(default_factory=schema.NetworkSettings)
    public: bool = False
    auto_stop: int = 15
    auto_archive: int = 7 * 24 * 60
    auto_delete: int = -1
    destroy_at: float | None = None
    active_at: float = 0.0
    updated_at: float = 0.0
    stopped_at: float | None = None
    spot_evicted_at: float | None = None
    machine: Machine | None = None
    sessions: Sessions | None = None
    token: str = ""
    signing_key: str = field(default_factory=lambda: secrets.token_hex(32))
    signed: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Tokens of signed preview URLs: their port, and until when."""
    links: set[Link] = field(default_factory=set)
    toolbox_down: bool = False
    stuck: bool = False
    released: anyio.Event = field(default_factory=anyio.Event)
    changed: anyio.Event = field(default_factory=anyio.Event)

    def new_token(self) -> None:
        self.token = secrets.token_urlsafe(24)
        self.signed.clear()

    def running(self) -> Machine:
        """
        :raises ApiError: as the proxy answers for a sandbox that is not there to answer.
        """
        if self.toolbox_down:
            raise ApiError(502, "bad gateway: failed to reach the sandbox's toolbox", source=schema.PROXY)
        if self.state != "started" or self.machine is None or self.machine.down.is_set():
            message = "bad request: failed to get sandbox IP: no IP address found. Is the Sandbox started?"
            raise ApiError(400, message, source=schema.PROXY)
        return self.machine

    @property
    def env(self) -> dict[str, str]:
        about = {"DAYTONA_SANDBOX_ID": self.id, "DAYTONA_REGION_ID": self.target}
        return {**self.build.env, **about, **(self.asked.env or {})}

    def set_state(self, state: str, now: float, desired: str | None = None) -> None:
        self.state, self.desired, self.updated_at = state, desired or self.desired, now
        self.changed.set()
        self.changed = anyio.Event()
