"""What one container is made of: its isolation, its limits, and the labels by which it is found again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from harness.guest import ROOT
from harness.models import Resources
from harness.sandbox.base import SandboxInfo, SandboxSettings, SandboxSpec
from harness.sandbox.docker.engine import Facts
from harness.sandbox.labels import OWNED as OWNED
from harness.sandbox.labels import labels as labels
from harness.sandbox.labels import owner_of

USER = 1000
_MIB = 1024 * 1024
_INODES_PER_MIB = 64


def info(listed: Mapping[str, Any]) -> SandboxInfo:
    """A container as the engine lists it. Labels that another program made up leave it without an owner."""
    found = {str(key): str(value) for key, value in (listed.get("Labels") or {}).items()}
    names = listed.get("Names") or [""]
    return SandboxInfo(
        id=str(listed["Id"]),
        name=str(names[0]).lstrip("/"),
        state=str(listed.get("State", "")),
        created_at=float(listed.get("Created") or 0),
        owner=owner_of(found),
        labels={key: value for key, value in found.items() if key.startswith("harness.")},
    )


def guest_limits(resources: Resources, facts: Facts) -> dict[str, int | None]:
    """The limits that are left to the guest: those that the engine cannot enforce (a rootless one with cgroups v1)."""
    return {
        "processes": None if "pids" in facts.limits else resources.processes,
        "open_files": None,
        "file_mib": None,
        "memory_mib": None if "memory" in facts.limits else resources.memory_mib,
    }


def config(spec: SandboxSpec, command: list[str], volumes: Iterable[str], facts: Facts) -> dict[str, Any]:
    """The body of the create call.

    The work folder and /tmp are file systems in memory: what is written there counts against the sandbox's memory too.

    :param volumes: paths that the image declares as volumes. They are mounted in memory like /tmp: a volume on the
        engine's disk would have no limit and be one more thing to remove.
    """
    settings, resources = spec.settings, spec.settings.resources
    return {
        "Image": spec.environment.handle,
        "Entrypoint": command,
        "Cmd": [],
        "User": f"{USER}:{USER}",
        "WorkingDir": "/",
        "Env": [f"HOME={ROOT}/home", "LANG=C.UTF-8"],
        "Labels": labels(spec.owner, trial=spec.trial, attempt=spec.attempt, lease_s=spec.lease_s),
        "Healthcheck": {"Test": ["NONE"]},
        "StopSignal": "SIGKILL",  # as PID 1 the guest would sit out any other, and hold up an engine that shuts down
        **CHANNEL,
        "HostConfig": {
            **isolation(settings, facts),
            "Tmpfs": {path: _tmpfs(resources, facts) for path in (ROOT, "/tmp", *volumes)},
            "ShmSize": max(16, resources.memory_mib // 4) * _MIB,
            "Memory": resources.memory_mib * _MIB if "memory" in facts.limits else 0,
            "MemorySwap": resources.memory_mib * _MIB if "swap" in facts.limits else 0,
            "NanoCpus": int(resources.cpus * 1e9) if "cpu" in facts.limits else 0,
            "PidsLimit": resources.processes if "pids" in facts.limits else 0,
            "Ulimits": [
                {"Name": name, "Soft": value, "Hard": value}
                for name, value in (
                    ("nofile", resources.open_files),
                    ("fsize", resources.file_mib * _MIB),
                    ("core", 0),
                )
            ],
        },
    }


CHANNEL: dict[str, Any] = {
    # Attached once: when the host's connection ends, for whatever reason, the guest reads the end of its input.
    **dict.fromkeys(("AttachStdin", "AttachStdout", "AttachStderr", "OpenStdin", "StdinOnce"), True),
    "Tty": False,
}


def isolation(settings: SandboxSettings, facts: Facts) -> dict[str, Any]:
    """What of ``HostConfig`` keeps a sandbox in. The engine's seccomp, AppArmor and masked-path defaults stay."""
    host: dict[str, Any] = {
        "NetworkMode": "none",
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "ReadonlyRootfs": not settings.writable_root,
        "IpcMode": "private",
        "LogConfig": {"Type": "none"},
        "Init": False,
        # What runs inside ends with its host: then nothing is left, even of a host that was killed.
        "AutoRemove": True,
    }
    if facts.api >= (1, 41):
        host["CgroupnsMode"] = "private"
    if settings.runtime:
        host["Runtime"] = settings.runtime
    return host


def _tmpfs(resources: Resources, facts: Facts) -> str:
    options = f"rw,exec,nosuid,nodev,size={resources.disk_mib}m,mode=1777"
    if facts.name == "Podman":  # knows no other options
        return options
    return f"{options},nr_inodes={resources.disk_mib * _INODES_PER_MIB},uid={USER},gid={USER}"
