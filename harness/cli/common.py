"""What commands share: how an error leaves the program, and JSON on stdout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import typer

from harness.errors import HarnessError, UsageError

EXIT_WRONG = 2


def exit_with(error: HarnessError, as_json: bool) -> NoReturn:
    """Print the error (stderr, and as JSON on stdout for programs) and end with exit code 2."""
    print(f"error: {error}", file=sys.stderr)
    show_json({"error": {"type": type(error).__name__, "message": error.message, "hint": error.hint}}, as_json)
    raise typer.Exit(EXIT_WRONG)


def show_json(document: Mapping[str, Any], as_json: bool) -> None:
    """Print one JSON document on stdout, if that was asked for."""
    if as_json:
        try:
            print(json.dumps(document, indent=2, allow_nan=False), flush=True)
        except OSError as error:
            print(f"error: the document could not be written to standard output: {error}", file=sys.stderr)
            os._exit(1)  # else Python tries once more to write what is left, and complains again


@contextmanager
def platform_extra() -> Iterator[None]:
    """For imports that need the platform's SDK.

    :raises UsageError: it is not installed; says how to install it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("osmosis_ai", "fastapi", "uvicorn"):
            raise UsageError(
                f"this needs the platform's SDK: {error}", hint="pip install 'rollout-harness[platform]'"
            ) from error
        raise
