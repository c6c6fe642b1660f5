"""What people see: on a terminal, in a pipe, and when nobody reads any more."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harness.models import Failure, Timing
from harness.report import make_reporter, printable, show_plan, show_results
from harness.store import RunStore
from tests.store.helpers import failed, info, inputs, row, trial

ROOT = Path(__file__).parents[2]


def shown(*, plain: bool = True) -> str:
    stream = io.StringIO()
    reporter = make_reporter(plain=plain, stream=stream)
    reporter.start("r", 6, 2)
    reporter.phase("building [bold]x[/bold]")
    reporter.trial_started(0, 0)
    reporter.trial_finished(trial(0, 0, timing=Timing(agent_s=3, policy_s=2, total_s=75)))
    message = "no\n\x1b[31mred\x1b]0;title\x07 [/bold] :smile: \u202e" + "x" * 1000
    failure = Failure(party="rollout", category="timeout", kind="TimeoutError", message=message)
    reporter.trial_finished(trial(0, 1, status="failed", reward=None, failure=failure))
    reporter.warning("careful")
    reporter.close()
    reporter.close()
    return stream.getvalue()


def test_a_line_per_trial_when_it_is_no_terminal() -> None:
    lines = shown().splitlines()
    assert lines[0] == "→ r: 4 of 6 trials pending, 2 already recorded"
    assert lines[1] == "→ building [bold]x[/bold]"
    assert lines[2] == "row 0 run 0  success  reward 1  1:15 (policy 2.0s, tools 1.0s)"
    assert lines[3].startswith(
        "row 0 run 1  failed  2.0s (policy 1.0s, tools 0.5s)  timeout: TimeoutError: no ?[31mred"
    )
    assert lines[4:] == ["warning: careful"]


def test_untrusted_text_cannot_reach_the_terminal_as_anything_but_text() -> None:
    output = shown()
    assert not {"\x1b", "\x07", "\u202e"} & set(output)
    assert "[/bold] :smile:" in output
    assert max(map(len, output.splitlines())) < 250


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\r\nb\tc", "a b c"),
        ("\x1b[2J\x9b1A", "?[2J?1A"),
        ("\u2066x\u200b", "?x?"),
        ("x" * 300, "x" * 199 + "…"),
        ("é✓", "é✓"),
    ],
)
def test_printable(text: str, expected: str) -> None:
    assert printable(text) == expected


def test_quiet_says_warnings_only(capfd: pytest.CaptureFixture[str]) -> None:
    reporter = make_reporter(quiet=True)
    reporter.start("r", 1, 0)
    reporter.warning("x")
    reporter.trial_finished(trial())
    reporter.close()
    assert capfd.readouterr() == ("", "warning: x\n")


def test_a_live_bar_on_a_terminal() -> None:
    leader, follower = os.openpty()
    output = bytearray()

    def read() -> None:
        while True:
            try:
                data = os.read(leader, 65536)
            except OSError:
                return
            output.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(follower, "w", encoding="utf-8") as stream:
        reporter = make_reporter(stream=stream)
        reporter.start("r", 3, 0, 0.5)
        for run, reward in enumerate((1.0, 0.0)):
            reporter.trial_started(0, run)
            reporter.trial_finished(trial(0, run, reward=reward))
        reporter.trial_started(0, 2)
        reporter.trial_finished(failed(0, 2))
        reporter.close()
    reader.join(5)
    os.close(leader)
    text = output.decode()
    assert "3/3" in text
    assert "pass 33% · failed 1 · running 0" in text


CHILD = """
import os, sys
from harness.report import make_reporter, show_plan
from tests.store.helpers import trial
reporter = make_reporter()
reporter.start("r", 10, 0)
for run in range(100):  # more than a pipe holds
    reporter.trial_started(0, run)
    reporter.trial_finished(trial(0, run))
    reporter.warning("x" * 1000)
show_plan({"Rollout": "x"})
reporter.close()
os.write(1, b"survived")
"""


@pytest.mark.parametrize("how", ["closed pipe", "closed descriptor", "nobody reads", "ascii"])
def test_a_standard_error_that_nobody_reads_does_not_matter(how: str) -> None:
    reading, writing = os.pipe()
    command = [sys.executable, "-c", CHILD]
    if how == "closed pipe":
        os.close(reading)
    if how == "closed descriptor":
        command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
    if how == "nobody reads":
        command[2] = command[2].replace("show_plan(", "str(")  # tables may wait for their reader
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii" if how == "ascii" else "utf-8"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writing, env=environment) as child:
        os.close(writing)
        if how == "ascii":
            with os.fdopen(reading, "rb") as stream:
                assert b"? r: 10 of 10 trials pending" in stream.read()
        assert child.stdout is not None
        assert child.stdout.read() == b"survived"
    assert child.returncode == 0
    if how in ("nobody reads", "closed descriptor"):
        os.close(reading)


@pytest.mark.anyio
async def test_results_say_what_metrics_json_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunStore.open(tmp_path, "r", inputs(), info()) as store:
        for index in range(3):
            await store.record(trial(index, 0, reward=float(index > 0)), row(index))
            await store.record(failed(index, 1, message="boom [red]\x1b[31m"), row(index))
        result = await store.finish()
    show_results(result)
    output = capsys.readouterr().out
    for expected in (
        "6/6 complete · 3 ok · 3 failed",
        "33.3% (2/6, threshold 1)",
        "mean 0.667 · median 1.000 · min 0.000 · max 1.000",
        "k=1 0.33 · k=2 0.67",
        "row 1 (source 6) run 1: error_type=agent_error ValueError: boom [red]?[31m -> ",
        str(tmp_path / "r"),
        "agent   1.500s",
    ):
        assert expected in output
    assert "\x1b" not in output
    assert "Trials" in output
    show_results(result, quiet=True)
    assert capsys.readouterr().out == ""


def test_the_plan_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    show_plan({"Rollout": "multiply", "Rows": "3 of 10"})
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line.split() for line in captured.err.splitlines()]
    assert lines == [["Local", "Evaluation"], ["Rollout", "multiply"], ["Rows", "3", "of", "10"]]
