"""What images and snapshots of environments have in common: content addresses, and scripts that find their Python."""

from __future__ import annotations

import hashlib
from pathlib import Path

from harness.guest import ENV


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def digest_files(folder: Path, pattern: str) -> str:
    """Content address of a folder's files: names, executable bits and contents."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob(pattern)):
        if path.is_file() and not {".git", "__pycache__"} & set(path.relative_to(folder).parts):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            found.update(f"{path.relative_to(folder)}\0{path.stat().st_mode & 0o100}\0{content}\0".encode())
    return found.hexdigest()


def own_shebang(script: bytes) -> bytes:
    """A console script with the environment's interpreter, whatever interpreter the installer wrote into it."""
    first, _, rest = script.partition(b"\n")
    if not first.startswith(b"#!"):
        return script
    if b"python" not in first:
        second, _, after = rest.partition(b"\n")
        if not second.startswith(b"'''exec'"):
            return script
        rest = after.partition(b"\n")[2]  # the installer's form for a path with blanks: two lines of shell
    return f"#!{ENV}/bin/python\n".encode() + rest
