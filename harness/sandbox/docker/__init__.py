"""Sandboxes as Docker containers."""

from harness.sandbox.docker.provider import DockerProvider as DockerProvider
from harness.sandbox.docker.provider import DockerSandbox as DockerSandbox
