"""A workspace: the folder that holds ``configs/``, ``rollouts/``, ``data/`` and, if it is there, ``harness.toml``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from harness.errors import ConfigError
from harness.models import Record

Kind = Literal["eval", "training"]


class Workspace(Record):
    """Where things lie. Nothing is read and nothing but ``root`` need exist."""

    root: Path

    @classmethod
    def of(cls, config_path: Path, kind: Kind | None = None) -> Workspace:
        """The workspace that a config file lies in: ``<root>/configs/<kind>/**/<name>.toml``.

        :param kind: the folder it must lie in; None for either.
        :raises ConfigError: it lies elsewhere, or is no ``.toml`` file.
        """
        path = config_path.expanduser().resolve()
        folders = [f"configs/{kind}/"] if kind else ["configs/eval/", "configs/training/"]
        where = " or ".join(f"`{folder}`" for folder in folders)
        for folder in path.parents:
            if folder.parent.name == "configs" and f"configs/{folder.name}/" in folders:
                if path.suffix != ".toml":
                    raise ConfigError(f"Config must be a .toml file under {where}, got: {path}")
                return cls(root=folder.parent.parent)
        raise ConfigError(
            f"Config must live under {where}.\n  Got: {path}",
            hint="The folder that holds configs/ is the workspace; rollouts/ and data/ are looked up beside it.",
        )

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def settings_file(self) -> Path:
        return self.root / "harness.toml"

    def check_rollout(self, rollout: str, entrypoint: str, label: str) -> None:
        """Refuse names that lead out of ``rollouts/<rollout>/``, in the platform's words.

        :param label: how the message starts: ``Evaluation``, ``Training``.
        :raises ConfigError: what is wrong with the names. Nothing is said about whether the files exist.
        """
        if Path(rollout).is_absolute():
            raise ConfigError(f"{label} rollout must be a logical rollout name.")
        if rollout in ("", ".", ".."):
            raise ConfigError(f"{label} rollout {rollout!r} is not a valid rollout name.")
        if "/" in rollout or "\\" in rollout:
            raise ConfigError(f"{label} rollout {rollout!r} must be a single-segment name (no path separators).")
        if "\0" in rollout or "\0" in entrypoint:
            raise ConfigError(f"{label} rollout and entrypoint must not contain NUL characters.")
        folder = (self.rollouts / rollout).resolve()
        if not folder.is_relative_to(self.rollouts.resolve()):
            raise ConfigError(
                f"{label} rollout must resolve under the current workspace directory's rollouts directory."
            )
        if not (folder / entrypoint).resolve().is_relative_to(folder):
            raise ConfigError(
                f"{label} entrypoint must resolve under rollouts/<rollout>/ within the current workspace directory."
            )
