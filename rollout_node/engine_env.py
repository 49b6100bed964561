"""The environment vLLM's processes start in, set in one place before vLLM is imported.

Invariant: engine processes are spawned, never forked (gRPC may already run in this process), reach out to nobody, write
their logs to stderr (stdout is the node's own), and end when the node's process ends, however it ends.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # every process of the engine imports this module: keep it light
    from rollout_node.engine_settings import EngineSettings

# Not FERMATA_*: those are settings, and unknown ones are refused.
OWNER_VARIABLE = "_FERMATA_ENGINE_OWNER"


def prepare_environment(settings: EngineSettings, environ: MutableMapping[str, str] | None = None) -> None:
    """Sets what vLLM reads from the environment. Call before the first import of vLLM."""
    env = os.environ if environ is None else environ
    env["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    env["VLLM_NO_USAGE_STATS"] = "1"
    env["DO_NOT_TRACK"] = "1"
    env["VLLM_LOGGING_LEVEL"] = settings.log_level
    env["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    env["VLLM_ENGINE_READY_TIMEOUT_S"] = str(max(1, int(settings.start_timeout_s)))
    # Workers have nothing to save: do not wait long for them before they are told to end.
    env.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "1")
    env["TOKENIZERS_PARALLELISM"] = "false"
    env[OWNER_VARIABLE] = str(os.getpid())
    if os.path.isdir(settings.model):
        # A local folder needs no hub; without this a missing optional file is looked for on the network.
        env.setdefault("HF_HUB_OFFLINE", "1")
    if settings.cpu_omp_threads_bind is not None:
        env["VLLM_CPU_OMP_THREADS_BIND"] = settings.cpu_omp_threads_bind
    plugins = env.get("VLLM_PLUGINS")
    if plugins is not None and "fermata" not in plugins.split(","):
        env["VLLM_PLUGINS"] = f"{plugins},fermata" if plugins else "fermata"


def end_with_owner() -> None:
    """In an engine process: ends this process when the node's does (vLLM's own processes outlive a kill -9)."""
    owner = os.environ.get(OWNER_VARIABLE)
    if owner is None or int(owner) == os.getpid() or not hasattr(os, "pidfd_open"):
        return
    try:
        handle = os.pidfd_open(int(owner))
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    threading.Thread(target=_wait_and_end, args=(handle,), name="fermata-owner", daemon=True).start()


def _wait_and_end(handle: int) -> None:
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    poller.poll()  # readable once the owner has ended
    os.kill(os.getpid(), signal.SIGKILL)
