"""An OpenAI-compatible policy on loopback whose answers follow a script, and which can fail in every way policies do.

By hand: ``python -m tests.support.policy --script multiply`` prints its base URL and serves until it is stopped.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio
from aiohttp import web

Body = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """One assistant message."""

    content: str = ""
    tools: tuple[tuple[str, dict[str, Any]], ...] = ()
    """Tool calls: name and arguments."""


@dataclass(frozen=True)
class Fault:
    """A way to fail. ``status`` answers with an HTTP error; ``drop`` closes the connection without a word; ``garbage``
    is a 200 that is no JSON; ``cut`` breaks off in the middle of a chunked answer; ``hang`` never answers.
    """

    kind: Literal["status", "drop", "garbage", "cut", "hang"]
    status: int = 500
    retry_after: str | None = None


Script = Callable[[Body], Reply | Fault]
"""What the policy answers to a request's body."""


@dataclass(frozen=True)
class Request:
    """One request, as it arrived."""

    path: str
    headers: dict[str, str]
    """Names in lower case."""
    body: Body


@dataclass
class ScriptedPolicy:
    """A running server. ``script`` may be replaced, and ``faults`` filled, at any time."""

    script: Script
    key: str | None = None
    """The bearer token it wants; anything goes when it is None."""
    delay_s: float = 0.0
    """Pause before an answer; a streamed one pauses before each of its chunks, too."""
    faults: list[Fault] = field(default_factory=list)
    """Spent first, one a request."""
    requests: list[Request] = field(default_factory=list)
    aborted: int = 0
    """Requests whose client went away before its answer."""
    url: str = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body: Body = await request.json()
        self.requests.append(Request(request.path, {k.lower(): v for k, v in request.headers.items()}, body))
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return failure(401)
        try:
            await anyio.sleep(self.delay_s)
            said = self.faults.pop(0) if self.faults else self.script(body)
            if isinstance(said, Fault):
                return await self.fail(request, said, stream=bool(body.get("stream")))
            if body.get("stream"):
                return await self.stream(request, chunks(said, body))
            return web.json_response(completion(said, body))
        except (anyio.get_cancelled_exc_class(), ConnectionError):
            self.aborted += 1
            raise

    async def fail(self, request: web.Request, fault: Fault, *, stream: bool) -> web.StreamResponse:
        if fault.kind == "hang":
            await anyio.sleep_forever()
        if fault.kind == "drop":
            close(request)
        if fault.kind == "garbage":
            return web.Response(body=b"\x00<html>no \xff policy here", content_type="text/html")
        if fault.kind == "cut":
            return await self.cut(request, stream=stream)
        return failure(fault.status, fault.retry_after)

    async def cut(self, request: web.Request, *, stream: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream" if stream else "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        chunk = {**head("chat.completion.chunk"), "choices": [{"index": 0, "delta": {"content": "half of"}}]}
        await response.write(event(chunk) if stream else b'{"id": "chatcmpl-1", "choices": [{"ind')
        close(request)
        return response

    async def stream(self, request: web.Request, parts: list[Body]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        for part in parts:
            await anyio.sleep(self.delay_s)
            await response.write(event(part))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "scripted", "object": "model"}]})


def failure(status: int, retry_after: str | None = None) -> web.Response:
    error = {"message": f"scripted failure {status}", "type": "scripted", "code": status}
    headers = {"Retry-After": retry_after} if retry_after is not None else {}
    return web.json_response({"error": error}, status=status, headers=headers)


def close(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def event(part: Body) -> bytes:
    return b"data: " + json.dumps(part).encode() + b"\n\n"


def head(kind: str) -> Body:
    return {"id": "chatcmpl-1", "object": kind, "created": 0, "model": "scripted"}


def tokens(text: str) -> list[int]:
    """Made-up token ids: one a word, the same word the same id."""
    return [sum(word.encode()) for word in text.split()]


def measured(reply: Reply, body: Body) -> tuple[list[int], list[int], Body]:
    """Token ids of prompt and answer, and the usage."""
    prompt = tokens(json.dumps(body.get("messages")))
    answer = tokens(reply.content + " " + json.dumps(reply.tools))
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(answer)}
    return prompt, answer, {**usage, "total_tokens": len(prompt) + len(answer)}


def tool_calls(reply: Reply, body: Body) -> list[Body]:
    turn = len(body.get("messages") or [])
    return [
        {
            "id": f"call_{turn}_{index}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for index, (name, arguments) in enumerate(reply.tools)
    ]


def completion(reply: Reply, body: Body) -> Body:
    """The reply as one object; with token ids and log-probabilities as vLLM gives them, when they are wanted."""
    prompt, answer, usage = measured(reply, body)
    message: Body = {"role": "assistant", "content": reply.content or None}
    if reply.tools:
        message["tool_calls"] = tool_calls(reply, body)
    choice: Body = {"index": 0, "message": message, "finish_reason": "tool_calls" if reply.tools else "stop"}
    whole = {**head("chat.completion"), "choices": [choice], "usage": usage}
    if body.get("return_token_ids"):
        whole["prompt_token_ids"], choice["token_ids"] = prompt, answer
    if body.get("logprobs"):
        choice["logprobs"] = logprobs(answer)
    return whole


def logprobs(ids: list[int]) -> Body:
    return {"content": [{"token": f"token_id:{i}", "logprob": -0.5, "bytes": None, "top_logprobs": []} for i in ids]}


def chunks(reply: Reply, body: Body) -> list[Body]:
    """The reply as a stream: content word by word, tool calls, finish reason, and the usage if it is wanted."""
    prompt, answer, usage = measured(reply, body)
    frame = head("chat.completion.chunk")
    deltas: list[Body] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": piece} for piece in re.findall(r"\S+\s*|\s+", reply.content)]
    deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(tool_calls(reply, body))]
    parts: list[Body] = [{**frame, "choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas]
    last: Body = {"index": 0, "delta": {}, "finish_reason": "tool_calls" if reply.tools else "stop"}
    if body.get("return_token_ids"):
        parts[0]["prompt_token_ids"], last["token_ids"] = prompt, answer
    if body.get("logprobs"):
        last["logprobs"] = logprobs(answer)
    parts.append({**frame, "choices": [last]})
    if (body.get("stream_options") or {}).get("include_usage"):
        parts.append({**frame, "choices": [], "usage": usage})
    return parts


def user_text(body: Body, *, first: bool = False) -> str:
    """The first or the last user message as text; content may be a string or a list of parts."""
    contents = [m.get("content") for m in body["messages"] if m["role"] == "user"]
    content = contents[0 if first else -1] if contents else ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content or [])


def multiply(body: Body) -> Reply:
    """Right for an even product, one too many for an odd one; multiples of six lack their ``####`` at first."""
    asked = [m["content"] for m in body["messages"] if m["role"] == "user"]
    if not re.search(r"\d", str(asked)):
        return Reply("hello")  # a preflight
    reminded = len(asked) > 1 and not re.search(r"\d", str(asked[-1]))
    a, b = map(int, re.findall(r"\d+", str(asked[-2] if reminded else asked[-1]))[:2])
    said = a * b + a * b % 2
    if said % 6 == 0 and not reminded:
        return Reply(f"{a} * {b} = {said}")
    return Reply(f"{a} * {b} = {said}\n#### {said}")


FIXES = {
    "mean.py": ("(len(numbers) - 1)", "len(numbers)"),
    "triangle.py": ("range(1, n)", "range(1, n + 1)"),
    "longest.py": ("<", ">"),
    "vowels.py": ("letter in line if", "letter in line.lower() if"),
    "factorial.py": ("result = 0", "result = 1"),
    "fizzbuzz.py": (" or ", " and "),
    "palindrome.py": ("letter for letter in line if", "letter for letter in line.lower() if"),
    "lead.py": ("sorted(numbers)", "sorted(set(numbers))"),
    "celsius.py": ("float(word) - 32 * 5", "(float(word) - 32) * 5"),
    "caesar.py": ('+ ord(letter) - ord("a") + 13', '+ (ord(letter) - ord("a") + 13) % 26'),
    "invoice.py": ("int(price) + int(count)", "int(price) * int(count)"),
    "unique.py": ("if line in seen", "if line not in seen"),
    "binary.py": ("digits += str(number % 2)", "digits = str(number % 2) + digits"),
    "gcd.py": ("a // b", "a % b"),
    "leap.py": ("and year % 400", "or year % 400"),
    "words.py": ('split(" ")', "split()"),
    "brackets.py": ("depth >= 0", "depth == 0"),
    "primes.py": ("int(number**0.5)", "int(number**0.5) + 1"),
    "transpose.py": ("range(len(rows))", "range(len(rows[0]))"),
    "median.py": ("numbers[len", "sorted(numbers)[len"),
}
"""The fault of each program of ``data/shell-agent.jsonl``, and its repair."""

GIVEN_UP = frozenset({"vowels.py", "lead.py", "leap.py", "median.py"})
"""Programs that the script submits as they are."""


def shell_agent(body: Body) -> Reply:
    """Looks at the program, repairs it, tries it, submits; some programs it gives up."""
    program = user_text(body, first=True).split(" ", 1)[0]
    if program not in FIXES:
        return Reply("hello")  # a preflight
    old, new = FIXES[program]
    repair = f"import pathlib; p = pathlib.Path({program!r}); p.write_text(p.read_text().replace({old!r}, {new!r}))"
    commands = [f"cat {program}", f"python3 - <<'END'\n{repair}\nEND", f"python3 {program} < sample.txt"]
    if program in GIVEN_UP:
        del commands[1:]
    done = sum(message["role"] == "tool" for message in body["messages"])
    if done < len(commands):
        return Reply(tools=(("bash", {"command": commands[done]}),))
    return Reply("Done.", tools=(("submit", {}),))


SCRIPTS: dict[str, Script] = {"multiply": multiply, "shell-agent": shell_agent}


@asynccontextmanager
async def serve(script: Script = multiply, *, port: int = 0, key: str | None = None) -> AsyncIterator[ScriptedPolicy]:
    """A policy on loopback; port 0 takes a free one."""
    policy = ScriptedPolicy(script, key=key)
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/chat/completions", policy.answer)
    app.router.add_get("/v1/models", policy.models)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        listener = socket.create_server(("127.0.0.1", port), backlog=2048)
        policy.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        await web.SockSite(runner, listener).start()
        yield policy
    finally:
        await runner.cleanup()


def refused_url() -> str:
    """The base URL of a policy that refuses every connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return f"http://127.0.0.1:{port}/v1"


async def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.policy", description=__doc__)
    parser.add_argument("--script", choices=SCRIPTS, default="multiply")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before each answer")
    options = parser.parse_args()
    async with serve(SCRIPTS[options.script], port=options.port) as policy:
        policy.delay_s = options.delay
        print(policy.url, flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main)
