"""What an engine's refusals mean: by their words, for engines answer 500 to most of what goes wrong."""

from __future__ import annotations

from harness.errors import ImageError, ProviderUnavailable, QuotaError, SandboxError, SandboxGone

START_HINT = (
    "Start Docker Desktop, or `sudo systemctl start docker` (without systemd: `sudo dockerd &`); "
    "for another engine set DOCKER_HOST or choose a context with `docker context use`."
)
PERMISSION_HINT = (
    "Add yourself to the engine's group (`sudo usermod -aG docker $USER`, then log in again), or use rootless Docker."
)
TLS_HINT = (
    "With DOCKER_TLS_VERIFY=1, DOCKER_CERT_PATH is a folder with ca.pem, which signed the engine's certificate, and "
    "with cert.pem and key.pem, which the engine accepts; the engine's certificate must be for the name in DOCKER_HOST."
)
CONTEXT_HINT = "`docker context ls` shows which there are; DOCKER_CONTEXT or `docker context use` chooses one."
FULL_HINT = (
    "Free some disk where the engine keeps its data: `python -m harness images prune --budget 0`; "
    "`docker system df` shows what else is there."
)
BUSY_HINT = "The engine has no room for more now: lower --max-in-flight."
_FULL = ("no space left on device", "disk quota exceeded")
_BUSY = (
    "too many open files",
    "resource temporarily unavailable",
    "cannot allocate memory",
    "context deadline exceeded",
)

_TLS = ("[ssl:", "client sent an http request to an https server")
_GOING = ("transport is closing", "connection is closing", "context canceled", "error while dialing", "shutting down")
"""What an engine answers while it shuts down."""


def out_of_reach(status: int, text: str) -> str | None:
    """What to do about an engine that cannot be reached, or is going away; None: it can, and said something else.

    :param status: of its answer; 0 or 900 where there was none.
    """
    lowered = text.lower()
    tls = any(word in lowered for word in _TLS)
    if status in (0, 900) or tls or (status >= 500 and any(word in lowered for word in _GOING)):
        return PERMISSION_HINT if "permission denied" in lowered else TLS_HINT if tls else START_HINT
    return None


def of_call(what: str, status: int, text: str) -> SandboxError:
    """The error for a call that was answered with this status and text."""
    lowered = text.lower()
    if any(word in lowered for word in _FULL):
        return ProviderUnavailable(f"Could not {what}: the engine's disk is full ({text}).", hint=FULL_HINT)
    if any(word in lowered for word in _BUSY):
        return QuotaError(f"Could not {what}: {text}", hint=BUSY_HINT)
    if status == 404 and "no such image" in lowered:
        hint = "The image was removed meanwhile; run again to have it rebuilt."
        return ImageError(f"Could not {what}: {text}", hint=hint)
    if "invalid reference format" in lowered:
        hint = "An image is a name with a tag (`python:3.13-slim`) or a digest, or a folder with a Dockerfile."
        return ImageError(f"Could not {what}: this is no image's name", hint=hint)
    if status == 404 and (not text or "no such container" in lowered):  # of attach there are no words
        return SandboxGone(f"Could not {what}: somebody removed it.")
    return SandboxError(f"Could not {what}: the engine answered {status}: {text}")


def of_message(what: str, text: str) -> SandboxError:
    """The error for a pull, build or import whose answer ended with this text."""
    if any(word in text.lower() for word in _FULL):
        return ProviderUnavailable(f"Could not {what}: the engine's disk is full ({text}).", hint=FULL_HINT)
    return ImageError(f"Could not {what}: {text}")
