"""The toolbox: the API of the daemon inside a sandbox, through the service's proxy at ``/toolbox/{sandbox}``."""

from __future__ import annotations

import base64
import json
import os
from contextlib import suppress

import anyio
from aiohttp import WSCloseCode, web

from . import schema
from .calls import Call, Method, routes
from .clock import iso
from .faults import FAULTS, Break
from .machine import HOME, chunks, write_all
from .records import Link
from .schema import DAEMON, ApiError
from .sessions import ENTRYPOINT, STDERR, STDOUT, Command, Pty
from .world import World

EXECUTE_S = 360
"""The daemon's own limit for a command that names none."""
RESULT_BYTES = 16 * 1024 * 1024
EXIT_CONTROL, ENVS = "X-Daytona-Pty-Exit-Control", "X-Daytona-Pty-Envs~"


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
        }
        return routes(self._world, table)

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
