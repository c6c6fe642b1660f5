"""Packages made by hand and an index that serves them, so that no test needs the network."""

from __future__ import annotations

import base64
import hashlib
import http.server
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from uv import find_uv_bin

from harness.rollout.lock import own_python

BACKEND = """
import zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "local_dep-1.0-py3-none-any.whl"
    with zipfile.ZipFile(folder + "/" + name, "w") as wheel:
        wheel.write("local_dep.py")
        wheel.writestr("local_dep-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: local-dep\\nVersion: 1.0\\n")
        kind = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
        wheel.writestr("local_dep-1.0.dist-info/WHEEL", kind)
        wheel.writestr("local_dep-1.0.dist-info/RECORD", "")
    return name
"""


def wheel(
    folder: Path, name: str, version: str = "1.0", *, requires: str = "", files: dict[str, str] | None = None
) -> Path:
    """A wheel with a module, a console script that prints the module's file, and a .pth file that runs."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "def main():\n    print(__file__)\n")
        for file, text in (files or {}).items():
            archive.writestr(file, text)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/entry_points.txt", f"[console_scripts]\n{name}-tool = {name}:main\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def project(folder: Path, dependencies: list[str], *, python: str = ">=3.12", more: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "rollout"\nversion = "0.1"\nrequires-python = "{python}"\n'
        f"dependencies = {dependencies!r}\n{more}"
    )
    return folder


def local_dependency(folder: Path) -> Path:
    """A path dependency that builds with a back end of its own."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "local-dep"\nversion = "1.0"\n'
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (folder / "backend.py").write_text(BACKEND)
    (folder / "local_dep.py").write_text("VALUE = 1\n")
    return folder


def uv_lock(folder: Path) -> None:
    subprocess.run([find_uv_bin(), "lock", "-q", "--python", str(own_python())], cwd=folder, check=True)


@contextmanager
def index(wheels: Path, *, password: str = "") -> Iterator[str]:
    """A package index on loopback; with a password, only for user ``u``. Gives its URL."""
    wanted = "Basic " + base64.b64encode(f"u:{password}".encode()).decode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if password and self.headers.get("Authorization") != wanted:
                self.send_response(401)
                self.send_header("WWW-Authenticate", "Basic")
                self.end_headers()
                return
            parts = self.path.strip("/").split("/")
            files = {file.name: file for file in wheels.glob("*.whl")}
            if parts[0] == "files" and parts[-1] in files:
                self._answer(files[parts[-1]].read_bytes(), "application/octet-stream")
            elif parts[0] == "simple" and (
                found := [n for n in files if n.split("-")[0] == parts[1].replace("-", "_")]
            ):
                links = (
                    f'<a href="/files/{n}#sha256={hashlib.sha256(files[n].read_bytes()).hexdigest()}">{n}</a>'
                    for n in found
                )
                self._answer("".join(links).encode(), "text/html")
            else:
                self.send_error(404)

        do_HEAD = do_GET

        def _answer(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/simple"
        finally:
            server.shutdown()
            thread.join()
