"""Which cores the engines get. Pure, but for `available_cores`.

vLLM binds its threads to cores and expects to be alone there; the trainer, which computes as long, is kept to the cores
that the engines leave, or shares with them where there is none. The small processes run wherever there is room.
"""

from __future__ import annotations

import os
from collections.abc import Sequence


def available_cores() -> tuple[int, ...]:
    """The cores this process may use; empty where the system does not say."""
    try:
        return tuple(sorted(os.sched_getaffinity(0)))
    except AttributeError:  # not on macOS
        return ()


def engine_cores(cores: Sequence[int], engines: int) -> list[str | None]:
    """For each engine what it is bound to, as `rollout.engine.cpu_omp_threads_bind`; None: vLLM's own choice.

    One core each: a model small enough for a local CPU cluster gains nothing from a second one. With fewer cores than
    engines they take turns.
    """
    if not cores:
        return [None] * engines
    return [str(cores[number % len(cores)]) for number in range(engines)]


def trainer_cores(cores: Sequence[int], engines: int) -> tuple[int, ...]:
    """The cores the trainer is kept to: those without an engine, all where none is left."""
    return tuple(cores[engines:]) or tuple(cores)
