"""The part of the Dockerfile language that single-stage images are written in."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field

CONTEXT = "/.context"
"""Where a build's context lies inside the machine that builds."""
_COPY = """
set -e; IFS=; dst=$1; shift
[ $# -le 1 ] || dst=${dst%/}/
for pattern; do for src in $pattern; do
    if [ -d "$src" ]; then mkdir -p "$dst"; cp -R "$src/." "$dst"; continue; fi
    [ -e "$src" ] || { echo "file not found in build context: $src"; exit 1; }
    case $dst in */) mkdir -p "$dst";; *) mkdir -p "$(dirname "$dst")";; esac
    cp "$src" "$dst"
done; done
"""


class DockerfileError(Exception):
    """Not a Dockerfile, or one that needs what is not there."""


@dataclass
class Step:
    text: str
    argv: list[str]
    env: dict[str, str]
    cwd: str


@dataclass
class Recipe:
    """What to run, in order, and what the image says about itself."""

    image: str = ""
    steps: list[Step] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = ""
    user: str = ""
    entrypoint: list[str] = field(default_factory=list)
    cmd: list[str] = field(default_factory=list)


def parse(text: str) -> Recipe:
    """
    :raises DockerfileError: with the line that is at fault.
    """
    recipe, arguments = Recipe(), dict[str, str]()
    # A comment line may stand between continued lines; a heredoc may not be used.
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\\n", " ", lines).splitlines():
        if not line.strip():
            continue
        word, _, rest = line.strip().partition(" ")
        word, rest = word.upper(), rest.strip()
        if not rest:
            raise DockerfileError(f"dockerfile parse error: {word} requires an argument")
        if not recipe.image and word not in ("FROM", "ARG"):
            raise DockerfileError("dockerfile parse error: no build stage in current context")
        match word:
            case "FROM":
                if recipe.image:
                    raise DockerfileError("the stand-in builds a single stage")
                if not re.fullmatch(r"\S+( AS \S+)?", rest, re.IGNORECASE):
                    raise DockerfileError("dockerfile parse error: FROM requires either one or three arguments")
                recipe.image = rest.split()[0]
            case "RUN":
                environment = {**arguments, **recipe.env}
                recipe.steps.append(Step(line, _command(rest), environment, recipe.workdir or "/"))
            case "ENV":
                recipe.env |= _pairs(rest)
            case "ARG":
                name, _, value = rest.partition("=")
                arguments[name] = shlex.split(value)[0] if value else ""
            case "WORKDIR":
                recipe.workdir = rest if rest.startswith("/") else f"{recipe.workdir.rstrip('/')}/{rest}"
                recipe.steps.append(Step(line, ["mkdir", "-p", recipe.workdir], {}, "/"))
            case "USER":
                recipe.user = rest
            case "ENTRYPOINT":
                recipe.entrypoint, recipe.cmd = _command(rest), []
            case "CMD":
                recipe.cmd = _command(rest)
            case "COPY" | "ADD":
                try:
                    *sources, to = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
                except ValueError as error:
                    raise DockerfileError(f"dockerfile parse error: {line}: {error}") from error
                if not sources or any(each.startswith("--from=") or "://" in each for each in sources):
                    raise DockerfileError(f"the stand-in copies files of the context only: {line}")
                sources = [each.lstrip("/") or "." for each in sources if not each.startswith("--")]
                to = to if to.startswith("/") else f"{recipe.workdir.rstrip('/')}/{to}"
                recipe.steps.append(Step(line, ["/bin/sh", "-c", _COPY, word, to, *sources], {}, CONTEXT))
            case "LABEL" | "EXPOSE" | "STOPSIGNAL":
                pass
            case _:
                raise DockerfileError(f"dockerfile parse error: unknown instruction: {word}")
    if not recipe.image:
        raise DockerfileError("dockerfile parse error: file with no instructions")
    return recipe


def _command(rest: str) -> list[str]:
    if rest.startswith("["):
        try:
            return [str(each) for each in json.loads(rest)]
        except ValueError:
            pass
    return ["/bin/sh", "-c", rest]


def _pairs(rest: str) -> dict[str, str]:
    if "=" not in rest.split()[0]:
        name, _, value = rest.partition(" ")
        return {name: value.strip()}
    return dict(pair.partition("=")[::2] for pair in shlex.split(rest))
