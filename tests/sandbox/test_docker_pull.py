"""Pulling from a real registry that limits the rate, wants a login, or is not there: what the engine hands on, and
what the user is told.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
import pytest
from aiodocker import Docker, DockerError
from aiohttp import web

from harness.errors import ImageError
from harness.sandbox.docker.build import build
from harness.sandbox.docker.context import directory
from harness.sandbox.docker.engine import Engine
from harness.sandbox.docker.pull import pull

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
JSON = json.dumps({"errors": [{"code": "TOOMANYREQUESTS", "message": "retry-after: 985.86µs, allowed: 9/s"}]})
TEXT = "slow down"


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Registry:
    """The pulling half of the OCI distribution API, with one image of one layer, ``tiny:1``."""

    def __init__(self) -> None:
        self.address = ""
        self.limited, self.refusal = "", ""
        """What has this in its path is refused with 429 and these words."""
        self.login = False
        """Whether it wants a token; its own token service gives one to anybody."""
        self.closed = False
        """Whether that service refuses."""
        with io.BytesIO() as file:
            with tarfile.open(mode="w", fileobj=file) as tar:
                tar.addfile(tarfile.TarInfo("hello"))
            root = file.getvalue()
        layer = gzip.compress(root, mtime=0)
        config = json.dumps(
            {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": [digest(root)]}}
        ).encode()
        self.layer, self.config = f"/blobs/{digest(layer)}", f"/blobs/{digest(config)}"
        self.blobs = {self.layer: layer, self.config: config}
        described = {
            kind: {
                "mediaType": f"application/vnd.oci.image.{media}",
                "digest": digest(data),
                "size": len(data),
            }
            for kind, media, data in (("config", "config.v1+json", config), ("layer", "layer.v1.tar+gzip", layer))
        }
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST}
        manifest |= {"config": described["config"], "layers": [described["layer"]]}
        self.manifest = json.dumps(manifest).encode()

    async def answer(self, request: web.Request) -> web.Response:
        path = request.path
        if self.limited and self.limited in path:
            return web.Response(status=429, text=self.refusal, headers={"Retry-After": "1"})
        if path == "/token":
            return self.error(401, "UNAUTHORIZED") if self.closed else web.json_response({"token": "any"})
        if self.login and "Authorization" not in request.headers:
            realm = f'Bearer realm="http://{self.address}/token",service="test"'
            return self.error(401, "UNAUTHORIZED", {"WWW-Authenticate": realm})
        if path == "/v2/":
            return web.json_response({})
        if path in ("/v2/tiny/manifests/1", f"/v2/tiny/manifests/{digest(self.manifest)}"):
            headers = {"Docker-Content-Digest": digest(self.manifest)}
            return web.Response(body=self.manifest, headers=headers, content_type=MANIFEST)
        if (blob := self.blobs.get(path.removeprefix("/v2/tiny"))) is not None:
            return web.Response(body=blob, content_type="application/octet-stream")
        return self.error(404, "MANIFEST_UNKNOWN")

    def error(self, status: int, code: str, headers: dict[str, str] | None = None) -> web.Response:
        body = {"errors": [{"code": code, "message": code.lower().replace("_", " ")}]}
        return web.json_response(body, status=status, headers=headers)


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    made = Registry()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.answer)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        made.address = f"127.0.0.1:{runner.addresses[0][1]}"
        yield made
    finally:
        await runner.cleanup()


@pytest.fixture
async def engine(registry: Registry) -> AsyncIterator[Engine]:
    made = Engine()
    try:
        yield made
    finally:
        await made.aclose()
        async with Docker() as docker:
            with suppress(DockerError):
                await docker.images.delete(f"{registry.address}/tiny:1", force=True)


@pytest.mark.parametrize(
    ("limited", "refusal"),
    [("manifests", TEXT), ("manifests", JSON), ("layer", TEXT), ("config", JSON), ("token", JSON)],
    ids=["manifest-text", "manifest", "layer-text", "config", "token"],
)
async def test_a_registry_that_limits_the_rate_is_asked_again(
    registry: Registry, engine: Engine, limited: str, refusal: str
) -> None:
    registry.login, registry.refusal = True, refusal
    registry.limited = getattr(registry, limited, f"/{limited}")
    waits: list[str] = []

    def progress(line: str) -> None:
        if "limits the rate of pulls; waiting" in line:
            waits.append(line)
            registry.limited = ""

    with anyio.fail_after(10):
        await pull(engine, f"{registry.address}/tiny:1", progress)
    assert await engine.image(f"{registry.address}/tiny:1") is not None
    assert len(waits) == 1


async def test_a_build_whose_base_is_limited_goes_on_after_the_wait(
    registry: Registry, engine: Engine, tmp_path: Path
) -> None:
    registry.limited, registry.refusal = "/manifests", JSON
    tmp_path.joinpath("Dockerfile").write_text(f"FROM {registry.address}/tiny:1\nLABEL of=test\n")
    tag, waits = f"harness-test:{registry.address.rpartition(':')[2]}", 0

    def progress(line: str) -> None:
        nonlocal waits
        if "limits the rate of pulls; waiting" in line:
            waits += 1
            registry.limited = ""

    try:
        with anyio.fail_after(20):
            await build(engine, partial(directory, folder=tmp_path), tag, {}, progress)
        assert waits == 1
    finally:
        assert await engine.remove_image(tag)


@pytest.mark.parametrize(
    ("name", "message"),
    [("tiny:2", "manifest unknown"), ("closed:1", "unauthorized"), ("away:1", "connection refused")],
)
async def test_an_image_that_cannot_be_had_is_refused_at_once(
    registry: Registry, engine: Engine, name: str, message: str
) -> None:
    registry.login, registry.closed = True, name.startswith("closed")
    reference = f"{registry.address if name != 'away:1' else '127.0.0.1:9'}/{name}"
    lines: list[str] = []
    with pytest.raises(ImageError, match=message) as caught:
        await pull(engine, reference, lines.append)
    assert caught.value.message.startswith(f"Image {reference} could not be pulled.")
    assert "docker login" in caught.value.hint
    assert lines == [f"pulling image {reference}"]
    assert await engine.image(reference) is None
