"""The contract that every provider keeps. It is small on purpose: a fifth provider is one file.

A provider prepares an environment once, makes sandboxes from it, hands back a byte stream to the guest inside each,
says what became of one, destroys it, and lists and reaps what it owns. Code goes in, files come out, logs and model
calls travel over that stream (see ``harness.guest``), so nothing else is asked of it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from anyio.abc import ByteStream
from pydantic import Field

from harness.models import Record, Resources
from harness.rollout.lock import Lock

ProviderName = Literal["docker", "daytona", "local", "process"]

Progress = Callable[[str], None]
"""Takes one line that says what long work is doing now. Called from the event loop only."""


_THREADS = (
    "GOMAXPROCS",
    "MKL_NUM_THREADS",
    "NUMEXPR_MAX_THREADS",
    "OMP_NUM_THREADS",
    "OMP_THREAD_LIMIT",
    "OPENBLAS_NUM_THREADS",
    "PYTHON_CPU_COUNT",
    "RAYON_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


class SandboxSettings(Record):
    """``[tool.harness.sandbox]`` with the flags applied."""

    image: str = ""
    """Base image reference; empty for the default image. Ignored by ``local`` and ``process``."""
    resources: Resources = Resources()
    env: dict[str, str] = Field(default_factory=dict)
    """Plain variables for the sandbox, secrets the rollout asked for included."""
    allow: tuple[str, ...] = ()
    """Host names the rollout may reach through the relay's proxy."""
    writable_root: bool = False
    """Let the sandbox write outside its work folder and /tmp (docker only; without a size limit of its own)."""
    runtime: str = ""
    """OCI runtime for docker: ``runsc``, ``kata``; empty for the engine's default."""

    def variables(self) -> dict[str, str]:
        """What the rollout finds in its environment: ``env``, and for the libraries how many CPUs are its own.

        Left alone they start a thread for each CPU of the machine, and all of them share the sandbox's quota.
        """
        threads = str(max(1, int(self.resources.cpus)))
        return {**dict.fromkeys(_THREADS, threads), "TOKENIZERS_PARALLELISM": "false", **self.env}


class Capabilities(Record):
    """What a provider can do."""

    name: ProviderName
    isolation: Literal["container", "namespaces", "remote", "none"]
    kept: bool = False
    """Whether a service that goes on when this process dies keeps the sandboxes."""


class Finding(Record):
    """One result of a provider's self-check."""

    check: str
    ok: bool
    required: bool = True
    """Whether the provider cannot work while this is not ok."""
    detail: str = ""
    remedy: str = ""


class Environment(Record):
    """A prepared environment: opaque to everyone but the provider that made it."""

    key: str
    """Content address: lock + Python + platform + base image + guest version."""
    handle: str
    """An image id, a snapshot name, or a directory."""
    python: str
    """Path of the environment's interpreter inside the sandbox."""


class Owner(Record):
    """Who made a sandbox, on labels and in the journal, so that a reaper knows dead owners from living ones."""

    host: str
    machine: str = ""
    """Says that a host of this name is the same installation; empty where nothing does."""
    boot_id: str
    namespace: str = ""
    """The PID namespace, in which alone the process id means something."""
    pid: int
    started: str
    """Start time of the process in clock ticks since boot, from /proc/<pid>/stat."""
    run: str


class SandboxSpec(Record):
    """One sandbox to make. The name is chosen, and journalled, before the create call."""

    name: str
    owner: Owner
    environment: Environment
    settings: SandboxSettings
    trial: str = ""
    attempt: int = 0
    lease_s: float = 60.0
    """The guest exits by itself when its host has been silent for this long."""


class Exit(Record):
    """What became of a sandbox."""

    state: Literal["running", "exited", "killed", "out_of_memory", "gone", "engine_unreachable", "engine_restarted"]
    code: int | None = None
    detail: str = ""
    last_lines: str = ""
    """The guest's own last lines on stderr, for diagnosis."""


class SandboxInfo(Record):
    """A sandbox as the provider lists it."""

    id: str
    name: str
    state: str
    created_at: float
    owner: Owner | None
    labels: dict[str, str] = Field(default_factory=dict)

    def age_s(self) -> float:
        return time.time() - self.created_at


class StoredImage(Record):
    """A prepared environment, or a base of one, as the provider keeps it: an image or a snapshot."""

    id: str
    tag: str
    kind: str
    """``environment``, ``base`` or ``default``."""
    size: int
    """Bytes on top of its base, where it has one that is still there."""
    created_at: float
    used_at: float
    """When it was last used, as far as is known; when it was made if never."""


class Sandbox(ABC):
    """One isolated machine for one trial. Leaving the ``async with`` destroys it."""

    id: str
    name: str
    stream: ByteStream
    """The channel's bytes: what the guest reads on its descriptor 0 and writes on its descriptor 1."""

    @abstractmethod
    async def outcome(self) -> Exit:
        """What became of it, asked when the stream ended or a deadline passed. Never raises for a sandbox that is
        gone."""

    @abstractmethod
    async def destroy(self) -> None:
        """Remove it and everything it holds. Idempotent, bounded in time, and "already gone" is success.

        :raises SandboxError: when it may still exist.
        """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.destroy()


class Provider(ABC):
    """Makes sandboxes. An async context manager: entering connects, leaving closes connections (not sandboxes)."""

    capabilities: Capabilities

    @abstractmethod
    async def doctor(self) -> list[Finding]:
        """Say what is wrong here and what to do about it. Never raises."""

    @abstractmethod
    async def prepare(self, lock: Lock, settings: SandboxSettings, progress: Progress) -> Environment:
        """Build, or find again, the environment for a lock. Single-flight across processes.

        :raises DependencyError: the dependencies do not resolve, download or build.
        :raises ImageError: the base image cannot be had.
        :raises ProviderUnavailable: the provider cannot work here.
        """

    @abstractmethod
    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Make a sandbox and start its guest. A create that fails or is cancelled leaves nothing behind.

        :raises SandboxError: with ``retryable`` telling whether another try can help.
        """

    @abstractmethod
    async def list(self) -> list[SandboxInfo]:
        """Every sandbox on this provider that a harness made, whoever owns it."""

    @abstractmethod
    async def remove(self, info: SandboxInfo) -> None:
        """Destroy a listed sandbox. "Already gone" is success."""

    async def stored(self) -> Sequence[StoredImage]:
        """What ``prepare`` has left with the provider, least recently used first."""
        return []

    async def prune(self, budget: int, progress: Progress) -> Sequence[StoredImage]:
        """Remove the least recently used of it until the rest takes at most ``budget`` bytes; says which."""
        return []

    async def __aenter__(self) -> Self:
        return self

    @abstractmethod
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def describe(settings: SandboxSettings) -> Mapping[str, Any]:
    """The settings as shown in a plan and in the manifest: variables by name only, never their values."""
    return {**settings.model_dump(exclude={"env"}), "env": sorted(settings.env)}
