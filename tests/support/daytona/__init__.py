"""A stand-in for the Daytona service, for tests and benchmarks: the official SDK talks to it by ``DAYTONA_API_URL``.

Every sandbox is real: a tree of processes in mount, process, network and IPC namespaces of its own, with private files.
It is strict where the service is, and a test can order faults and put the clock forward::

    async with DaytonaStandIn() as service:
        daytona = AsyncDaytona(DaytonaConfig(api_key=service.api_key, api_url=service.url))
        service.faults.add("POST /sandbox", too_many(retry_after=2))
        await service.clock.advance(15 * 60)
        assert not service.sandboxes

What it is not: no sandbox has any egress, whatever its network settings say; resources are accounted for, not enforced;
all base images hold this machine's ``/usr`` and Python; a build has one stage, and this machine's network; what is
uploaded for its COPY lines comes without TLS, which the SDK must be told to allow.
"""

from .clock import Clock as Clock
from .clock import Rate as Rate
from .faults import Break as Break
from .faults import Delay as Delay
from .faults import Faults as Faults
from .faults import LoseResponse as LoseResponse
from .faults import Respond as Respond
from .faults import SlowStart as SlowStart
from .faults import Stuck as Stuck
from .faults import too_many as too_many
from .records import Quota as Quota
from .records import Sandbox as Sandbox
from .service import DaytonaStandIn as DaytonaStandIn
