"""The three-part proof of what is served: comparing digests, storage and probes.

Pure: takes what workers, trainer and engine said. Invariant: `holds` only where all three parts were made and agree; a
number that is no number agrees with nothing.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from fermata.v1 import weights_pb2 as pb

MISMATCHES_NAMED = 8
# Largest log-probability difference for weights that are the same: what the kernels' rounding can do (trainer and node
# may order sums differently), well below what another version of the weights does.
TOLERANCES = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}


def default_tolerance(dtype: str) -> float:
    """By the dtype that the node computes in."""
    return TOLERANCES.get(dtype, max(TOLERANCES.values()))


def unpack_probe(probe: pb.Probe) -> tuple[list[int], list[float]]:
    """Token ids and the trainer's log-probabilities. ValueError says what does not fit."""
    ids, logprobs = array("i"), array("f")
    if len(probe.token_ids) % 4 or len(probe.logprobs) % 4:
        raise ValueError("a probe's token_ids and logprobs are columns of 4 bytes an entry")
    ids.frombytes(probe.token_ids)
    logprobs.frombytes(probe.logprobs)
    if len(ids) < 2 or len(logprobs) != len(ids) - 1:
        raise ValueError(
            f"a probe has {len(ids)} tokens and {len(logprobs)} log-probabilities: "
            "at least 2 tokens, and one log-probability fewer, are needed"
        )
    return list(ids), list(logprobs)


def compare_received(sent: Sequence[tuple[str, bytes]], workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Part (a). What differs between the trainer's digests and each worker's, as sentences; empty: all equal."""
    wrong: dict[str, None] = {}
    if not sent:
        return ["the trainer sent no digests"]
    expected = dict(sent)
    if len(expected) != len(sent):
        wrong["the trainer named a tensor twice"] = None
    for worker in workers:
        received = dict(worker["received"])
        for name, digest in expected.items():
            if name not in received:
                wrong[f"{name}: not received"] = None
            elif received[name] != digest:
                wrong[f"{name}: other bytes than were sent"] = None
        for name in received.keys() - expected.keys():
            wrong[f"{name}: received, but the trainer has no digest of it"] = None
        for name in worker["missing"]:
            wrong[f"{name}: a parameter of the model that was not sent"] = None
    return list(wrong)


def shard_digests(workers: Sequence[Mapping[str, Any]]) -> list[pb.ShardDigest]:
    """Part (b) as it travels."""
    return [
        pb.ShardDigest(worker=rank, layout_fingerprint=worker["layout"], digest=worker["digest"])
        for rank, worker in enumerate(workers)
    ]


def storage_faults(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"worker {rank}: {fault}" for rank, worker in enumerate(workers) for fault in worker["faults"]]


def compare_probes(
    expected: Sequence[Sequence[float]], measured: Sequence[Sequence[float]]
) -> tuple[float, float, int]:
    """Part (c): largest and mean absolute difference, and of how many tokens."""
    differences = [
        abs(mine - theirs)
        for row, other in zip(expected, measured, strict=True)
        for theirs, mine in zip(row, other, strict=True)
    ]
    if not differences:
        return math.nan, math.nan, 0
    worst = math.nan if any(math.isnan(d) for d in differences) else max(differences)
    return worst, sum(differences) / len(differences), len(differences)


def summary(mismatches: Sequence[str]) -> str:
    """A bounded list for one sentence."""
    shown = ", ".join(mismatches[:MISMATCHES_NAMED])
    more = len(mismatches) - MISMATCHES_NAMED
    return f"{shown} and {more} more" if more > 0 else shown
