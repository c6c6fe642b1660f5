"""Sandboxes in the Daytona service, by its official asynchronous SDK (extra ``daytona``)."""

from harness.sandbox.daytona.provider import DaytonaProvider as DaytonaProvider
