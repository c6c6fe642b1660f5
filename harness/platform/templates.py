"""Worked rollouts to start from, and the scaffold of an empty one, in the platform's layout and by its rules.

The templates are the worked examples of this repository. A checkout reads them where they lie; a wheel carries them in
``harness/_templates``.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import harness
from harness.errors import UsageError
from harness.models import Record
from harness.rollout.source import EXCLUDE_DIRS

_DATA = Path("data")
_SCAFFOLD = Path(__file__).with_name("scaffold")
_NAME = re.compile(r"[a-z][a-z0-9-]*")
_TOKEN = "<your-rollout>"
_LAYOUT = {
    "main.py.tpl": "rollouts/{name}/main.py",
    "pyproject.toml.tpl": "rollouts/{name}/pyproject.toml",
    "README.md.tpl": "rollouts/{name}/README.md",
    "eval.toml.tpl": "configs/eval/{name}.toml",
    "training.toml.tpl": "configs/training/{name}.toml",
    "data.jsonl.tpl": "data/{name}.jsonl",
}


class Written(Record):
    """What a command wrote: paths relative to the workspace, and what to do next."""

    name: str
    files: list[str]
    next_steps: list[str]


def templates_root() -> Path:
    """The folder with ``rollouts/``, ``configs/`` and ``data/`` of the templates.

    :raises UsageError: this installation has none.
    """
    package = Path(harness.__file__).parent
    for root in (package / "_templates", package.parent):
        if (root / "rollouts").is_dir() and (root / "configs/eval").is_dir():
            return root
    raise UsageError("this installation carries no templates", hint="Reinstall rollout-harness.")


def list_templates() -> dict[str, str]:
    """Names, sorted, with the description that each pyproject.toml gives."""
    root = templates_root() / "rollouts"
    found = {}
    for project in sorted(root.glob("*/pyproject.toml")):
        line = re.search(r'^description = "(.*)"', project.read_text("utf-8"), re.MULTILINE)
        found[project.parent.name] = line[1] if line else ""
    return found


def apply_template(name: str, workspace: Path, *, force: bool = False) -> Written:
    """Copy a template into a workspace: its rollout, both configs and its data.

    A data file that is there already with the same content is no conflict. With ``force`` the rollout's folder is
    replaced as a whole and the other files are overwritten.

    :raises UsageError: no such template, or it would overwrite something.
    """
    known = list_templates()
    if name not in known:
        raise UsageError(f"Template '{name}' not found. Available templates: {', '.join(known)}.")
    root = templates_root()
    files = sorted(_files(root, name))
    owned = Path("rollouts", name)
    _check_inside(workspace, [owned, *files])
    if not force:
        conflicts = [f"{owned.as_posix()}/"] if (workspace / owned).exists() else []
        for file in files:
            there = workspace / file
            same = file.is_relative_to(_DATA) and _same(root / file, there)
            if there.exists() and not file.is_relative_to(owned) and not same:
                conflicts.append(file.as_posix())
        if conflicts:
            raise UsageError(
                "Refusing to overwrite existing files in the workspace directory:\n"
                + "".join(f"  {each}\n" for each in sorted(conflicts))
                + f"\nRe-run with `harness templates apply {name} --force` to replace them."
            )
    _clear(workspace / owned, owned)
    for file in files:
        there = workspace / file
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / file, there)
    return Written(name=name, files=[file.as_posix() for file in files], next_steps=_next_steps(name))


def init_rollout(name: str, workspace: Path, *, force: bool = False) -> Written:
    """Write a rollout that runs as it is and does next to nothing, its configs and four rows of data.

    :raises UsageError: the name is none for a rollout, or something is there already.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"Invalid rollout name '{name}'.\n  Must match ^[a-z][a-z0-9-]*$ (lowercase letters, digits, and hyphens; "
            "must start with a letter)."
        )
    if name == "default":
        raise UsageError(f"'{name}' is reserved and cannot be used as a rollout name.")
    targets = {source: Path(layout.format(name=name)) for source, layout in _LAYOUT.items()}
    owned = Path("rollouts", name)
    _check_inside(workspace, [owned, *targets.values()])
    if not force:
        paths = [owned, *(path for path in targets.values() if not path.is_relative_to(owned))]
        conflicts = [path for path in paths if (workspace / path).exists() or (workspace / path).is_symlink()]
        if conflicts:
            listing = "".join(f"  {path.as_posix()}{'/' if path == owned else ''}\n" for path in conflicts)
            raise UsageError(
                f"Refusing to overwrite existing rollout paths:\n{listing}\n"
                f"Re-run with `harness init {name} --force` to replace them."
            )
    _clear(workspace / owned, owned)
    for source, path in targets.items():
        there = workspace / path
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_text((_SCAFFOLD / source).read_text("utf-8").replace(_TOKEN, name), encoding="utf-8")
    return Written(name=name, files=[path.as_posix() for path in targets.values()], next_steps=_next_steps(name))


def _next_steps(name: str) -> list[str]:
    return [
        f"python -m harness validate configs/eval/{name}.toml",
        f"python -m harness run configs/eval/{name}.toml",
        "git push",
        f"osmosis eval submit configs/eval/{name}.toml",
        f"osmosis train submit configs/training/{name}.toml",
    ]


def _files(root: Path, name: str) -> Iterator[Path]:
    for path in (root / "rollouts" / name).rglob("*"):
        hidden = any(part in EXCLUDE_DIRS or part.startswith(".") for part in path.relative_to(root).parts)
        if path.is_file() and not hidden:
            yield path.relative_to(root)
    data = set()
    for kind in ("eval", "training"):
        config = Path("configs", kind, f"{name}.toml")
        if (root / config).is_file():
            yield config
            data |= set(re.findall(r'^dataset = "(.*)"', (root / config).read_text("utf-8"), re.MULTILINE))
    yield from (_DATA / f"{dataset}.jsonl" for dataset in sorted(data))


def _check_inside(workspace: Path, paths: list[Path]) -> None:
    root = workspace.resolve()
    for path in paths:
        if not (workspace / path).resolve().is_relative_to(root):
            raise UsageError(f"Refusing to write template file outside the workspace directory: {workspace / path}")


def _clear(folder: Path, shown: Path) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UsageError(
            f"Refusing to replace non-directory path: {shown.as_posix()}\n"
            "  --force only replaces existing directories; move or delete this path manually before re-running."
        )
    if folder.is_dir():
        shutil.rmtree(folder)


def _same(left: Path, right: Path) -> bool:
    try:
        return left.read_bytes() == right.read_bytes()
    except OSError:
        return False
