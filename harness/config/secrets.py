"""Secrets: where their values come from, and how they are kept out of everything that is written or shown."""

from __future__ import annotations

import json
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
        values[name] = _unquote(value.strip())
    return values


def _unquote(value: str) -> str:
    return value[1:-1] if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'" else value


class Redactor:
    """Replaces secret values by ``[REDACTED]``, in text and in bytes (UTF-8), also where JSON has escaped them.

    :param values: every one that is not empty counts, however short.
    """

    def __init__(self, values: Iterable[str]) -> None:
        forms = {form for value in values for form in (value, json.dumps(value)[1:-1]) if form}
        self._texts = sorted(forms)
        self._bytes = [form.encode("utf-8", "surrogateescape") for form in self._texts]

    def redact[S: (str, bytes)](self, data: S) -> S:
        """The data without secrets."""
        if isinstance(data, str):
            return RedactedStream(self._texts, REDACTED).feed(data, last=True)
        return RedactedStream(self._bytes, REDACTED.encode()).feed(data, last=True)

    def text_stream(self) -> RedactedStream[str]:
        return RedactedStream(self._texts, REDACTED)

    def byte_stream(self) -> RedactedStream[bytes]:
        return RedactedStream(self._bytes, REDACTED.encode())


class RedactedStream[S: (str, bytes)]:
    """Redacts what comes in pieces, a secret that is cut between two of them included.

    Held back is only what may be the beginning of a secret: fewer characters than the longest has.
    """

    def __init__(self, secrets: Sequence[S], mark: S) -> None:
        self._secrets: Sequence[S] = secrets
        self._mark: S = mark
        self._longest = max(map(len, secrets), default=0)
        self._firsts: set[S] = {secret[:1] for secret in secrets}
        self._held: S = mark[:0]
        self._covered = 0
        """How much at the start of what is held belongs to a secret whose mark is out already."""

    def feed(self, data: S, *, last: bool = False) -> S:
        """What can be shown after this piece.

        :param last: nothing follows, hold nothing back.
        """
        data = self._held + data
        cut = len(data) if last else self._cut(data)
        shown: list[S] = []
        position = 0
        for start, end in self._spans(data):
            if start >= self._covered:  # its mark is not out yet
                if start >= cut:
                    break
                shown += [data[position:start], self._mark]
            position = end
        shown.append(data[position:cut])
        self._held = data[cut:]
        self._covered = max(0, position - cut)
        return self._mark[:0].join(shown)

    def _cut(self, data: S) -> int:
        """Where the earliest thing starts that more data may turn into a secret."""
        for i in range(max(0, len(data) - self._longest + 1), len(data)):
            if data[i : i + 1] in self._firsts and any(secret.startswith(data[i:]) for secret in self._secrets):
                return i
        return len(data)

    def _spans(self, data: S) -> list[tuple[int, int]]:
        """Where secrets lie, ascending; those that overlap are one."""
        found = [(0, self._covered)] if self._covered else []
        for secret in self._secrets:
            at = data.find(secret)
            while at >= 0:
                found.append((at, at + len(secret)))
                at = data.find(secret, at + 1)
        spans: list[tuple[int, int]] = []
        for start, end in sorted(found):
            if spans and start < spans[-1][1]:
                spans[-1] = (spans[-1][0], max(spans[-1][1], end))
            else:
                spans.append((start, end))
        return spans
