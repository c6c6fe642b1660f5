"""Tables before and after a run. They print what ``metrics.json`` and the journal say and compute no second truth."""

from __future__ import annotations

import os
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.models import Timing
from harness.report.terminal import make_console, printable, seconds
from harness.store import Entry, RunResult

SMALL = 20
"""Runs of at most so many trials get a line per trial."""


def show_plan(table: Mapping[str, object], *, quiet: bool = False, plain: bool = False) -> None:
    """Print what is about to run, label and value, on standard error."""
    rows = [(label, str(value)) for label, value in table.items()]
    _show(sys.stderr, lambda console: print_table(console, "Local Evaluation", rows), quiet=quiet, plain=plain)


def show_results(result: RunResult, *, quiet: bool = False, plain: bool = False) -> None:
    """Print what a run came to, on standard output."""
    _show(sys.stdout, lambda console: print_results(result, console), quiet=quiet, plain=plain)


def print_results(result: RunResult, console: Console) -> None:
    """Rewards of each trial (small runs), failed rows, timings, and the results."""
    if len(result.entries) <= SMALL:
        header = ("Row", "Run", "Status", "Reward", "Time", "Tokens", "Note")
        print_table(console, "Trials", [_trial_row(entry) for entry in result.entries], header)
    print_failures(result, console)
    timings = _timings(result.entries)
    if timings:
        print_table(console, "Timings", timings, ("Phase", "Median", "P90"))
    summary = result.metrics["summary"]
    states = Counter(entry.status for entry in result.entries)
    items = f"{len(result.entries)}/{result.planned} complete · {states['success']} ok · {states['failed']} failed"
    items += f" · {states['skipped']} skipped" if states["skipped"] else ""
    scored = f"{summary['passed']}/{summary['completed_samples']}, threshold {summary['pass_threshold']:g}"
    rows = [("Run", result.name), ("Work Items", items), ("Pass Rate", f"{summary['pass_rate']:.1%} ({scored})")]
    if "reward_stats" in summary:
        stats = " · ".join(f"{name} {summary['reward_stats'][name]:.3f}" for name in ("mean", "median", "min", "max"))
        rows.append(("Reward", stats))
    if "pass_at_k" in summary:
        rows.append(("pass@k", " · ".join(f"k={point['k']} {point['value']:.2f}" for point in summary["pass_at_k"])))
    rows += [
        ("Tokens Used", f"{summary['tokens_used']:,}"),
        ("Duration", seconds(result.duration_s)),
        ("Output", str(result.run_dir)),
    ]
    print_table(console, "Results" if result.complete else "Results (incomplete)", rows)


def print_failures(result: RunResult, console: Console) -> None:
    """Failed trials, at most 50, with why and where to look."""
    failed = [entry for entry in result.entries if entry.status == "failed"]
    if failed:
        console.print("Failed rows", style="bold")
    for entry in failed[:50]:
        moved = entry.source_row_index not in (None, entry.row_index)
        source = f" (source {entry.source_row_index})" if moved else ""
        where = result.run_dir / "rollout_trials" / entry.rollout_id
        console.print(
            f"row {entry.row_index}{source} run {entry.run_index}: error_type={entry.error_type or 'unknown'}"
            f" {printable(entry.error or '')} -> {printable(str(where), 1000)}"
        )
    if len(failed) > 50:
        console.print(f"... and {len(failed) - 50} more: see {result.run_dir / 'index.jsonl'}")


def print_table(
    console: Console, title: str, rows: Sequence[Sequence[str]], header: Sequence[str] | None = None
) -> None:
    """A table, on a terminal with lines around it. Cells may be untrusted."""
    frame = box.HEAVY_HEAD if console.is_terminal else None
    table = Table(title=title, title_justify="left", title_style="bold", show_header=header is not None, box=frame)
    for name in header or ("", ""):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell, 1000)) for cell in row))
    console.print(table)


def _trial_row(entry: Entry) -> tuple[str, ...]:
    reward = "" if entry.reward is None else f"{entry.reward:g}"
    tokens = "" if entry.tokens is None else str(entry.tokens)
    where = str(entry.row_index), str(entry.run_index)
    return *where, entry.status, reward, seconds(entry.duration_ms / 1000), tokens, printable(entry.error or "", 80)


def _timings(entries: Sequence[Entry]) -> list[tuple[str, str, str]]:
    rows = []
    for name in Timing.model_fields:
        values = sorted(entry.timing.get(name, 0.0) for entry in entries if entry.timing)
        if values and values[-1] > 0:
            p90 = values[min(len(values) - 1, int(len(values) * 0.9))]
            rows.append((name.removesuffix("_s"), f"{statistics.median(values):.3f}s", f"{p90:.3f}s"))
    return rows


def _show(stream: TextIO, render: Callable[[Console], None], *, quiet: bool, plain: bool) -> None:
    if quiet or stream is None:  # None: the descriptor was closed before Python started
        return
    target = make_console(stream, plain=plain)
    with target.capture() as captured:
        render(target)
    try:
        encoding = stream.encoding or "utf-8"
        text = re.sub(" +\n", "\n", captured.get())
        stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()
    except (OSError, ValueError):  # nobody reads any more; keep the interpreter from complaining about it at its end
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
