"""A rollout's entry point, loaded: which workflow and grader, with which configs.

The entry point is a program. It runs as ``__main__``, as the platform runs it, up to where it would serve; the backend
that it handed to ``create_rollout_server`` says what to run. One that wires nothing is read by the older rule: its
namespace must hold exactly one concrete ``AgentWorkflow`` and at most one ``Grader``.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .failures import LoadError, error_info
from .standins import HarborBackend, StandIns

__all__ = ["LoadError", "Wiring", "load"]


@dataclass(frozen=True)
class Wiring:
    """What an entry point runs. Classes and config objects are the rollout's own."""

    workflow: Any
    workflow_config: Any
    grader: Any
    """None when the rollout has no grader."""
    grader_config: Any
    sdk: str
    """Version of osmosis-ai."""
    generation: Literal["0.2", "0.3"]
    source: Literal["main", "namespace"]
    """Who said so: the program itself, or the rule for one that wires nothing."""

    def names(self) -> dict[str, str | None]:
        """What a host may know about it."""
        return {
            "sdk": self.sdk,
            "generation": self.generation,
            "workflow": _name(self.workflow),
            "grader": None if self.grader is None else _name(self.grader),
        }


def load(folder: Path, entrypoint: str) -> Wiring:
    """Run ``folder / entrypoint`` as ``__main__`` in this process, from the folder, without letting it serve.

    :raises LoadError: it is not there, raises, or does not name exactly one workflow.
    """
    entry = folder / entrypoint
    os.chdir(folder)
    ours = dict.fromkeys(str(path) for path in (entry.parent, folder, folder / "src") if path.is_dir())
    sys.path[:] = [*ours, *(path for path in sys.path if path not in ours)]
    module = types.ModuleType("__main__")
    module.__file__ = str(entry)
    sys.modules["__main__"] = module
    sys.argv = [str(entry)]
    with StandIns() as stand_ins:
        try:
            code = compile(entry.read_bytes(), str(entry), "exec", dont_inherit=True)
            exec(code, vars(module))
        except (FileNotFoundError, IsADirectoryError) as exc:
            raise (
                _failed(exc, entrypoint) if entry.is_file() else LoadError(f"Entrypoint file not found: {entrypoint}")
            ) from exc
        except SystemExit as exc:
            if not stand_ins.backends and exc.code not in (None, 0):
                raise LoadError(
                    f"{entrypoint} exits while it is loaded: sys.exit({exc.code!r})", error_info(exc)
                ) from exc
        except BaseException as exc:
            if not stand_ins.stopped:
                raise _failed(exc, entrypoint) from exc
        try:
            return _wiring(stand_ins, vars(module), entrypoint)
        except LoadError:
            raise
        except BaseException as exc:
            raise _failed(exc, entrypoint) from exc


def _wiring(stand_ins: StandIns, namespace: dict[str, Any], entrypoint: str) -> Wiring:
    sdk: Any = importlib.import_module("osmosis_ai.rollout")
    context: Any = importlib.import_module("osmosis_ai.rollout.context")
    version = str(importlib.import_module("osmosis_ai.consts").PACKAGE_VERSION)
    generation: Literal["0.2", "0.3"] = "0.2" if hasattr(context.RolloutContext, "register_sample_source") else "0.3"
    backend = _backend(stand_ins, entrypoint)
    if backend is None:
        return Wiring(*_scan(sdk, namespace, entrypoint), version, generation, "namespace")
    if isinstance(backend, HarborBackend):
        parts = _harbor_parts(backend.options)
    else:
        parts = (backend.workflow_cls, backend.workflow_config, backend.grader_cls, backend.grader_config)
    return Wiring(*parts, version, generation, "main")


def _backend(stand_ins: StandIns, entrypoint: str) -> Any:
    """The served one where it is one that we know; else the only one there is."""
    for backend in stand_ins.backends:
        if backend is stand_ins.served:
            return backend
    if len(stand_ins.backends) > 1:
        raise LoadError(
            f"{entrypoint} builds {len(stand_ins.backends)} backends and hands none of them to create_rollout_server"
        )
    return stand_ins.backends[0] if stand_ins.backends else None


def _harbor_parts(options: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    resolve = importlib.import_module("osmosis_ai.rollout.utils.imports").resolve_object
    workflow = options.get("agent", options.get("workflow"))  # SDK 0.3, 0.2
    if workflow is None:
        raise LoadError("HarborBackend has no agent: pass it an AgentWorkflow")
    if isinstance(workflow, str) and ":" not in workflow:
        raise LoadError(
            f"HarborBackend runs Harbor's own agent {workflow!r}: only an AgentWorkflow can run in a sandbox"
        )
    rest = (options.get(name) for name in ("workflow_config", "grader", "grader_config"))
    config, grader, grader_config = (resolve(ref) if ref else None for ref in rest)
    return resolve(workflow), config, grader, grader_config


def _scan(sdk: Any, namespace: dict[str, Any], entrypoint: str) -> tuple[Any, Any, Any, Any]:
    def classes(base: type) -> list[tuple[str, Any]]:
        return [
            (name, value)
            for name, value in namespace.items()
            if isinstance(value, type)
            and issubclass(value, base)
            and value is not base
            and not inspect.isabstract(value)
        ]

    def instances(base: type) -> list[tuple[str, Any]]:
        return [(name, value) for name, value in namespace.items() if isinstance(value, base)]

    def only(found: list[tuple[str, Any]], what: str, one: str) -> Any:
        distinct = {id(value): name for name, value in reversed(found)}  # aliases of one object are one
        if len(distinct) > 1:
            raise LoadError(
                f"Multiple {what} found in '{entrypoint}': {', '.join(sorted(distinct.values()))}. "
                f"Keep only one {one} in the entrypoint module, or move extra classes to a separate file."
            )
        return found[0][1] if found else None

    workflow = only(classes(sdk.AgentWorkflow), "AgentWorkflow subclasses", "AgentWorkflow subclass")
    if workflow is None:
        raise LoadError(f"No AgentWorkflow subclass found in '{entrypoint}'")
    return (
        workflow,
        only(instances(sdk.AgentWorkflowConfig), "AgentWorkflowConfig instances", "AgentWorkflowConfig instance"),
        only(classes(sdk.Grader), "Grader subclasses", "Grader subclass"),
        only(instances(sdk.GraderConfig), "GraderConfig instances", "GraderConfig instance"),
    )


def _failed(exc: BaseException, entrypoint: str) -> LoadError:
    error = error_info(exc)
    message = f"{entrypoint} cannot be loaded: {error['types'][0]}: {error['message']}"
    if isinstance(exc, ModuleNotFoundError) and exc.name:
        missing = exc.name.partition(".")[0]
        if missing == "osmosis_ai":
            message = f"{entrypoint} cannot be loaded: osmosis-ai is not among the rollout's dependencies"
        elif importlib.util.find_spec(missing) is None:
            message += f" (add the package that provides {missing!r} to the dependencies in pyproject.toml)"
    return LoadError(message, error)


def _name(ref: Any) -> str:
    return str(getattr(ref, "__name__", type(ref).__name__))
