"""Small trajectories and models for the tests of the trainer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from fermata.v1 import rollout_pb2 as pb

from node_runtime.segments import Version
from trainer_node.model import PolicyModel
from trainer_node.trajectory import Sample, Trajectory

LINEAGE = "line"


def version(number: int, lineage: str = LINEAGE) -> Version:
    return Version(lineage, number)


def trajectory(
    prompt: Sequence[int] = (1, 2, 3),
    sampled: Sequence[int] = (4, 5, 6, 7),
    *,
    logprobs: Sequence[float] | None = None,
    versions: Sequence[tuple[int, int]] | None = None,
    lineage: str = LINEAGE,
    answer: str = "",
) -> Trajectory:
    """`versions`: (number, tokens) over the sampled tokens; default all of version 1."""
    ids = array("i", [*prompt, *sampled])
    mask = bytearray(len(prompt)) + bytearray(b"\x01" * len(sampled))
    values = list(logprobs) if logprobs is not None else [-1.0] * len(sampled)
    spans, start = [], len(prompt)
    for number, tokens in versions or ((1, len(sampled)),):
        spans.append((start, start + tokens, Version(lineage, number)))
        start += tokens
    return Trajectory(
        trajectory_id="t",
        generation=0,
        ids=ids,
        mask=mask,
        logprobs=array("f", [0.0] * len(prompt) + values),
        versions=tuple(spans),
        recomputed=True,
        answer=answer,
        reason=pb.FINISH_REASON_STOP,
        turns=1,
        calls=(),
        generate_us=0,
        tool_wait_us=0,
        queue_us=0,
    )


def sample(reward: float = 1.0, **fields: object) -> Sample:
    return Sample(trajectory(**fields), reward, "task", "kind")  # type: ignore[arg-type]


def tiny_module(*, tied: bool = False, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=48,
        hidden_size=16,
        num_hidden_layers=2,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    return transformers.Qwen3ForCausalLM(config).eval()


def tiny_policy(*, tied: bool = False, tokens_per_microbatch: int = 4096) -> PolicyModel:
    return PolicyModel(
        tiny_module(tied=tied), Path("none"), torch.device("cpu"), tokens_per_microbatch=tokens_per_microbatch
    )
