"""The clipped surrogate over sampled tokens.

Owns the formulas alone: tensors in, tensors out, no model. Which ratio is used:

* `old_policy: sampler`: the behaviour policy is the sampler, token by token at whatever weight version made the token
  (versions may differ within one trajectory). ratio = π_θ / π_sampler. With one update per batch and no staleness it is
  1 up to rounding; with staleness it is the true importance ratio, and the clip bounds it. No TIS weight is applied: it
  would count the same ratio twice.
* `old_policy: recompute`: the old policy is the trainer's own, evaluated before the first update on this batch.
  ratio = π_θ / π_old is the proximal one, and the mismatch between trainer and sampler (numerics, staleness) is
  corrected beside it by the TIS weight min(π_old / π_sampler, C), a constant to the gradient.

Shapes: T is the number of trained tokens of a (micro)batch, laid out flat.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class LossTerms:
    """`loss` is the share of the batch's loss that these tokens bring: shares of microbatches add up to the whole."""

    loss: Tensor  # scalar, with gradient
    clipped: Tensor  # scalar: tokens where the clip was active
    ratio_max: Tensor  # scalar


def surrogate_T(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """−min(ρ A, clip(ρ, 1 − clip_low, 1 + clip_high) A) per token, with ρ = exp(logprob − old_logprob).

    PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, equation 7) with the asymmetric bounds of DAPO's
    clip-higher (Yu et al. 2025, arXiv:2503.14476, equation 10). Returns loss, ratio and whether the clip was active.
    """
    # A ratio past e^20 carries no information, and inf · 0 would poison the batch.
    ratio_T = torch.exp((logprobs_T - old_logprobs_T).clamp(-20.0, 20.0))
    bounded_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    plain_T = ratio_T * advantages_T
    clipped_T = bounded_T * advantages_T
    return -torch.minimum(plain_T, clipped_T), ratio_T, clipped_T < plain_T


def tis_weights_T(old_logprobs_T: Tensor, sampler_logprobs_T: Tensor, cap: float) -> Tensor:
    """min(π_old / π_sampler, C) per token, without gradient.

    Truncated importance sampling (Ionides 2008; for rollout engines Yao et al. 2025, "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training", the TIS estimator with cap C).
    """
    return torch.exp((old_logprobs_T - sampler_logprobs_T).clamp(max=20.0)).clamp(max=cap).detach()


def aggregation_weights(token_counts: list[int], aggregation: str, *, dr_grpo_tokens: int = 1) -> list[float]:
    """What one token of each sequence weighs in the batch's loss; `token_counts`: trained tokens per sequence.

    * `token`: 1 / Σ_i |o_i|. Every token counts alike (DAPO, arXiv:2503.14476, equation 8).
    * `sequence`: 1 / (N |o_i|). Every sequence counts alike (GRPO, arXiv:2402.03300, equation 3).
    * `dr_grpo`: 1 / (N L) with a constant L, so that length biases nothing (arXiv:2503.20783, section 3.2).
    """
    sequences = len(token_counts)
    if aggregation == "token":
        total = sum(token_counts)
        return [1.0 / total if total else 0.0] * sequences
    if aggregation == "sequence":
        return [1.0 / (sequences * count) if count else 0.0 for count in token_counts]
    if aggregation == "dr_grpo":
        return [1.0 / (sequences * dr_grpo_tokens)] * sequences
    raise ValueError(f"loss aggregation must be token, sequence or dr_grpo, got {aggregation!r}")


def policy_loss(
    logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    old_logprobs_T: Tensor | None = None,
    tis_cap: float | None = None,
) -> LossTerms:
    """Σ_t w_t · L_t over the tokens given. `old_logprobs_T` None: the sampler is the old policy (module docstring)."""
    reference_T = sampler_logprobs_T if old_logprobs_T is None else old_logprobs_T
    loss_T, ratio_T, clipped_T = surrogate_T(
        logprobs_T, reference_T.detach(), advantages_T, clip_low=clip_low, clip_high=clip_high
    )
    if old_logprobs_T is not None and tis_cap is not None:
        loss_T = loss_T * tis_weights_T(old_logprobs_T, sampler_logprobs_T, tis_cap)
    empty = loss_T.numel() == 0
    return LossTerms(
        loss=(loss_T * weights_T).sum(),
        clipped=clipped_T.sum(),
        ratio_max=ratio_T.new_zeros(()) if empty else ratio_T.detach().max(),
    )
