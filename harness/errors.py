"""The one error tree. It says who broke, what to do about it, and whether trying again can help.

::

    HarnessError
    ├── UsageError             the command, the config or the data is wrong; nothing was started (exit code 2)
    │   ├── ConfigError        an eval or training TOML, harness.toml or [tool.harness]
    │   ├── DataError          a data row: file, line, field
    │   └── SecretsError       a required secret has no value
    ├── RolloutError           the user's rollout
    │   ├── EntryPointError    main.py cannot be loaded or wires no single workflow
    │   ├── DependencyError    pyproject.toml or uv.lock does not resolve or build
    │   ├── WorkflowError      the workflow raised, exited, hung or broke a limit
    │   └── OutOfMemory        the sandbox used more memory than it may
    ├── GraderError            the rollout's grader raised, hung, crashed or gave no reward
    ├── PolicyError            the model that answers
    │   ├── PolicyUnreachable  refused, reset, timed out, 5xx or 429 after all retries   (retryable)
    │   └── PolicyRefused      401, 403, 404, 400: the same request will be refused again
    ├── SandboxError           the provider or one of its sandboxes
    │   ├── ProviderUnavailable  no engine, no namespaces, no key
    │   ├── ImageError         an image cannot be found, pulled or built
    │   ├── QuotaError         the provider is full; admission waits                       (retryable)
    │   └── SandboxGone        it vanished or was killed from outside                      (retryable)
    ├── ChannelError           the stream to the guest
    │   ├── ChannelClosed      the other side went away                                    (retryable)
    │   └── ProtocolError      what comes from the sandbox breaks the protocol; the rollout's doing
    └── StoreError             the run directory: disk full, locked, different inputs
"""

from __future__ import annotations

from typing import ClassVar, Literal

Party = Literal["user", "rollout", "grader", "policy", "sandbox", "relay", "store"]

Category = Literal["timeout", "validation_error", "http_error", "agent_error", "internal_error", "lease_expired"]
"""The managed platform's error vocabulary (``RolloutErrorCategory``)."""


class HarnessError(Exception):
    """Base of everything the harness raises on purpose.

    :param message: what happened and where, in one sentence.
    :param hint: what the reader can do about it; empty when there is nothing to add.
    """

    party: ClassVar[Party] = "user"
    category: ClassVar[Category] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class UsageError(HarnessError):
    """Raised when the command, the config or the data is wrong and nothing was started."""

    category: ClassVar[Category] = "validation_error"


class ConfigError(UsageError):
    """Raised when a config file does not say what it must; lists every problem of the file."""


class DataError(UsageError):
    """Raised when a data set cannot be read; names the file, the line and the field."""


class SecretsError(UsageError):
    """Raised when a required secret has no value."""


class RolloutError(HarnessError):
    """Raised when the user's rollout is at fault."""

    party: ClassVar[Party] = "rollout"
    category: ClassVar[Category] = "agent_error"


class EntryPointError(RolloutError):
    """Raised when the entry point cannot be loaded or does not name exactly one workflow."""

    category: ClassVar[Category] = "validation_error"


class DependencyError(RolloutError):
    """Raised when the rollout's dependencies do not resolve, download or build."""

    category: ClassVar[Category] = "validation_error"


class WorkflowError(RolloutError):
    """Raised when a workflow raised, exited, hung or broke a limit."""


class OutOfMemory(RolloutError):
    """Raised when a whole sandbox was ended because it used more memory than it may."""


class GraderError(HarnessError):
    """Raised when a grader raised, hung, crashed or gave no reward."""

    party: ClassVar[Party] = "grader"
    category: ClassVar[Category] = "agent_error"


class PolicyError(HarnessError):
    """Raised when the policy does not answer as an OpenAI-compatible server should."""

    party: ClassVar[Party] = "policy"
    category: ClassVar[Category] = "agent_error"


class PolicyUnreachable(PolicyError):
    """Raised when the policy refused, reset, timed out, or still answered 429 or 5xx after every retry."""

    retryable: ClassVar[bool] = True


class PolicyRefused(PolicyError):
    """Raised when the policy answered 400, 401, 403 or 404: the same request will be refused again."""


class SandboxError(HarnessError):
    """Raised when a provider or one of its sandboxes is at fault."""

    party: ClassVar[Party] = "sandbox"
    category: ClassVar[Category] = "http_error"


class ProviderUnavailable(SandboxError):
    """Raised when a provider cannot work on this machine: no engine, no namespaces, no key, no disk."""


class ImageError(SandboxError):
    """Raised when an image cannot be found, pulled or built."""


class QuotaError(SandboxError):
    """Raised when a provider has no room for another sandbox now."""

    retryable: ClassVar[bool] = True


class SandboxGone(SandboxError):
    """Raised when a sandbox vanished or was killed from outside."""

    retryable: ClassVar[bool] = True


class ChannelError(HarnessError):
    """Raised when the stream between host and guest failed."""

    party: ClassVar[Party] = "sandbox"
    category: ClassVar[Category] = "http_error"


class ChannelClosed(ChannelError):
    """Raised when the other side of the channel went away."""

    retryable: ClassVar[bool] = True


class ProtocolError(ChannelError):
    """Raised when what comes from a sandbox breaks the protocol.

    The guest does not do that by itself: something that the rollout started speaks in its place. It costs the trial.
    """

    party: ClassVar[Party] = "rollout"
    category: ClassVar[Category] = "agent_error"


class StoreError(HarnessError):
    """Raised when the run directory cannot be used: disk full, locked by another process, different inputs."""

    party: ClassVar[Party] = "store"
