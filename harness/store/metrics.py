"""What ``index.jsonl`` and ``metrics.json`` say, computed from the journal's entries with the platform's formulas."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from harness.store.journal import Entry


def index_row(entry: Entry, *, trajectory: bool, resumed: bool) -> dict[str, Any]:
    """One line of ``index.jsonl``; absent values are left out, never null."""
    names = {"row_index", "run_index", "rollout_id", "status", "reward", "tokens", "duration_ms", "error_type"}
    row = entry.model_dump(include=names, exclude_none=True)
    if trajectory:
        row["trajectory_filename"] = "trajectory.json"
    if resumed:
        row["resumed"] = True
    return row


def summarize(entries: Sequence[Entry], pass_threshold: float) -> dict[str, Any]:
    """The ``summary`` of ``metrics.json``.

    A failed trial counts as one that did not pass; a skipped one does not count. The deviation is the population's.
    """
    counted = [entry for entry in entries if entry.status != "skipped"]
    rewards = [entry.reward for entry in counted if entry.reward is not None]
    passed = sum(reward >= pass_threshold for reward in rewards)
    summary: dict[str, Any] = {
        "total_samples": len(entries),
        "completed_samples": len(counted),
        "graded": len(rewards),
        "passed": passed,
        "failed": sum(entry.status == "failed" for entry in counted),
        "skipped": len(entries) - len(counted),
        "pass_rate": passed / len(counted) if counted else 0,
        "pass_threshold": pass_threshold,
        "tokens_used": sum(entry.tokens or 0 for entry in entries),
    }
    if rewards:
        summary["reward_stats"] = {
            "mean": statistics.fmean(rewards),
            "median": statistics.median(rewards),
            "std": statistics.pstdev(rewards),
            "min": min(rewards),
            "max": max(rewards),
        }
    runs = max((entry.run_index for entry in entries), default=0) + 1
    if runs > 1:
        summary["n_runs"] = runs
        points = _pass_at_k(counted, pass_threshold, runs)
        if len(points) > 1:
            summary["pass_at_k"] = points
    return summary


def _pass_at_k(counted: Sequence[Entry], pass_threshold: float, runs: int) -> list[dict[str, Any]]:
    attempts: dict[int, list[bool]] = {}
    for entry in counted:
        passed = entry.reward is not None and entry.reward >= pass_threshold
        attempts.setdefault(entry.row_index, []).append(passed)
    points = []
    for k in (2**power for power in range(runs.bit_length())):
        values = [pass_at_k(len(row), sum(row), k) for _, row in sorted(attempts.items()) if len(row) >= k]
        if values:
            points.append({"k": k, "value": statistics.fmean(values)})
    return points


def pass_at_k(attempts: int, passes: int, k: int) -> float:
    """Chance that one of ``k`` attempts passes, the unbiased estimate from ``attempts >= k`` (Chen et al., 2021)."""
    miss = 1.0
    for index in range(k):
        miss *= max(0, attempts - passes - index) / (attempts - index)
    return 1.0 - miss
