"""Exceptions of a rollout's code as data: the ``error`` objects of the messages."""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

_TEXT_LIMIT = 64 * 1024
OURS = [str(Path(__file__).parent), "<frozen "]
"""Where the harness's own code is: how it came to call the user's is left out of tracebacks."""


class LoadError(Exception):
    """Raised when an entry point cannot be loaded, or does not name exactly one workflow.

    :param error: the ``error`` object that says why; made from the message when there is no exception behind it.
    """

    def __init__(self, message: str, error: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.error: dict[str, Any] = {
            "types": ["LoadError"],
            "traceback": "",
            "status_code": None,
            **(error or {}),
            "message": cut(message),
            "category": "validation_error",
        }


def error_info(exc: BaseException) -> dict[str, Any]:
    """The ``error`` object of an exception. Never raises, whatever the exception's own methods do."""
    status_code = _quietly(lambda: getattr(exc, "status_code", None), None)
    return {
        "types": [cls.__name__ for cls in type(exc).__mro__ if cls is not object],
        "message": text_of(exc),
        "traceback": cut(_quietly(lambda: _traceback(exc), "")),
        "status_code": status_code if isinstance(status_code, int) else None,
        "category": _quietly(lambda: _category(exc), "agent_error"),
    }


def reported(exc: BaseException) -> dict[str, Any]:
    """``error_info``, with the traceback printed for the trial's log."""
    error = error_info(exc)
    say(error["traceback"].rstrip())
    return error


def say(text: str) -> None:
    """Print to the trial's log, whatever the rollout did to stderr."""
    with contextlib.suppress(Exception):
        print(text, file=sys.stderr)


def flush() -> None:
    """Flush stdout and stderr, whatever the rollout did to them."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def text_of(value: object) -> str:
    """``str(value)``, bounded, and the name of its type where that fails."""
    return cut(_quietly(lambda: str(value), f"<{type(value).__name__}>"))


def cut(text: str) -> str:
    """The text with what UTF-8 cannot say replaced, and its middle left out when it is long."""
    text = text if text.isascii() else text.encode("utf-8", errors="replace").decode()
    if len(text) <= _TEXT_LIMIT:
        return text
    half = _TEXT_LIMIT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def _quietly[T](compute: Any, otherwise: T) -> T:
    try:
        result: T = compute()
    except Exception:
        return otherwise
    return result


def _traceback(exc: BaseException) -> str:
    trace: TracebackType | None = exc.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(tuple(OURS)):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(exc), exc, trace))


def _category(exc: BaseException) -> str:
    try:
        errors = importlib.import_module("osmosis_ai.rollout.utils.errors")
    except ImportError:  # SDK 0.2
        if isinstance(exc, TimeoutError):
            return "timeout"
        return "validation_error" if isinstance(exc, ValueError | TypeError | AssertionError) else "agent_error"
    return str(errors.categorize_exception(exc).value)
