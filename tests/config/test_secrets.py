from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from osmosis_ai.cli.errors import CLIError
from osmosis_ai.eval.local.runner import AMBIENT_SECRET_ENV_NAMES
from osmosis_ai.platform.cli.secret_resolution import _read_dotenv

from harness.config import Redactor, ambient_secrets, resolve_secrets
from harness.config.secrets import AMBIENT_NAMES
from harness.errors import SecretsError

FILES = {
    "plain": "A=1\nB = two words \n",
    "quotes": "A=\"x\"\nB='y'\nC=\"unbalanced'\nD=\"\nE=''\n",
    "export": "export A=1\n  export   B=2\n",
    "comments": "# A=1\n\nA=b # not a comment\n",
    "equals": "A=b=c==\n",
    "twice": "A=1\nA=2\n",
    "crlf": "A=1\r\nB=2\r\n",
    "no separator": "A=1\nsecret-value\n",
    "no name": "A=1\n\n=x\n",
    "bad name": "a-b=1\n",
}


@pytest.mark.parametrize("text", FILES.values(), ids=FILES.keys())
def test_files_are_read_as_the_platform_reads_them(tmp_path: Path, text: str) -> None:
    path = tmp_path / "secrets.env"
    path.write_bytes(text.encode())
    names, expected, said = ["A"], "", ""
    try:
        values = _read_dotenv(str(path))
        names, expected = list(values), str(values)
    except CLIError as error:
        expected = str(error)
    try:
        said = str(resolve_secrets(names, path, {}))
    except SecretsError as error:
        said = error.message
    assert said == expected


def test_the_file_comes_first_then_the_environment_then_the_prompt(tmp_path: Path) -> None:
    path = tmp_path / "secrets.env"
    path.write_text("A=file\n")
    asked: list[str] = []

    def prompt(text: str) -> str:
        asked.append(text)
        return "typed"

    values = resolve_secrets(["A", "B", "C", "D"], path, {"A": "env", "B": "env", "C": ""}, prompt)
    assert values == {"A": "file", "B": "env", "C": "typed", "D": "typed"}
    assert asked == ["Value for C: ", "Value for D: "]


def test_what_is_missing_is_named_at_once() -> None:
    with pytest.raises(SecretsError) as caught:
        resolve_secrets(["A", "B", "C"], None, {"B": "1"})
    assert caught.value.message == "No value found for: A, C. Export them or pass --secrets-file."
    with pytest.raises(SecretsError, match="Secret value for A must not be empty"):
        resolve_secrets(["A"], None, {}, lambda _: "")
    assert resolve_secrets([], None, {}) == {}


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\ufeffA=é\n".encode())))
    assert resolve_secrets(["A"], "-", {}) == {"A": "é"}


def test_errors_never_show_the_content(tmp_path: Path) -> None:
    path = tmp_path / "secrets.env"
    for data in (b"A=1\nhunter2hunter2\n", b"A=1\nB=hunter2hunter2\xff\n", b"A=1\nB=hunter2hunter2\0\n"):
        path.write_bytes(data)
        with pytest.raises(SecretsError, match="Invalid line 2 in") as caught:
            resolve_secrets(["A"], path, {})
        assert "hunter2" not in str(caught.value)
        assert caught.value.__cause__ is None
    with pytest.raises(SecretsError, match="Cannot read secrets file"):
        resolve_secrets(["A"], tmp_path / "nope", {})


def test_ambient_names_are_the_platforms() -> None:
    assert set(AMBIENT_NAMES) == AMBIENT_SECRET_ENV_NAMES
    assert ambient_secrets({"OPENAI_API_KEY": "sk-12345", "HF_TOKEN": "short", "PATH": "/usr/bin:/bin"}) == ["sk-12345"]


def test_redaction() -> None:
    redactor = Redactor(["sk-12345678", "sk-12345678-more", "é1", "", 'line1\n"line2"'])
    assert redactor.redact("a sk-12345678-more b sk-12345678 c é1.") == "a [REDACTED] b [REDACTED] c [REDACTED]."
    assert redactor.redact(r'{"key": "line1\n\"line2\""}') == '{"key": "[REDACTED]"}'
    assert "sk-1" not in repr(redactor)
    assert Redactor([]).redact("text") == "text"


def test_overlapping_secrets_leave_no_rest() -> None:
    assert Redactor(["abcd", "cdef"]).redact("-abcdef-") == "-[REDACTED]-"
    assert Redactor(["aa"]).redact("aaa") == "[REDACTED]"
    assert Redactor(["RED"]).redact("RED") == "[REDACTED]"
