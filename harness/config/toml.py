"""Reading TOML, and saying what is wrong with it in the platform's words."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from harness.errors import ConfigError
from harness.models import Record

_EXPECTED = {
    "bool_type": "a boolean",
    "dict_type": "a table",
    "float_type": "a number",
    "finite_number": "finite",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "a table",
    "string_type": "a string",
}


class Table(Record):
    """Base of what is read from a TOML table: a value of another type is refused, never converted."""

    model_config = ConfigDict(strict=True)


def read_toml(path: Path) -> dict[str, Any]:
    """:raises ConfigError: there is no such file, it cannot be read, or it is not TOML (with line and column)."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"Config file not found: {path}") from None
    except OSError as error:
        raise ConfigError(f"Cannot read config file {path}: {error}") from error
    try:
        return tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"Invalid TOML in {path}: not UTF-8 (at line {line})") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"Invalid TOML in {path}: {error}") from error


def refuse(text: str, value: object) -> PydanticCustomError:
    """What a validator raises to have ``text, got <value>`` reported as it stands."""
    return PydanticCustomError("refused", "{text}, got {value}", {"text": text, "value": repr(value)})


def check[T: Record](model: type[T], data: Mapping[str, Any]) -> tuple[T | None, list[ErrorDetails]]:
    """The record, or every problem that the data has."""
    try:
        return model(**data), []
    except ValidationError as error:
        return None, error.errors()


def explain(error: ErrorDetails) -> str:
    """The platform's text for one problem: ``must be a string, got 5``, ``Unrecognized key``."""
    kind = error["type"]
    if kind == "extra_forbidden":
        return "Unrecognized key"
    if kind in _EXPECTED:
        return f"must be {_EXPECTED[kind]}, got {error['input']!r}"
    return error["msg"] if kind == "refused" else f"is invalid: {error['msg']}"


def key(section: str, error: ErrorDetails) -> str:
    """``section.key`` of a problem."""
    return ".".join([*([section] if section else []), *map(str, error["loc"])])


def issue(section: str, error: ErrorDetails) -> str:
    """One line of a list of problems."""
    return f"  - {key(section, error)}: {explain(error)}"
