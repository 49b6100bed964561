"""Trajectories of uneven length → padded microbatches with little padding.

Invariant: every sequence is in exactly one microbatch, and its trained tokens keep their order in the flat layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def plan_microbatches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of sequences per microbatch: sorted by length, each with at most `max_tokens` padded tokens.

    A sequence longer than `max_tokens` gets a microbatch of its own: it is never cut.
    """
    batches: list[list[int]] = []
    current: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        # Sorted longest first, so the first of a batch gives its width.
        if current and lengths[current[0]] * (len(current) + 1) > max_tokens:
            batches.append(current)
            current = []
        current.append(index)
    if current:
        batches.append(current)
    return batches


@dataclasses.dataclass(frozen=True, slots=True)
class Microbatch:
    """Right-padded ids and the flat positions of trained tokens.

    With causal attention and padding on the right no real token ever sees padding, so no attention mask is needed and
    the fast causal kernel can be used.
    """

    ids_BL: Tensor
    rows_T: Tensor  # row of each selected token
    predicted_at_T: Tensor  # position whose output predicts it (its own, less one)
    targets_T: Tensor  # its id


def pad(ids: Sequence[Sequence[int]], selected: Sequence[bytes | bytearray], device: torch.device) -> Microbatch:
    """`selected`: one byte a token, 1 for each whose log-probability is wanted (never the first of a sequence)."""
    width = max(len(row) for row in ids)
    padded = np.zeros((len(ids), width), dtype=np.int64)
    chosen = np.zeros((len(ids), width), dtype=np.bool_)
    for row, (tokens, wanted) in enumerate(zip(ids, selected, strict=True)):
        padded[row, : len(tokens)] = tokens
        chosen[row, : len(tokens)] = np.frombuffer(wanted, dtype=np.uint8) != 0
    if chosen[:, 0].any():
        raise ValueError("the first token of a sequence has no log-probability: nothing predicts it")
    rows, positions = np.nonzero(chosen)
    return Microbatch(
        ids_BL=torch.from_numpy(padded).to(device),
        rows_T=torch.from_numpy(rows).to(device),
        predicted_at_T=torch.from_numpy(positions - 1).to(device),
        targets_T=torch.from_numpy(padded[rows, positions]).to(device),
    )
