"""What runs inside a sandbox: standard library only, apart from the rollout itself in the child process.

The folder is copied or mounted as the package ``harness_guest``, so its modules import each other relatively and
nothing else of the harness. The host imports ``wire``, ``mux`` and the constants below from here, so both ends share
one codec.

**Paths inside a sandbox** (``ROOT`` is another folder under the ``process`` provider)::

    /opt/harness/env                the environment, a virtual environment, read-only
    /opt/harness/lib/harness_guest  this package, read-only
    /sandbox/rollout                the rollout's code: working folder and sys.path[0]
    /sandbox/artifacts              ctx.artifacts_dir
    /sandbox/home                   $HOME
    /tmp                            private

**Start.** ``command(python, lib, boot)`` is the sandbox's first process (PID 1 where there is a PID namespace).
``boot`` is a JSON object: ``root`` (folder), ``uid`` and ``gid`` (drop to these before anything else; null: stay),
``lease_s``, and ``limits``: ``processes``, ``open_files``, ``file_mib``, ``memory_mib``, null for a limit that the
provider enforces itself. Descriptors 0 and 1 are the channel (they may be one socket); descriptor 2 takes the guest's
own last words.

**Messages.** Stream 0 carries JSON objects, one a line; each has a ``type``. The host opens odd streams, the guest
even ones; an ``OPEN`` frame's payload is the stream's purpose in ASCII.

Host to guest:

``load``
    ``entrypoint`` (relative path), ``env`` (str to str), ``token`` (bearer for the relay), ``log_bytes`` (budget for
    each of stdout and stderr), ``proxy`` (whether there are allowed hosts). The code follows on a host-opened stream
    ``code`` as an uncompressed tar. Must come first. The guest forks the child, which imports the entry point at
    once, so that a sandbox can wait, loaded, for its trial.
``run``
    ``rollout_id``, ``prompt``, ``metadata``, ``timeout_s`` (null: none). At most once.
``probe``
    ``path``, ``body`` (object), ``timeout_s``: one POST through the loopback port, with the token, to check the relay.
``cancel``
    ``grace_s``: TERM to the child's processes, KILL after the grace.
``export``
    Ends whatever is left, then streams ``folder`` (one of those above; else the artifacts) as a tar on a guest-opened
    stream ``export``.
``ping``, ``exit``
    ``n``, answered by ``pong``; end now. Any frame renews the lease.

Guest to host:

``hello``
    ``version`` (``PROTOCOL``), ``python`` ("3.13.5"), ``pid``, ``port`` (loopback port).
``loaded``
    ``ok``, ``sdk`` (version), ``workflow`` and ``grader`` (class names or null), ``error`` when not ok, ``import_s``.
``log``
    ``source`` ("stdout" or "stderr"), ``text``, ``dropped`` (bytes left out so far).
``probed``
    ``status`` (HTTP, or null), ``body`` (first 4 KiB), ``error``.
``ended``
    ``how``: returned, raised, exited, signaled, timeout, cancelled or out_of_memory; ``samples`` [{``name``,
    ``data``}] and ``labelled`` when returned; ``error`` when raised; ``code`` (exit status) or ``signal``;
    ``agent_s``; ``peak_mib``.
``exported``
    ``files``, ``bytes``, ``skipped`` (list of {``path``, ``reason``}).

``error`` objects: ``types`` (class names along the MRO, most derived first), ``message``, ``traceback``,
``status_code`` (of provider errors), ``category`` (the SDK's own ``categorize_exception`` where it has one).

**Model calls.** The guest listens on a loopback port; each TCP connection becomes a guest-opened stream ``http``, raw
bytes both ways. HTTP is parsed in the host only, and ``CONNECT`` to an allowed host is told apart there too.
"""

from __future__ import annotations

import json
from typing import Any

PROTOCOL = 1
"""Version of the wire and the messages; part of every environment's key."""

LIB = "/opt/harness/lib"
ENV = "/opt/harness/env"
ROOT = "/sandbox"


def command(python: str, lib: str, boot: dict[str, Any]) -> list[str]:
    """The sandbox's first process. ``-I -S``: nothing of the environment runs in the supervisor."""
    code = f"import sys; sys.path.insert(0, {lib!r}); from harness_guest.start import main; main()"
    return [python, "-I", "-S", "-c", code, json.dumps(boot)]
