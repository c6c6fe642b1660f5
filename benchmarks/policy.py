"""A policy that answers at once, or after a delay: ``python -m benchmarks.policy [SECONDS]`` prints its URL."""

from __future__ import annotations

import asyncio
import json
import sys

from aiohttp import web

ANSWER = json.dumps(
    {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "ok"}}],
        "usage": {"prompt_tokens": 8, "completion_tokens": 1, "total_tokens": 9},
    }
).encode()


async def main(delay_s: float) -> None:
    async def answer(request: web.Request) -> web.Response:
        await request.read()
        if delay_s:
            await asyncio.sleep(delay_s)
        return web.Response(body=ANSWER, content_type="application/json")

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=2048)
    await site.start()
    assert site._server is not None
    print(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1", flush=True)  # type: ignore[attr-defined]
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]) if len(sys.argv) > 1 else 0.0))
