"""What exists: sandboxes and snapshots, their states and clocks, and the organisation's quota."""

from __future__ import annotations

import re
from contextlib import suppress

import anyio
from anyio.abc import TaskGroup

from . import schema
from .builds import Build, Builder
from .clock import Clock
from .faults import Action, SlowStart, Stuck
from .machine import Machine, MachineDown, MachineRoom
from .records import PUBLIC_SNAPSHOT, Quota, Sandbox, Snapshot
from .schema import ApiError
from .sessions import Sessions

CREATE_WAIT_S = 30.0
"""How long the service holds the answer to a create from a snapshot until the sandbox has started."""
UNUSED_S = 14 * 86400.0
"""When the service puts aside a snapshot that nobody uses."""
ACTIVATE_S = 0.2
_MORE = "\nTo increase concurrency limits, upgrade your organization's Tier."
_IDLE = ("stopped", "archived", "error", "build_failed", "destroyed")


class World:
    """:param start_delay_s: how much slower than its processes a sandbox is to start, to be like the service."""

    def __init__(
        self,
        clock: Clock,
        room: MachineRoom,
        builder: Builder,
        tasks: TaskGroup,
        *,
        quota: Quota,
        regions: tuple[str, ...],
        start_delay_s: float,
        delete_delay_s: float,
        secret_names: tuple[str, ...],
    ) -> None:
        self.clock = clock
        self.quota = quota
        self.regions = regions
        self._room = room
        self._builder = builder
        self._tasks = tasks
        self._start_delay_s = start_delay_s
        self._delete_delay_s = delete_delay_s
        self._secret_names = secret_names
        self.sandboxes: dict[str, Sandbox] = {}
        self.snapshots: dict[str, Snapshot] = {}
        self.contexts: dict[str, bytes] = {}
        """Of builds: tars by the hash that the SDK gives them."""
        self.created = 0
        self.peak = 0
        """The most sandboxes that ever existed at once."""
        build, _ = builder.get("FROM daytonaio/sandbox:small\n")
        build.end("active")
        public = Snapshot(PUBLIC_SNAPSHOT, build, 1, 1, 3, 0, clock.now(), None, None, regions[0], general=True)
        self.snapshots[public.id] = public

    # Looking up

    def find(self, id_or_name: str, *, destroyed: bool = False) -> Sandbox:
        for each in (self.sandboxes.get(id_or_name), *self.sandboxes.values()):
            if each and id_or_name in (each.id, each.name) and (destroyed or each.state != "destroyed"):
                return each
        raise ApiError(404, f"Sandbox with ID or name {id_or_name} not found")

    def find_snapshot(self, id_or_name: str) -> Snapshot:
        for each in self.snapshots.values():
            if id_or_name in (each.id, each.name):
                return each
        raise ApiError(404, f"Snapshot with ID or name {id_or_name} not found")

    def live(self) -> list[Sandbox]:
        return [each for each in self.sandboxes.values() if each.state != "destroyed"]

    def region(self, asked: str | None) -> str:
        if asked and asked not in self.regions:
            raise ApiError(404, f'Region "{asked}" not found')
        return asked or self.regions[0]

    # Snapshots

    async def create_snapshot(self, asked: schema.CreateSnapshot) -> Snapshot:
        if not schema.SNAPSHOT_NAME.fullmatch(asked.name):
            raise ApiError(400, f"Invalid snapshot name {asked.name!r}")
        if any(each.name == asked.name for each in self.snapshots.values()):
            raise ApiError(409, f'Snapshot with name "{asked.name}" already exists for this organization')
        if (asked.image_name is None) == (asked.build_info is None):
            raise ApiError(400, "Must specify either an image name or build info")
        if asked.build_info and asked.entrypoint:
            raise ApiError(400, "Cannot specify an entrypoint when using a build info entry")
        if asked.image_name is not None:
            tag = asked.image_name.rpartition("/")[2].partition(":")[2]
            if re.search(r"\s", asked.image_name):
                raise ApiError(400, "Image name must not contain whitespace")
            if not tag and "@sha256:" not in asked.image_name:
                raise ApiError(400, "Image name must include a tag (e.g., ubuntu:22.04) or digest")
            if tag == "latest":
                raise ApiError(400, 'Images with tag ":latest" are not allowed')
        cpu, memory, disk = asked.cpu or 1, asked.memory or 1, asked.disk or 3
        region = self.region(asked.region_id)
        self._check_each(cpu, memory, disk)
        most = self.quota.snapshots
        if most is not None and sum(not each.general for each in self.snapshots.values()) >= most:
            raise ApiError(403, f"Snapshot quota exceeded. Maximum allowed: {most}")
        content = asked.build_info.dockerfile_content if asked.build_info else f"FROM {asked.image_name}\n"
        build = self._build(content, asked.build_info)
        snapshot = Snapshot(
            asked.name,
            build,
            cpu,
            memory,
            disk,
            asked.gpu or 0,
            self.clock.now(),
            asked.image_name,
            asked.entrypoint,
            region,
        )
        self.snapshots[snapshot.id] = snapshot
        return snapshot

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        if snapshot.general:
            raise ApiError(403, "General snapshots cannot be removed")
        if snapshot.removing or snapshot.state in ("pending", "building"):
            raise ApiError(409, "Snapshot state change in progress")
        snapshot.removing = True

        async def remove() -> None:
            await anyio.sleep(self._delete_delay_s)
            self.snapshots.pop(snapshot.id, None)

        self._tasks.start_soon(remove)

    async def activate_snapshot(self, snapshot: Snapshot) -> None:
        if snapshot.state == "active":
            raise ApiError(400, f"Snapshot {snapshot.id} is already active")
        if snapshot.state != "inactive":
            raise ApiError(400, f"Snapshot {snapshot.id} cannot be activated - it is in {snapshot.state} state")
        snapshot.aside = "pending"

        async def activate() -> None:
            await anyio.sleep(ACTIVATE_S)
            snapshot.aside, snapshot.used_at = "", self.clock.now()

        self._tasks.start_soon(activate)

    def _build(self, content: str, asked: schema.BuildInfo | None, delay_s: float = 0.0) -> Build:
        contexts = {}
        for each in (asked and asked.context_hashes) or []:
            if each not in self.contexts:
                raise ApiError(400, f"Build context {each} was not uploaded")
            contexts[each] = self.contexts[each]
        build, new = self._builder.get(content, contexts)
        if new:
            self._tasks.start_soon(self._builder.run, build, delay_s)
        return build

    # Sandboxes

    async def create(self, asked: schema.CreateSandbox, faults: list[Action]) -> Sandbox:
        """Make one, and wait for it as long as the service does: not at all when it is built from an image."""
        now, target = self.clock.now(), self.region(asked.target)
        schema.check_network(asked.network_block_all, asked.network_allow_list, asked.domain_allow_list)
        for name in [each for pair in asked.secrets or [] for each in pair.values()]:
            if name not in self._secret_names:
                raise ApiError(400, f"Secret {name} not found")
        if asked.volumes:
            raise ApiError(404, f"Volume {asked.volumes[0].volume_id} not found")
        if asked.name and any(each.name == asked.name for each in self.live()):
            raise ApiError(409, f"Sandbox with name {asked.name} already exists")
        if asked.build_info:
            if asked.snapshot:
                raise ApiError(400, "Cannot specify a snapshot when using a build info entry")
            cpu, memory, disk = asked.cpu or 1, asked.memory or 1, asked.disk or 3
            self._check_quota(cpu, memory, disk)
            build = self._build(asked.build_info.dockerfile_content, asked.build_info)
            command = build.command
        else:
            if asked.cpu or asked.memory or asked.disk or asked.gpu:
                raise ApiError(400, "Cannot specify Sandbox resources when using a snapshot")
            snapshot = self._usable(asked.snapshot or PUBLIC_SNAPSHOT, target)
            snapshot.used_at = now
            cpu, memory, disk = snapshot.cpu, snapshot.memory, snapshot.disk
            self._check_quota(cpu, memory, disk)
            build, command = snapshot.build, snapshot.command
        sandbox = Sandbox("", build, command, asked, target, cpu, memory, disk, now, active_at=now, updated_at=now)
        sandbox.name = asked.name or sandbox.id
        sandbox.labels = dict(asked.labels or {})
        sandbox.public = bool(asked.public)
        sandbox.network = schema.NetworkSettings(
            networkBlockAll=asked.network_block_all,
            networkAllowList=asked.network_allow_list,
            domainAllowList=asked.domain_allow_list,
        )
        sandbox.auto_stop = 15 if asked.auto_stop_interval is None else asked.auto_stop_interval
        sandbox.auto_archive = asked.auto_archive_interval or sandbox.auto_archive
        sandbox.auto_delete = -1 if asked.auto_delete_interval is None else asked.auto_delete_interval
        sandbox.destroy_at = now + asked.ttl_minutes * 60 if asked.ttl_minutes else None
        sandbox.state = "creating" if build.state == "active" else "pending_build"
        sandbox.stuck = any(isinstance(each, Stuck) for each in faults)
        self.sandboxes[sandbox.id] = sandbox
        self.created += 1
        self.peak = max(self.peak, len(self.live()))
        delay = self._start_delay_s + sum(each.seconds for each in faults if isinstance(each, SlowStart))
        self._tasks.start_soon(self._bring_up, sandbox, delay)
        if not asked.build_info:
            with anyio.move_on_after(CREATE_WAIT_S):
                while sandbox.state == "creating":
                    await sandbox.changed.wait()
        return sandbox

    async def start(self, sandbox: Sandbox) -> None:
        self._settled(sandbox)
        if sandbox.state != "stopped":
            raise ApiError(400, "Sandbox is not in valid state")
        self._check_quota(sandbox.cpu, sandbox.memory, 0, again=True)
        sandbox.set_state("starting", self.clock.now(), "started")
        self._tasks.start_soon(self._bring_up, sandbox, self._start_delay_s)

    async def stop(self, sandbox: Sandbox) -> None:
        self._settled(sandbox)
        if sandbox.state != "started":
            raise ApiError(400, "Sandbox is not started")
        sandbox.set_state("stopping", self.clock.now(), "stopped")

        async def stop() -> None:
            await self._take_down(sandbox)
            sandbox.stopped_at = self.clock.now()
            sandbox.set_state("stopped", sandbox.stopped_at)
            if sandbox.auto_delete == 0:
                await self._destroy(sandbox)

        self._tasks.start_soon(stop)

    async def delete(self, sandbox: Sandbox, faults: list[Action]) -> None:
        if sandbox.state in ("creating", "starting", "stopping", "destroying", "building_snapshot"):
            raise ApiError(409, "Sandbox state change in progress")
        sandbox.stuck = any(isinstance(each, Stuck) for each in faults)
        sandbox.released = anyio.Event()
        sandbox.set_state("destroying", self.clock.now(), "destroyed")
        self._tasks.start_soon(self._destroy, sandbox)

    async def vanish(self, sandbox: Sandbox) -> None:
        del self.sandboxes[sandbox.id]
        sandbox.set_state("destroyed", self.clock.now(), "destroyed")
        await self._take_down(sandbox)
        await self._room.remove(sandbox.id)

    async def evict(self, sandbox: Sandbox) -> None:
        """Its record stays, so that who waits for it learns why."""
        sandbox.spot_evicted_at = self.clock.now()
        sandbox.set_state("destroyed", sandbox.spot_evicted_at, "destroyed")
        await self._take_down(sandbox)
        await self._room.remove(sandbox.id)

    async def fail(self, sandbox: Sandbox, reason: str) -> None:
        sandbox.error_reason = reason
        sandbox.set_state("error", self.clock.now())
        await self._take_down(sandbox)

    async def sweep(self) -> None:
        """Do what the clocks ask for."""
        now = self.clock.now()
        for snapshot in self.snapshots.values():
            unused_s = now - (snapshot.used_at or snapshot.created_at)
            if snapshot.state == "active" and not snapshot.general and unused_s > UNUSED_S:
                snapshot.aside = "inactive"
        for sandbox in self.live():
            if sandbox.state in ("destroying", "creating", "starting", "stopping"):
                continue
            stopped = sandbox.stopped_at if sandbox.state == "stopped" else None
            expired = sandbox.destroy_at is not None and now >= sandbox.destroy_at
            unwanted = stopped is not None and 0 <= sandbox.auto_delete * 60 <= now - stopped
            if expired or unwanted:
                await self.delete(sandbox, [])
            elif sandbox.state == "started" and sandbox.auto_stop and now - sandbox.active_at >= sandbox.auto_stop * 60:
                await self.stop(sandbox)

    async def close(self) -> list[str]:
        """End everything. Returns the ids of sandboxes that nobody had deleted."""
        left = [each.id for each in self.live() if each.state != "destroying"]
        async with anyio.create_task_group() as tasks:
            for sandbox in self.sandboxes.values():
                tasks.start_soon(self._take_down, sandbox)
        self.sandboxes.clear()
        return left

    def _usable(self, name: str, target: str) -> Snapshot:
        try:
            snapshot = self.find_snapshot(name)
        except ApiError:
            message = f"Snapshot {name} not found. Did you add it through the Daytona Dashboard?"
            raise ApiError(400, message) from None
        if snapshot.state != "active":
            raise ApiError(400, f"Snapshot {name} is {snapshot.state}")
        if not snapshot.general and snapshot.region != target:
            raise ApiError(400, f"Snapshot {name} is not available in region {target}")
        return snapshot

    def _settled(self, sandbox: Sandbox) -> None:
        if sandbox.state != sandbox.desired and sandbox.state not in ("error", "build_failed"):
            raise ApiError(409, "Sandbox state change in progress")

    def _check_each(self, cpu: int, memory: int, disk: int) -> None:
        quota = self.quota
        more = "\nNeed higher resource limits per-sandbox? Contact support."
        if cpu > quota.cpu_each:
            raise ApiError(400, f"CPU request {cpu} exceeds maximum allowed per sandbox ({quota.cpu_each}).{more}")
        for what, asked, most in (("Memory", memory, quota.memory_each), ("Disk", disk, quota.disk_each)):
            if asked > most:
                raise ApiError(400, f"{what} request {asked}GB exceeds maximum allowed per sandbox ({most}GB).{more}")

    def _check_quota(self, cpu: int, memory: int, disk: int, *, again: bool = False) -> None:
        """A stopped sandbox still uses disk. The organisation's limits are said in the service's words."""
        self._check_each(cpu, memory, disk)
        quota, all_of_them = self.quota, self.live()
        running = [each for each in all_of_them if each.state not in _IDLE]
        if sum(each.cpu for each in running) + cpu > quota.cpu:
            raise ApiError(400, f"Total CPU limit exceeded. Maximum allowed: {quota.cpu}.{_MORE}")
        if sum(each.memory for each in running) + memory > quota.memory:
            raise ApiError(400, f"Total memory limit exceeded. Maximum allowed: {quota.memory}GiB.{_MORE}")
        if sum(each.disk for each in all_of_them if each.state != "archived") + disk > quota.disk:
            archive = "\nConsider archiving your unused Sandboxes to free up available storage."
            raise ApiError(400, f"Total disk limit exceeded. Maximum allowed: {quota.disk}GiB.{archive}{_MORE}")
        if quota.sandboxes is not None and not again and len(all_of_them) >= quota.sandboxes:
            raise ApiError(400, f"Sandbox resource limit reached ({quota.sandboxes})")

    async def _bring_up(self, sandbox: Sandbox, delay_s: float) -> None:
        build = sandbox.build
        if not build.ended.is_set():
            sandbox.set_state("building_snapshot" if build.state == "building" else "pending_build", self.clock.now())
            await build.ended.wait()
            if sandbox.state not in ("pending_build", "building_snapshot"):  # gone meanwhile
                return
        if build.state != "active":
            sandbox.error_reason = build.reason
            sandbox.set_state("build_failed", self.clock.now())
            return
        if sandbox.state in ("pending_build", "building_snapshot"):
            sandbox.command = build.command
            sandbox.set_state("creating", self.clock.now())
        await anyio.sleep(delay_s)
        if sandbox.stuck:
            await sandbox.released.wait()
            sandbox.stuck = False
        await self._take_down(sandbox)  # what is left of a run that ended by itself
        try:
            machine = await self._room.start(sandbox.id, build.layers)
            if sandbox.state not in ("creating", "starting"):  # gone meanwhile
                await machine.kill()
                return
            sandbox.machine, sandbox.sessions = machine, Sessions(machine, sandbox.env, build.workdir, self._tasks)
            await sandbox.sessions.boot(sandbox.command)
        except (MachineDown, OSError, TimeoutError) as error:
            await self.fail(sandbox, f"Sandbox failed to start: {error}")
            return
        machine.on_down = lambda: self._went_down(sandbox, machine)
        sandbox.new_token()
        sandbox.active_at = self.clock.now()
        sandbox.set_state("started", sandbox.active_at)

    def _went_down(self, sandbox: Sandbox, machine: Machine) -> None:
        """Nobody asked for it: as when the container's main process died."""
        if sandbox.machine is machine and sandbox.state == "started":
            sandbox.stopped_at = self.clock.now()
            sandbox.set_state("stopped", sandbox.stopped_at, "stopped")

    async def _take_down(self, sandbox: Sandbox) -> None:
        machine, sandbox.machine = sandbox.machine, None
        sessions, sandbox.sessions = sandbox.sessions, None
        for link in list(sandbox.links):
            link.cut()
        with anyio.CancelScope(shield=True):  # nobody else would know of them
            if machine:
                await machine.kill()
            if sessions:
                sessions.close()

    async def _destroy(self, sandbox: Sandbox) -> None:
        sandbox.set_state("destroying", self.clock.now(), "destroyed")
        await anyio.sleep(self._delete_delay_s)
        if sandbox.stuck:
            await sandbox.released.wait()
        await self._take_down(sandbox)
        with suppress(OSError):
            await self._room.remove(sandbox.id)
        self.sandboxes.pop(sandbox.id, None)
        sandbox.set_state("destroyed", self.clock.now())
