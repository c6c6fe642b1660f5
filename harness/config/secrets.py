"""Secrets: where their values come from, and how they are kept out of everything that is written or shown."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from harness.errors import SecretsError

REDACTED = "[REDACTED]"

AMBIENT_NAMES = (
    *(f"{provider}_API_KEY" for provider in (
        "OPENAI", "ANTHROPIC", "XAI", "GEMINI", "GOOGLE", "OPENROUTER", "CEREBRAS", "AZURE", "TOGETHER", "FIREWORKS",
        "GROQ", "MISTRAL", "COHERE", "DEEPSEEK", "HUGGINGFACE", "WANDB", "OSMOSIS", "DAYTONA", "CURSOR", "MSWEA",
    )),
    "HF_TOKEN", "OSMOSIS_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
)  # fmt: skip
"""Variables that often hold a key without being named in ``[secrets]`` (the platform's list)."""
MIN_AMBIENT = 8
"""Shorter values of those are placeholders, and redacting them would spoil the text."""


def resolve_secrets(
    required: Sequence[str],
    secrets_file: Path | Literal["-"] | None,
    environ: Mapping[str, str],
    prompt: Callable[[str], str] | None = None,
) -> dict[str, str]:
    """Values of the required secrets, each from the first that has one: file, environment, prompt.

    :param secrets_file: lines of ``NAME=value``; ``-`` is standard input.
    :param prompt: asks the user without echo; None when nobody can be asked.
    :raises SecretsError: names every secret without a value, or the line of the file that is wrong (never its content).
    """
    from_file = _read_dotenv(secrets_file) if secrets_file else {}
    values: dict[str, str] = {}
    missing: list[str] = []
    for name in required:
        if name in from_file:
            values[name] = from_file[name]
        elif environ.get(name):
            values[name] = environ[name]
        elif prompt is None:
            missing.append(name)
        elif not (value := prompt(f"Value for {name}: ")):
            raise SecretsError(f"Secret value for {name} must not be empty.")
        else:
            values[name] = value
    if missing:
        raise SecretsError(f"No value found for: {', '.join(missing)}. Export them or pass --secrets-file.")
    return values


def ambient_secrets(environ: Mapping[str, str]) -> list[str]:
    """Values of provider keys that lie about in an environment, for redaction."""
    return [value for name in AMBIENT_NAMES if len(value := environ.get(name, "")) >= MIN_AMBIENT]


def _read_dotenv(source: Path | Literal["-"]) -> dict[str, str]:
    label = "stdin" if source == "-" else str(source)
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).expanduser().read_bytes()
    except OSError as error:
        raise SecretsError(f"Cannot read secrets file {label}: {error.strerror}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # from None: the cause would carry the content
        line = data.count(b"\n", 0, error.start) + 1
        raise SecretsError(f"Invalid line {line} in {label}: not UTF-8.") from None
    values: dict[str, str] = {}
    for number, line_text in enumerate(text.splitlines(), start=1):
        stripped = line_text.strip()
        if not stripped or stripped.startswith("#"):
            continue
        name, separator, value = stripped.partition("=")
        name = name.strip().removeprefix("export ").strip()
        if not separator or not name.isidentifier() or "\0" in value:
            raise SecretsError(
                f"Invalid line {number} in {label}: expected NAME=value. "
                "Values spanning multiple lines are not supported."
            )
        value = value.strip()
        quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'"
        values[name] = value[1:-1] if quoted else value
    return values


class Redactor:
    """Replaces secret values by ``[REDACTED]``, also where JSON has escaped them.

    :param values: every one that is not empty counts, however short.
    """

    def __init__(self, values: Iterable[str]) -> None:
        forms = {form for value in values for form in (value, json.dumps(value)[1:-1]) if form}
        self._forms = sorted(forms, key=len, reverse=True)
        # A lookahead finds secrets that overlap too; the longest of those that start at one place comes first.
        self._pattern = re.compile(f"(?=({'|'.join(map(re.escape, self._forms))}))")

    def redact(self, text: str) -> str:
        """The text without secrets; those that overlap get one mark. Thread-safe."""
        if not any(form in text for form in self._forms):
            return text
        pieces: list[str] = []
        end = 0
        for match in self._pattern.finditer(text):
            if match.start() >= end:
                pieces += [text[end : match.start()], REDACTED]
            end = max(end, match.end(1))
        return "".join([*pieces, text[end:]])
