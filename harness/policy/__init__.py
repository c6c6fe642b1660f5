"""Which model answers: what ``model_path`` means, where the key comes from, whether it answers, the embedded model."""

from harness.policy.embedded import embedded_policy as embedded_policy
from harness.policy.preflight import check_policy as check_policy
from harness.policy.resolve import Policy as Policy
from harness.policy.resolve import resolve_policy as resolve_policy
