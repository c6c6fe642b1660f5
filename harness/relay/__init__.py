"""HTTP from the sandbox in, the policy's answers out: capture, limits, egress. There is no listener on the host."""

from harness.relay.egress import EgressRecord as EgressRecord
from harness.relay.relay import Lease as Lease
from harness.relay.relay import Relay as Relay
from harness.relay.settings import CallLimits as CallLimits
from harness.relay.settings import RelaySettings as RelaySettings
