"""The way to an engine on another machine: its socket, forwarded by the user's own ``ssh``.

What the user's ssh knows holds here too: keys and agents, known hosts, jump hosts. One connection carries everything in
forwarded streams. (aiodocker's own way takes a session for each connection to the engine; sshd allows ten.)
"""

from __future__ import annotations

import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import anyio
from anyio.abc import Process

_SOCKET = "/var/run/docker.sock"
_READY = b"harness-ready\n"
_OPTIONS = {
    "BatchMode": "yes",  # nobody is there to answer a question
    "ConnectTimeout": "10",
    "ServerAliveInterval": "15",
    "ExitOnForwardFailure": "yes",
    "StreamLocalBindUnlink": "yes",
    "ControlPath": "none",  # a shared connection would outlive us
    "ForwardAgent": "no",
    "ForwardX11": "no",
}


class Tunnel:
    """:param url: ``ssh://[user@]host[:port][/path/of/the/engine's/socket]``."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host = f"ssh://{parts.netloc}"
        self.path = parts.path.rstrip("/") or _SOCKET
        self._folder = tempfile.TemporaryDirectory(prefix="harness-ssh-")
        self._socket, self._log = (Path(self._folder.name) / name for name in ("engine.sock", "log"))
        self.url = f"unix://{self._socket}"
        self.hint = (
            f"`ssh {self.host} ls -l {self.path}` must work without a question, and show a socket that you may use. "
            f"If the engine has another one: DOCKER_HOST={self.host}/path/to/docker.sock."
        )
        self._process: Process | None = None
        self._opening = anyio.Lock()

    async def open(self) -> None:
        """Connect, unless it is connected.

        :raises ConnectionError: in the words of ssh.
        """
        async with self._opening:
            if self._process is not None and self._process.returncode is None:
                return
            await self._end()
            options = [word for name, value in _OPTIONS.items() for word in ("-o", f"{name}={value}")]
            forward = ["-L", f"{self._socket}:{self.path}"]
            # The far program ends with its input, and ssh with that program: nothing outlives this process.
            command = ["ssh", "-T", *options, *forward, self.host, f"echo {_READY.decode().strip()}; exec cat"]
            with self._log.open("wb") as log:
                self._process = await anyio.open_process(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
                )
            assert self._process.stdout is not None
            said = b""
            try:
                while not said.endswith(_READY):
                    said = (said + await self._process.stdout.receive())[-4096:]
            except anyio.EndOfStream:
                await self._process.wait()
                raise ConnectionError(self.last_words() or "ssh ended without a word") from None
            except BaseException:
                await self._end()
                raise

    def last_words(self) -> str:
        """What ssh said last; empty when it did not complain."""
        lines = self._log.read_text(errors="replace").split("\n") if self._log.exists() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{self.path} cannot be reached there: {last}" if "open failed" in last else last

    async def aclose(self) -> None:
        await self._end()
        self._folder.cleanup()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.terminate()
            with anyio.CancelScope(shield=True):
                await process.aclose()
