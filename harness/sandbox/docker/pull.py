"""Pulling an image, with patience for registries that limit the rate.

When they will answer again does not reach us: engines keep a refusal's ``Retry-After`` to themselves.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_delay,
    wait_exponential,
    wait_random,
)

from harness.errors import ImageError, SandboxError
from harness.sandbox.base import Progress
from harness.sandbox.docker.engine import Engine

DEFAULT_IMAGE = "harness-python:3.13"
BOOTSTRAP = "python -m harness images bootstrap"

_PULL_S = 1800.0
_RATE_LIMIT_S = 1200.0
_TOLD_EVERY_S = 2.0


async def pull(engine: Engine, reference: str, progress: Progress) -> None:
    """Pull an image.

    :raises ImageError: the image cannot be had from its registry.
    """
    progress(f"pulling image {reference}")
    try:
        async for attempt in patiently(f"image {reference}", progress):
            with attempt:
                await engine.pull(reference, _reporter(reference, progress), _PULL_S)
    except SandboxError as error:
        if error.hint:  # the engine is away or its disk is full
            raise
        hint = (
            f"Check the name, or fetch it yourself (`docker login`, `docker pull {reference}`). Where no registry can "
            f"be reached, `{BOOTSTRAP}` makes {DEFAULT_IMAGE} from Debian packages; then leave the image setting empty."
        )
        raise ImageError(f"Image {reference} could not be pulled. {error.message}", hint=hint) from error


def patiently(what: str, progress: Progress) -> AsyncRetrying:
    """Tries for what needs a registry: again, for 20 minutes and ever more rarely, while it limits the rate."""
    return AsyncRetrying(
        retry=retry_if_exception(_is_rate_limit),
        stop=stop_after_delay(_RATE_LIMIT_S),
        wait=wait_exponential(1, max=300) + wait_random(0, 1),
        before_sleep=partial(_tell, what, progress),
        sleep=anyio.sleep,
        reraise=True,
    )


def _reporter(reference: str, progress: Progress) -> Callable[[dict[str, Any]], None]:
    layers: dict[str, tuple[int, int]] = {}
    told = 0.0

    def on_message(message: dict[str, Any]) -> None:
        nonlocal told
        detail = message.get("progressDetail") or {}
        if message.get("status") == "Downloading" and detail.get("total"):
            layers[str(message.get("id"))] = (int(detail.get("current", 0)), int(detail["total"]))
            if time.monotonic() - told > _TOLD_EVERY_S:
                told = time.monotonic()
                done, total = (sum(pair[i] for pair in layers.values()) / 1e6 for i in (0, 1))
                progress(f"pulling image {reference}: {done:.0f} of {total:.0f} MB")

    return on_message


def _is_rate_limit(error: BaseException) -> bool:
    """By its words: engines answer 500 for whatever a registry answered them."""
    return isinstance(error, SandboxError) and bool(
        re.search(r"toomanyrequests|too many requests|http 429", error.message, re.IGNORECASE)
    )


def _tell(what: str, progress: Progress, state: RetryCallState) -> None:
    wait = state.next_action.sleep if state.next_action else 0.0
    progress(f"the registry of {what} limits the rate of pulls; waiting {wait:.0f} s")
