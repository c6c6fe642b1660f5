"""The toolbox: the API of the daemon inside a sandbox, through the service's proxy at ``/toolbox/{sandbox}``."""

from __future__ import annotations

import base64
import errno
import json
import os
import posixpath
import secrets
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import anyio
from aiohttp import BodyPartReader, WSCloseCode, web

from . import schema
from .clock import iso
from .faults import FAULTS, Break
from .machine import CHUNK, HOME, MachineDown, chunks, write_all
from .schema import DAEMON, ApiError
from .sessions import ENTRYPOINT, STDERR, STDOUT, Command, Pty, Sessions
from .world import Link, Sandbox, World

EXECUTE_S = 360
"""The daemon's own limit for a command that names none."""
RESULT_BYTES = 16 * 1024 * 1024
EXIT_CONTROL, ENVS = "X-Daytona-Pty-Exit-Control", "X-Daytona-Pty-Envs~"

Method = Callable[["Call"], Awaitable[web.StreamResponse]]


class Call:
    """A request to the toolbox of a running sandbox. Making one counts as activity."""

    def __init__(self, world: World, request: web.Request) -> None:
        self.request = request
        self.sandbox: Sandbox = world.find(request.match_info["id"])
        self.machine = self.sandbox.running()
        if self.sandbox.sessions is None:
            raise ApiError(502, "bad gateway: the toolbox is not ready", source=schema.PROXY)
        self.sessions: Sessions = self.sandbox.sessions
        self.now = world.clock.now()
        self.sandbox.active_at = self.now

    def path(self, name: str = "path") -> str:
        text = self.request.query.get(name, "")
        if not text:
            raise ApiError(400, f"{name} is required", code="INVALID_FILE_PATH", source=DAEMON)
        return self.absolute(text)

    def absolute(self, path: str) -> str:
        path = HOME + path[1:] if path.startswith("~") else path
        return posixpath.normpath(posixpath.join(self.sessions.workdir, path))


class Toolbox:
    def __init__(self, world: World) -> None:
        self._world = world

    def routes(self) -> list[web.RouteDef]:
        session, pty = "/process/session/{session}", "/process/pty/{pty}"
        table: dict[tuple[str, str], Method] = {
            ("GET", "/version"): self.version,
            ("GET", "/user-home-dir"): self.home,
            ("GET", "/work-dir"): self.work_dir,
            ("POST", "/env"): self.update_env,
            ("POST", "/process/execute"): self.execute,
            ("POST", "/process/session"): self.create_session,
            ("GET", "/process/session"): self.list_sessions,
            ("GET", "/process/session/entrypoint/logs"): self.logs,
            ("GET", session): self.get_session,
            ("DELETE", session): self.delete_session,
            ("POST", f"{session}/exec"): self.session_execute,
            ("GET", f"{session}/command/{{command}}"): self.get_command,
            ("GET", f"{session}/command/{{command}}/logs"): self.logs,
            ("POST", f"{session}/command/{{command}}/input"): self.send_input,
            ("GET", "/process/pty"): self.list_ptys,
            ("GET", "/process/pty/create-connect"): self.create_pty,
            ("GET", pty): self.get_pty,
            ("GET", f"{pty}/connect"): self.connect_pty,
            ("POST", f"{pty}/resize"): self.resize_pty,
            ("DELETE", pty): self.delete_pty,
            ("GET", "/files"): self.list_files,
            ("DELETE", "/files"): self.delete_file,
            ("GET", "/files/info"): self.file_info,
            ("POST", "/files/folder"): self.create_folder,
            ("POST", "/files/permissions"): self.set_permissions,
            ("POST", "/files/move"): self.move,
            ("POST", "/files/bulk-upload"): self.upload,
            ("POST", "/files/bulk-download"): self.download,
        }
        return [
            web.route(verb, "/toolbox/{id}" + path, self._handler(method)) for (verb, path), method in table.items()
        ]

    def _handler(self, method: Method) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await method(Call(self._world, request))
            except OSError as error:
                if isinstance(error, ConnectionError):
                    raise
                raise _file_error(error) from error
            except (MachineDown, TimeoutError) as error:
                raise ApiError(502, "bad gateway: the sandbox went away", source=schema.PROXY) from error

        return handle

    async def version(self, call: Call) -> web.Response:
        return web.json_response({"version": "0.226.1"})

    async def home(self, call: Call) -> web.Response:
        return web.json_response({"dir": HOME})

    async def work_dir(self, call: Call) -> web.Response:
        return web.json_response({"dir": call.sessions.workdir})

    async def update_env(self, call: Call) -> web.Response:
        body = json.loads(await call.request.read())
        call.sessions.env |= body.get("set") or {}
        for name in body.get("unset") or []:
            call.sessions.env.pop(name, None)
        return web.json_response({})

    # Processes

    async def execute(self, call: Call) -> web.Response:
        """Output and errors in one. On a timeout only the shell is killed, as the daemon does it."""
        asked = schema.parse(schema.Execute, await call.request.read(), DAEMON)
        env, output = {**call.sessions.env, **(asked.envs or {})}, bytearray()
        cwd = call.absolute(asked.cwd or ".")
        child = await call.machine.spawn(["/bin/sh", "-c", asked.command], env, cwd, merge=True)
        try:
            with anyio.fail_after(asked.timeout or EXECUTE_S):
                async for data in chunks(child.descriptors[1]):
                    output += data[: max(0, RESULT_BYTES - len(output))]
                code = await child.wait()
        except TimeoutError:
            await call.machine.call("kill", pid=child.pid, number=9)
            message = "command execution timeout"
            raise ApiError(408, message, code="PROCESS_EXECUTION_TIMEOUT", source=DAEMON) from None
        finally:
            for descriptor in child.descriptors:
                os.close(descriptor)
        return web.json_response({"exitCode": code, "result": output.decode(errors="replace")})

    async def create_session(self, call: Call) -> web.Response:
        await call.sessions.create(schema.parse(schema.CreateSession, await call.request.read(), DAEMON).session_id)
        return web.Response(status=201)

    async def list_sessions(self, call: Call) -> web.Response:
        found = [each.describe() for name, each in call.sessions.all.items() if name != ENTRYPOINT]
        return web.json_response(found)

    async def get_session(self, call: Call) -> web.Response:
        return web.json_response(call.sessions.get(call.request.match_info["session"]).describe())

    async def delete_session(self, call: Call) -> web.Response:
        await call.sessions.delete(call.request.match_info["session"])
        return web.Response(status=204)

    async def session_execute(self, call: Call) -> web.Response:
        asked = schema.parse(schema.SessionExecute, await call.request.read(), DAEMON)
        session = call.sessions.get(call.request.match_info["session"])
        command = await call.sessions.execute(session, asked.command)
        if asked.run_async or asked.var_async:
            return web.json_response({"cmdId": command.id}, status=202)
        await command.done.wait()
        if command.code is None:
            raise ApiError(410, "session ended before the command did", code="SESSION_ENDED", source=DAEMON)
        return web.json_response({"cmdId": command.id, "exitCode": command.code, **_logs(command)})

    def _command(self, call: Call) -> Command:
        session = call.sessions.get(call.request.match_info.get("session", ENTRYPOINT))
        if number := call.request.match_info.get("command"):
            return session.command(number)
        return next(iter(session.commands.values()))

    async def get_command(self, call: Call) -> web.Response:
        return web.json_response(self._command(call).describe())

    async def logs(self, call: Call) -> web.StreamResponse:
        command = self._command(call)
        if call.request.headers.get("Upgrade", "").lower() != "websocket":
            return web.json_response(_logs(command))
        async with _Socket(call) as socket:
            async for data in command.follow():
                await socket.send(data)
        return socket.response

    async def send_input(self, call: Call) -> web.Response:
        command = self._command(call)
        if command.done.is_set() or command.stdin < 0:
            raise ApiError(410, "command has already completed", code="COMMAND_ALREADY_COMPLETED", source=DAEMON)
        data = schema.parse(schema.SessionInput, await call.request.read(), DAEMON).data
        await write_all(command.stdin, data.encode())
        return web.Response(status=204)

    # Terminals

    async def list_ptys(self, call: Call) -> web.Response:
        return web.json_response({"sessions": [each.describe() for each in call.sessions.ptys.values()]})

    def _pty(self, call: Call) -> Pty:
        return call.sessions.pty(call.request.match_info["pty"])

    async def get_pty(self, call: Call) -> web.Response:
        return web.json_response(self._pty(call).describe())

    async def resize_pty(self, call: Call) -> web.Response:
        asked = schema.parse(schema.PtyResize, await call.request.read(), DAEMON)
        self._pty(call).resize(asked.cols, asked.rows)
        return web.json_response(self._pty(call).describe())

    async def delete_pty(self, call: Call) -> web.Response:
        await call.sessions.kill_pty(self._pty(call))
        return web.json_response({"message": "PTY session deleted"})

    async def create_pty(self, call: Call) -> web.StreamResponse:
        query, envs = call.request.query, {}
        for offered in call.request.headers.get("Sec-WebSocket-Protocol", "").split(","):
            if (token := offered.strip()).startswith(ENVS):
                text = token[len(ENVS) :]
                envs = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        try:
            size = schema.PtyResize(cols=int(query.get("cols", "80")), rows=int(query.get("rows", "24")))
        except ValueError as error:
            raise ApiError(400, "cols and rows must be 1 to 1000", source=DAEMON) from error
        if not query.get("id"):
            raise ApiError(400, "id is required", source=DAEMON)
        cwd = call.absolute(query["cwd"]) if query.get("cwd") else ""
        pty = await call.sessions.open_pty(query["id"], size.cols, size.rows, cwd, envs, iso(call.now))
        return await self._attach(call, pty)

    async def connect_pty(self, call: Call) -> web.StreamResponse:
        return await self._attach(call, self._pty(call))

    async def _attach(self, call: Call, pty: Pty) -> web.StreamResponse:
        async with _Socket(call, protocols=(EXIT_CONTROL,)) as socket, anyio.create_task_group() as tasks:
            await socket.say({"type": "control", "status": "connected"})

            async def typed() -> None:
                async for message in socket.response:
                    call.sandbox.active_at = self._world.clock.now()
                    data = message.data.encode() if isinstance(message.data, str) else message.data
                    with suppress(OSError, anyio.ClosedResourceError):
                        await write_all(pty.terminal, data)
                tasks.cancel_scope.cancel()  # the terminal stays, for another connection

            tasks.start_soon(typed)
            with suppress(anyio.ClosedResourceError):
                async for data in chunks(pty.terminal):
                    await socket.send(data)
            code = await pty.child.wait()
            await call.sessions.kill_pty(pty)
            await socket.say({"type": "control", "status": "exited", "exitCode": code})
            socket.reason = json.dumps({"exitCode": code}).encode()
            tasks.cancel_scope.cancel()
        return socket.response

    # Files

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
                envelope = _file_error(error).envelope("POST", call.request.path, iso(call.now))
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


class _Socket:
    """A WebSocket that faults can cut or silence. A normal end closes with 1000."""

    def __init__(self, call: Call, protocols: tuple[str, ...] = ()) -> None:
        self.response = web.WebSocketResponse(protocols=protocols, max_msg_size=0)
        self.reason = b""
        self._call = call
        self._break = next((each for each in call.request[FAULTS] if isinstance(each, Break)), None)
        self._sent = 0

    async def __aenter__(self) -> _Socket:
        await self.response.prepare(self._call.request)
        transport = self._call.request.transport
        self._link = Link(self._call.sandbox.links, transport.abort if transport else lambda: None)
        return self

    async def send(self, data: bytes) -> None:
        if self._break and self._sent >= self._break.after_bytes:
            if not self._break.silent:
                self._link.cut()
            self._link.silent = True
        self._sent += len(data)
        if self._link.silent:
            await anyio.sleep_forever()
        await self.response.send_bytes(data)

    async def say(self, message: dict[str, object]) -> None:
        if not self._link.silent:
            await self.response.send_str(json.dumps(message))

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self._link.close()
        with anyio.CancelScope(shield=True), anyio.move_on_after(1):
            await self.response.close(code=WSCloseCode.OK if kind is None else 1011, message=self.reason)
        return kind is not None and issubclass(kind, ConnectionError)


def _logs(command: Command) -> dict[str, str]:
    return {
        "output": command.text_of(STDOUT, STDERR),
        "stdout": command.text_of(STDOUT),
        "stderr": command.text_of(STDERR),
    }


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


def _file_error(error: OSError) -> ApiError:
    kinds = {
        errno.ENOENT: (404, "FILE_NOT_FOUND"),
        errno.ENOTDIR: (404, "FILE_NOT_FOUND"),
        errno.EACCES: (403, "FILE_ACCESS_DENIED"),
        errno.EPERM: (403, "FILE_ACCESS_DENIED"),
    }
    status, code = kinds.get(error.errno or 0, (400, "INVALID_FILE_PATH"))
    return ApiError(status, f"{error.strerror}", code=code, source=DAEMON)
