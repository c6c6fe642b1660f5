"""What needs no engine: console scripts and platforms."""

from __future__ import annotations

import pytest

from harness.guest import ENV
from harness.sandbox.docker.base import Interpreter
from harness.sandbox.packing import own_shebang


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
