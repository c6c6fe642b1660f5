"""``python -m tests.support.daytona``: the stand-in as a process of its own, until it is told to stop.

One line of JSON on standard output when it listens: ``url``, ``api_key``, ``organization_id``; one at the end: counts.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal

import anyio

from . import DaytonaStandIn, Quota, Rate


async def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.daytona")
    parser.add_argument("--mode", choices=["process"], default="process")
    parser.add_argument("--tier", type=int, choices=[1, 2, 3, 4], default=4)
    parser.add_argument("--unlimited", action="store_true", help="no quota and no rate limits")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--start-delay", type=float, default=0.0, metavar="S", help="added to each start of a sandbox")
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # some three for each sandbox
    quota, rates = (Quota(10**6, 10**6, 10**6), dict[str, Rate]()) if options.unlimited else (None, None)
    service = DaytonaStandIn(
        options.mode, tier=options.tier, port=options.port, start_delay_s=options.start_delay, quota=quota, rates=rates
    )
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with service:
            about = {"url": service.url, "api_key": service.api_key, "organization_id": service.organization_id}
            print(json.dumps(about), flush=True)
            async for _ in signals:
                break
    counts = {"created": service.world.created, "peak": service.peak, "left": len(service.left_behind)}
    print(json.dumps({**counts, "requests": dict(service.requests.counts)}), flush=True)


if __name__ == "__main__":
    anyio.run(main)
