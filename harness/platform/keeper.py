"""What all rollouts of a server share, and the one task that keeps it: relay, graders, sandboxes ahead of need."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from harness.config import RolloutSettings, Workspace, load_settings
from harness.errors import ConfigError, HarnessError, SandboxError
from harness.grading import GraderInfo
from harness.policy import Policy
from harness.rollout.source import Rollout
from harness.sandbox.owner import this_process
from harness.sandbox.select import Choice
from harness.store import ArtifactLimits
from harness.trial.fleet import Fleet
from harness.trial.prepare import prepare
from harness.trial.session import Blueprint
from harness.trial.trial import TrialRunner

log = logging.getLogger(__name__)

AHEAD = 0.25
"""Sandboxes that wait, loaded, as a share of those that may be in use; at least one."""
SHUTDOWN_S = 180.0
RETRY_S = 2.0
"""After a preparation that failed the next one is not begun sooner."""

NOBODY = Policy(name="each rollout's own", base_url="", model="", key=None)
"""Answers a sandbox until its rollout says who does."""


@dataclass(frozen=True)
class ServeJob:
    """What is served: a rollout, its settings with the variables applied, and where it runs."""

    rollout: Rollout
    settings: RolloutSettings
    sandbox: Choice
    environ: Mapping[str, str]
    policy: Policy | None = NOBODY
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, rollout: Rollout, *, sandbox: Choice | None, image: str | None, environ: Mapping[str, str] | None = None
    ) -> ServeJob:
        """Read the rollout's settings; the variables that they let in come from ``environ``.

        :raises ConfigError: the settings are wrong, or name a variable that has no value.
        """
        values = dict(os.environ if environ is None else environ)
        settings = load_settings(Workspace(root=rollout.path.parent.parent), rollout.path)
        if missing := [name for name in settings.secrets if not values.get(name)]:
            raise ConfigError(
                f"[tool.harness] of rollout {rollout.name!r} lets {', '.join(missing)} in, which have no value",
                hint="Set them in the environment of this server.",
            )
        env = {**settings.sandbox.env, **{name: values[name] for name in settings.secrets}}
        update = {"env": env, "image": image if image is not None else settings.sandbox.image}
        settings = settings.model_copy(update={"sandbox": settings.sandbox.model_copy(update=update)})
        return cls(rollout, settings, sandbox or settings.provider, values)

    def grader_env(self) -> dict[str, str]:
        """Variables of the grader's process: this one's, without what belongs to the server and its interpreter."""
        mine = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")
        env = {k: v for k, v in self.environ.items() if k not in mine and not k.startswith("_OSMOSIS_")}
        return {**env, **self.settings.grader.env}


@dataclass
class Ready:
    """What a rollout needs to run."""

    runner: TrialRunner
    info: GraderInfo


@dataclass
class _Preparation:
    done: anyio.Event = field(default_factory=anyio.Event)
    ready: Ready | None = None
    error: HarnessError | None = None
    ended: float = 0.0
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)


class Keeper:
    """Prepares at the first need, keeps until ``close``; a preparation that failed is tried again by the next rollout.

    The SDK gives a backend no place to enter a context, so what is kept lives in a task of its own: it enters and
    leaves everything, and ``close`` awaits it.
    """

    def __init__(self, job: ServeJob, max_in_flight: int) -> None:
        self._job = job
        self._max_in_flight = max_in_flight
        self._task: asyncio.Task[None] | None = None
        self._state: _Preparation | None = None
        self._closed = False

    @property
    def error(self) -> HarnessError | None:
        """Why nothing can run now; None while preparing, and when all is well."""
        return self._state.error if self._state is not None else None

    def start(self) -> None:
        """Begin to prepare, unless that was done. Needs a running event loop, and does nothing without."""
        state = self._state
        if self._closed or (state is not None and (state.error is None or time.monotonic() < state.ended + RETRY_S)):
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        self._state = _Preparation()
        self._task = loop.create_task(self._keep(self._state), name="harness-keeper")

    async def ready(self) -> Ready:
        """Wait until rollouts can run.

        :raises HarnessError: they cannot.
        """
        self.start()
        state = self._state
        if state is None:
            raise SandboxError("the server is shutting down")
        await state.done.wait()
        if state.ready is None or state.error is not None or self._closed:
            raise state.error or SandboxError("the server is shutting down")
        return state.ready

    async def close(self) -> None:
        """Destroy every sandbox, end the graders and the relay. Bounded; says on stdout what may be left."""
        self._closed = True
        if self._task is None or self._state is None:
            return
        self._state.scope.cancel()
        with anyio.CancelScope(shield=True):
            _, pending = await asyncio.wait({self._task}, timeout=SHUTDOWN_S)
            if pending:
                print(f"Harness shutdown: sandboxes may be left after {SHUTDOWN_S:g} s", flush=True)
                self._task.cancel()
                await asyncio.wait({self._task}, timeout=5)

    async def _keep(self, state: _Preparation) -> None:
        try:
            with state.scope:
                await self._serve(state)
        except HarnessError as error:
            log.error("the server cannot run rollouts: %s", error)
            state.error = error
        except Exception as error:
            log.exception("the server cannot run rollouts")
            state.error = SandboxError(f"the harness failed: {error!r}")
        finally:
            if state.ready is None and state.error is None:
                state.error = SandboxError("the server is shutting down")
            state.ended = time.monotonic()
            state.done.set()

    async def _serve(self, state: _Preparation) -> None:
        job = self._job
        async with prepare(job, _progress) as prepared:
            for warning in prepared.warnings:
                log.warning("%s", warning)
            blueprint = Blueprint(
                provider=prepared.provider,
                environment=prepared.environment,
                settings=job.settings.sandbox,
                owner=this_process(f"serve-{job.rollout.name}"),
                relay=prepared.relay,
                entrypoint=job.rollout.entrypoint,
                code=prepared.code,
            )
            ahead = max(1, round(self._max_in_flight * AHEAD))
            async with Fleet(blueprint, max_in_flight=self._max_in_flight, ahead=ahead, demand=sys.maxsize) as fleet:
                fleet.put(await fleet.open())  # one, to know that it works; the first rollout takes it
                fleet.fill()
                limits = job.settings.artifacts
                runner = TrialRunner(
                    fleet,
                    prepared.graders,
                    limits=ArtifactLimits(files=limits.max_files, total_bytes=limits.max_mib << 20),
                )
                state.ready = Ready(runner, await prepared.graders.check())
                state.done.set()
                log.info("ready: rollout %s on %s sandboxes", job.rollout.name, prepared.provider.capabilities.name)
                await anyio.sleep_forever()


def _progress(line: str) -> None:
    log.info("%s", line)


def find_rollout(workflow: object, entrypoint: Path | None) -> Rollout:
    """The rollout that a workflow class belongs to: the program that runs, or the file of the class.

    :param entrypoint: the file to load in sandboxes, where neither is right.
    :raises ConfigError: there is no file, or no pyproject.toml beside or above it.
    """
    candidates = [getattr(sys.modules.get(name), "__file__", None) for name in ("__main__", _module_of(workflow))]
    home = _project(Path(candidates[1]).resolve()) if candidates[1] else None
    entry = entrypoint
    for candidate in candidates:
        if entry is None and candidate is not None:
            file = Path(candidate).resolve()
            if home is None or _project(file) == home:
                entry = file
    folder = _project(entry.resolve()) if entry is not None else None
    if entry is None or folder is None:
        raise ConfigError(
            "SandboxBackend finds no rollout: neither the running program nor its workflow lies in a folder with a"
            " pyproject.toml",
            hint="Run the rollout's own main.py, or name it: SandboxBackend(entrypoint=Path(__file__), ...).",
        )
    return Rollout(name=folder.name, path=folder, entrypoint=entry.resolve().relative_to(folder).as_posix())


def _module_of(workflow: object) -> str:
    return workflow.rpartition(":")[0] if isinstance(workflow, str) else getattr(workflow, "__module__", "")


def _project(file: Path) -> Path | None:
    return next((folder for folder in file.parents if (folder / "pyproject.toml").is_file()), None)
