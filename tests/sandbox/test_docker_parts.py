"""What needs no engine: console scripts, platforms, and how long a registry is waited for."""

from __future__ import annotations

import pytest
from tenacity import Future, RetryCallState, Retrying

from harness.errors import ImageError
from harness.guest import ENV
from harness.sandbox.docker.base import Interpreter
from harness.sandbox.docker.context import own_shebang
from harness.sandbox.docker.pull import told_wait


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (b"#!/home/me/x/bin/python3\nimport small\n", f"#!{ENV}/bin/python\nimport small\n".encode()),
        (
            b"#!/bin/sh\n'''exec' '/home/a b/python' \"$0\" \"$@\"\n' '''\nimport small\n",
            f"#!{ENV}/bin/python\nimport small\n".encode(),
        ),
        (b"#!/bin/sh\necho x\n", b"#!/bin/sh\necho x\n"),
        (b"\x7fELF\x00python", b"\x7fELF\x00python"),
    ],
    ids=["direct", "shell", "not-python", "binary"],
)
def test_console_scripts_get_the_environments_interpreter(script: bytes, expected: bytes) -> None:
    assert own_shebang(script) == expected


@pytest.mark.parametrize(
    ("libc", "platform"),
    [
        ("glibc 2.41", "x86_64-manylinux_2_40"),
        ("glibc 2.36", "x86_64-manylinux_2_36"),
        ("glibc 2.29", "x86_64-manylinux_2_28"),
        ("glibc 2.12", "x86_64-manylinux_2_17"),
        ("musl", "x86_64-unknown-linux-musl"),
    ],
)
def test_packages_are_chosen_for_the_images_c_library(libc: str, platform: str) -> None:
    found = Interpreter(version="3.13.5", machine="x86_64", executable="/usr/bin/python3", libc=libc)
    assert found.platform() == platform


@pytest.mark.parametrize(
    ("message", "seconds"),
    [
        ("toomanyrequests: retry-after: 1.5s, allowed: 44000/minute", 1.5),
        ("toomanyrequests: retry-after: 1m2s", 62.0),
        ("429 Too Many Requests, Retry-After: 30", 30.0),
        ("toomanyrequests: retry-after: 300ms", 0.5),
        ("toomanyrequests: You have reached your pull rate limit.", 15.0),
    ],
)
def test_a_registry_that_limits_is_waited_for_as_told(message: str, seconds: float) -> None:
    state = RetryCallState(Retrying(), None, (), {})
    state.outcome = Future.construct(1, ImageError(message), has_exception=True)
    assert told_wait(state) == seconds
