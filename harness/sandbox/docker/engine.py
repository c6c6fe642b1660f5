"""The Docker Engine API as this room uses it: one client, a deadline on every call, errors of ``harness.errors``.

aiodocker finds the engine (``DOCKER_HOST``, contexts, the usual sockets; unix, tcp and TLS) and speaks HTTP. Its
``_query`` level is used for the calls that its public methods do not do well: attach (see ``stream``), and those that
stream their answer. An engine behind ssh is reached through a ``Tunnel``. Podman's Docker-compatible socket answers the
same calls.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlencode

import aiohttp
import anyio
from aiodocker import Docker, DockerError
from aiodocker.exceptions import DockerContextError
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from harness.errors import ProviderUnavailable, QuotaError, SandboxError, SandboxGone
from harness.models import Record
from harness.sandbox.docker import refusals
from harness.sandbox.docker.ssh import Tunnel
from harness.sandbox.docker.stream import AttachStream

OnMessage = Callable[[dict[str, Any]], None]


class Facts(Record):
    """What an engine says about itself."""

    name: str
    """``Docker`` or ``Podman``."""
    version: str
    api: tuple[int, int]
    cpus: int
    driver: str
    root: str
    """Where the engine keeps its data, on its own machine."""
    cgroup: str
    rootless: bool
    runtimes: tuple[str, ...]
    """Those that it can be asked for."""
    limits: frozenset[str]
    """Which limits it can enforce: ``memory``, ``swap``, ``cpu``, ``pids``."""


class Engine:
    """One Docker engine. Connects with the first call.

    :param url: its address; empty to look where the ``docker`` command looks.
    """

    def __init__(self, url: str = "") -> None:
        self.url = url
        self._docker: Docker | None = None
        self._tunnel: Tunnel | None = None
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
        if self._tunnel is not None:
            tunnel, self._tunnel = self._tunnel, None
            await tunnel.aclose()

    # -- the engine

    async def facts(self) -> Facts:
        """:raises ProviderUnavailable: nothing answers there, or not as a Docker engine would."""
        if self._facts is None:
            try:
                async with self._use("ask the engine what it is", 15) as docker:
                    version = await docker.version()
                    info = await docker.system.info()
                major, minor = str(version["ApiVersion"]).split(".")[:2]
                components = [str(component.get("Name", "")) for component in version.get("Components") or ()]
                podman = any("Podman" in component for component in components)
                # Podman runs all with its default, whatever it is asked for.
                runtimes = [info.get("DefaultRuntime", "")] if podman else info.get("Runtimes") or ()
                self._facts = Facts(
                    name="Podman" if podman else "Docker",
                    version=str(version["Version"]),
                    api=(int(major), int(minor)),
                    cpus=int(info.get("NCPU") or 1),
                    driver=str(info.get("Driver", "")),
                    root=str(info.get("DockerRootDir", "")),
                    cgroup=str(info.get("CgroupVersion") or "1"),
                    rootless=any("rootless" in str(option) for option in info.get("SecurityOptions") or ()),
                    runtimes=tuple(sorted(runtimes)),
                    limits=frozenset(name for name, key in _LIMIT_KEYS.items() if info.get(key)),
                )
            except (KeyError, ValueError, TypeError, AttributeError) as error:
                raise ProviderUnavailable(
                    f"What answers at {self.url} is not a Docker engine ({type(error).__name__}: {error}).",
                    hint=refusals.START_HINT,
                ) from error
            except SandboxError as error:
                if isinstance(error, ProviderUnavailable):
                    raise
                raise ProviderUnavailable(error.message, hint=error.hint or refusals.START_HINT) from error
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
            _keep_alive(response)
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
            f"The Docker engine at {self.url} went away and has not been back for {timeout_s:g} s.",
            hint=refusals.START_HINT,
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
        # Podman takes neither a tag of its own nor several lines in one parameter.
        path = "images/create?" + urlencode([("changes", change) for change in changes])
        params = {"fromSrc": "-", "repo": reference}
        await self._stream(f"import image {reference}", path, params, root, on_message, timeout_s)

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
            _keep_alive(response)
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
                docker = self._client()
                if self._tunnel is not None:
                    await self._tunnel.open()
                yield docker
        except DockerError as error:
            raise self._translate(what, error) from error
        except TimeoutError as error:
            raise QuotaError(
                f"Could not {what}: no answer from the Docker engine within {timeout_s:g} s.", hint=refusals.BUSY_HINT
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._translate(what, DockerError(900, str(error))) from error

    def _client(self) -> Docker:
        if self._docker is None:
            # As the docker command does: the variable goes before the context. With aiodocker it is the other way.
            url = address = self.url or os.environ.get("DOCKER_HOST", "")
            try:
                if not url and (context := Docker._get_docker_context_endpoint()):
                    address = context.host
                if address.startswith("ssh://"):
                    self._tunnel = Tunnel(address)
                    url = self._tunnel.url
                self._docker = Docker(url=url or None)
            except AssertionError as error:  # it looked for a socket
                raise ProviderUnavailable(
                    "No Docker engine was found on this machine.", hint=refusals.START_HINT
                ) from error
            except DockerContextError as error:
                raise ProviderUnavailable(
                    f"The docker context cannot be used: {error}", hint=refusals.CONTEXT_HINT
                ) from error
            except ValueError as error:
                hint = refusals.TLS_HINT if "ssl" in str(error) else "It begins with unix://, tcp:// or ssh://."
                raise ProviderUnavailable(
                    f"The engine's address {address} cannot be used: {error}", hint=hint
                ) from error
            except OSError as error:
                text = f"The certificates for the engine at {address} cannot be read: {error}"
                raise ProviderUnavailable(text, hint=refusals.TLS_HINT) from error
            self.url = address or self._docker._connection_info
            if isinstance(tls := getattr(self._docker.connector, "_ssl", None), ssl.SSLContext):
                # Python 3.13 refuses certificates that were made as Docker's own documentation says.
                tls.verify_flags &= ~ssl.VERIFY_X509_STRICT
            # Each attached sandbox holds a connection; at the pool's own limit (100) every other call would wait.
            self._docker.connector._limit = 0
        return self._docker

    def _translate(self, what: str, error: DockerError) -> SandboxError:
        text = re.sub(r"Cannot connect to Docker Engine via \S+ \[(.*)\]", r"\1", error.message.strip())
        where = self.url or "the Docker engine"
        if (hint := refusals.out_of_reach(error.status, text)) is None:
            return refusals.of_call(what, error.status, text)
        if self._tunnel is not None:
            hint = self._tunnel.hint
            if (words := self._tunnel.last_words()) not in text:
                text = f"{text}; ssh said: {words}"
        if self._facts is not None:
            return SandboxGone(f"Could not {what}: the Docker engine at {where} went away ({text}).", hint=hint)
        return ProviderUnavailable(f"No Docker engine answers at {where} ({text}).", hint=hint)


_LIMIT_KEYS = {"memory": "MemoryLimit", "swap": "SwapLimit", "cpu": "CpuCfsQuota", "pids": "PidsLimit"}


def _keep_alive(response: aiohttp.ClientResponse) -> None:
    """Let the kernel find out when a remote engine is gone: what it answers may be silent for minutes."""
    transport = response.connection.transport if response.connection is not None else None
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
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
        raise refusals.of_message(what, str(error).strip())
    on_message(message)
