"""Rewards of a group → advantages.

Invariant: only samples that were scored enter a mean or a deviation. A masked sample (an infrastructure fault, a reward
that failed, tokens too old) is simply not in the list that this module is given.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """Advantages of one group, in the order of its rewards; `None`: the group teaches nothing and is dropped."""

    mean: float
    deviation: float
    advantages: tuple[float, ...] | None
    dropped: str | None  # why, for the counters: "zero_variance" | "too_small"


def group_advantages(
    rewards: Sequence[float], *, normalisation: Literal["group_std", "none"] = "group_std", epsilon: float = 1e-6
) -> GroupAdvantages:
    """Advantage of each sample against its group.

    `group_std`: A_i = (r_i − mean(r)) / (std(r) + ε), GRPO with outcome supervision (Shao et al. 2024, "DeepSeekMath",
    arXiv:2402.03300, section 4.1.2). The deviation is that of the population (÷ G), ε guards the division alone.
    `none`: A_i = r_i − mean(r), as Dr. GRPO takes it (Liu et al. 2025, "Understanding R1-Zero-Like Training",
    arXiv:2503.20783, section 3.2), which removes the bias towards groups of small deviation.

    A group whose rewards are all equal has no gradient in either form and is dropped (the filter of DAPO's dynamic
    sampling, Yu et al. 2025, arXiv:2503.14476, equation 11), as is one with fewer than two scored samples.
    """
    if len(rewards) < 2:
        mean = rewards[0] if rewards else math.nan
        return GroupAdvantages(mean, 0.0, None, "too_small")
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    deviation = math.sqrt(math.fsum(value * value for value in centred) / len(rewards))
    # Compared themselves too: the deviation of equal floats may come out as 1e-17, that of tiny ones as 0.
    if max(rewards) == min(rewards) or deviation == 0.0:
        return GroupAdvantages(mean, 0.0, None, "zero_variance")
    if normalisation == "none":
        return GroupAdvantages(mean, deviation, tuple(centred), None)
    return GroupAdvantages(mean, deviation, tuple(value / (deviation + epsilon) for value in centred), None)
