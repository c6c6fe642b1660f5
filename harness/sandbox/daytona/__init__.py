"""Sandboxes in the Daytona service, by its official asynchronous SDK (extra ``daytona``)."""

from harness.errors import ProviderUnavailable

try:
    from harness.sandbox.daytona.provider import DaytonaProvider as DaytonaProvider
except ImportError as error:  # of a name: whether there is an SDK at all has been asked before
    raise ProviderUnavailable(
        f"the Daytona SDK is not one that this harness knows: {error}",
        hint="Install the one that it was tested with: `pip install 'rollout-harness[daytona]'`.",
    ) from error
