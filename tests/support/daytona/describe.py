"""Records as the service says them: dictionaries for the SDK's Sandbox, SandboxListItem, SnapshotDto and BuildInfo."""

from __future__ import annotations

from typing import Any

from .builds import Build
from .clock import iso
from .records import PUBLIC_SNAPSHOT, Sandbox, Snapshot


def describe(sandbox: Sandbox, organization: str, toolbox_url: str, *, listed: bool = False) -> dict[str, Any]:
    """The Sandbox of an answer; of a list, which says less."""
    asked = sandbox.asked
    said: dict[str, Any] = {
        "id": sandbox.id, "organizationId": organization, "name": sandbox.name, "user": asked.user or "daytona",
        "labels": sandbox.labels, "public": sandbox.public, "target": sandbox.target, "cpu": sandbox.cpu,
        "gpu": asked.gpu or 0, "memory": sandbox.memory, "disk": sandbox.disk, "state": sandbox.state,
        "desiredState": sandbox.desired, "networkBlockAll": bool(sandbox.network.network_block_all),
        "autoStopInterval": sandbox.auto_stop, "autoArchiveInterval": sandbox.auto_archive,
        "autoDeleteInterval": sandbox.auto_delete, "createdAt": iso(sandbox.created_at),
        "updatedAt": iso(sandbox.updated_at), "lastActivityAt": iso(sandbox.active_at), "backupState": "None",
        "spot": bool(asked.spot), "sandboxClass": "container", "daemonVersion": "0.226.1",
        "toolboxProxyUrl": toolbox_url,
    }  # fmt: skip
    optional = {
        "snapshot": None if asked.build_info else asked.snapshot or PUBLIC_SNAPSHOT,
        "errorReason": sandbox.error_reason,
        "networkAllowList": sandbox.network.network_allow_list,
        "domainAllowList": sandbox.network.domain_allow_list,
        "autoDestroyAt": iso(sandbox.destroy_at) if sandbox.destroy_at else None,
        "spotEvictedAt": iso(sandbox.spot_evicted_at) if sandbox.spot_evicted_at else None,
    }
    said |= {name: value for name, value in optional.items() if value is not None}
    if not listed:
        said |= {"env": asked.env or {}, "kvm": bool(asked.kvm), "volumes": []}
        if asked.build_info:
            said["buildInfo"] = describe_build(sandbox.build, sandbox.created_at)
    return said


def describe_build(build: Build, at: float) -> dict[str, Any]:
    return {
        "dockerfileContent": build.content, "contextHashes": list(build.contexts), "snapshotRef": build.ref,
        "createdAt": iso(at), "updatedAt": iso(at),
    }  # fmt: skip


def describe_snapshot(snapshot: Snapshot, organization: str) -> dict[str, Any]:
    at = iso(snapshot.created_at)
    said: dict[str, Any] = {
        "id": snapshot.id, "organizationId": organization, "general": snapshot.general, "name": snapshot.name,
        "state": snapshot.state, "size": 0.1 if snapshot.state == "active" else None,
        "entrypoint": snapshot.command or None, "cpu": snapshot.cpu, "gpu": snapshot.gpu, "mem": snapshot.memory,
        "disk": snapshot.disk, "errorReason": snapshot.build.reason, "createdAt": at, "updatedAt": at,
        "lastUsedAt": iso(snapshot.used_at) if snapshot.used_at else None, "sourceSandboxId": None,
        "regionIds": [snapshot.region], "ref": snapshot.build.ref, "sandboxClass": "container",
    }  # fmt: skip
    if snapshot.image_name:
        said["imageName"] = snapshot.image_name
    else:
        said["buildInfo"] = describe_build(snapshot.build, snapshot.created_at)
    return said
