"""Names of runs: the rule for them, and memorable ones for runs that were given none."""

from __future__ import annotations

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
    if not name or len(name) > MAX_LENGTH:
        raise StoreError(f"a run's name must have 1 to {MAX_LENGTH} characters: {name[:MAX_LENGTH]!r}")
    if name[0] in "-." or not all(char in "._-" or char.isalnum() for char in name):
        raise StoreError(
            f"run name {name!r} cannot be used",
            hint="Start with a letter or digit and use only letters, digits, '.', '_' and '-'.",
        )
    return name
