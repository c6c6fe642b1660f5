"""An SDK sample as JSON-safe data. Whatever a rollout puts into one, this neither raises nor loses the rest."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

from .failures import cut, say, text_of

_DEPTH_LIMIT = 100
_INT_BITS = 4096  # Python refuses to write or read integers of more than 4,300 digits
_DROP = object()
_TELEMETRY = frozenset({"metrics", "extra_fields"})


def sample_data(sample: Any) -> dict[str, Any]:
    """All fields of a ``RolloutSample`` of either SDK generation.

    ``metrics`` and ``extra_fields`` follow the SDK's ``json_safe_copy``: foreign numbers become plain ones, what JSON
    cannot say is dropped with one warning on stderr. Everything else is kept in the best form there is: what pydantic
    makes of it, else its text; NaN and infinity become null. An explicit ``trajectory_messages=None`` stays None.
    """
    lost: list[str] = []
    data = {
        name: plain(getattr(sample, name, None), lost if name in _TELEMETRY else None)
        for name in type(sample).model_fields
    }
    if lost:
        say(f"dropped from metrics/extra_fields, no JSON form: {', '.join(sorted(set(lost)))}")
    return data


def plain(value: Any, lost: list[str] | None = None) -> Any:
    """The value as ``json`` writes it. With ``lost``, what has no JSON form is dropped and named there."""
    fitted = _fit(value, lost, [])
    return None if fitted is _DROP else fitted


def _fit(value: Any, lost: list[str] | None, inside: list[int]) -> Any:
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return value if value.isascii() else value.encode("utf-8", errors="replace").decode()
    if kind is int and value.bit_length() <= _INT_BITS:
        return value
    if kind is float and math.isfinite(value):
        return value
    if isinstance(value, str):
        return _fit(str.__str__(value), lost, inside)
    if isinstance(value, numbers.Integral) and int(value).bit_length() <= _INT_BITS:
        return int(value)
    if isinstance(value, numbers.Real):
        return _fit_real(value, lost)
    if isinstance(value, Mapping | list | tuple):
        if id(value) in inside or len(inside) >= _DEPTH_LIMIT:
            return _lose("nesting", lost, "<nested too deeply>")
        inside.append(id(value))
        try:
            return _fit_container(value, lost, inside)
        finally:
            inside.pop()
    if lost is not None:
        return _lose(kind.__name__, lost, None)
    return _fit_foreign(value, inside)


def _fit_real(value: Any, lost: list[str] | None) -> Any:
    try:
        number = float(value)
    except (OverflowError, ValueError):
        number = math.inf
    return number if math.isfinite(number) else _lose(f"non-finite {type(value).__name__}", lost, None)


def _fit_container(value: Any, lost: list[str] | None, inside: list[int]) -> Any:
    if not isinstance(value, Mapping):
        return [item for entry in value if (item := _fit(entry, lost, inside)) is not _DROP]
    fitted: dict[str, Any] = {}
    for key, entry in value.items():
        if (
            lost is not None
            and not isinstance(key, str)
            and (isinstance(key, bool) or not isinstance(key, numbers.Real))
        ):
            lost.append(f"key {type(key).__name__}")
        elif (item := _fit(entry, lost, inside)) is not _DROP:
            fitted[cut(str.__str__(key)) if isinstance(key, str) else text_of(key)] = item
    return fitted


def _fit_foreign(value: Any, inside: list[int]) -> Any:
    """Dates, enums, sets, data classes, models, arrays: as pydantic writes them, else as text."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", errors="replace")
    try:
        if hasattr(value, "tolist"):  # NumPy and its relatives
            converted = value.tolist()
        else:
            from pydantic_core import to_jsonable_python  # comes with the SDK

            converted = to_jsonable_python(value)
        if isinstance(converted, Mapping | list | str | int | float | None) and len(inside) < _DEPTH_LIMIT:
            return _fit(converted, None, [*inside, id(value)])
    except Exception:
        return text_of(value)
    return text_of(value)


def _lose(what: str, lost: list[str] | None, instead: Any) -> Any:
    if lost is None:
        return instead
    lost.append(what)
    return _DROP
