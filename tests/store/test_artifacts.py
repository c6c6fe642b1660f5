"""Hostile and broken archives: nothing leaves its folder, nothing raises, memory stays bounded."""

from __future__ import annotations

import io
import os
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import ByteStream
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.store import ArtifactLimits, ArtifactReport, receive_artifacts
from harness.store.artifacts import remove_unsafe

pytestmark = pytest.mark.anyio


class Bytes(ByteStream):
    """A stream of given bytes, or of ``repeat`` without end after them."""

    def __init__(self, data: bytes, step: int = 5000, repeat: bytes = b"", error: Exception | None = None) -> None:
        self._data, self._step, self._repeat, self._error, self._at = data, step, repeat, error, 0

    async def receive(self, max_bytes: int = 65536) -> bytes:
        await anyio.lowlevel.checkpoint()
        piece = self._data[self._at : self._at + min(self._step, max_bytes)]
        self._at += len(piece)
        if not piece and self._repeat:
            return self._repeat
        if not piece:
            raise self._error or anyio.EndOfStream
        return piece

    async def send(self, item: bytes) -> None:
        raise NotImplementedError

    async def send_eof(self) -> None: ...

    async def aclose(self) -> None: ...


def archive(*members: tuple[Any, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for member, data in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def raw(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = special(name, kind)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


async def unpack(data: bytes, folder: Path, limits: ArtifactLimits | None = None, **options: Any) -> ArtifactReport:
    return await receive_artifacts(Bytes(data, **options), folder, limits)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT], ids=["pax", "ustar"])
@pytest.mark.parametrize("step", [1, 511, 1 << 20])
async def test_ordinary_files_arrive(tmp_path: Path, form: int, step: int) -> None:
    long = "d" * 90 + "/" + "é" * 40 + ".txt"
    files = {"a.txt": b"a", "./sub/dir/b": b"b" * 3000, "empty": b"", long: b"long"}
    if form != tarfile.USTAR_FORMAT and step > 1:
        files["x" * 200] = b"c" * 700_000
    report = await unpack(archive(*files.items(), form=form), tmp_path / "out", step=step)
    assert report == ArtifactReport(files=len(files), bytes=sum(map(len, files.values())))
    assert tree(tmp_path / "out") == {name.removeprefix("./"): data for name, data in files.items()}


async def test_modes_are_normalised(tmp_path: Path) -> None:
    members = []
    for name, mode in (("s", 0o4777), ("r", 0o400), ("w", 0o666)):
        info = tarfile.TarInfo(name)
        info.mode = mode
        members.append((info, b"x"))
    await unpack(archive(*members), tmp_path)
    assert [oct((tmp_path / n).stat().st_mode & 0o7777) for n in "srw"] == ["0o755", "0o644", "0o644"]


HOSTILE = [
    "/etc/evil",
    "../evil",
    "a/../../evil",
    "..",
    ".",
    "a\\b",
    "a\nb",
    "a\x7fb",
    "manifest.json",
    "./MANIFEST.json",
    "x" * 300,
    "/".join("d" for _ in range(80)),
    "/".join(["d" * 100] * 10),
    "end/",
]


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: repr(name[:20]))
async def test_hostile_names_are_skipped_and_the_rest_arrives(tmp_path: Path, name: str) -> None:
    report = await unpack(archive(("before", b"1"), (name, b"evil"), ("after", b"2")), tmp_path / "out")
    assert tree(tmp_path / "out") == {"before": b"1", "after": b"2"}
    assert report.files == 2
    assert report.error is None
    assert len(report.skipped) == 1
    assert not (tmp_path / "evil").exists()


async def test_names_that_are_not_utf8_are_skipped(tmp_path: Path) -> None:
    report = await unpack(raw("a\udcffb", 0) + bytes(1024), tmp_path)
    assert report.skipped == [("a?b", "a backslash, control character or invalid UTF-8 in its name")]


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE], ids=str
)
async def test_nothing_can_be_written_through_a_link(tmp_path: Path, kind: bytes) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    data = archive((special("link", kind, str(outside)), b""), ("link/x", b"evil"), ("ok", b"1"))
    report = await unpack(data, tmp_path / "out")
    assert not list(outside.iterdir())
    assert ("link", "not a regular file") in report.skipped
    assert tree(tmp_path / "out") == {"link/x": b"evil", "ok": b"1"}


async def test_links_that_were_there_before_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/link").symlink_to(outside)
    (tmp_path / "out/file").symlink_to(outside / "file")
    report = await unpack(archive(("link/x", b"evil"), ("file", b"evil"), ("ok", b"1")), tmp_path / "out")
    assert not list(outside.iterdir())
    assert report.files == 1
    assert [path for path, _ in report.skipped] == ["link/x", "file"]


async def test_the_first_of_equal_names_stays(tmp_path: Path) -> None:
    data = archive(("a", b"first"), ("./a", b"second"), ("a/b", b"below a file"), ("A", b"other"))
    report = await unpack(data, tmp_path)
    assert tree(tmp_path) == {"a": b"first", "A": b"other"}
    assert len(report.skipped) == 2


async def test_limits_skip_what_is_too_much_and_keep_the_rest(tmp_path: Path) -> None:
    limits = ArtifactLimits(files=3, total_bytes=1000, file_bytes=600)
    data = archive(("big", b"x" * 601), ("a", b"x" * 600), ("over", b"x" * 500), ("b", b""), ("c", b"1"), ("d", b"2"))
    report = await unpack(data, tmp_path, limits)
    assert tree(tmp_path).keys() == {"a", "b", "c"}
    assert [path for path, _ in report.skipped] == ["big", "over", "d"]


async def test_the_list_of_skips_is_bounded(tmp_path: Path) -> None:
    report = await unpack(archive(*[("../x", b"")] * 250), tmp_path)
    assert len(report.skipped) == 100
    assert report.skipped_more == 150


async def test_a_cut_archive_keeps_what_came_and_says_so(tmp_path: Path) -> None:
    data = archive(("a", b"1"), ("b", b"x" * 900_000))
    report = await unpack(data[:500_000], tmp_path)
    assert report.error == "the archive is cut short"
    assert report.files == 1
    assert report.skipped == [("b", "cut: not all of its 900000 bytes arrived")]
    assert 0 < (tmp_path / "b").stat().st_size < 900_000


async def test_a_broken_stream_is_a_warning(tmp_path: Path) -> None:
    report = await unpack(archive(("a", b"1"))[:1024], tmp_path, error=anyio.BrokenResourceError())
    assert report.files == 1
    assert "BrokenResourceError" in (report.error or "")


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"garbage" * 1000, "ended early"),
        (b"", "cut short"),
        (raw("x", 1 << 40, tarfile.XHDTYPE), "extended header"),
        (raw("x", -5), "negative"),
        (raw("x", 600, tarfile.XHDTYPE) + b"9" * 1024, "broken extended header"),
    ],
    ids=range(5),
)
async def test_archives_nobody_can_read_end_with_a_reason(tmp_path: Path, data: bytes, error: str) -> None:
    report = await unpack(data, tmp_path)
    assert error in (report.error or "")
    assert tree(tmp_path) == {}


@pytest.mark.parametrize(
    "head",
    [raw("x", 1 << 40), raw("x", 1 << 40, tarfile.XGLTYPE), raw("x", 1 << 40, b"Z"), b""],
    ids=["file", "global header", "unknown type", "headers"],
)
async def test_an_endless_archive_ends_in_bounded_memory(tmp_path: Path, head: bytes) -> None:
    limits = ArtifactLimits(files=5, total_bytes=1 << 20, file_bytes=1 << 19)
    repeat = bytes(range(256)) * 256 if head else raw("../x", 0) * 128
    tracemalloc.start()
    try:
        report = await unpack(head, tmp_path, limits, repeat=repeat)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert report.error is not None
    assert peak < 4 << 20


async def test_cancelling_leaves_no_descriptor(tmp_path: Path) -> None:
    class Stuck(Bytes):
        async def receive(self, max_bytes: int = 65536) -> bytes:
            if self._at == len(self._data):
                await anyio.sleep_forever()
            return await super().receive(max_bytes)

    before = sum(1 for _ in os.scandir("/proc/self/fd"))
    with anyio.move_on_after(0.2):
        await receive_artifacts(Stuck(raw("a", 1 << 20) + bytes(600_000)), tmp_path)
    assert sum(1 for _ in os.scandir("/proc/self/fd")) == before


BASE = archive(("a/b", b"hello" * 200), ("x" * 150, b"1"), (special("l", tarfile.SYMTYPE, "/etc"), b""), ("z", b"2"))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, len(BASE) - 1), st.integers(0, 255)), max_size=8), st.integers(0, len(BASE)))
async def test_flipped_bytes_never_raise_and_never_escape(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(BASE)
    for at, value in flips:
        data[at] = value
    for start in range(0, len(data) - 511, 512):  # keep the checksums right, so that the fields themselves are tried
        if data[start + 257 : start + 262] == b"ustar":
            data[start + 148 : start + 156] = b" " * 8
            data[start + 148 : start + 156] = b"%06o\0 " % sum(data[start : start + 512])
    top = tmp_path_factory.mktemp("fuzz")
    report = await unpack(bytes(data[:cut]), top / "out")
    assert [path.name for path in top.iterdir()] == ["out"]
    assert not [path for path in (top / "out").rglob("*") if path.is_symlink()]
    assert report.files <= 4


def test_what_a_grader_must_not_leave_is_removed(tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir/ok").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "dir/fifo")
    (tmp_path / "a\\b").write_text("x")
    removed = remove_unsafe(tmp_path)
    assert {path for path, _ in removed} == {"link", "dir/fifo", "a\\b"}
    assert tree(tmp_path) == {"dir/ok": b"x"}
    assert remove_unsafe(tmp_path / "missing") == []
