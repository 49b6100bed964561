"""Settings of the vLLM engine in a rollout node. Imports without torch and vLLM.

Invariant: no default is bound to a device: the same settings start the engine on GPUs and on CPUs, and every engine
argument that has no field of its own goes through `extra`.
"""

from __future__ import annotations

from typing import Any, Literal

import pydantic

from node_runtime.settings import Section

# Arguments the node sets itself: exact ids, proven weights and priority scheduling depend on them.
OWNED_BY_NODE = frozenset(
    {
        "model",
        "scheduling_policy",
        "skip_tokenizer_init",
        "weight_transfer_config",
        "worker_extension_cls",
        "generation_config",
        "disable_log_stats",
    }
)


class EngineSettings(Section):
    """How the node runs vLLM. Sizes are per node; `None` leaves the choice to vLLM."""

    model: str = ""  # a Hugging Face folder or hub name
    dtype: str = "auto"  # "float32", "bfloat16", ...
    max_model_len: int | None = pydantic.Field(None, ge=1)  # tokens of prompt and output together
    tensor_parallel_size: int = pydantic.Field(1, ge=1)
    pipeline_parallel_size: int = pydantic.Field(1, ge=1)
    gpu_memory_utilization: float = pydantic.Field(0.9, gt=0, le=1)
    # KV cache in GiB per worker; None: what gpu_memory_utilization leaves (on a CPU a share of the host's memory).
    kv_cache_gib: float | None = pydantic.Field(None, gt=0)
    num_gpu_blocks_override: int | None = pydantic.Field(None, ge=1)  # makes KV scarce, for tests
    block_size: int | None = pydantic.Field(None, ge=1)  # tokens; CPUs want a multiple of 32
    max_num_seqs: int = pydantic.Field(256, ge=1)
    max_num_batched_tokens: int | None = pydantic.Field(None, ge=1)
    enforce_eager: bool = False  # starts sooner, no compiled graph
    seed: int = 0
    # The logprob reported for a sampled token is that of the distribution it was drawn from (after temperature, top-p,
    # top-k). "raw_logprobs" reports the model's own distribution.
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    # Cores for vLLM's CPU threads ("0", "0-3", "auto"); two engines on one machine must be bound apart.
    cpu_omp_threads_bind: str | None = None
    weight_transfer: Literal["auto", "gloo", "nccl"] = "auto"  # auto: nccl on GPUs, gloo on CPUs
    # A node of a training run serves only after its first proven weight sync. True serves the folder's own weights at
    # once (evaluation, tests).
    serve_before_sync: bool = False
    start_timeout_s: float = pydantic.Field(600.0, gt=0)
    control_timeout_s: float = pydantic.Field(30.0, gt=0)  # pause, resume, cache reset
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "WARNING"
    # Further AsyncEngineArgs, passed on as they are.
    extra: dict[str, Any] = pydantic.Field(default_factory=dict)

    @pydantic.field_validator("extra")
    @classmethod
    def _extra_leaves_the_nodes_own(cls, value: dict[str, Any]) -> dict[str, Any]:
        known = set(cls.model_fields) | OWNED_BY_NODE
        clash = sorted(known & value.keys())
        if clash:
            raise ValueError(f"'{clash[0]}' is not for 'extra': it has a setting of its own or the node sets it")
        return value
