"""vLLM without Fermata: the same engine as the rollout node's, for controls that a notebook writes by itself.

Invariants: the engine is started by the node's own function from the node's own settings, on the same core, so that a
comparison compares what is around it; what vLLM prints goes to a log file; after `stop` none of its processes is left.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TextIO

from fermata_cli.cluster.cores import available_cores, engine_cores
from fermata_cli.schema import ALL_SECTIONS
from node_runtime.settings import load
from rollout_node import engine_build
from rollout_node.settings import RolloutSettings

_ELSEWHERE = ["rollout.gateway=[none:1]", "trainer.rollout_nodes=[none:1]"]  # the file leaves addresses to flags


class PlainVllm:
    """Made by `start`. Token ids in, token ids out, greedy; a turn ends with a stop id, or when it is long enough."""

    def __init__(self, built: engine_build.Built, params: Any, log: TextIO) -> None:
        self._built = built
        self._params = params
        self._log = log
        self._numbers = itertools.count()

    @classmethod
    async def start(cls, config: Path, log: Path, *, stop_ids: Sequence[int]) -> Self:
        """`config`: the settings file that the rollout node reads."""
        rollout = load(ALL_SECTIONS, file=config, env={}, overrides=_ELSEWHERE)["rollout"]
        assert isinstance(rollout, RolloutSettings)
        (core,) = engine_cores(available_cores(), 1)
        file = log.open("a", encoding="utf-8")  # vLLM's loggers write to it for as long as it lives
        with _printing_to(file):
            built = await engine_build.build(rollout.engine_settings.model_copy(update={"cpu_omp_threads_bind": core}))
            from vllm import SamplingParams
            from vllm.sampling_params import RequestOutputKind

            params = SamplingParams(
                temperature=0.0,
                max_tokens=rollout.limits.max_tokens_per_turn,
                stop_token_ids=list(stop_ids),
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
        return cls(built, params, file)

    async def generate(self, ids: Sequence[int]) -> list[int]:
        """The ids of the model's next turn after these."""
        sampled: Sequence[int] = ()
        prompt = engine_build.tokens_prompt(ids, None)
        async for output in self._built.llm.generate(prompt, self._params, str(next(self._numbers))):
            sampled = output.outputs[0].token_ids
        return list(sampled)

    async def stop(self) -> None:
        await engine_build.shutdown(self._built)
        self._log.close()


@contextlib.contextmanager
def _printing_to(file: TextIO) -> Iterator[None]:
    """What is written to stdout and stderr, here and by processes started meanwhile, goes to the file."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = {number: os.dup(number) for number in (1, 2)}
    try:
        for number in kept:
            os.dup2(file.fileno(), number)
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            yield
    finally:
        for number, old in kept.items():
            os.dup2(old, number)
            os.close(old)
