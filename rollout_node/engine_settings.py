"""Settings of the vLLM engine in a rollout node. Imports without torch and vLLM.

Invariant: no default is bound to a device: the same settings start the engine on GPUs and on CPUs, and every engine
argument that has no field of its own goes through `extra`.
"""

from __future__ import annotations

from typing import Any, Literal

import pydantic
from pydantic import Field

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

    model: str = Field("", description="leave it empty: rollout.model names the folder")
    dtype: str = Field(
        "auto", description="of weights and activations: auto (as the model folder says), float32, bfloat16, ..."
    )
    max_model_len: int | None = Field(
        None, ge=1, description="tokens of prompt and output together; null: what the model was made for"
    )
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs over which each layer is split")
    pipeline_parallel_size: int = Field(1, ge=1, description="groups of layers, each on GPUs of its own")
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of each GPU's memory that the engine may take (on CPUs, of the host's)"
    )
    kv_cache_gib: float | None = Field(
        None, gt=0, description="KV cache per worker in GiB; null: what gpu_memory_utilization leaves"
    )
    num_gpu_blocks_override: int | None = Field(
        None, ge=1, description="blocks of the KV cache, whatever memory there is; makes it scarce, for tests"
    )
    block_size: int | None = Field(
        None, ge=1, description="tokens in a block of the KV cache; CPUs want a multiple of 32; null: vLLM's choice"
    )
    max_num_seqs: int = Field(256, ge=1, description="sequences decoded at once")
    max_num_batched_tokens: int | None = Field(None, ge=1, description="tokens in one engine step; null: vLLM's choice")
    enforce_eager: bool = Field(False, description="no compiled graphs: starts sooner, decodes slower")
    seed: int = Field(0, description="seed of the engine; tasks bring the seeds of their own sampling")
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = Field(
        "processed_logprobs",
        description="log-probability reported for a sampled token: of the distribution it was drawn from (after "
        "temperature, top-p and top-k), or of the model's own",
    )
    cpu_omp_threads_bind: str | None = Field(
        None,
        description="cores of vLLM's CPU threads (0, 0-3, auto), null: vLLM's choice; two engines on one machine must "
        "be bound apart",
    )
    weight_transfer: Literal["auto", "gloo", "nccl"] = Field(
        "auto", description="how weights arrive; auto: nccl on GPUs, gloo on CPUs"
    )
    serve_before_sync: bool = Field(
        False,
        description="serve the folder's own weights at once (evaluation, tests); else the node serves only after its "
        "first proven weight sync",
    )
    start_timeout_s: float = Field(600.0, gt=0, description="seconds the engine may take to load the model")
    control_timeout_s: float = Field(
        30.0, gt=0, description="seconds for a pause, a resume or a reset of the prefix cache"
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("WARNING", description="lowest level vLLM logs")
    extra: dict[str, Any] = Field(
        default_factory=dict,
        description="further arguments of vLLM's AsyncEngineArgs, by their names there, passed on as they are",
    )

    @pydantic.field_validator("extra")
    @classmethod
    def _extra_leaves_the_nodes_own(cls, value: dict[str, Any]) -> dict[str, Any]:
        known = set(cls.model_fields) | OWNED_BY_NODE
        clash = sorted(known & value.keys())
        if clash:
            raise ValueError(f"'{clash[0]}' is not for 'extra': it has a setting of its own or the node sets it")
        return value
