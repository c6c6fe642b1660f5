"""Data sets: jsonl, csv and parquet files, read and normalised as the platform does it at run time.

The rules are those of osmosis-ai 0.3.8 (``eval/local/dataset.py``), which shares them with the platform. Refused here,
and not there, is what would break a run later or lose data unseen: NaN, lone surrogates, bottomless metadata, cells
beyond the csv header, a column that appears twice. Accepted here, and not there: a byte order mark.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import Any, NoReturn

from harness.config.workspace import Workspace
from harness.errors import DataError, UsageError
from harness.models import Message, Record, Row

EXTENSIONS = ("jsonl", "csv", "parquet")
"""In the order in which ``data/<name>.*`` is looked for."""
COLUMNS = ("system_prompt", "user_prompt", "ground_truth", "label", "metadata")
"""All others are ignored."""
MAX_FIELD = 16 * 1024 * 1024
"""Longest csv field, in characters."""
MAX_DEPTH = 100
"""Levels of objects and lists in metadata: what takes them apart later has limits of its own."""

_SELECTOR = re.compile(r"[0-9]{1,18}(-[0-9]{1,18})?(,[0-9]{1,18}(-[0-9]{1,18})?)*")
_STRICT = json.JSONEncoder(ensure_ascii=False, allow_nan=False)

Raw = tuple[str, Mapping[str, Any]]
"""Where a row lies (``file:line``) and its columns."""


class Selection(Record):
    """The rows of one run."""

    rows: list[Row]
    total_rows: int
    """Rows in the file."""


def resolve_dataset(workspace: Workspace, name: str, dataset_file: Path | None = None) -> Path:
    """The file of a data set: ``dataset_file`` if given, else ``data/<name>.jsonl``, ``.csv`` or ``.parquet``.

    :raises DataError: there is no such file, or it is of another kind.
    """
    if dataset_file is not None:
        path = dataset_file.expanduser()
        if not path.is_file():
            raise DataError(f"--dataset-file {dataset_file} is not a file")
        _extension(path)
        return path
    if name in ("", ".", "..") or not set(name).isdisjoint("/\\\0"):
        raise DataError(
            f"dataset {name!r} is not a data set's name", hint="For a file that lies elsewhere pass --dataset-file."
        )
    candidates = [workspace.data / f"{name}.{extension}" for extension in EXTENSIONS]
    for path in candidates:
        if path.is_file():
            return path
    looked = "\n".join(f"  - {path}" for path in candidates)
    raise DataError(
        f"Data set {name!r} not found. Looked for:\n{looked}",
        hint="Put the file there, correct experiment.dataset, or pass --dataset-file.",
    )


def dataset_digest(path: Path) -> str:
    """SHA-256 of the file, in hex.

    :raises DataError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error}") from error


def select_rows(path: Path, rows: str | None = None, limit: int | None = None) -> Selection:
    """Read a data set in one pass, keeping the selected rows only.

    :param rows: ``"3,7,10-20"``, positions in the file from 0; overrides ``limit``.
    :param limit: the first rows; None or not positive: all.
    :raises UsageError: ``rows`` is no selector.
    :raises DataError: what is wrong with which row, by file, line and field; or nothing is selected.
    """
    spans = _parse_selector(rows) if rows else None
    selected: list[Row] = []
    total = 0
    with closing(_read(path)) as raws:
        for where, raw in raws:
            index = total
            total += 1
            if spans is not None:
                if not any(start <= index <= end for start, end in spans):
                    continue
            elif limit is not None and 0 < limit <= len(selected):
                continue  # the rest is still counted
            selected.append(_normalise(raw, len(selected), index, where))
    if spans and spans[-1][1] >= total:
        beyond = list(islice(chain.from_iterable(range(max(start, total), end + 1) for start, end in spans), 11))
        named = ", ".join(map(str, beyond[:10])) + (", ..." if len(beyond) > 10 else "")
        raise DataError(
            f"--rows selects [{named}] but {path.name} has {total} rows (valid indices are 0-{max(total - 1, 0)})"
        )
    if not selected:
        raise DataError(f"{path} selected no rows")
    return Selection(rows=selected, total_rows=total)


def _parse_selector(text: str) -> list[tuple[int, int]]:
    """Ascending spans, both ends included, that do not overlap."""
    if not _SELECTOR.fullmatch(text.strip()):
        raise UsageError(f"--rows must be comma-separated indices or ranges, for example '3,7,10-20': got {text!r}")
    spans: list[tuple[int, int]] = []
    for part in text.strip().split(","):
        start, _, end = part.partition("-")
        spans.append((int(start), int(end or start)))
        if spans[-1][0] > spans[-1][1]:
            raise UsageError(f"--rows range {part!r} is inverted; write it as {int(end)}-{int(start)}")
    merged: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


def _extension(path: Path) -> str:
    extension = path.suffix.lstrip(".").lower()
    if extension not in EXTENSIONS:
        raise DataError(f"{path} has extension {extension or '(none)'!r}; expected one of {sorted(EXTENSIONS)}")
    return extension


def _read(path: Path) -> Generator[Raw]:
    read = {"jsonl": _read_jsonl, "csv": _read_csv, "parquet": _read_parquet}[_extension(path)]
    try:
        yield from read(path)
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error}") from error


def _lines(path: Path) -> Iterator[str]:
    # decoded one by one, so that the line that holds a broken byte is known
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                byte = f"byte 0x{line[error.start]:02x} at column {error.start + 1}"
                raise DataError(f"{path}:{number}: not valid UTF-8 ({byte})") from None
            yield text


def _read_jsonl(path: Path) -> Iterator[Raw]:
    for number, line in enumerate(_lines(path), start=1):
        text = line.strip()
        if not text:
            continue
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{number}: invalid JSON ({error.msg}) at column {error.colno}") from error
        except (ValueError, RecursionError) as error:  # an integer of thousands of digits; thousands of brackets
            raise DataError(f"{path}:{number}: unreadable JSON ({error})") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: each line must be a JSON object")
        yield f"{path}:{number}", row


def _read_csv(path: Path) -> Iterator[Raw]:
    previous = csv.field_size_limit(MAX_FIELD)
    number = 1
    try:
        reader = csv.reader(_lines(path))
        header = next(reader, None)
        if not header:
            raise DataError(f"{path} has no CSV header row")
        for column in COLUMNS:
            if header.count(column) > 1:
                raise DataError(f"{path}:1: column {column!r} appears {header.count(column)} times")
        number = reader.line_num + 1
        for cells in reader:
            if any(cells[len(header) :]):
                raise DataError(
                    f"{path}:{number}: {len(cells)} cells, but the header names {len(header)} columns",
                    hint="A field that holds a comma must stand in double quotes.",
                )
            if cells:
                # a short row lacks its last columns; in metadata mode they are there, and empty
                yield f"{path}:{number}", {**dict.fromkeys(header), **dict(zip(header, cells, strict=False))}
            number = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}:{number}: unreadable CSV ({error})") from error
    finally:
        csv.field_size_limit(previous)


def _read_parquet(path: Path) -> Iterator[Raw]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise DataError(
            f"Reading {path} needs pyarrow, which is not installed",
            hint='Install the parquet extra: `uv sync --extra parquet`, or `pip install "rollout-harness[parquet]"`.',
        ) from error
    index = 0
    try:
        with pq.ParquetFile(path) as file:
            names = [name for name in file.schema_arrow.names if name in COLUMNS]
            for batch in file.iter_batches(batch_size=1024, columns=names or None):
                for row in batch.to_pylist():
                    yield str(path), row
                    index += 1
    except (pa.ArrowException, ValueError) as error:
        raise DataError(f"{path}: unreadable Parquet after row {index}: {error}") from error


def _normalise(raw: Mapping[str, Any], index: int, source_index: int, where: str) -> Row:
    def fail(text: str) -> NoReturn:
        raise DataError(f"{where}: row {source_index}: {text}")

    metadata_mode = "metadata" in raw
    metadata = raw.get("metadata")
    if isinstance(metadata, str):
        text = metadata.strip()
        try:
            metadata = json.loads(text) if text else None
        except json.JSONDecodeError as error:
            fail(f"metadata is not valid JSON ({error.msg})")
        except (ValueError, RecursionError) as error:
            fail(f"metadata is not readable JSON ({error})")
        if metadata is None and text:
            fail("metadata must be a JSON object")
    if metadata is not None and not isinstance(metadata, Mapping):
        fail("metadata must be a JSON object")
    metadata = dict(metadata) if metadata else None
    if _deeper(metadata, MAX_DEPTH):
        fail(f"metadata is nested more than {MAX_DEPTH} levels deep")
    for column in COLUMNS:
        if isinstance(number := raw.get(column), float) and not math.isfinite(number):
            fail(f"{column} is {number}; leave it out where there is none")

    system, user = _text(raw, "system_prompt"), _text(raw, "user_prompt")
    if user is None and not metadata_mode:
        fail("user_prompt is required for a dataset with no 'metadata' column")
    label = _text(raw, "ground_truth")
    if label is None:
        label = _text(raw, "label")
    if label is None and not metadata_mode:
        fail("ground_truth (or label) is required for a dataset with no 'metadata' column")
    prompt: list[Message] = [
        {"role": role, "content": text} for role, text in (("system", system), ("user", user)) if text is not None
    ]
    if not prompt and metadata is None:
        fail("has no prompt and no metadata; a row needs at least a user_prompt or a non-empty 'metadata' object")

    for field, value in (("system_prompt", system), ("user_prompt", user), ("label", label), ("metadata", metadata)):
        try:
            value.encode() if isinstance(value, str) else _STRICT.encode(value).encode()
        except UnicodeEncodeError:
            fail(f"{field} holds half of a surrogate pair, which is no text")
        except (TypeError, ValueError, RecursionError) as error:
            fail(f"{field} cannot be written as JSON ({error}); NaN and infinity are not JSON, use null")
    return Row(index=index, source_index=source_index, prompt=prompt, label=label, metadata=metadata)


def _deeper(value: object, levels: int) -> bool:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return levels < 0 or any(_deeper(each, levels - 1) for each in inner)


def _text(raw: Mapping[str, Any], column: str) -> str | None:
    value = raw.get(column)
    return None if value is None or value == "" else str(value)
