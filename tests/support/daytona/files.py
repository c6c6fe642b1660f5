"""The toolbox's file endpoints."""

from __future__ import annotations

import json
import os
import posixpath
import secrets
import stat
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import anyio
from aiohttp import BodyPartReader, web

from . import schema
from .calls import Call, Method, file_error, routes
from .clock import iso
from .machine import CHUNK, MachineDown, chunks, write_all
from .schema import DAEMON, ApiError
from .world import World


class Files:
    def __init__(self, world: World) -> None:
        self._world = world

    def routes(self) -> list[web.RouteDef]:
        table: dict[tuple[str, str], Method] = {
            ("GET", "/files"): self.list_files,
            ("DELETE", "/files"): self.delete_file,
            ("GET", "/files/info"): self.file_info,
            ("POST", "/files/folder"): self.create_folder,
            ("POST", "/files/permissions"): self.set_permissions,
            ("POST", "/files/move"): self.move,
            ("POST", "/files/bulk-upload"): self.upload,
            ("POST", "/files/bulk-download"): self.download,
        }
        return routes(self._world, table)

    async def list_files(self, call: Call) -> web.Response:
        depth = int(call.request.query.get("depth", "1"))
        path = call.absolute(call.request.query.get("path") or ".")
        reply, _ = await call.machine.call("listing", path=path, depth=depth)
        return web.json_response([_file(each) for each in reply["files"]])

    async def file_info(self, call: Call) -> web.Response:
        return web.json_response(_file((await call.machine.call("info", path=call.path()))[0]))

    async def delete_file(self, call: Call) -> web.Response:
        await call.machine.call("remove", path=call.path(), recursive=call.request.query.get("recursive") == "true")
        return web.Response(status=204)

    async def create_folder(self, call: Call) -> web.Response:
        await call.machine.call("folder", path=call.path(), mode=_mode(call))
        return web.Response(status=201)

    async def set_permissions(self, call: Call) -> web.Response:
        await call.machine.call("chmod", path=call.path(), mode=_mode(call))
        return web.Response(status=200)

    async def move(self, call: Call) -> web.Response:
        await call.machine.call("move", source=call.path("source"), destination=call.path("destination"))
        return web.Response(status=200)

    async def upload(self, call: Call) -> web.Response:
        """Pairs of parts ``files[i].path`` and ``files[i].file``. No executable bits: all files become 0644."""
        paths: dict[str, str] = {}
        written: list[dict[str, Any]] = []
        errors: list[str] = []
        async for part in await call.request.multipart():
            if not isinstance(part, BodyPartReader):
                continue
            number, _, kind = (part.name or "").partition("].")
            if kind == "path":
                paths[number] = (await part.read()).decode()
            elif kind == "file" and number in paths:
                path = call.absolute(paths[number])
                try:
                    written.append({"path": path, "bytes": await self._write(call, path, part)})
                except OSError as error:
                    errors.append(f"{path}: {error.strerror}")
            else:
                errors.append(f"file part {part.name} without a path before it")
        return web.json_response({"files": written, "errors": errors}, status=400 if errors else 200)

    async def _write(self, call: Call, path: str, part: BodyPartReader) -> int:
        reply, [descriptor] = await call.machine.call("write", path=path)
        size = 0
        try:
            while data := await part.read_chunk(CHUNK):
                await write_all(descriptor, data)
                size += len(data)
        except BaseException:
            with anyio.CancelScope(shield=True), suppress(OSError, MachineDown):
                await call.machine.call("remove", path=reply["path"])
            raise
        finally:
            os.close(descriptor)
        await call.machine.call("move", source=reply["path"], destination=path)
        return size

    async def download(self, call: Call) -> web.StreamResponse:
        asked = schema.parse(schema.Download, await call.request.read(), DAEMON)
        boundary = secrets.token_hex(16)
        response = web.StreamResponse(headers={"Content-Type": f"multipart/form-data; boundary={boundary}"})
        await response.prepare(call.request)
        for path in asked.paths:
            name = f"filename=\"{quote(path, safe='/ ')}\"; filename*=UTF-8''{quote(path, safe='/')}"
            try:
                reply, [descriptor] = await call.machine.call("read", path=call.absolute(path))
            except OSError as error:
                envelope = file_error(error).envelope("POST", call.request.path, iso(call.now))
                kind, more, body = "error", "Content-Type: application/json", json.dumps(envelope).encode()
                descriptor = -1
            else:
                kind, more, body = (
                    "file",
                    f"Content-Type: application/octet-stream\r\nContent-Length: {reply['size']}",
                    b"",
                )
            head = f'--{boundary}\r\nContent-Disposition: form-data; name="{kind}"; {name}\r\n{more}\r\n\r\n'
            await response.write(head.encode() + body)
            if descriptor >= 0:
                try:
                    async for data in chunks(descriptor):
                        await response.write(data)
                finally:
                    os.close(descriptor)
            await response.write(b"\r\n")
        await response.write(f"--{boundary}--\r\n".encode())
        await response.write_eof()
        return response


def _file(found: dict[str, Any]) -> dict[str, Any]:
    at = iso(found["mtime"])
    return {
        "name": posixpath.basename(found["path"]), "path": found["path"], "isDir": stat.S_ISDIR(found["mode"]),
        "size": found["size"], "mode": stat.filemode(found["mode"]), "modTime": at, "modifiedAt": at,
        "permissions": f"{stat.S_IMODE(found['mode']):04o}", "owner": str(found["uid"]), "group": str(found["gid"]),
    }  # fmt: skip


def _mode(call: Call) -> int:
    try:
        return int(call.request.query.get("mode") or "755", 8)
    except ValueError as error:
        raise ApiError(400, "invalid mode format", source=DAEMON) from error
