"""What is shown on standard error while a run is going."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from harness.models import TrialRecord
from harness.report.terminal import Terminal, make_console, printable, seconds


class Reporter:
    """Told what happens; called from the event loop, never blocks, never raises. This one says nothing."""

    def start(self, name: str, total: int, done: int, pass_threshold: float = 1.0) -> None:
        """The run of that name has ``total`` trials, of which ``done`` had results before."""

    def phase(self, line: str) -> None:
        """A step of the preparation, or of the end."""

    def trial_started(self, row_index: int, run_index: int) -> None: ...

    def trial_finished(self, trial: TrialRecord) -> None: ...

    def warning(self, text: str) -> None: ...

    def close(self) -> None:
        """Leave the last state on screen. Idempotent."""


def make_reporter(*, quiet: bool = False, plain: bool = False, stream: TextIO | None = None) -> Reporter:
    """A live bar if ``stream`` (standard error) is a terminal, else lines, as if ``plain``; or warnings only."""
    stream = stream or sys.stderr
    if stream is None:  # the descriptor was closed before Python started
        return Reporter()
    terminal = Terminal(stream)
    if quiet:
        return WarningReporter(terminal)
    return LineReporter(terminal) if plain or not terminal.isatty() else LiveReporter(terminal)


class WarningReporter(Reporter):
    """For programs: what they must not miss, and nothing else."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self.console = make_console(terminal)

    def warning(self, text: str) -> None:
        self.console.print(f"warning: {printable(text, 1000)}", style="yellow")

    def close(self) -> None:
        self._terminal.close()


class LineReporter(WarningReporter):
    """One line per trial, for logs and pipes."""

    def start(self, name: str, total: int, done: int, pass_threshold: float = 1.0) -> None:
        self.phase(f"{name}: {total - done} of {total} trials pending" + (f", {done} already recorded" if done else ""))

    def phase(self, line: str) -> None:
        self.console.print(f"→ {printable(line)}", style="cyan")

    def trial_finished(self, trial: TrialRecord) -> None:
        self.console.print(trial_line(trial))


class LiveReporter(LineReporter):
    """A bar that counts, below the lines of the phases."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(terminal)
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._threshold = 1.0
        self._running = self._done = self._skipped = self._failed = self._passed = 0

    def start(self, name: str, total: int, done: int, pass_threshold: float = 1.0) -> None:
        super().start(name, total, done, pass_threshold)
        self._threshold = pass_threshold
        self._progress = Progress(
            TextColumn("rollouts"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}", markup=False),
            TimeElapsedColumn(),
            console=self.console,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("", total=total - done, detail="")

    def trial_started(self, row_index: int, run_index: int) -> None:
        self._running += 1
        if self._progress is not None:
            self._progress.start()  # not before the phases are over: they print lines
        self._show()

    def trial_finished(self, trial: TrialRecord) -> None:
        self._running -= 1
        self._done += trial.status != "cancelled"
        self._skipped += trial.status == "skipped"
        self._failed += trial.status == "failed"
        self._passed += trial.reward is not None and trial.reward >= self._threshold
        self._show()

    def _show(self) -> None:
        if self._progress is not None:
            rate = self._passed / max(1, self._done - self._skipped)
            detail = f"pass {rate:.0%} · failed {self._failed} · running {self._running}"
            self._progress.update(self._task, completed=self._done, detail=detail)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        super().close()


def trial_line(trial: TrialRecord) -> str:
    """One trial in one line: row, run, status, reward, where the time went, and the failure in short."""
    timing = trial.timing
    line = f"row {trial.row_index} run {trial.run_index}  {trial.status}"
    if trial.reward is not None:
        line += f"  reward {trial.reward:g}"
    tools = max(0.0, timing.agent_s - timing.policy_s)
    line += f"  {seconds(timing.total_s)} (policy {seconds(timing.policy_s)}, tools {seconds(tools)})"
    if trial.failure is not None:
        line += f"  {trial.failure.category}: {printable(f'{trial.failure.kind}: {trial.failure.message}', 120)}"
    return line
