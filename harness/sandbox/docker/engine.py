"""The Docker Engine API as this room uses it: one client, a deadline on every call, errors of ``harness.errors``.

aiodocker finds the engine (``DOCKER_HOST``, contexts, the usual sockets; unix, tcp, TLS and ssh) and speaks HTTP. Its
``_query`` level is used for the calls that its public methods do not do well: attach (see ``stream``), and those that
stream their answer. Podman's Docker-compatible socket answers the same calls.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import anyio
from aiodocker import Docker, DockerError
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from harness.errors import ImageError, ProviderUnavailable, QuotaError, SandboxError, SandboxGone
from harness.models import Record
from harness.sandbox.docker.stream import AttachStream

START_HINT = (
    "Start Docker Desktop, or `sudo systemctl start docker` (without systemd: `sudo dockerd &`); "
    "for another engine set DOCKER_HOST or choose a context with `docker context use`."
)
_PERMISSION_HINT = (
    "Add yourself to the engine's group (`sudo usermod -aG docker $USER`, then log in again), or use rootless Docker."
)
_SSH_HINT = "Install the ssh transport (`uv add 'aiodocker[ssh]'`) or forward the engine's socket yourself."
FULL_HINT = (
    "Free some disk where the engine keeps its data: `python -m harness images prune`; "
    "`docker system df` shows what else is there."
)
_BUSY_HINT = "The engine has no room for more now: lower --max-in-flight."
_FULL = ("no space left on device", "disk quota exceeded")
_BUSY = (
    "too many open files",
    "resource temporarily unavailable",
    "cannot allocate memory",
    "context deadline exceeded",
)

_GOING = ("transport is closing", "connection is closing", "context canceled", "error while dialing", "shutting down")
"""What an engine answers while it shuts down."""

OnMessage = Callable[[dict[str, Any]], None]


class Facts(Record):
    """What an engine says about itself."""

    version: str
    api: tuple[int, int]
    cpus: int
    driver: str
    root: str
    """Where the engine keeps its data, on its own machine."""
    cgroup: str
    rootless: bool
    runtimes: tuple[str, ...]
    limits: frozenset[str]
    """Which limits it can enforce: ``memory``, ``swap``, ``cpu``, ``pids``."""


class Engine:
    """One Docker engine. Connects with the first call.

    :param url: its address; empty to look where the ``docker`` command looks.
    """

    def __init__(self, url: str = "") -> None:
        self.url = url
        self._docker: Docker | None = None
        self._facts: Facts | None = None

    @property
    def local(self) -> bool:
        """Whether the engine is reached through a socket of this machine."""
        return self.url.startswith("unix://")

    async def aclose(self) -> None:
        if self._docker is not None:
            docker, self._docker = self._docker, None
            with anyio.CancelScope(shield=True), anyio.move_on_after(5):
                await docker.close()

    # -- the engine

    async def facts(self) -> Facts:
        """:raises ProviderUnavailable: nothing answers there, or not as a Docker engine would."""
        if self._facts is None:
            try:
                async with self._use("ask the engine what it is", 15) as docker:
                    version = await docker.version()
                    info = await docker.system.info()
                major, minor = str(version["ApiVersion"]).split(".")[:2]
                self._facts = Facts(
                    version=str(version["Version"]),
                    api=(int(major), int(minor)),
                    cpus=int(info.get("NCPU") or 1),
                    driver=str(info.get("Driver", "")),
                    root=str(info.get("DockerRootDir", "")),
                    cgroup=str(info.get("CgroupVersion") or "1"),
                    rootless=any("rootless" in str(option) for option in info.get("SecurityOptions") or ()),
                    runtimes=tuple(sorted(info.get("Runtimes") or ())),
                    limits=frozenset(name for name, key in _LIMIT_KEYS.items() if info.get(key)),
                )
            except (KeyError, ValueError, TypeError, AttributeError) as error:
                raise ProviderUnavailable(
                    f"What answers at {self.url} is not a Docker engine ({type(error).__name__}: {error}).",
                    hint=START_HINT,
                ) from error
            except SandboxError as error:
                if isinstance(error, ProviderUnavailable):
                    raise
                raise ProviderUnavailable(error.message, hint=error.hint or START_HINT) from error
        return self._facts

    # -- containers

    async def create(self, name: str, config: Mapping[str, Any]) -> str:
        async with self._use(f"create container {name}", 30) as docker:
            return (await docker.containers.create(dict(config), name=name)).id

    async def attach(self, container: str) -> AttachStream:
        """The container's standard streams. Before its start, or the first bytes are lost."""
        params = {"stream": 1, "stdin": 1, "stdout": 1, "stderr": 1}
        async with self._use(f"attach to container {container[:12]}", 30) as docker:
            response = await docker._do_query(
                f"containers/{container}/attach",
                "POST",
                params=params,
                headers={"Connection": "Upgrade", "Upgrade": "tcp"},
                read_until_eof=False,
            )
            protocol = response.connection.protocol if response.connection is not None else None
            if protocol is None or protocol.transport is None:
                response.close()
                raise DockerError(900, "the engine closed the attached connection")
            _keep_alive(protocol.transport.get_extra_info("socket"))
            return AttachStream(protocol.transport, protocol._tail, response.close)

    async def start(self, container: str) -> None:
        async with self._use(f"start container {container[:12]}", 120) as docker:
            await docker.containers.container(container).start()

    async def inspect(self, container: str) -> dict[str, Any] | None:
        """What the engine knows of a container, by id or name; None when there is none."""
        async with self._use(f"inspect container {container[:12]}", 15) as docker:
            try:
                return await docker.containers.container(container).show()
            except DockerError as error:
                if error.status == 404:
                    return None
                raise

    async def remove(self, container: str, *, timeout_s: float = 30) -> bool:
        """Kill and remove a container, by id or name, with its anonymous volumes; whether there was one.

        :raises SandboxError: when it may still exist after the time is over.
        """
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(SandboxError),
            stop=stop_after_delay(timeout_s),
            wait=wait_random_exponential(0.1, max=3),
            sleep=anyio.sleep,
            reraise=True,
        ):
            with attempt:
                async with self._use(f"remove container {container[:40]}", timeout_s) as docker:
                    try:
                        await docker.containers.container(container).delete(force=True, v=True)
                    except DockerError as error:
                        if error.status == 404:
                            return False
                        if error.status != 409:
                            raise
                        with suppress(
                            DockerError
                        ):  # its removal is in progress: it has ended, or somebody else did this
                            await docker.containers.container(container).wait(condition="removed")
        return True

    async def containers(self, label: str) -> list[dict[str, Any]]:
        """Containers with a label (``name`` or ``name=value``), in whatever state, as the engine lists them."""
        async with self._use("list containers", 60) as docker:
            found = await docker.containers.list(all=True, filters=json.dumps({"label": [label]}))
            return [container._container for container in found]

    async def events(self, label: str, since: str, on_open: Callable[[], None], on_message: OnMessage) -> None:
        """Hear of containers with a label, until the engine or the connection to it ends.

        :param since: the engine's time from which on, in seconds; empty for now.
        """
        params = {"filters": json.dumps({"type": ["container"], "label": [label]})}
        if since:
            params["since"] = since
        await self._stream("listen to the engine", "events", params, None, on_message, math.inf, "GET", on_open)

    async def back(self, timeout_s: float) -> None:
        """Wait for an engine that went away: many a restart takes only seconds.

        :raises ProviderUnavailable: it stays away.
        """
        with anyio.move_on_after(timeout_s):
            while True:
                with suppress(SandboxError):
                    async with self._use("ask whether the engine is back", 5) as docker:
                        await docker.version()
                    return
                await anyio.sleep(0.5)
        raise ProviderUnavailable(
            f"The Docker engine at {self.url} went away and has not been back for {timeout_s:g} s.", hint=START_HINT
        )

    # -- images

    async def image(self, reference: str) -> dict[str, Any] | None:
        """What the engine knows of an image, by id or reference; None when it has none."""
        async with self._use(f"inspect image {reference}", 30) as docker:
            try:
                return await docker.images.inspect(reference)
            except DockerError as error:
                if error.status == 404:
                    return None
                raise

    async def images(self, label: str, *, untagged: bool = False) -> list[dict[str, Any]]:
        """Images with a label (``name`` or ``name=value``; empty: all), as the engine lists them."""
        filters = {**({"label": label} if label else {}), **({"dangling": "true"} if untagged else {})}
        async with self._use("list images", 60) as docker:
            return await docker.images.list(filters=filters)

    async def remove_image(self, reference: str) -> bool:
        """Remove an image; False when something uses it or there is none."""
        async with self._use(f"remove image {reference}", 120) as docker:
            try:
                await docker.images.delete(reference)
            except DockerError as error:
                if error.status in (404, 409):
                    return False
                raise
        return True

    async def pull(self, reference: str, on_message: OnMessage, timeout_s: float) -> None:
        params = {"fromImage": reference}
        if not {":", "@"} & set(reference.rpartition("/")[2]):
            params["tag"] = "latest"  # without one the engine pulls every tag there is
        await self._stream(f"pull image {reference}", "images/create", params, None, on_message, timeout_s)

    async def build(
        self,
        context: AsyncIterator[bytes],
        *,
        tag: str,
        labels: Mapping[str, str],
        on_message: OnMessage,
        timeout_s: float,
        network: str = "",
    ) -> None:
        """Build an image from a tar that holds a Dockerfile and what it copies.

        :param network: of the steps that run; empty for the engine's default.
        """
        params = {"t": tag, "rm": "1", "forcerm": "1", "labels": json.dumps(labels)}
        if network:
            params["networkmode"] = network
        await self._stream(f"build image {tag}", "build", params, context, on_message, timeout_s)

    async def import_image(
        self, root: AsyncIterator[bytes], *, reference: str, changes: list[str], on_message: OnMessage, timeout_s: float
    ) -> None:
        """Make an image of a root file system's tar.

        :param changes: Dockerfile lines that describe it.
        """
        repository, _, tag = reference.rpartition(":")
        params = {"fromSrc": "-", "repo": repository, "tag": tag, "changes": "\n".join(changes)}
        await self._stream(f"import image {reference}", "images/create", params, root, on_message, timeout_s)

    # -- the boundary

    async def _stream(
        self,
        what: str,
        path: str,
        params: Mapping[str, Any],
        data: AsyncIterator[bytes] | None,
        on_message: OnMessage,
        timeout_s: float,
        method: str = "POST",
        on_open: Callable[[], None] = lambda: None,
    ) -> None:
        """A call that answers with one JSON message after another; an error among them is an ``ImageError``."""
        async with (
            self._use(what, timeout_s) as docker,
            docker._query(
                path, method, params=params, data=data, headers={"Content-Type": "application/x-tar"}
            ) as response,
            response,
        ):
            on_open()
            rest = b""
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    _take(what, line, on_message)
            _take(what, rest, on_message)

    @asynccontextmanager
    async def _use(self, what: str, timeout_s: float) -> AsyncIterator[Docker]:
        try:
            with anyio.fail_after(timeout_s):
                yield self._client()
        except DockerError as error:
            raise self._translate(what, error) from error
        except TimeoutError as error:
            raise QuotaError(
                f"Could not {what}: no answer from the Docker engine within {timeout_s:g} s.", hint=_BUSY_HINT
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._translate(what, DockerError(900, str(error))) from error

    def _client(self) -> Docker:
        if self._docker is None:
            try:
                self._docker = Docker(url=self.url or None)
            except (AssertionError, ValueError) as error:  # it asserts that it found a socket
                raise ProviderUnavailable("No Docker engine was found on this machine.", hint=START_HINT) from error
            self.url = self.url or self._docker._connection_info
            # Each attached sandbox holds a connection; at the pool's own limit (100) every other call would wait.
            self._docker.connector._limit = 0
        return self._docker

    def _translate(self, what: str, error: DockerError) -> SandboxError:
        text = error.message.strip()
        lowered = text.lower()
        where = self.url or "the Docker engine"
        if "asyncssh" in lowered:
            return ProviderUnavailable(f"Could not {what}: {text}", hint=_SSH_HINT)
        if error.status in (0, 900) or (error.status >= 500 and any(word in lowered for word in _GOING)):
            if self._facts is not None:
                return SandboxGone(
                    f"Could not {what}: the Docker engine at {where} went away ({text}).", hint=START_HINT
                )
            hint = _PERMISSION_HINT if "permission denied" in lowered else START_HINT
            return ProviderUnavailable(f"No Docker engine answers at {where} ({text}).", hint=hint)
        if any(word in lowered for word in _FULL):
            return QuotaError(f"Could not {what}: the engine's disk is full ({text}).", hint=FULL_HINT)
        if any(word in lowered for word in _BUSY):
            return QuotaError(f"Could not {what}: {text}", hint=_BUSY_HINT)
        if error.status == 404 and "no such image" in lowered:
            return ImageError(
                f"Could not {what}: {text}", hint="The image was removed meanwhile; run again to have it rebuilt."
            )
        return SandboxError(f"Could not {what}: the engine answered {error.status}: {text}")


_LIMIT_KEYS = {"memory": "MemoryLimit", "swap": "SwapLimit", "cpu": "CpuCfsQuota", "pids": "PidsLimit"}


def _keep_alive(sock: socket.socket) -> None:
    """Let the kernel find out when a remote engine is gone: an attached connection may be silent for minutes."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _take(what: str, line: bytes, on_message: OnMessage) -> None:
    if not line.strip():
        return
    try:
        message = json.loads(line)
    except ValueError:
        return
    if not isinstance(message, dict):
        return
    if error := message.get("error"):
        text = str(error).strip()
        if any(word in text.lower() for word in _FULL):
            raise QuotaError(f"Could not {what}: the engine's disk is full ({text}).", hint=FULL_HINT)
        raise ImageError(f"Could not {what}: {text}")
    on_message(message)
