"""Data sets, held against the platform's own normaliser."""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from osmosis_ai.eval.local.dataset import DatasetResolutionError, normalize_row, parse_row_selector
from osmosis_ai.eval.local.dataset import select_rows as platform_select

from harness.config import Workspace, dataset_digest, resolve_dataset, select_rows
from harness.config.dataset import MAX_FIELD, _normalise
from harness.errors import DataError, UsageError

Plain = tuple[int, int, list[dict[str, Any]], str | None, dict[str, Any] | None]


def platform(path: Path, rows: str | None = None, limit: int | None = None) -> tuple[list[Plain], int]:
    selection = platform_select(path, limit=limit, row_selector=parse_row_selector(rows) if rows else None)
    return [
        (r.row_index, r.source_row_index, [dict(m) for m in r.initial_messages], r.label, r.metadata)
        for r in selection.rows
    ], selection.total_dataset_rows


def harness(path: Path, rows: str | None = None, limit: int | None = None) -> tuple[list[Plain], int]:
    selection = select_rows(path, rows, limit)
    return [(r.index, r.source_index, r.prompt, r.label, r.metadata) for r in selection.rows], selection.total_rows


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """The same rows as jsonl, csv or parquet, by the name's ending."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows({k: json.dumps(v) if isinstance(v, dict) else v for k, v in row.items()} for row in rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


PROMPTS = [
    {"system_prompt": "be brief", "user_prompt": f"2*{i}?\nnow", "ground_truth": str(2 * i), "other": i}
    for i in range(30)
]
METADATA = [
    {"user_prompt": "q", "metadata": {"a": 1, "b": [1.5, None], "c": {"d": "é"}}},
    {"user_prompt": "", "metadata": {"a": 2, "b": [2.5, 1.0], "c": {"d": ""}}},
]


@pytest.mark.parametrize("extension", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("rows", [PROMPTS, METADATA], ids=["prompts", "metadata"])
def test_files_are_read_as_the_platform_reads_them(tmp_path: Path, extension: str, rows: list[dict[str, Any]]) -> None:
    path = write(tmp_path / f"d.{extension}", rows)
    assert harness(path) == platform(path)
    assert harness(path)[1] == len(rows)


@pytest.mark.parametrize("extension", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize(
    ("rows", "limit"),
    [("0", None), ("29", 3), ("3,7,10-20", None), ("7,3,3,2-4", 1), (None, 5), (None, 0), (None, -1), (None, 99)],
)
def test_selection(tmp_path: Path, extension: str, rows: str | None, limit: int | None) -> None:
    path = write(tmp_path / f"d.{extension}", PROMPTS)
    assert harness(path, rows, limit) == platform(path, rows, limit)


@pytest.mark.parametrize("selector", ["", "a", "1-", "-1", "1,,2", "1 2", "5-3", "1;2", "1-2-3"])
def test_selectors_that_are_none(tmp_path: Path, selector: str) -> None:
    path = write(tmp_path / "d.jsonl", PROMPTS)
    if selector:
        with pytest.raises(DatasetResolutionError) as theirs:
            parse_row_selector(selector)
        with pytest.raises(UsageError) as ours:
            select_rows(path, selector)
        assert ours.value.message == str(theirs.value)
    else:
        assert len(select_rows(path, selector).rows) == 30


@pytest.mark.parametrize("selector", ["30", "28-31", "0,99,40-41"])
def test_rows_beyond_the_end(tmp_path: Path, selector: str) -> None:
    path = write(tmp_path / "d.jsonl", PROMPTS)
    with pytest.raises(DatasetResolutionError) as theirs:
        platform(path, selector)
    with pytest.raises(DataError) as ours:
        select_rows(path, selector)
    assert ours.value.message == str(theirs.value)


def test_an_endless_range_is_no_trouble(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", PROMPTS)
    with pytest.raises(DataError, match=r"\[30, 31, .*, 39, \.\.\.\] but d\.jsonl has 30 rows"):
        select_rows(path, "0-999999999999999999")


words = st.text(alphabet="a é\n", max_size=3)
texts = st.one_of(st.none(), words, st.integers(), st.booleans(), st.floats(allow_nan=False, allow_infinity=False))
metadata = st.one_of(
    st.none(),
    st.just({}),
    st.dictionaries(words, st.integers(), max_size=2),
    st.integers(),
    st.sampled_from(["", " ", "{}", '{"a": 1}', "[]", "null", "{", ' {"a": {}} ', "3"]),
    st.lists(st.integers(), max_size=1),
)
raw_rows = st.fixed_dictionaries(
    {},
    optional={
        "system_prompt": texts,
        "user_prompt": texts,
        "ground_truth": texts,
        "label": texts,
        "metadata": metadata,
        "other": st.integers(),
    },
)


@given(raw_rows)
def test_every_row_is_normalised_as_the_platform_does(raw: dict[str, Any]) -> None:
    expected: object
    said: object
    try:
        row = normalize_row(raw, row_index=3, source_row_index=5)
        expected = [dict(message) for message in row.initial_messages], row.label, row.metadata
    except DatasetResolutionError as error:
        expected = f"d.jsonl:9: {error}"
    try:
        mine = _normalise(raw, 3, 5, "d.jsonl:9")
        said = mine.prompt, mine.label, mine.metadata
    except DataError as error:
        said = error.message
    assert said == expected


GOOD_LINE = b'{"user_prompt": "a", "label": "b"}\n'


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"user_prompt": }\n', r"d\.jsonl:3: invalid JSON \(Expecting value\)"),
        (b"[1]\n", r"d\.jsonl:3: each line must be a JSON object"),
        (b'{"user_prompt": "\xff"}\n', r"d\.jsonl:3: not valid UTF-8 \(byte 0xff at column 18\)"),
        (b'{"label": "b"}\n', r"d\.jsonl:3: row 1: user_prompt is required"),
        (b'{"user_prompt": "a"}\n', r"d\.jsonl:3: row 1: ground_truth \(or label\) is required"),
        (b'{"metadata": ""}\n', r"d\.jsonl:3: row 1: has no prompt and no metadata"),
        (b'{"metadata": [1]}\n', r"d\.jsonl:3: row 1: metadata must be a JSON object"),
        (b'{"metadata": "{"}\n', r"d\.jsonl:3: row 1: metadata is not valid JSON"),
        (b'{"metadata": {"a": [NaN]}}\n', r"d\.jsonl:3: row 1: metadata cannot be written as JSON .*use null"),
        (b'{"metadata": {"a": 1e999}}\n', r"d\.jsonl:3: row 1: metadata cannot be written as JSON"),
        (b'{"user_prompt": "\\ud83d", "label": "b"}\n', r"d\.jsonl:3: row 1: user_prompt holds half of a surrogate"),
        (b'{"user_prompt": "a", "ground_truth": NaN}\n', r"d\.jsonl:3: row 1: ground_truth is nan; leave it out"),
        (b'{"metadata": {"a": ' + b"[" * 102 + b"]" * 102 + b"}}\n", r"d\.jsonl:3: row 1: .*more than 100 levels deep"),
        (b'{"metadata": ' + b"[" * 200_000 + b"}\n", r"d\.jsonl:3: unreadable JSON"),
        (b'{"user_prompt": ' + b"1" * 5000 + b"}\n", r"d\.jsonl:3: unreadable JSON"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, line: bytes, text: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(GOOD_LINE + b"\n" + line)
    with pytest.raises(DataError, match=text):
        select_rows(path)


def test_nan_in_a_column_that_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"user_prompt": "a", "label": "b", "score": NaN}\n')
    assert harness(path) == platform(path)


@pytest.mark.parametrize("extension", ["jsonl", "csv"])
def test_byte_order_mark_and_crlf(tmp_path: Path, extension: str) -> None:
    plain = write(tmp_path / f"d.{extension}", PROMPTS)
    expected = harness(plain)
    odd = tmp_path / f"odd.{extension}"
    odd.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))
    rows, total = harness(odd)
    assert total == expected[1]
    assert [row[3] for row in rows] == [row[3] for row in expected[0]]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "has no CSV header row"),
        (b"user_prompt,user_prompt,label\na,b,c\n", r"d\.csv:1: column 'user_prompt' appears 2 times"),
        (b'user_prompt,label\n"a\nb",c\na,b,c\n', r"d\.csv:4: 3 cells, but the header names 2 columns"),
        (b'user_prompt,label\n"a\nb",c\n,c\n', r"d\.csv:4: row 1: user_prompt is required"),
        (b"user_prompt,label\na,b\n\xff,b\n", r"d\.csv:3: not valid UTF-8 \(byte 0xff at column 1\)"),
        (b"user_prompt,label\na,b\n" + b"x" * (MAX_FIELD + 1) + b",b\n", r"d\.csv:3: unreadable CSV \(field larger"),
        (b"user_prompt,label\n", "selected no rows"),
    ],
    ids=["empty", "column twice", "too many cells", "field", "utf-8", "huge field", "no rows"],
)
def test_broken_csv_is_named(tmp_path: Path, data: bytes, text: str) -> None:
    path = tmp_path / "d.csv"
    path.write_bytes(data)
    before = csv.field_size_limit()
    with pytest.raises(DataError, match=text):
        select_rows(path)
    assert csv.field_size_limit() == before


@pytest.mark.parametrize(
    "data", [b"user_prompt,label\n\na,b\n", b"user_prompt,label,\na,b,,\n", b'metadata,user_prompt\n,a\n"{""a"": 1}"\n']
)
def test_odd_csv_is_read_as_the_platform_reads_it(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "d.csv"
    path.write_bytes(data)
    assert harness(path) == platform(path)


def test_parquet_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    path.write_bytes(b"no parquet")
    with pytest.raises(DataError, match=r"d\.parquet: unreadable Parquet after row 0"):
        select_rows(path)


def test_parquet_field_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "d.parquet", [{"user_prompt": "a", "label": 1.5}, {"user_prompt": None, "label": 2.0}])
    assert select_rows(path, "0").rows[0].label == "1.5"
    with pytest.raises(DataError, match=r"d\.parquet: row 1: user_prompt is required"):
        select_rows(path)


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / "d.parquet"
    path.write_bytes(b"")
    with pytest.raises(DataError) as caught:
        select_rows(path)
    assert "parquet extra" in caught.value.hint


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Cannot read .*no\.jsonl"):
        select_rows(tmp_path / "no.jsonl")
    with pytest.raises(DataError, match=r"Cannot read .*no\.jsonl"):
        dataset_digest(tmp_path / "no.jsonl")
    with pytest.raises(DataError, match=r"has extension 'txt'; expected one of \['csv', 'jsonl', 'parquet'\]"):
        select_rows(tmp_path / "d.txt")


def test_data_set_is_found_by_name(tmp_path: Path) -> None:
    workspace = Workspace(root=tmp_path)
    workspace.data.mkdir()
    with pytest.raises(DataError) as caught:
        resolve_dataset(workspace, "d")
    for extension in ("jsonl", "csv", "parquet"):
        assert str(tmp_path / "data" / f"d.{extension}") in caught.value.message
    for extension in ("parquet", "csv", "jsonl"):
        (workspace.data / f"d.{extension}").touch()
        assert resolve_dataset(workspace, "d") == workspace.data / f"d.{extension}"
    for name in ("../d", "", "..", "a/b"):
        with pytest.raises(DataError, match="is not a data set's name"):
            resolve_dataset(workspace, name)


def test_data_set_file_is_taken(tmp_path: Path) -> None:
    workspace = Workspace(root=tmp_path)
    path = write(tmp_path / "elsewhere.jsonl", PROMPTS)
    assert resolve_dataset(workspace, "d", path) == path
    with pytest.raises(DataError, match=r"--dataset-file .*no\.jsonl is not a file"):
        resolve_dataset(workspace, "d", tmp_path / "no.jsonl")
    (tmp_path / "d.txt").touch()
    with pytest.raises(DataError, match="has extension 'txt'"):
        resolve_dataset(workspace, "d", tmp_path / "d.txt")


def test_digest(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", PROMPTS)
    assert dataset_digest(path) == hashlib.sha256(path.read_bytes()).hexdigest()
