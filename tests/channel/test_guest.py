from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import anyio
import pytest
from anyio.abc import ByteStream

from harness.channel import Ended
from harness.errors import ChannelClosed, ChannelError, EntryPointError, ProtocolError
from tests.channel.conftest import Box, Boxes

pytestmark = pytest.mark.anyio

ROLLOUT = """
from osmosis_ai.rollout import AgentWorkflow, AgentWorkflowOutput
import asyncio, json, os, signal, subprocess, sys, time, urllib.request
from osmosis_ai.rollout import get_rollout_context
class W(AgentWorkflow):
    async def run(self, ctx):
        BODY
"""


def workflow(body: str) -> str:
    return ROLLOUT.replace("BODY", body.replace("\n", "\n        "))


async def run(box: Box, timeout: float | None = 20) -> Ended:
    return await box.guest.run(
        rollout_id="a b::1", prompt=[{"role": "user", "content": "hi"}], metadata={"k": 1}, timeout=timeout
    )


async def run_body(boxes: Boxes, body: str, *, timeout: float | None = 20, **limits: int) -> tuple[Ended, Box]:
    async with boxes(**limits) as box:
        loaded = await box.load(main=workflow(body))
        assert loaded.ok, loaded.error
        return await run(box, timeout), box


async def test_a_workflow_returns_its_messages(box: Boxes) -> None:
    ended, made = await run_body(
        box,
        "print('grüezi', os.environ['GREETING'], os.getcwd())\n"
        "return [*ctx.prompt, {'role': 'assistant', 'content': str(ctx.metadata)}]",
    )
    assert ended.how == "returned"
    assert ended.samples[0].data["messages"][-1]["content"] == "{'k': 1}"
    assert f"grüezi hello {made.root}/rollout" in made.printed()


async def test_model_calls_travel_over_the_channel(box: Boxes) -> None:
    ended, _ = await run_body(
        box,
        "c = get_rollout_context()\n"
        "r = urllib.request.Request(c.chat_completions_url + '/chat/completions', data=b'{}',"
        " headers={'Authorization': 'Bearer ' + c.api_key})\n"
        "answer = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(r)))\n"
        "return [{'role': 'assistant', 'content': json.dumps(answer)}]",
    )
    assert ended.how == "returned", ended.error
    answer = json.loads(ended.samples[0].data["messages"][0]["content"])
    assert answer == {"head": "POST /v1/rollouts/a%20b%3A%3A1/chat/completions HTTP/1.1", "auth": True}


async def test_a_stream_that_the_host_drops_is_reset_in_the_sandbox(box: Boxes) -> None:
    async def cut(stream: ByteStream) -> None:
        await stream.receive()
        await stream.send(b"HTTP/1.1 200 OK\r\n\r\npartial")

    async with box(serve=cut) as made:
        body = (
            "import http.client\n"
            "port = int(os.environ['OPENAI_BASE_URL'].split(':')[2].split('/')[0])\n"
            "c = http.client.HTTPConnection('127.0.0.1', port)\n"
            "c.request('GET', '/')\n"
            "await asyncio.to_thread(lambda: c.getresponse().read())"
        )
        await made.load(main=workflow(body))
        ended = await run(made)
    assert ended.how == "raised"
    assert ended.error is not None
    assert ended.error.types[0] == "ConnectionResetError"


async def test_probe_goes_the_way_of_model_calls(box: Boxes) -> None:
    async with box() as made:
        await made.load(main=workflow("return []"))
        probed = await made.guest.probe("/v1/chat/completions", {"x": 1}, 10)
        assert probed.status == 200
        assert json.loads(probed.body) == {"head": "POST /v1/chat/completions HTTP/1.1", "auth": True}
        assert (await run(made)).how == "returned"


@pytest.mark.parametrize(
    ("body", "how", "detail"),
    [
        ("raise ValueError('no')", "raised", "ValueError"),
        ("sys.exit(3)", "exited", 3),
        ("os._exit(4)", "exited", 4),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "signaled", signal.SIGSEGV),
        ("while True: await asyncio.sleep(1)", "timeout", None),
        ("while True: time.sleep(1)", "timeout", None),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(1)", "timeout", None),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "timeout", None),
    ],
    ids=["raises", "sys.exit", "os._exit", "signal", "hangs", "blocks", "ignores TERM", "stops itself"],
)
async def test_endings(box: Boxes, body: str, how: str, detail: object) -> None:
    ended, _ = await run_body(box, body, timeout=1)
    assert ended.how == how
    if how == "raised":
        assert ended.error is not None
        assert ended.error.types[0] == detail
    elif how == "exited":
        assert ended.code == detail
    elif how == "signaled":
        assert ended.signal == detail


async def test_what_the_workflow_leaves_behind_is_ended_before_the_export(box: Boxes) -> None:
    ended, made = await run_body(
        box,
        "p = subprocess.Popen(['setsid', 'sh', '-c', 'trap \"\" TERM; while :; do echo x >> ' + str(ctx.artifacts_dir)"
        " + '/log; sleep 0.01; done'])\n"
        "await asyncio.sleep(0.3)\n"
        "return []",
    )
    assert ended.how == "returned"
    size = (made.root / "artifacts/log").stat().st_size
    await anyio.sleep(0.2)
    assert (made.root / "artifacts/log").stat().st_size == size > 0


async def test_cancel(box: Boxes) -> None:
    async with box() as made:
        await made.load(main=workflow("await asyncio.sleep(60)"))
        async with anyio.create_task_group() as tasks:

            async def cancel() -> None:
                await anyio.sleep(0.3)
                made.guest.cancel(0.5)

            tasks.start_soon(cancel)
            assert (await run(made)).how == "cancelled"


async def test_output_is_bounded_and_its_head_and_tail_are_kept(box: Boxes) -> None:
    ended, made = await run_body(
        box,
        "sys.stdout.write('first line\\n')\n"
        "sys.stdout.flush()\n"
        "for _ in range(200): os.write(1, b'\\xff\\xfe' * 25000)\n"
        "os.write(1, b'last line')\n"
        "return []",
    )
    assert ended.how == "returned"
    printed = made.printed()
    assert printed.startswith("first line\n")
    assert printed.endswith("last line")
    assert "\N{REPLACEMENT CHARACTER}" in printed
    assert len(printed) <= 40_000
    assert made.dropped > 9_000_000


async def test_garbage_on_every_descriptor_costs_nothing_but_the_result(box: Boxes) -> None:
    ended, _ = await run_body(
        box,
        "for fd in range(3, 256):\n"
        "    try: os.write(fd, b'\\xff' * 4096)\n"
        "    except OSError: pass\n"
        "await asyncio.sleep(60)",
        timeout=3,
    )
    assert ended.how in ("exited", "signaled", "timeout", "raised")


FORGE = (
    "import socket\n"
    "for fd in os.listdir('/proc/self/fd'):\n"
    "    try: s = socket.socket(fileno=os.dup(int(fd)))\n"
    "    except OSError: continue\n"
    "    if s.family == socket.AF_UNIX:\n"
    "        body = VERDICT\n"
    "        s.sendall(len(body).to_bytes(4, 'big') + body)\n"
    "os._exit(0)"
)


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (b'{"type":"ended","how":"returned","samples":[],"agent_s":Infinity}', "exited"),
        (b'{"type":"ended","how":"returned","samples":[{"name":"","data":{"x":1e999}}]}', "exited"),
        (b'{"type":"ended","how":' + b"[" * 50_000, "exited"),
        (b'{"type":"ended","how":"returned","samples":[{}]}', ProtocolError),
        (b'{"type":"ended","how":"won"}', ProtocolError),
    ],
    ids=["infinity", "overflow", "deep", "no sample", "unknown ending"],
)
async def test_a_forged_verdict_is_seen_through(box: Boxes, verdict: bytes, expected: object) -> None:
    body = FORGE.replace("VERDICT", repr(verdict))
    if isinstance(expected, str):
        ended, _ = await run_body(box, body)
        assert ended.how == expected
        return
    with pytest.raises(ProtocolError) as caught:
        await run_body(box, body)
    assert caught.value.party == "rollout"


async def test_an_interrupt_from_the_child_does_not_reach_the_guest(box: Boxes) -> None:
    ended, _ = await run_body(box, "os.kill(os.getppid(), signal.SIGINT)\nawait asyncio.sleep(0.2)\nreturn []")
    assert ended.how == "returned"


async def test_an_entry_point_that_does_not_load(box: Boxes) -> None:
    async with box() as made:
        loaded = await made.load(main="import no_such_module_anywhere")
        assert not loaded.ok
        assert loaded.error is not None
        assert "no_such_module_anywhere" in loaded.error.message


async def test_an_entry_point_that_ends_its_process(box: Boxes) -> None:
    async with box() as made:
        with pytest.raises(EntryPointError, match="exit status 9"):
            await made.load(main="import os; os._exit(9)")


async def test_artifacts_come_out_as_a_tar_without_links(box: Boxes, tmp_path: Path) -> None:
    received = bytearray()

    async def receive(stream: ByteStream) -> None:
        try:
            while True:
                received.extend(await stream.receive())
        except anyio.EndOfStream:
            pass

    async with box() as made:
        await made.load(
            main=workflow(
                "(ctx.artifacts_dir / 'd').mkdir()\n"
                "(ctx.artifacts_dir / 'd/a.bin').write_bytes(bytes(3_000_000))\n"
                "(ctx.artifacts_dir / 'link').symlink_to('/etc/passwd')\n"
                "(ctx.artifacts_dir / 'dirlink').symlink_to('/etc')\n"
                "os.mkfifo(ctx.artifacts_dir / 'fifo')\n"
                "return []"
            )
        )
        await run(made)
        exported = await made.guest.export(receive, 20)
    (tmp_path / "a.tar").write_bytes(received)
    import tarfile

    with tarfile.open(tmp_path / "a.tar") as tar:
        assert {m.name: m.size for m in tar} == {"d/a.bin": 3_000_000}
    assert exported.files == 1
    assert {skip["path"] for skip in exported.skipped} == {"link", "dirlink", "fifo"}


async def test_the_guest_ends_when_its_host_is_silent(box: Boxes) -> None:
    async with box(lease_s=1.5) as made:
        await made.load(main=workflow("await asyncio.sleep(60)"))
        started = time.monotonic()
        with pytest.raises(ChannelClosed):
            await run(made)
        assert time.monotonic() - started < 10
    assert made.process.returncode == 75


async def test_a_guest_that_falls_silent_is_given_up_without_a_deadline(box: Boxes) -> None:
    async with box() as made:
        await made.load(main=workflow("await asyncio.sleep(60)"))
        made.guest._lease_s = 0.3
        made.guest._background.tasks.start_soon(made.guest._ping)
        os.kill(made.process.pid, signal.SIGSTOP)
        try:
            with anyio.fail_after(20), pytest.raises(ChannelClosed, match="silent"):
                await run(made, timeout=None)
        finally:
            os.kill(made.process.pid, signal.SIGCONT)


async def test_the_guest_ends_when_its_host_goes_away(box: Boxes) -> None:
    async with box() as made:
        await made.load(main=workflow("await asyncio.sleep(60)"))
    assert made.process.returncode == 76


async def test_a_killed_guest_is_a_closed_channel(box: Boxes) -> None:
    async with box() as made:
        await made.load(main=workflow("await asyncio.sleep(60)"))
        async with anyio.create_task_group() as tasks:

            async def kill() -> None:
                await anyio.sleep(0.2)
                os.kill(made.process.pid, signal.SIGKILL)

            tasks.start_soon(kill)
            with pytest.raises(ChannelError):
                await run(made)


async def test_memory_beyond_the_limit(box: Boxes) -> None:
    ended, _ = await run_body(
        box,
        "for _ in range(4):\n"
        "    if os.fork() == 0:\n"
        "        x = bytearray(60 << 20)\n"
        "        for i in range(0, len(x), 4096): x[i] = 1\n"
        "        time.sleep(30)\n"
        "await asyncio.sleep(30)",
        memory_mib=200,
    )
    assert ended.how == "out_of_memory"
    assert ended.peak_mib > 200
