"""Everything the engine needs from vLLM's own modules, imported late: building it, its parameter objects, its errors.

Invariant: vLLM is imported only after `engine_env.prepare_environment` has run, and only from here and
`rollout_node.weights` modules that run inside vLLM's processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pydantic

from node_runtime.errors import EXIT_USAGE, NodeError
from rollout_node.engine_env import prepare_environment
from rollout_node.engine_settings import EngineSettings

if TYPE_CHECKING:
    from rollout_node.engine import SamplingSpec


@dataclass
class Counters:
    """What vLLM's scheduler said in its last step."""

    kv_used: float = 0.0
    running: int = 0
    waiting: int = 0
    generated_tokens: int = 0


@dataclass
class Built:
    llm: Any
    counters: Counters
    model_hash: str
    transfer_backends: tuple[str, ...]
    processes: list[psutil.Process]

    def sentinels(self) -> list[int]:
        """Descriptors that become readable when a process of the engine ends."""
        manager = self.llm.engine_core.resources.engine_manager
        return list(manager.sentinels()) if hasattr(manager, "sentinels") else []


async def build(settings: EngineSettings) -> Built:
    """Starts vLLM in a thread, so that signals are still seen meanwhile."""
    if not settings.model:
        raise NodeError("no model is named: set rollout.model to a model folder or a hub name", EXIT_USAGE)
    folder = Path(settings.model)
    if (folder.is_absolute() or settings.model.startswith(".")) and not (folder / "config.json").is_file():
        raise NodeError(
            f"the model folder {settings.model!r} has no config.json: name a Hugging Face model folder", EXIT_USAGE
        )
    prepare_environment(settings)
    return await asyncio.to_thread(_build, settings)


def kv_tokens(llm: Any) -> int:
    """How many tokens the KV cache holds, as the engine measured it at its start."""
    cache = llm.vllm_config.cache_config
    return int(cache.num_gpu_blocks or 0) * int(cache.block_size)


def _build(settings: EngineSettings) -> Built:
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    load_general_plugins()
    backends = ("gloo",) if current_platform.is_cpu() else ("nccl", "gloo")
    backend = backends[0] if settings.weight_transfer == "auto" else settings.weight_transfer
    if backend not in backends:
        raise NodeError(f"weight transfer by {backend!r} needs GPUs: on this node use {backends[0]!r}", EXIT_USAGE)
    counters = Counters()
    try:
        args = AsyncEngineArgs(**engine_args(settings, backend))
        llm = AsyncLLM.from_engine_args(
            args, usage_context=UsageContext.ENGINE_CONTEXT, stat_loggers=[_logger_factory(counters)]
        )
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        raise NodeError(f"vLLM could not start with model {settings.model!r}: {_reason(error)}") from error
    return Built(llm, counters, _model_hash(llm.model_config.hf_config), backends, _processes(llm))


def _processes(llm: Any) -> list[psutil.Process]:
    """The engine's core processes here, and their workers."""
    manager = llm.engine_core.resources.engine_manager
    cores = [psutil.Process(process.pid) for process in getattr(manager, "processes", ()) if process.pid]
    return [*cores, *(worker for core in cores for worker in core.children(recursive=True))]


def _reason(error: Exception) -> str:
    """The line of vLLM's message that says what is wrong."""
    if isinstance(error, pydantic.ValidationError):
        return "; ".join(str(detail["msg"]) for detail in error.errors())
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def engine_args(settings: EngineSettings, backend: str) -> dict[str, Any]:
    """AsyncEngineArgs for these settings; fields left to vLLM are absent."""
    chosen: dict[str, Any] = {
        "model": settings.model,
        "dtype": settings.dtype,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "max_num_seqs": settings.max_num_seqs,
        "enforce_eager": settings.enforce_eager,
        "seed": settings.seed,
        "logprobs_mode": settings.logprobs_mode,
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
        "skip_tokenizer_init": True,  # ids in, ids out
        "generation_config": "vllm",  # sample as asked, not as the model folder suggests
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "weight_transfer_config": {"backend": backend},
        "worker_extension_cls": "rollout_node.weights.worker.WeightWorkerExtension",
    }
    optional = {
        "max_model_len": settings.max_model_len,
        "num_gpu_blocks_override": settings.num_gpu_blocks_override,
        "block_size": settings.block_size,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "kv_cache_memory_bytes": None if settings.kv_cache_gib is None else int(settings.kv_cache_gib * 2**30),
    }
    chosen.update({name: value for name, value in optional.items() if value is not None})
    return {**chosen, **settings.extra}


def _logger_factory(counters: Counters) -> Any:
    from vllm.v1.metrics.loggers import StatLoggerBase

    class _Counting(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            if scheduler_stats is not None:
                counters.kv_used = scheduler_stats.kv_cache_usage
                counters.running = scheduler_stats.num_running_reqs
                counters.waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            if iteration_stats is not None:
                counters.generated_tokens += iteration_stats.num_generation_tokens

        def log_engine_initialized(self) -> None:
            pass

    return _Counting


def _model_hash(config: Any) -> str:
    """Of the architecture, not of the weights: snapshots resume on any version of the same model."""
    fields = {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


async def shutdown(built: Built) -> None:
    """Ends vLLM and waits until its processes are gone, also those whose own parent was killed."""
    llm = built.llm
    # Its core lets go of everything within a second and then often does not exit by itself.
    await asyncio.to_thread(llm.shutdown, timeout=3.0)
    # vLLM's finaliser shuts down once more; as late as the interpreter's end that only prints an error.
    llm.shutdown = lambda timeout=None: None
    _, alive = await asyncio.to_thread(psutil.wait_procs, built.processes, timeout=5.0)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    await asyncio.to_thread(psutil.wait_procs, alive, timeout=10.0)


@functools.lru_cache(maxsize=256)
def sampling_params(spec: SamplingSpec) -> Any:
    """Made once per spec: vLLM checks each anew, and clones what it is given for every request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=spec.max_tokens,
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        min_p=spec.min_p,
        seed=spec.seed,
        stop_token_ids=list(spec.stop_token_ids),
        ignore_eos=True,  # only the stop ids asked for end a turn, whatever the model folder calls its end
        logprobs=0,  # the sampled token's own
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def probe_params() -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def tokens_prompt(ids: Sequence[int], salt: str | None) -> Any:
    from vllm.inputs import tokens_input

    return tokens_input(list(ids), cache_salt=salt)


def prompt_logprobs_of(output: Any, ids: Sequence[int]) -> list[float]:
    rows = output.prompt_logprobs
    return [rows[position][token].logprob for position, token in enumerate(ids) if position > 0]


@functools.cache
def vllm_errors() -> tuple[type[BaseException], ...]:
    from vllm.exceptions import GracefulHTTPError, VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    return (EngineDeadError, EngineGenerateError, VLLMClientError, GracefulHTTPError, ValueError)


def failure_of(error: Exception) -> str:
    """What went wrong in a worker, out of the wrappings vLLM puts around it."""
    text = " ".join(str(error).split())
    inner = re.search(r"Worker failed with error '(.*)', please check", text)
    return inner.group(1) if inner else text.removeprefix("Call to collective_rpc method failed: ")


def is_dead_error(error: BaseException) -> bool:
    from vllm.v1.engine.exceptions import EngineDeadError

    return isinstance(error, EngineDeadError)


def is_bad_request(error: BaseException) -> bool:
    from vllm.exceptions import VLLMClientError

    return isinstance(error, VLLMClientError | ValueError)
