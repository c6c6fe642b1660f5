"""Names of runs: the rule for them, and memorable ones for runs that were given none."""

from __future__ import annotations

import re
import secrets

from harness.errors import StoreError

MAX_LENGTH = 96

_ADJECTIVES = (
    "brave calm daring eager fierce gentle happy keen lively mellow noble patient quick serene swift tender "
    "vivid warm zealous agile bold clever diligent elegant fluent graceful humble jolly kindly lucid mighty "
    "nimble polite radiant silent tranquil upbeat witty youthful zen "
)
_ANIMALS = (
    "falcon tiger dolphin eagle panther wolf hawk lion bear fox owl raven shark whale cobra jaguar lynx otter "
    "puma seal badger crane dove finch gecko heron ibis koala lemur manta newt oriole parrot quail robin stork "
    "toucan viper wombat zebra "
)


def generate_name() -> str:
    """``adjective-animal-number``, as the platform names its runs."""
    return f"{secrets.choice(_ADJECTIVES.split())}-{secrets.choice(_ANIMALS.split())}-{secrets.randbelow(100)}"


def check_name(name: str) -> str:
    """The name itself, when it is one safe path segment of at most 96 characters.

    :raises StoreError: it is not.
    """
    if not re.fullmatch(rf"\w[\w.-]{{0,{MAX_LENGTH - 1}}}", name):
        raise StoreError(
            f"run name {name[: MAX_LENGTH + 1]!r} cannot be used",
            hint=f"Start with a letter or digit; at most {MAX_LENGTH} letters, digits, '.', '_' and '-'.",
        )
    return name
