"""Environments as snapshots: one per recipe, named by its content, built by the service once and found again.

The recipe is a Dockerfile without a context. What an image build can fetch by itself (packages from the public index,
each pinned by hash) is only named in it; what it cannot (path dependencies, URLs, git, packages pinned to an index of
their own) is installed here, with this machine's credentials, and travels inside the recipe.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import math
import re
import sys
import tarfile
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path

import anyio
import anyio.to_thread
from daytona import CreateSnapshotParams, Image
from daytona import Resources as Size
from daytona.common import errors as sdk

from harness.errors import DependencyError, ImageError, SandboxError
from harness.guest import ENV, ROOT
from harness.models import Record, Resources
from harness.rollout.environment import site_packages
from harness.rollout.lock import Lock, allows, read_pyproject
from harness.sandbox.base import Environment, Progress, SandboxSettings, StoredImage
from harness.sandbox.daytona.client import Client, is_transient, patiently, translate
from harness.sandbox.docker.build import digest_files
from harness.sandbox.docker.context import own_shebang

PREFIX = "harness-"
LAYOUT = "1"
BUILD_S = 3600.0
POLL_S = 1.0
MAX_DISK_GIB = 10
MAX_TRAVEL = 8 * 1024 * 1024
"""Bytes, compressed, of the packages that may travel inside a recipe."""
_PIECE = 48 * 1024
"""A line of a Dockerfile may hold 64 KiB, an argument of a program 128 KiB."""
_STEP = "harness: installing packages"
_WORK = "/opt/harness/build"
_PLATFORM = "x86_64-manylinux_2_28"
_KEPT_LINES = 15
_FROM_ELSEWHERE = re.compile(r" @ |^[./]|^file:")


def size(resources: Resources) -> Size:
    """The sandbox's resources in the service's units, rounded up.

    :raises SandboxError: more disk than a sandbox can have.
    """
    disk = (
        math.ceil((2 * resources.disk_mib) / 1024) + 1
    )  # the work folder and /tmp, and room for what is written beside
    if disk > MAX_DISK_GIB:
        most = (MAX_DISK_GIB - 1) * 1024 // 2
        raise SandboxError(
            f"disk_mib = {resources.disk_mib} needs a sandbox of {disk} GiB; Daytona's have at most {MAX_DISK_GIB}.",
            hint=f"Set disk_mib in [tool.harness.sandbox] to at most {most}.",
        )
    return Size(cpu=math.ceil(resources.cpus), memory=math.ceil(resources.memory_mib / 1024), disk=disk)


async def ensure(client: Client, lock: Lock, settings: SandboxSettings, progress: Progress) -> Environment:
    """Find, or have built, the snapshot of a lock.

    :raises DependencyError: its dependencies cannot be installed.
    :raises ImageError: the base image cannot be had, or does not build.
    """
    wanted = size(settings.resources)
    image = await _recipe(lock, settings, progress)
    parts = [LAYOUT, image.dockerfile(), str(wanted.cpu), str(wanted.memory), str(wanted.disk), client.target or ""]
    parts += await anyio.to_thread.run_sync(_context, image)
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    name = f"{PREFIX}{key}"
    with anyio.move_on_after(BUILD_S) as scope:
        await _active(client, CreateSnapshotParams(name=name, image=image, resources=wanted), progress)
    if scope.cancelled_caught:
        raise ImageError(f"Daytona: snapshot {name} was not ready after {BUILD_S / 60:.0f} minutes.")
    return Environment(key=key, handle=name, python=f"{ENV}/bin/python")


def _context(image: Image) -> list[str]:
    """Digests of the files beside a Dockerfile of the user's own, which the SDK uploads."""
    return [digest_files(Path(each.source_path).parent, Path(each.source_path).name) for each in image._context_list]


async def _active(client: Client, wanted: CreateSnapshotParams, progress: Progress) -> None:
    """Wait until the snapshot is usable; make it where nobody does. Its name lets one build run, whoever asks."""
    name, waiting, failed = wanted.name, "", False
    while True:
        try:
            found = await patiently(lambda: client.sdk.snapshot.get(name))
        except sdk.DaytonaNotFoundError:
            if not await _build(client, wanted, progress):
                continue  # another process was first
            return
        except Exception as error:
            raise translate(error, f"Daytona: cannot look for snapshot {name}") from error
        state = str(found.state.value)
        if state == "active":
            return
        if state == "inactive":  # the service puts aside what nobody used for two weeks
            progress(f"activating snapshot {name}")
            await _again(partial(client.sdk.snapshot.activate, found), name)
        elif state in ("error", "build_failed"):
            if failed:
                raise ImageError(f"Daytona: snapshot {name}: {found.error_reason or state}")
            failed = True  # an older build's failure says nothing of one now
            await _again(partial(client.sdk.snapshot.delete, found), name)
        if state != waiting:
            progress(f"snapshot {name} is {state}: waiting")
            waiting = state
        await anyio.sleep(POLL_S)


async def _build(client: Client, wanted: CreateSnapshotParams, progress: Progress) -> bool:
    """Have it built, with its log as progress. Returns whether it was we who made it."""
    lines: list[str] = []

    def on_logs(text: str) -> None:
        for line in text.splitlines():
            shown = line.strip()
            if shown:
                lines[:] = [*lines[1 - _KEPT_LINES :], shown[:300]]
                installing.append(True) if _STEP in line and not installing else None
                progress(shown[:300] if len(shown) < 300 else f"{shown[:120]} …")

    installing: list[bool] = []
    progress(f"building snapshot {wanted.name}")
    try:
        await client.gate.call(
            "authenticated", lambda: client.sdk.snapshot.create(wanted, on_logs=on_logs, timeout=BUILD_S)
        )
        return True
    except sdk.DaytonaConflictError:
        return False
    except sdk.DaytonaError as error:
        if is_transient(error):
            return False  # it may be there all the same
        if error.status_code is not None:
            raise translate(error, f"Daytona does not build snapshot {wanted.name}") from error
        await _again(partial(client.sdk.snapshot.delete, wanted.name), wanted.name)
        text = f"Daytona: {error.message.splitlines()[0]}"
        tail = "\n".join(f"    {line}" for line in lines)
        if installing:
            hint = (
                "A package from an index of your own: pin it there in [tool.uv.sources]; it is then fetched here and "
                "travels. One that is built from source: use an image with its tools ([tool.harness.sandbox] image)."
            )
            raise DependencyError(f"{text}\n{tail}", hint=hint) from error
        hint = "The base image needs python3 (3.12 or newer) with venv and pip, and a tag that a registry knows."
        raise ImageError(f"{text}\n{tail}", hint=hint) from error


async def _again(change: Callable[[], Awaitable[object]], name: str) -> None:
    """A change of a snapshot's state; where another process is at it already, that is as good."""
    try:
        await patiently(change)
    except (sdk.DaytonaNotFoundError, sdk.DaytonaConflictError, sdk.DaytonaBadRequestError):
        pass
    except Exception as error:
        raise translate(error, f"Daytona: snapshot {name}") from error


async def _recipe(lock: Lock, settings: SandboxSettings, progress: Progress) -> Image:
    python = _python(lock)
    base = settings.image or f"python:{python}-slim"
    folder = lock.project / base
    if base.startswith((".", "/")) or await anyio.to_thread.run_sync(folder.is_dir):
        if not await anyio.to_thread.run_sync((folder / "Dockerfile").is_file):
            raise ImageError(f"The image setting names {folder}, where there is no Dockerfile.")
        image = await anyio.to_thread.run_sync(Image.from_dockerfile, folder / "Dockerfile")
    else:
        image = Image.base(base)
    here, elsewhere = split(lock)
    travelling = await _travelling(lock, elsewhere, python, progress) if elsewhere else None
    needed = lock.requires_python
    if travelling is not None and travelling.native:  # machine code fits one Python only
        needed += f",>={python},<3.{int(python.partition('.')[2]) + 1}"
    uv = version("uv")
    check = (
        f"import sys; v = sys.version_info; ok = v >= (3, 12) and {_check(needed)}; "
        f"sys.exit(0 if ok else 'Python %d.%d.%d: the rollout needs {needed}' % v[:3])"
    )
    install = (
        f"echo '{_STEP}' && python3 -m venv {_WORK}/uv && {_WORK}/uv/bin/pip install --quiet uv=={uv} "
        f"&& {_WORK}/uv/bin/uv venv --no-project --python python3 {ENV} "
        f"&& {_WORK}/uv/bin/uv pip install --python {ENV}/bin/python --no-deps --link-mode copy --no-cache "
        f"-r {_WORK}/requirements.txt && rm -rf {_WORK}/uv"
    )
    unpack = f"import tarfile; tarfile.open('{_WORK}/packages').extractall('{_WORK}/packages.d', filter='data')"
    place = (
        f"import shutil, sysconfig, pathlib; new = pathlib.Path('{_WORK}/packages.d'); "
        f"[shutil.copytree(new / n, t, dirs_exist_ok=True) for n, t in (('site', sysconfig.get_path('purelib')), "
        f"('bin', '{ENV}/bin')) if (new / n).is_dir()]"
    )
    lines = ["USER root", f'RUN ["python3", "-c", {json.dumps(check)}]', f"RUN mkdir -p {_WORK}"]
    lines += _file("requirements.txt", here.encode())
    lines += [f"RUN {install}"]
    if travelling is not None:
        lines += _file("packages", travelling.packed)
        lines += [
            f'RUN ["python3", "-c", {json.dumps(unpack)}]',
            f'RUN ["{ENV}/bin/python", "-c", {json.dumps(place)}]',
        ]
    compile_all = f"import compileall; compileall.compile_dir('{ENV}', quiet=2, workers=0)"
    lines += [
        f'RUN ["{ENV}/bin/python", "-I", "-c", {json.dumps(compile_all)}]',
        f"RUN rm -rf {_WORK} && mkdir -p {ROOT} && chmod 1777 {ROOT}",
        'ENTRYPOINT ["sleep", "infinity"]',
    ]
    return image.dockerfile_commands(lines)


def _python(lock: Lock) -> str:
    """The Python of the default image: this one's, else the newest that the rollout allows."""
    own = sys.version_info[:2]
    for minor in (own[1], *range(14, 11, -1)):
        if allows(lock.requires_python, (3, minor, 99)) or allows(lock.requires_python, (3, minor, 0)):
            return f"3.{minor}"
    return f"3.{own[1]}"


def _check(specifier: str) -> str:
    """A ``requires-python`` as a Python expression over ``v``, as far as it is a comparison of releases."""
    clauses = []
    for clause in specifier.split(","):
        found = re.fullmatch(r"\s*(>=?|<=?)\s*(\d+(?:\.\d+)*)\s*", clause)
        if found:
            numbers = ", ".join(str(int(part)) for part in found[2].split("."))
            width = len(found[2].split("."))
            clauses.append(f"v[:{width}] {found[1]} ({numbers},)")
    return " and ".join(clauses) or "True"


def split(lock: Lock) -> tuple[str, str]:
    """The lock's requirements: those that the public index has, and those that must travel."""
    sources = read_pyproject(lock.project).get("tool", {}).get("uv", {}).get("sources", {})
    pinned = {_normal(str(name)) for name, source in sources.items() if isinstance(source, dict) and "index" in source}
    here: list[str] = []
    elsewhere: list[str] = []
    for entry in _entries(lock.requirements):
        name = re.match(r"[\w.-]+", entry)
        travels = bool(_FROM_ELSEWHERE.search(entry.partition(" ;")[0])) or (name and _normal(name[0]) in pinned)
        (elsewhere if travels else here).append(entry)
    return "\n".join([*here, ""]), "\n".join([*elsewhere, ""]) if elsewhere else ""


def _entries(requirements: str) -> Iterable[str]:
    """Each requirement with its continued lines."""
    entry = ""
    for line in requirements.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            entry += line if not entry else f"\n{line}"
            if not line.endswith("\\"):
                yield entry
                entry = ""


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class _Luggage(Record):
    """Packages that travel: a compressed tar, and whether there is machine code in it."""

    packed: bytes
    native: bool


async def _travelling(lock: Lock, requirements: str, python: str, progress: Progress) -> _Luggage:
    digest = hashlib.sha256(f"{lock.digest} {requirements}".encode()).hexdigest()
    part = lock.model_copy(update={"requirements": requirements, "digest": digest})
    folder = await site_packages(part, python, _PLATFORM, progress)
    packed = await anyio.to_thread.run_sync(_pack, folder)
    if len(packed) > MAX_TRAVEL:
        raise DependencyError(
            f"{lock.project}: the packages that no public index has take {len(packed) / 2**20:.0f} MiB; "
            f"{MAX_TRAVEL >> 20} MiB can travel with a Daytona snapshot's recipe",
            hint="Put them into an image of your own and name it as image in [tool.harness.sandbox].",
        )
    return _Luggage(packed=packed, native=any(folder.rglob("*.so")))


def _pack(folder: Path) -> bytes:
    """A folder of packages as a compressed tar, the same bytes for the same content."""
    output = io.BytesIO()
    with gzip.GzipFile(fileobj=output, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w|") as tar:
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder)
            if not path.is_file() or inside.suffix == ".pyc":
                continue
            script = inside.parts[0] == "bin"
            data = own_shebang(path.read_bytes()) if script else path.read_bytes()
            entry = tarfile.TarInfo(str(inside) if script else f"site/{inside}")
            entry.size, entry.mode = len(data), 0o755 if script or path.stat().st_mode & 0o100 else 0o644
            tar.addfile(entry, io.BytesIO(data))
    return output.getvalue()


def _file(name: str, content: bytes) -> list[str]:
    """Dockerfile lines that write a file: a build without a context has no other way."""
    text = base64.b64encode(gzip.compress(content, mtime=0)).decode()
    pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
    path = f"{_WORK}/{name}"
    decode = (
        f"import base64, gzip, pathlib; p = pathlib.Path('{path}.b64'); "
        f"pathlib.Path('{path}').write_bytes(gzip.decompress(base64.b64decode(p.read_bytes()))); p.unlink()"
    )
    return [
        *(f"RUN printf %s '{piece}' >> {path}.b64" for piece in pieces),
        f'RUN ["python3", "-c", {json.dumps(decode)}]',
    ]


async def stored(client: Client) -> list[StoredImage]:
    """The snapshots that we made, the least recently used first."""
    found: list[StoredImage] = []
    page = 1
    while True:
        try:
            listed = await patiently(partial(client.sdk.snapshot.list, page=page, limit=100))
        except Exception as error:
            raise translate(error, "cannot list the snapshots") from error
        for each in listed.items:
            if re.fullmatch(PREFIX + "[0-9a-f]{32}", each.name):
                created = unix_time(each.created_at)
                record = StoredImage(
                    id=each.id,
                    tag=each.name,
                    kind="environment",
                    size=int(float(each.size or 0) * 2**30),
                    created_at=created,
                    used_at=unix_time(each.last_used_at) or created,
                )
                found.append(record)
        if page >= listed.total_pages:
            return sorted(found, key=lambda each: each.used_at)
        page += 1


async def prune(client: Client, budget: int, progress: Progress) -> list[StoredImage]:
    """Remove the least recently used of our snapshots until the rest takes at most ``budget`` bytes; says which."""
    found, removed = await stored(client), []
    total = sum(each.size for each in found)
    for each in found:
        if total <= budget:
            break
        await _again(partial(client.sdk.snapshot.delete, each.tag), each.tag)
        progress(f"removed snapshot {each.tag} ({each.size / 1e6:.0f} MB)")
        total -= each.size
        removed.append(each)
    return removed


def unix_time(said: object) -> float:
    try:
        return datetime.fromisoformat(str(said)).timestamp()
    except ValueError:
        return 0.0
