"""``harness run`` from the outside: what a user gives it, and what comes back."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from tests.support.policy import Fault, Reply, ScriptedPolicy
from tests.support.workspace import ROOT, WORKFLOW, Finished, Workspace

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

LOCAL = pytest.param("local", marks=pytest.mark.namespaces)
DOCKER = pytest.param("docker", marks=pytest.mark.docker)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "ws")


async def run(workspace: Workspace, policy: ScriptedPolicy | None, *arguments: str, **options: Any) -> Finished:
    url = ["--policy-url", policy.url] if policy else []
    return await anyio.to_thread.run_sync(lambda: workspace.run(*url, *arguments, **options))


# What goes wrong inside a trial costs that trial

ABUSE: dict[str, tuple[str, str, str]] = {
    "raises": ("raise KeyError('nope')", "KeyError", "agent_error"),
    "wrong type": ("return 7", "TypeError", "validation_error"),
    "exits": ("sys.exit(3)", "SystemExit", "agent_error"),
    "aborts": ("os.abort()", "Killed", "agent_error"),
    "hangs": ("await asyncio.sleep(600)", "TimeoutError", "timeout"),
    "blocks": ("time.sleep(600)", "TimeoutError", "timeout"),
    "fork bomb": ("while True:\n    try: os.fork()\n    except OSError: time.sleep(0.01)", "", ""),
    "memory": (
        "x = []\nfor _ in range(8):\n    if os.fork() == 0:\n        y = bytearray(os.urandom(1 << 20) * 200)\n"
        "        time.sleep(60)\ntime.sleep(60)",
        "OutOfMemory",
        "agent_error",
    ),
    "kills its parent": (
        "os.kill(os.getppid(), 9)\nos.kill(1, 9)\nraise KeyError('survived')",
        "KeyError",
        "agent_error",
    ),
    "garbage everywhere": (
        "for fd in range(256):\n    try: os.write(fd, b'\\xff' * 100000)\n    except OSError: pass\n"
        "for pid in os.listdir('/proc'):\n    for fd in range(64):\n        try:\n"
        "            with open(f'/proc/{pid}/fd/{fd}', 'wb', buffering=0) as f: f.write(b'\\xff' * 1000)\n"
        "        except OSError: pass\nraise KeyError('done')",
        "",
        "",
    ),
    "prints much": (
        "for _ in range(1000): os.write(1, b'\\xff\\xfex' * 33000)\nraise KeyError('x')",
        "KeyError",
        "agent_error",
    ),
    "fills the disk": (
        "try:\n    with open('/tmp/big', 'wb') as f:\n        while True: f.write(bytes(1 << 20))\n"
        "except OSError as e: raise KeyError(e.errno)",
        "KeyError",
        "agent_error",
    ),
}


@pytest.mark.parametrize("provider", [LOCAL, DOCKER])
async def test_a_bad_trial_costs_itself_only(
    provider: str, workspace: Workspace, scripted_policy: ScriptedPolicy
) -> None:
    scripted_policy.script = lambda body: Reply("ok")
    body = "case = (ctx.metadata or {}).get('case')\n"
    body += "".join(
        f"if case == {name!r}:\n    " + code.replace("\n", "\n    ") + "\n" for name, (code, _, _) in ABUSE.items()
    )
    workspace.write_main(body + "return [*ctx.prompt, await asyncio.to_thread(ask, ctx.prompt)]")
    workspace.settings("[tool.harness.sandbox]\nmemory_mib = 512\ndisk_mib = 64\nprocesses = 64\n")
    cases = [case for name in ABUSE for case in (name, "good")]
    workspace.write_rows([{"user_prompt": "x", "ground_truth": "ok", "metadata": {"case": case}} for case in cases])
    done = await run(
        workspace, scripted_policy, "--sandbox", provider, "--agent-timeout", "8", "--max-in-flight", "3", timeout=280
    )
    assert done.code == 0, done.err
    for case, trial in zip(cases, done.trials, strict=True):
        if case == "good":
            assert (trial["status"], trial["reward"]) == ("success", 1.0), trial
        else:
            _, kind, category = ABUSE[case]
            assert (trial["status"], trial["reward"]) == ("failed", None), (case, trial)
            assert trial["failure"]["party"] in ("rollout", "sandbox"), (case, trial)
            if kind:
                assert (trial["failure"]["kind"], trial["failure"]["category"]) == (kind, category), (case, trial)
    summary = done.document["summary"]
    assert (summary["passed"], summary["failed"]) == (len(ABUSE), len(ABUSE))


@pytest.mark.namespaces
async def test_keep_and_artifacts(workspace: Workspace, scripted_policy: ScriptedPolicy) -> None:
    workspace.write_main(
        "open('made.txt', 'w').write('m')\n(ctx.artifacts_dir / 'a.txt').write_text('a')\n"
        "return [{'role': 'assistant', 'content': 'ok'}]"
    )
    done = await run(workspace, scripted_policy, "--sandbox", "local", "--keep")
    assert done.code == 0, done.err
    folder = workspace.root / "out/r/rollout_trials" / done.trials[0]["rollout_id"]
    assert (folder / "sandbox/made.txt").read_text() == "m"
    assert (folder / "artifacts/a.txt").read_text() == "a"
    assert (workspace.root / "out/r/artifacts/row_0_run_0/a.txt").read_text() == "a"


@pytest.mark.namespaces
async def test_an_archive_that_is_cut_off_costs_no_time(workspace: Workspace, scripted_policy: ScriptedPolicy) -> None:
    workspace.settings("[tool.harness.artifacts]\nmax_files = 0\nmax_mib = 0\n")
    workspace.write_main(
        "for n in range(1500): (ctx.artifacts_dir / f'{n}.txt').touch()\n"
        "(ctx.artifacts_dir / 'z').write_text('z' * 9**8)\n"
        "return [{'role': 'assistant', 'content': 'ok'}]"
    )
    done = await run(workspace, scripted_policy, "--sandbox", "local")
    (trial,) = done.trials
    assert trial["reward"] == 1.0
    assert [line for line in trial["warnings"] if "could not be taken out" in line] == []
    assert [line for line in trial["warnings"] if "ended early: the archive has too many entries" in line]


@pytest.mark.parametrize("provider", [LOCAL, DOCKER])
async def test_libraries_are_told_how_many_cpus_they_have(
    workspace: Workspace, scripted_policy: ScriptedPolicy, provider: str
) -> None:
    workspace.settings("[tool.harness.sandbox]\ncpus = 2\nenv = { MKL_NUM_THREADS = '7' }\n")
    names = ["OMP_NUM_THREADS", "GOMAXPROCS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM"]
    workspace.write_main(f"return [{{'role': 'assistant', 'content': str([os.environ.get(n) for n in {names}])}}]")
    workspace.write_rows([{"user_prompt": "how many?", "ground_truth": "['2', '2', '7', 'false']"}])
    done = await run(workspace, scripted_policy, "--sandbox", provider)
    assert done.trials[0]["reward"] == 1.0, done.trials[0]["samples"]


@pytest.mark.parametrize("provider", [LOCAL, DOCKER])
async def test_a_dry_run_says_what_would_be_built_and_builds_nothing(
    workspace: Workspace, scripted_policy: ScriptedPolicy, provider: str
) -> None:
    pyproject = workspace.rollout / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace('"osmosis-ai==0.3.8"', '"idna==3.10"'))
    cache = {"HARNESS_CACHE": str(workspace.root / "cache")}
    for _ in range(2):
        done = await run(workspace, scripted_policy, "--sandbox", provider, "--dry-run", env=cache)
        assert done.code == 0, done.err
        assert done.document["Work Items"] == 1
        assert any("building" in step for step in done.document["Would Build"]), done.document
    assert not (workspace.root / "out").exists()
    assert scripted_policy.requests == []


@pytest.mark.parametrize(
    "flags",
    [
        ("--agent-timeout", "nan"),
        ("--agent-timeout", "-1"),
        ("--grader-timeout", "0"),
        ("--limit", "-5"),
        ("--name", "../x"),
        ("--output", "/etc/passwd"),
        ("--rows", "\u0663"),
    ],
    ids=" ".join,
)
async def test_flags_that_make_no_sense(workspace: Workspace, flags: tuple[str, ...]) -> None:
    done = await run(workspace, None, "--policy-url", "http://127.0.0.1:9/v1", "--dry-run", *flags)
    assert done.code == 2, (done.out, done.err)
    assert "Traceback" not in done.err


# What is wrong before anything starts: one clear message, exit code 2, nothing left


def broken(workspace: Workspace, what: str) -> tuple[str, ...]:
    """Break one thing; returns flags."""
    if what == "no main.py":
        (workspace.rollout / "main.py").unlink()
    elif what == "syntax error":
        workspace.write_main(text="def f(:\n")
    elif what == "no workflow":
        workspace.write_main(text="x = 1\n")
    elif what == "two workflows":
        text = (workspace.rollout / "main.py").read_text()
        workspace.write_main(text=text + "\nclass Other(Workflow): pass\n")
    elif what == "missing dependency":
        workspace.write_main(text="import no_such_thing\n")
    elif what == "import fails in the sandbox only":
        text = (workspace.rollout / "main.py").read_text()
        workspace.write_main(text="import os\nassert not os.path.exists('/sandbox'), 'not here'\n" + text)
    elif what == "unresolvable":
        pyproject = workspace.rollout / "pyproject.toml"
        pyproject.write_text(pyproject.read_text().replace("osmosis-ai==0.3.8", "osmosis-ai==99.0"))
    elif what == "unknown keys":
        workspace.write_config(evaluation="foo = 1")
    elif what == "broken row":
        workspace.data.write_text('{"user_prompt": "x", "ground_truth": "1"}\n{"user_prompt": "x"}\n')
    elif what == "no secret":
        workspace.write_config(secrets=["NOT_SET_ANYWHERE"])
    elif what == "unknown model":
        workspace.config.write_text(workspace.config.read_text().replace("vllm/m", "nobody/m"))
        return ("--sandbox", "local")
    elif what == "no engine":
        return ("--sandbox", "docker", "--policy-url", "http://127.0.0.1:9/v1")
    return ("--sandbox", "local", "--policy-url", "http://127.0.0.1:9/v1")


@pytest.mark.namespaces
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("no main.py", ["main.py"]),
        ("syntax error", ["rollouts/x/main.py:1", "SyntaxError"]),
        ("no workflow", ["No AgentWorkflow subclass found in 'main.py'"]),
        ("two workflows", ["Multiple AgentWorkflow subclasses found in 'main.py': Other, Workflow"]),
        ("missing dependency", ["no_such_thing", "pyproject.toml"]),
        ("import fails in the sandbox only", ["not here"]),
        ("unresolvable", ["osmosis-ai", "99.0"]),
        ("unknown keys", ["Invalid eval config:", "evaluation.foo: Unrecognized key"]),
        ("broken row", ["x.jsonl:2", "ground_truth"]),
        ("no secret", ["No value found for: NOT_SET_ANYWHERE"]),
        ("unknown model", ["nobody/m", "--policy-url"]),
        ("no engine", ["docker", "dockerd"]),
        ("nothing", ["127.0.0.1:9", "refused"]),
    ],
)
async def test_what_is_wrong_is_said_before_anything_starts(workspace: Workspace, what: str, said: list[str]) -> None:
    flags = broken(workspace, what)
    env = {"DOCKER_HOST": "unix:///nowhere/docker.sock"} if what == "no engine" else {}
    done = await run(workspace, None, *flags, env=env)
    assert done.code == 2, (done.out, done.err)
    for words in said:
        assert words in done.err, done.err
    assert "Traceback (most recent call last)" not in done.err.replace("\n  Traceback", "")
    assert done.document["error"]["message"]
    assert not (workspace.root / "out/r").exists()


@pytest.mark.namespaces
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault("status", 401), ["401", "key"]),
        (Fault("status", 404), ["404"]),
        (Fault("status", 400), ["400"]),
        (Fault("status", 500), ["500"]),
        (Fault("garbage"), ["no completion"]),
        (Fault("drop"), ["127.0.0.1"]),
    ],
    ids=lambda value: f"{value.kind}{value.status}" if isinstance(value, Fault) else "",
)
async def test_a_policy_that_fails_from_the_start(
    workspace: Workspace, scripted_policy: ScriptedPolicy, fault: Fault, said: list[str]
) -> None:
    scripted_policy.script = lambda body: fault
    done = await run(workspace, scripted_policy, "--sandbox", "local")
    assert done.code == 2, (done.out, done.err)
    for words in said:
        assert words in done.err, done.err
    assert not (workspace.root / "out/r").exists()


@pytest.mark.namespaces
async def test_a_policy_that_fails_some_trials(workspace: Workspace, scripted_policy: ScriptedPolicy) -> None:
    faults = {
        "refuses": Fault("status", 400),
        "key": Fault("status", 401),
        "breaks": Fault("status", 503),
        "cuts": Fault("cut"),
        "garbage": Fault("garbage"),
    }

    def script(body: dict[str, Any]) -> Reply | Fault:
        text = json.dumps(body["messages"])
        return next((fault for name, fault in faults.items() if name in text), Reply("ok"))

    scripted_policy.script = script
    names = [*faults, "good"]
    workspace.write_rows([{"user_prompt": name, "ground_truth": "ok"} for name in names])
    done = await run(workspace, scripted_policy, "--sandbox", "local")
    assert done.code == 0, done.err
    for name, trial in zip(names, done.trials, strict=True):
        if name == "good":
            assert trial["reward"] == 1.0
        else:
            assert trial["reward"] is None, (name, trial)
            assert trial["failure"]["party"] == "policy", (name, trial)
            assert trial["failure"]["retryable"] == (name in ("breaks", "cuts")), (name, trial)


@pytest.mark.namespaces
async def test_a_deadline_that_passes_while_the_policy_owes_an_answer_is_the_policys_fault(
    workspace: Workspace, scripted_policy: ScriptedPolicy
) -> None:
    faults = {"hangs": Fault("hang"), "limits": Fault("status", 429, retry_after="1000")}

    def script(body: dict[str, Any]) -> Reply | Fault:
        text = json.dumps(body["messages"])
        return next((fault for name, fault in faults.items() if name in text), Reply("ok"))

    scripted_policy.script = script
    workspace.write_main("if 'dawdles' in str(ctx.prompt):\n    await asyncio.sleep(600)\n" + WORKFLOW)
    names = [*faults, "dawdles"]
    workspace.write_rows([{"user_prompt": name, "ground_truth": "ok"} for name in names])
    done = await run(workspace, scripted_policy, "--sandbox", "local", "--agent-timeout", "4")
    assert done.code == 0, done.err
    failures = {name: trial["failure"] for name, trial in zip(names, done.trials, strict=True)}
    assert [(f["party"], f["retryable"]) for f in failures.values()] == [("policy", True)] * 2 + [("rollout", False)]
    assert {f["category"] for f in failures.values()} == {"timeout"}
    assert "429" in failures["limits"]["message"]


# Interruptions and continuing


@pytest.mark.namespaces
@pytest.mark.parametrize("times", [1, 2])
async def test_interrupted_and_continued(workspace: Workspace, scripted_policy: ScriptedPolicy, times: int) -> None:
    scripted_policy.script = lambda body: Reply("ok")
    workspace.write_main(
        "await asyncio.sleep(0.2 if ctx.metadata['n'] < 4 else 30)\nreturn [{'role': 'a', 'content': 'ok'}]"
    )
    workspace.write_rows([{"user_prompt": "x", "ground_truth": "ok", "metadata": {"n": n}} for n in range(8)])
    flags = ("--sandbox", "local", "--policy-url", scripted_policy.url, "--max-in-flight", "2", "--json")
    process = await anyio.to_thread.run_sync(
        lambda: subprocess.Popen(
            workspace.command(*flags), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    )
    journal = workspace.root / "out/r/events.jsonl"
    with anyio.fail_after(100):
        while not journal.exists() or len(journal.read_text().splitlines()) < 4:
            await anyio.sleep(0.1)
    await anyio.sleep(1)
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        await anyio.sleep(0.1)
    started = time.monotonic()
    out, err = await anyio.to_thread.run_sync(lambda: process.communicate(timeout=60))
    assert process.returncode == 1, err
    assert time.monotonic() - started < 30
    assert json.loads(out)["eval_run"]["status"] == "incomplete"
    workspace.write_main("return [{'role': 'a', 'content': 'ok'}]")
    refused = await run(workspace, scripted_policy, "--sandbox", "local")
    assert refused.code == 2
    assert "Changed: rollout" in refused.err
    done = await run(workspace, scripted_policy, "--sandbox", "local", "--retry", "failed")
    assert done.code == 0, done.err
    assert done.document["summary"]["passed"] == 8
    again = await run(workspace, None, "--sandbox", "local", "--policy-url", "http://127.0.0.1:9/v1")
    assert again.code == 0, "a finished run needs neither policy nor sandbox"
    assert again.document["summary"] == done.document["summary"]


@pytest.mark.namespaces
async def test_killed_and_continued(workspace: Workspace, scripted_policy: ScriptedPolicy) -> None:
    scripted_policy.script = lambda body: Reply("ok")
    workspace.write_rows([{"user_prompt": str(n), "ground_truth": "ok"} for n in range(12)])
    flags = ("--sandbox", "local", "--policy-url", scripted_policy.url, "--max-in-flight", "2", "--json")
    journal = workspace.root / "out/r/events.jsonl"
    process = await anyio.to_thread.run_sync(
        lambda: subprocess.Popen(
            workspace.command(*flags), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    )
    with anyio.fail_after(100):
        while not journal.exists() or len(journal.read_text().splitlines()) < 3:
            await anyio.sleep(0.05)
    process.kill()
    await anyio.to_thread.run_sync(process.wait)
    kept = [json.loads(line)["rollout_id"] for line in journal.read_text().splitlines()]
    done = await run(workspace, scripted_policy, "--sandbox", "local")
    assert done.code == 0, done.err
    assert done.document["summary"]["passed"] == 12
    index = [json.loads(line) for line in (workspace.root / "out/r/index.jsonl").read_text().splitlines()]
    assert set(kept) <= {entry["rollout_id"] for entry in index}


# Secrets


@pytest.mark.namespaces
async def test_secrets_reach_whom_they_may(workspace: Workspace, scripted_policy: ScriptedPolicy) -> None:
    scripted_policy.script = lambda body: Reply("ok")
    workspace.write_config(secrets=["FOR_GRADER", "FOR_BOTH"], env='PLAIN = "plain-value"')
    workspace.settings('[tool.harness]\nsecrets = ["FOR_BOTH"]\n')
    workspace.write_main(
        "await asyncio.to_thread(ask, ctx.prompt)\n"
        "print(os.environ['FOR_BOTH'])\n"
        "return [{'role': 'assistant', 'content': json.dumps(dict(os.environ))}]",
        "seen = json.loads(ctx.sample.messages[0]['content'])\n"
        "assert os.environ['FOR_GRADER'] == 'grader-secret-1' and os.environ['FOR_BOTH'] == 'both-secret-22'\n"
        "assert 'POLICY_KEY' not in os.environ\n"
        "ctx.set_reward(float('FOR_GRADER' not in seen and 'FOR_BOTH' in seen and seen['PLAIN'] == 'plain-value'))",
    )
    done = await run(
        workspace, scripted_policy, "--sandbox", "local", "--policy-key-env", "POLICY_KEY",
        env={"FOR_GRADER": "grader-secret-1", "FOR_BOTH": "both-secret-22", "POLICY_KEY": "policy-key-333"},
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.trials[0]["reward"] == 1.0, done.trials
    written = b"".join(path.read_bytes() for path in (workspace.root / "out/r").rglob("*") if path.is_file())
    for secret in (b"grader-secret-1", b"both-secret-22", b"policy-key-333"):
        assert secret not in written
    assert b"[REDACTED]" in written
    assert all(request.headers["authorization"] == "Bearer policy-key-333" for request in scripted_policy.requests)
