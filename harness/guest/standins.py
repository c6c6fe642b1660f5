"""What an entry point finds instead of a server while it is loaded.

The SDK's own ``LocalBackend`` runs and is remembered. ``HarborBackend``, ``create_rollout_server`` and ``uvicorn`` are
stand-ins, made when they are imported: the real ones cost a second of imports or are not installed, and none is needed
to run a workflow. What a stand-in does not know it takes from the real module. Afterwards ``uvicorn`` is itself again,
for workflows that serve tools.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import socket
import sys
import types
from collections.abc import Callable, Generator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, Self

_LOCAL = "osmosis_ai.rollout.backend.local.backend"
_HARBOR = "osmosis_ai.rollout.backend.harbor"
_OURS = "harness"
_PORT = "_OSMOSIS_ROLLOUT_PORT"


class Stop(SystemExit):
    """Raised in the entry point where it would begin to serve."""


class Anything:
    """Takes every use and does nothing: the app of a server, the options of an orchestrator."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: object, **options: object) -> Any:
        return self

    def __await__(self) -> Generator[None, None, Any]:
        return self
        yield

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return ()


class StandIns:
    """A context in which an entry point can run. It knows afterwards what was built and what was served."""

    def __init__(self) -> None:
        self.backends: list[Any] = []
        """Every backend that was built, in order."""
        self.served: Any = None
        """The first backend that was handed to ``create_rollout_server``."""
        self.stopped = False
        """Whether the program came to the point of serving; what it raised after that means nothing."""
        self._active = False
        self._undo: list[Callable[[], None]] = []
        harbor = functools.partial(HarborBackend, self.backends)
        self._known: dict[str, dict[str, object]] = {
            "uvicorn": {"run": self._run},
            "osmosis_ai.rollout.server.app": {"create_rollout_server": self._create_rollout_server},
            _HARBOR: {"HarborBackend": harbor, "TaskMode": Anything()},
            f"{_HARBOR}.backend": {"HarborBackend": harbor},
            f"{_HARBOR}.tasks": {"TaskMode": Anything()},
            _OURS: {"SandboxBackend": functools.partial(SandboxBackend, self.backends)},
            f"{_OURS}.platform": {"SandboxBackend": functools.partial(SandboxBackend, self.backends)},
        }
        self._no_harbor = importlib.util.find_spec("harbor") is None

    def __enter__(self) -> Self:
        self._active = True
        sys.meta_path.insert(0, self)
        if _LOCAL in sys.modules:
            self._watch_local(sys.modules[_LOCAL])
        # The safety net for every other server: hypercorn, uvicorn.Server, aiohttp.
        real_bind = socket.socket.bind

        def bind(sock: socket.socket, address: Any) -> None:
            if self.backends and sock.family in (socket.AF_INET, socket.AF_INET6):
                self._stop()
            real_bind(sock, address)

        socket.socket.bind = bind  # type: ignore[method-assign, assignment]
        if _PORT not in os.environ:  # always set where the platform runs an entry point
            os.environ[_PORT] = "8000"
            self._undo.append(lambda: os.environ.pop(_PORT, None))  # type: ignore[arg-type]
        return self

    def __exit__(self, *_: object) -> None:
        self._active = False
        sys.meta_path.remove(self)
        del socket.socket.bind
        for undo in self._undo:
            undo()

    # -- import system

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        if name == _LOCAL:
            spec = PathFinder.find_spec(name, path)
            if spec is not None and spec.loader is not None:
                spec.loader = _Watched(spec.loader, self._watch_local)
            return spec
        if name in self._known:
            behind = PathFinder.find_spec(name, path)
            if name == _OURS and behind is not None and not _is_ours(behind):
                return None  # a module of the rollout's own that happens to have this name
            return ModuleSpec(name, _StandInLoader(self._known[name], behind), is_package=True)
        if self._no_harbor and name.partition(".")[0] == "harbor":
            return ModuleSpec(name, _StandInLoader(None, None), is_package=True)
        return None

    def _watch_local(self, module: types.ModuleType) -> None:
        cls: Any = module.LocalBackend
        original = cls.__init__

        @functools.wraps(original)
        def __init__(backend: Any, *args: Any, **options: Any) -> None:
            original(backend, *args, **options)
            self.backends.append(backend)

        cls.__init__ = __init__
        self._undo.append(lambda: setattr(cls, "__init__", original))

    # -- what the entry point calls

    def _create_rollout_server(self, *, backend: Any, configure_logging: bool = True, **_: object) -> Anything:
        if self.served is None:
            self.served = backend
        if configure_logging and not logging.getLogger().handlers:  # as the SDK does
            logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        return Anything()

    def _run(self, *args: Any, **options: Any) -> Any:
        if self._active:
            self._stop()
        return sys.modules["uvicorn"].real().run(*args, **options)

    def _stop(self) -> None:
        self.stopped = True
        raise Stop(0)


class HarborBackend(Anything):
    """Remembers its options. The platform runs the workflow in a container of Harbor's; here it has its sandbox."""

    def __init__(self, backends: list[Any], **options: Any) -> None:
        self.options = options
        backends.append(self)


class SandboxBackend(HarborBackend):
    """Remembers its options, which name the same as ``LocalBackend``'s. This sandbox is what it would make."""

    def __init__(self, backends: list[Any], *, workflow: Any, **options: Any) -> None:
        super().__init__(backends, workflow=workflow, **options)


def _is_ours(spec: ModuleSpec) -> bool:
    folders = spec.submodule_search_locations or []
    return any(Path(folder, "platform", "backend.py").exists() for folder in folders)


class _StandIn(types.ModuleType):
    """A module of a few known names. ``known`` None: every name is there, and means nothing."""

    def __init__(self, name: str, known: dict[str, object] | None, behind: ModuleSpec | None) -> None:
        super().__init__(name)
        self._known, self._behind = known, behind
        self._real: Any = None
        vars(self).update(known or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return Anything() if self._known is None else getattr(self.real(), name)

    def real(self) -> Any:
        """The module that this one stands in for.

        :raises ModuleNotFoundError: it is not installed.
        """
        if self._real is None:
            if self._behind is None or self._behind.loader is None:
                raise ModuleNotFoundError(f"No module named {self.__name__!r}", name=self.__name__)
            self._real = importlib.util.module_from_spec(self._behind)
            self._behind.loader.exec_module(self._real)
        return self._real


class _StandInLoader(Loader):
    def __init__(self, known: dict[str, object] | None, behind: ModuleSpec | None) -> None:
        self._known, self._behind = known, behind

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        if self._behind is not None:  # submodules are the real ones
            spec.submodule_search_locations = self._behind.submodule_search_locations or []
        return _StandIn(spec.name, self._known, self._behind)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Watched(Loader):
    """A real loader that reports the module once it is there."""

    def __init__(self, loader: Any, then: Callable[[types.ModuleType], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        module: types.ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then(module)
