"""A Docker engine of the tests' own: it can be stopped, started again, and run out of disk."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from aiodocker import Docker

DISK = 3 << 30


class PrivateEngine:
    """A dockerd in a network namespace of its own, or it would remove the machine's bridge. Its disk is in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.url = f"unix://{folder / 'engine.sock'}"
        self.options: list[str] = []
        """More of dockerd's options."""
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        folder, log = self.folder, self.folder / "log"
        command = ["unshare", "--net", "dockerd", "--bridge=none", "--iptables=false", "-H", self.url]
        command += ["--data-root", str(self.data), "--exec-root", str(folder / "exec")]
        command += ["--pidfile", str(folder / "pid"), *self.options]
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        deadline = time.monotonic() + 60
        while "API listen on" not in (said := log.read_text(errors="replace")):
            assert self.process.poll() is None, f"dockerd ended: {said[-2000:]}"
            assert time.monotonic() < deadline, f"dockerd does not start: {said[-2000:]}"
            time.sleep(0.1)

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @contextmanager
    def running(self) -> Iterator[None]:
        try:
            self.start()
            yield
        finally:
            self.stop()
            for shim in Path("/proc").glob("[0-9]*"):  # an engine that ends while it starts a container may forget this
                with suppress(OSError):
                    if str(self.folder / "exec") in (shim / "cmdline").read_text():
                        os.kill(int(shim.name), signal.SIGKILL)

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """Meanwhile another program writes whatever fits on the engine's disk."""
        ballast, over = self.data / "ballast", threading.Event()

        def write() -> None:
            while not over.wait(0.005):
                with suppress(OSError), ballast.open("ab", buffering=0) as file:
                    while file.write(b"-" * 4096):
                        pass

        used = shutil.disk_usage(self.data).used
        self._resize(used + (1 << 20))
        writer = threading.Thread(target=write)
        writer.start()
        try:
            yield
        finally:
            over.set()
            writer.join()
            ballast.unlink(missing_ok=True)
            self._resize(DISK)

    def _resize(self, size: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self.data)], check=True)


async def copy_image(name: str, url: str) -> None:
    """Have another engine take an image over from the machine's."""
    async with Docker() as source, Docker(url=url) as target, source.images.export_image(name) as image:
        async for _ in target.images.import_image(image.iter_chunked(1 << 18), stream=True):
            pass


@contextmanager
def private_engine() -> Iterator[PrivateEngine]:
    """One that is not started yet. Skips the test, or fails it where Docker is required, when there can be none."""
    if os.geteuid() != 0 or shutil.which("dockerd") is None or shutil.which("unshare") is None:
        refuse = pytest.fail if os.environ.get("HARNESS_REQUIRE_DOCKER") == "1" else pytest.skip
        refuse("a second engine needs root, dockerd and unshare")
    # Not pytest's own folder: its path may be longer than a Unix socket's can be.
    with tempfile.TemporaryDirectory(prefix="engine-", ignore_cleanup_errors=True) as name:
        engine = PrivateEngine(Path(name))
        engine.data.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "engine", str(engine.data)], check=True)
        try:
            yield engine
        finally:
            for mount in reversed(Path("/proc/self/mounts").read_text().splitlines()):
                if (target := mount.split()[1]).startswith(name):
                    subprocess.run(["umount", "-l", target], check=False)
