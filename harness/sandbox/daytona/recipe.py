"""The recipe of an environment: a Dockerfile that the service builds.

What an image build can fetch by itself (packages from the public index, each pinned by hash) is only named in it; what
it cannot (path dependencies, URLs, git, packages pinned to an index of their own) is installed here, with this
machine's credentials, and travels inside the recipe.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import re
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import anyio.to_thread
from daytona import Image
from daytona.common.errors import DaytonaError

from harness.errors import DependencyError, ImageError
from harness.guest import ENV, ROOT
from harness.rollout.environment import site_packages
from harness.rollout.lock import Lock, allows, read_pyproject
from harness.sandbox.base import Progress
from harness.sandbox.packing import digest_files, own_shebang

STEP = "harness: installing packages"
"""In the build's log, when it is the dependencies' turn."""
MAX_TRAVEL = 8 * 1024 * 1024
"""Bytes, compressed, of the packages that may travel inside a recipe."""
_PIECE = 48 * 1024
"""A line of a Dockerfile may hold 64 KiB, an argument of a program 128 KiB."""
_WORK = "/opt/harness/build"
_PLATFORM = "x86_64-manylinux_2_28"
_ENTRY = re.compile(r"^[^\s#](?:.*\\\n)*.*", re.MULTILINE)
"""A requirement with its continued lines."""
_REFERENCE = re.compile(r"[\w./:-]*[\w./-](:[\w.-]+|@sha256:[0-9a-f]{64})")
"""A tag stands after the last slash; before it there may be a registry's port."""
_FROM_ELSEWHERE = re.compile(r" @ |^[./]|^file:")
_LOCAL_ADD = re.compile(r"^[ \t]*ADD[ \t]+(?:--\S+[ \t]+)*(?!https?://|git@|--)\S.*", re.IGNORECASE | re.MULTILINE)


async def make(lock: Lock, image: str, progress: Progress) -> tuple[Image, str]:
    """The recipe, and a digest of the files beside it, which the SDK uploads; empty where there can be none.

    :param image: the base: a reference, a folder with a Dockerfile (relative to the project), or empty for the default.
    :raises DependencyError: dependencies that must travel cannot be installed here, or are too large.
    :raises ImageError: the folder has no Dockerfile that can be used.
    """
    python = _python(lock)
    base, files = Image.base(image or f"python:{python}-slim"), ""
    folder = lock.project / image
    if image and (image.startswith((".", "/")) or await anyio.to_thread.run_sync(folder.is_dir)):
        base, files = await anyio.to_thread.run_sync(_own, folder)
    elif image and not _REFERENCE.fullmatch(image):
        raise ImageError(f"The image setting {image!r} is no reference with a tag.", hint="Name one, as my/base:1.2.")
    here, elsewhere = split(lock)
    packed, native = await _travelling(lock, elsewhere, python, progress) if elsewhere else (b"", False)
    needed = lock.requires_python
    if native:  # machine code fits one Python only
        needed += f",>={python},<3.{int(python.partition('.')[2]) + 1}"
    check = (
        f"import sys; v = sys.version_info; ok = v >= (3, 12) and {_check(needed)}; "
        f"sys.exit(0 if ok else 'Python %d.%d.%d: the rollout needs {needed}' % v[:3])"
    )
    install = (
        f"echo '{STEP}' && python3 -m venv {_WORK}/uv && {_WORK}/uv/bin/pip install --quiet uv=={version('uv')} "
        f"&& {_WORK}/uv/bin/uv venv --no-project --python python3 {ENV} "
        f"&& {_WORK}/uv/bin/uv pip install --python {ENV}/bin/python --no-deps --link-mode copy --no-cache "
        f"-r {_WORK}/requirements.txt && rm -rf {_WORK}/uv"
    )
    lines = ["", "USER root", _run("python3", check), f"RUN mkdir -p {_WORK}"]
    lines += [*_file("requirements.txt", here.encode()), f"RUN {install}"]
    if packed:
        place = (
            f"import shutil, sysconfig, pathlib, tarfile; new = pathlib.Path('{_WORK}/packages.d'); "
            f"tarfile.open('{_WORK}/packages').extractall(new, filter='data'); "
            f"[shutil.copytree(new / n, t, dirs_exist_ok=True) for n, t in (('site', sysconfig.get_path('purelib')), "
            f"('bin', '{ENV}/bin')) if (new / n).is_dir()]"
        )
        lines += [*_file("packages", packed), _run(f"{ENV}/bin/python", place)]
    lines += [
        _run(f"{ENV}/bin/python", f"import compileall; compileall.compile_dir('{ENV}', quiet=2, workers=0)"),
        f"RUN rm -rf {_WORK} && mkdir -p {ROOT} && chmod 1777 {ROOT}",
        'ENTRYPOINT ["sleep", "infinity"]',
    ]
    return base.dockerfile_commands(lines), files


def _own(folder: Path) -> tuple[Image, str]:
    """The image of a folder's Dockerfile, and the digest of all that is in the folder."""
    path = folder / "Dockerfile"
    if not path.is_file():
        raise ImageError(f"The image setting names {folder}, where there is no Dockerfile.")
    if found := _LOCAL_ADD.search(path.read_text()):
        raise ImageError(
            f"{path}: the files of {found[0].strip()!r} cannot be sent to Daytona: its SDK sends those of COPY.",
            hint="Write COPY instead, and unpack an archive in a RUN line.",
        )
    try:
        return Image.from_dockerfile(path, strict_context=True), digest_files(folder, "*")
    except DaytonaError as error:
        raise ImageError(f"{path}: {error.message}") from error


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
    for entry in _ENTRY.findall(lock.requirements):
        name = re.match(r"[\w.-]+", entry)
        travels = bool(_FROM_ELSEWHERE.search(entry.partition(" ;")[0])) or (name and _normal(name[0]) in pinned)
        (elsewhere if travels else here).append(entry)
    return "\n".join([*here, ""]), "\n".join([*elsewhere, ""]) if elsewhere else ""


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


async def _travelling(lock: Lock, requirements: str, python: str, progress: Progress) -> tuple[bytes, bool]:
    """Packages as a compressed tar, and whether there is machine code in it."""
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
    return packed, any(folder.rglob("*.so"))


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
    return [*(f"RUN printf %s '{piece}' >> {path}.b64" for piece in pieces), _run("python3", decode)]


def _run(python: str, code: str) -> str:
    return f'RUN ["{python}", "-I", "-c", {json.dumps(code)}]'
