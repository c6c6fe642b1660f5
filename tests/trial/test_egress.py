"""Allowed hosts, from the rollout's settings to the trial's files: a sandbox without a network reaches just those."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from anyio.abc import SocketAttribute, SocketStream

from tests.support.policy import Reply, ScriptedPolicy
from tests.support.workspace import Workspace

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(200)]

WORKFLOW = """
import http.client, socket
def fetch(host, port):
    proxy = os.environ["HTTPS_PROXY"].removeprefix("http://").split(":")
    try:
        socket.create_connection((host, port), timeout=1).close()
        return "directly!"
    except OSError:
        pass
    connection = http.client.HTTPConnection(proxy[0], int(proxy[1]), timeout=20)
    connection.set_tunnel(host, port)
    try:
        connection.request("GET", "/")
        return connection.getresponse().read().decode()
    except OSError as error:
        return str(error)
    finally:
        connection.close()
found = await asyncio.to_thread(lambda: [fetch(*target) for target in ctx.metadata["targets"]])
return [*ctx.prompt, {"role": "assistant", "content": json.dumps(found)}]
"""


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """A web server on this machine's loopback."""

    async def answer(stream: SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer)
        yield listener.extra(SocketAttribute.local_port)
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    "provider",
    [pytest.param("local", marks=pytest.mark.namespaces), pytest.param("docker", marks=pytest.mark.docker)],
)
async def test_listed_hosts_are_reached_others_are_refused_and_each_attempt_is_on_record(
    provider: str, port: int, tmp_path: Path, scripted_policy: ScriptedPolicy
) -> None:
    workspace = Workspace(tmp_path / "ws")
    workspace.write_main(WORKFLOW, "ctx.set_reward(1.0)")
    workspace.settings(f'[tool.harness.sandbox]\nallow = ["127.0.0.1:{port}", "localhost:{port + 1}"]\n')
    targets = [("127.0.0.1", port), ("localhost", port + 1), ("127.0.0.1", port + 1), ("169.254.169.254", 80)]
    workspace.write_rows([{"user_prompt": "x", "ground_truth": "y", "metadata": {"targets": targets}}])
    scripted_policy.script = lambda body: Reply("ok")
    done = await anyio.to_thread.run_sync(
        lambda: workspace.run("--policy-url", scripted_policy.url, "--sandbox", provider, timeout=180)
    )
    assert done.code == 0, done.err
    (trial,) = done.trials
    assert trial["status"] == "success", trial["failure"]
    found = json.loads(trial["samples"][0]["data"]["messages"][-1]["content"])
    assert found[0] == "hello"
    # A listed name that leads to a private address does not open that address.
    assert all("403" in answer for answer in found[1:])
    log = Path(done.document["run_dir"], "rollout_trials", trial["rollout_id"], "logs", "egress.txt")
    # A record is written when its connection is over: one that was let through ends when it likes.
    records = [json.loads(line) for line in (await anyio.Path(log).read_text()).splitlines()]
    records.sort(key=lambda record: targets.index((record["host"], record["port"])))
    assert [(record["host"], record["port"], record["status"]) for record in records] == [
        (host, number, status) for (host, number), status in zip(targets, (200, 403, 403, 403), strict=True)
    ]
    assert records[0]["address"] == "127.0.0.1"
    assert records[0]["received_bytes"] > 5
    assert records[0]["sent_bytes"] > 5
