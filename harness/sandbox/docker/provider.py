"""Sandboxes as Docker containers: the guest is PID 1, its attached standard streams are the channel, no network.

A trial costs three calls: create, attach, start. A container that ended removes itself, whether we still live or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import anyio

from harness import guest
from harness.background import Background
from harness.errors import ImageError, ProviderUnavailable, SandboxError, SandboxGone
from harness.rollout.lock import Lock
from harness.sandbox.base import (
    Capabilities,
    Environment,
    Exit,
    Finding,
    Progress,
    Provider,
    Sandbox,
    SandboxInfo,
    SandboxSettings,
    SandboxSpec,
    StoredImage,
)
from harness.sandbox.docker import container, images
from harness.sandbox.docker.build import LOW_DISK, free_disk
from harness.sandbox.docker.ends import Ends
from harness.sandbox.docker.engine import Engine
from harness.sandbox.docker.pull import BOOTSTRAP, DEFAULT_IMAGE
from harness.sandbox.docker.refusals import FULL_HINT, START_HINT
from harness.sandbox.docker.stream import AttachStream
from harness.sandbox.owner import this_process

MIN_API = (1, 41)
_REMOVE_S = 30.0
_LEAVE_S = 2.0
_SETTLE_S = 2.0
"""How long the news of a container's end may come after the end of its output."""
ENGINE_S = 60.0
"""How long an engine that went away is waited for."""
_LATE_S = 5.0


class DockerSandbox(Sandbox):
    """One container."""

    stream: AttachStream

    def __init__(self, engine: Engine, ends: Ends, id: str, name: str, stream: AttachStream) -> None:
        self.id = id
        self.name = name
        self.stream = stream
        self._engine = engine
        self._ends = ends
        self._end = ends.expect(id)
        self._destroying = anyio.Lock()
        self._destroyed = False

    async def outcome(self) -> Exit:
        words = self.stream.last_words
        if self.stream.at_eof:
            with anyio.move_on_after(_SETTLE_S):
                await self._end.died.wait()
        state: dict[str, Any] | None = None
        if not self._end.died.is_set():
            try:
                found = await self._engine.inspect(self.id)
            except SandboxError as error:
                return Exit(state="engine_unreachable", detail=error.message, last_lines=words)
            if found is None and self._ends.interruptions > self._end.interruptions:
                return Exit(state="engine_restarted", last_lines=words)
            if found is None:
                return Exit(state="gone", detail=f"container {self.name} does not exist any more", last_lines=words)
            state = found["State"]
            if state.get("Running"):
                return Exit(state="running", last_lines=words)
        return self._exit(state or {}, words)

    def _exit(self, state: Mapping[str, Any], words: str) -> Exit:
        """What was heard of the end, or, where it was not heard, the state that the engine tells when asked."""
        code = self._end.code if self._end.died.is_set() else int(state.get("ExitCode", 0))
        detail = str(state.get("Error") or "")
        if code == 137 and (self._end.oom or state.get("OOMKilled")):
            return Exit(state="out_of_memory", code=code, detail="the memory limit was reached", last_lines=words)
        if code is not None and code > 128:
            return Exit(state="killed", code=code, detail=detail or f"killed by signal {code - 128}", last_lines=words)
        return Exit(state="exited", code=code, detail=detail, last_lines=words)

    async def destroy(self) -> None:
        with anyio.CancelScope(shield=True):
            async with self._destroying:
                if not self._destroyed:
                    await self.stream.aclose()
                    with anyio.move_on_after(_LEAVE_S):  # the guest ends with its channel, and then it is removed
                        await self._end.removed.wait()
                    if not self._end.removed.is_set():
                        await self._engine.remove(self.id, timeout_s=_REMOVE_S)
                    self._ends.forget(self.id)
                    self._destroyed = True


class DockerProvider(Provider):
    """Any engine with the Docker API: local, rootless, Docker Desktop, remote (tcp, TLS, ssh), Podman's socket.

    :param url: the engine's address; empty to look where the ``docker`` command looks.
    :param command: makes PID 1's arguments from the interpreter, the folder of the guest's package and the boot object.
    """

    capabilities = Capabilities(name="docker", isolation="container", kept=True)

    def __init__(
        self, url: str = "", *, command: Callable[[str, str, dict[str, Any]], list[str]] = guest.command
    ) -> None:
        self.engine = Engine(url)
        self._command = command
        self._volumes: dict[str, Sequence[str]] = {}
        self._ends = Ends(self.engine, f"{container.OWNED}={this_process('').host}")  # Podman wants a value
        self._following = False

    async def __aenter__(self) -> Self:
        self._background = Background()
        self._tasks = await self._background.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._background.__aexit__(kind, error, trace)
        finally:
            self._following = False
            await self.engine.aclose()

    async def prepare(self, lock: Lock, settings: SandboxSettings, progress: Progress) -> Environment:
        facts = await self.engine.facts()
        if settings.resources.cpus > facts.cpus:
            raise SandboxError(
                f"The sandbox should have {settings.resources.cpus:g} CPUs; the Docker engine has {facts.cpus}.",
                hint=f"Set cpus in [tool.harness.sandbox] to at most {facts.cpus}.",
            )
        # Docker accepts containerd's shim names without listing them.
        shim = facts.name == "Docker" and "." in settings.runtime
        if settings.runtime and settings.runtime not in facts.runtimes and not shim:
            where = "added to its daemon.json" if facts.name == "Docker" else "had by `podman --runtime`, for all"
            raise SandboxError(
                f"The {facts.name} engine has no runtime {settings.runtime!r}.",
                hint=f"It has: {', '.join(facts.runtimes)}. Others are {where}.",
            )
        return await images.ensure(self.engine, lock, settings, progress)

    async def create(self, spec: SandboxSpec) -> DockerSandbox:
        facts = await self.engine.facts()
        if not self._following:
            self._following = True
            self._starting = anyio.Semaphore(max(2, facts.cpus))
            self._tasks.start_soon(self._ends.follow)
        deadline = math.inf
        while True:
            try:
                # An engine that starts many at once takes longer for all of them together. And few are half made when
                # this process is killed: one that was not started cannot remove itself, and waits for the next run.
                async with self._starting:
                    return await self._create(spec)
            except ImageError as error:
                raise ProviderUnavailable(error.message, hint=error.hint) from error  # so it is for every other one
            except SandboxGone:
                deadline = min(deadline, anyio.current_time() + ENGINE_S)
                if anyio.current_time() > deadline:
                    raise
                await self.engine.back(ENGINE_S)
                await self.engine.remove(spec.name, timeout_s=_REMOVE_S)

    async def _create(self, spec: SandboxSpec) -> DockerSandbox:
        facts = await self.engine.facts()
        boot = {
            "root": guest.ROOT,
            "uid": None,
            "gid": None,
            "limits": container.guest_limits(spec.settings.resources, facts),
            "lease_s": spec.lease_s,
        }
        command = self._command(spec.environment.python, guest.LIB, boot)
        body = container.config(spec, command, await self._declared_volumes(spec.environment.handle), facts)
        with anyio.move_on_after(_SETTLE_S):
            await self._ends.listening.wait()
        id, stream = "", None
        try:
            # Not cancelled half-way: the engine would go on, and the container appear under its name some time later.
            with anyio.CancelScope(shield=True):
                id = await self.engine.create(spec.name, body)
            stream = await self.engine.attach(id)
            sandbox = DockerSandbox(self.engine, self._ends, id, spec.name, stream)
            await self.engine.start(id)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                if stream is not None:
                    await stream.aclose()
                self._ends.forget(id)
                try:
                    if id:
                        await self.engine.remove(id, timeout_s=_REMOVE_S)
                    elif not isinstance(error, SandboxError) or error.retryable:
                        await self._remove_late(spec.name)
                except SandboxError as leftover:
                    error.add_note(f"Container {spec.name} may still exist: {leftover.message}")
            raise
        return sandbox

    async def _remove_late(self, name: str) -> None:
        """Remove a container whose create call was not answered: it may come into being after the call was given up."""
        with anyio.move_on_after(_LATE_S):
            while not await self.engine.remove(name, timeout_s=_REMOVE_S):  # noqa: ASYNC110  # nothing tells of it
                await anyio.sleep(0.25)

    async def _declared_volumes(self, image: str) -> Sequence[str]:
        if image not in self._volumes:
            found = await self.engine.image(image)
            if found is None:
                raise ImageError(f"Image {image} is not there any more.", hint="Run again: it is rebuilt.")
            self._volumes[image] = tuple((found.get("Config") or {}).get("Volumes") or ())
        return self._volumes[image]

    async def stored(self) -> list[StoredImage]:
        return await images.stored(self.engine)

    async def prune(self, budget: int, progress: Progress) -> list[StoredImage]:
        return await images.prune(self.engine, budget, progress)

    async def doctor(self) -> list[Finding]:
        try:
            facts = await self.engine.facts()
        except SandboxError as error:
            return [Finding(check="docker engine", ok=False, detail=error.message, remedy=error.hint)]
        engine = f"{facts.name} {facts.version}" + (", rootless" if facts.rootless else "")
        missing = sorted({"memory", "cpu", "pids"} - facts.limits)
        podman = "; Podman limits no number of files, and does not say of a kill that memory was the reason"
        findings = [
            Finding(check="docker engine", ok=True, detail=f"{engine} at {self.engine.url}"),
            Finding(
                check="docker api",
                ok=facts.api >= MIN_API,
                detail="API {}.{}".format(*facts.api),
                remedy=""
                if facts.api >= MIN_API
                else "Update the engine: 20.10 or newer is needed (API {}.{}).".format(*MIN_API),
            ),
            Finding(
                check="docker storage",
                ok=facts.driver != "vfs",
                required=False,
                detail=f"storage driver {facts.driver}",
                remedy="vfs copies the whole image for each sandbox: use overlay2." if facts.driver == "vfs" else "",
            ),
            Finding(
                check="docker limits",
                ok=not missing,
                required=False,
                detail=f"control groups v{facts.cgroup}"
                + (f"; not enforced: {', '.join(missing)}" if missing else "")
                + (podman if facts.name == "Podman" else ""),
                remedy="Rootless engines need control groups v2 with delegation (systemd) to enforce limits."
                if missing
                else "",
            ),
        ]
        try:
            if (free := await free_disk(self.engine)) is not None:
                findings.append(
                    Finding(
                        check="docker disk",
                        ok=free >= LOW_DISK,
                        required=False,
                        detail=f"{free / 2**30:.1f} GiB free at {facts.root}",
                        remedy="" if free >= LOW_DISK else FULL_HINT,
                    )
                )
            present = await self.engine.image(DEFAULT_IMAGE) is not None
        except (SandboxError, OSError) as error:
            return [*findings, Finding(check="docker images", ok=False, detail=str(error), remedy=START_HINT)]
        remedy = f"The first run makes it. Where no registry can be reached: `{BOOTSTRAP}`."
        default = Finding(
            check="docker image",
            ok=present,
            required=False,
            detail=f"default image {DEFAULT_IMAGE} is {'' if present else 'not yet '}there",
            remedy="" if present else remedy,
        )
        return [*findings, default]

    async def list(self) -> list[SandboxInfo]:
        return [container.info(found) for found in await self.engine.containers(container.OWNED)]

    async def remove(self, info: SandboxInfo) -> None:
        with anyio.CancelScope(shield=True):
            await self.engine.remove(info.id, timeout_s=_REMOVE_S)
