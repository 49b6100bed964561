"""The vLLM engine of a rollout node: exact token ids in, deltas of sampled ids out, each under its weight version.

Invariants: a delta is handed on only once the weights that sampled it have been proven, so nothing made by weights that
failed their proof leaves this module; after `refuse` or the engine's death every live request ends with one EngineError
and new ones are refused with the same sentence, until `serve`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fermata.v1 import tool_pb2
from fermata.v1.weights_pb2 import WeightVersion

from node_runtime.errors import EXIT_FAILED, EXIT_USAGE, NodeError
from rollout_node import engine_build
from rollout_node.engine_settings import EngineSettings
from rollout_node.weights.version import parse_label, spans_of, version_label

NOT_SYNCED = "this node has no proven weights yet: it serves after its first weight sync (or set serve_before_sync)"
# Above every ordinary request: a probe must not wait behind the traffic it decides about.
PROBE_PRIORITY = -(2**31)


class EngineError(NodeError):
    """The engine cannot do what was asked; carries the outcome and fault for the trajectory."""

    def __init__(self, sentence: str, outcome: tool_pb2.Outcome.ValueType, fault: tool_pb2.Fault.ValueType) -> None:
        super().__init__(sentence, EXIT_USAGE if fault == tool_pb2.FAULT_CALLER else EXIT_FAILED)
        self.outcome = outcome
        self.fault = fault


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How one turn is sampled. top_k 0 and min_p 0 are off; without stop ids only max_tokens ends the turn."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """Newly sampled ids, all of one weight version. `finish_reason`: "stop", "length" or "abort" on the last delta.

    A stop token stays in `token_ids` (last, `stop_token_kept`). `kv_kept`: sampled over KV that an older version made.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None
    stop_token_kept: bool
    version: WeightVersion
    kv_kept: bool = False


@dataclass(frozen=True, slots=True)
class EngineStats:
    """kv_used is a share of the KV cache, 0 to 1; generated_tokens counts since the engine started."""

    kv_used: float
    running: int
    waiting: int
    generated_tokens: int


class Engine:
    """One vLLM `AsyncLLM`. Made by `start`; `close` ends its processes."""

    def __init__(self, built: engine_build.Built, settings: EngineSettings) -> None:
        self._built = built
        self._llm = built.llm
        self._counters = built.counters
        self._settings = settings
        self._live: dict[str, Any] = {}  # external id -> vLLM's collector of its outputs
        self._probe_ids = itertools.count()
        self._proof_over = asyncio.Event()
        self._proof_over.set()
        self._proving: str | None = None  # label of the version under proof
        self._label = version_label(WeightVersion())  # what the engine samples under, proven or not
        self._salt: str | None = None
        self._kept: deque[str] = deque(maxlen=64)  # labels of versions that came in with their predecessor's KV kept
        self._why_not: str | None = None if settings.serve_before_sync else NOT_SYNCED
        self._life = 0  # counts refusals: no request outlives one
        self._last_refusal = ""
        self._dead: str | None = None
        self._ended = asyncio.Event()  # set with _dead
        self._closing = False
        self._sentinels = built.sentinels()
        # Called with (serving, why_not) whenever it changes; the node's health hangs on it.
        self.on_serving: list[Callable[[bool, str], None]] = []
        self.version = WeightVersion()
        self.model_hash = built.model_hash
        self.model_id = settings.model
        self.start_seconds = 0.0
        self.vocab_size: int = built.llm.model_config.get_vocab_size()
        self.max_model_len: int = built.llm.model_config.max_model_len
        self.dtype = str(built.llm.model_config.dtype).removeprefix("torch.")
        self.kv_tokens: int = engine_build.kv_tokens(built.llm)  # room of the KV cache
        self.workers: int = settings.tensor_parallel_size * settings.pipeline_parallel_size
        self.transfer_backends: tuple[str, ...] = built.transfer_backends

    @classmethod
    async def start(cls, settings: EngineSettings, *, model: str | None = None) -> Engine:
        """Starts vLLM (tens of seconds) off the event loop. NodeError says why it could not."""
        if model is not None:
            settings = settings.model_copy(update={"model": model})
        began = time.monotonic()
        built = await engine_build.build(settings)
        engine = cls(built, settings)
        await built.llm.update_weight_version(engine._label)
        loop = asyncio.get_running_loop()
        for sentinel in engine._sentinels:
            loop.add_reader(sentinel, engine._on_process_end)
        try:
            # The first step builds kernels, for seconds: not while a sync waits for its probes.
            await engine.prompt_logprobs([0, 0])
        except BaseException:
            await engine.close()
            raise
        engine.start_seconds = time.monotonic() - began
        return engine

    @property
    def serving(self) -> bool:
        return self._why_not is None

    @property
    def why_not(self) -> str:
        """One sentence; empty while serving."""
        return self._why_not or ""

    async def ended(self) -> str:
        """Returns once the engine's process has ended, or it was closed: one sentence why."""
        await self._ended.wait()
        return self._dead or ""

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingSpec,
        priority: int = 0,
        *,
        cache_salt: str | None = None,
    ) -> AsyncIterator[Delta]:
        """Samples after exactly `prompt_ids`; lower `priority` goes first. Closing the iterator aborts the request.

        Raises EngineError: the request is not possible (fault CALLER), or the node does not serve (fault INFRA).
        """
        self._require_serving()
        life = self._life
        if request_id in self._live:
            raise _caller(f"request {request_id!r} is already being generated: ids must be unique among live requests")
        collector = None
        finished = False
        born = self._label
        try:
            params = engine_build.sampling_params(sampling)
            self._live[request_id] = None  # taken before the first await
            collector = await self._add(request_id, prompt_ids, params, priority, self._salted(cache_salt))
            self._live[request_id] = collector
            self._require_serving(life)  # it may have changed while the request was handed over
            stop_ids = frozenset(sampling.stop_token_ids)
            position = 0
            while not finished:
                output = collector.get_nowait() or await collector.get()
                finished = output.finished
                for delta in self._deltas(output, collector.request_id, position, stop_ids, born):
                    position += len(delta.token_ids)
                    while self._proving is not None and version_label(delta.version) == self._proving:
                        await self._proof_over.wait()
                    self._require_serving(life)
                    yield delta
        except engine_build.vllm_errors() as error:
            finished = True
            raise self._translate(error) from error
        finally:
            await self._forget(request_id, collector, finished)

    async def abort(self, request_id: str) -> None:
        """Ends a live request: its iterator gets a last delta with finish_reason "abort". Unknown ids are ignored."""
        collector = self._live.get(request_id)
        if collector is not None and self._dead is None:
            await self._llm.abort(collector.request_id, internal=True)

    async def prompt_logprobs(self, ids: Sequence[int]) -> list[float]:
        """Log-probability of token i+1 given the first i+1 (one fewer than ids), through the path that serves.

        Works while the weights are under proof, ahead of all ordinary requests.
        """
        params = engine_build.probe_params()
        request_id = f"probe-{next(self._probe_ids)}"
        collector, finished = None, False
        try:
            collector = await self._add(request_id, ids, params, PROBE_PRIORITY, self._salted(None))
            self._live[request_id] = collector
            self._require_alive()
            output = collector.get_nowait() or await collector.get()
            finished = True
        except engine_build.vllm_errors() as error:
            raise self._translate(error) from error
        finally:
            await self._forget(request_id, collector, finished)
        return engine_build.prompt_logprobs_of(output, ids)

    def stats(self) -> EngineStats:
        """As of the engine's last step."""
        counters = self._counters
        return EngineStats(counters.kv_used, counters.running, counters.waiting, counters.generated_tokens)

    # What follows is for the weight sync.

    async def pause(self, *, clear_cache: bool = True, timeout_s: float | None = None) -> None:
        """Stops between engine steps, keeping requests; with clear_cache they are recomputed when they go on."""
        await self._control(
            "pause", lambda: self._llm.pause_generation(mode="keep", clear_cache=clear_cache), timeout_s
        )

    async def resume(self, *, timeout_s: float | None = None) -> None:
        await self._control("resume", lambda: self._llm.resume_generation(), timeout_s)

    async def collective(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Calls a method of every worker; their results by rank. TimeoutError where they take longer."""
        return list(
            await self._control(f"worker call {method}", lambda: self._llm.collective_rpc(method, args=args), timeout_s)
        )

    async def begin_proof(self, version: WeightVersion, *, keep_kv: bool) -> None:
        """The weights are `version` now, unproven: what they sample is held back. Call while paused."""
        label = version_label(version)
        if keep_kv:
            # Old blocks stay for the requests that own them; new requests must not find them.
            self._salt = label
            self._kept.append(label)
        else:
            self._salt = None
            await self._control("cache reset", lambda: self._llm.reset_prefix_cache(reset_running_requests=True))
        await self._control("version", lambda: self._llm.update_weight_version(label))
        self._label = self._proving = label
        self._proof_over.clear()

    def serve(self, version: WeightVersion) -> None:
        """The proof held: what was held back goes out, and the node serves."""
        self._end_proof()
        if self._dead is None:
            self.version = version
            self._set_serving(None)

    def refuse(self, reason: str) -> None:
        """Serve nothing from now on: every live request ends with `reason`, new ones are refused."""
        self._life += 1
        self._set_serving(self._dead or reason)
        self._last_refusal = self.why_not
        error = EngineError(self.why_not, tool_pb2.OUTCOME_INTERNAL, tool_pb2.FAULT_INFRA)
        for collector in self._live.values():
            if collector is not None:
                collector.put(error)
        self._end_proof()

    async def close(self) -> None:
        """Ends the engine's processes and waits for them; safe to call twice."""
        if self._closing:
            return
        self._closing = True
        loop = asyncio.get_running_loop()
        for sentinel in self._sentinels:
            loop.remove_reader(sentinel)
        self._dead = self._dead or "the rollout node is shutting down"
        self._ended.set()
        self.refuse(self._dead)
        self._llm = None
        await engine_build.shutdown(self._built)

    def _salted(self, cache_salt: str | None) -> str | None:
        if self._salt is None or cache_salt is None:
            return cache_salt or self._salt
        return f"{self._salt}:{cache_salt}"

    async def _add(self, request_id: str, ids: Sequence[int], params: Any, priority: int, salt: str | None) -> Any:
        self._require_alive()
        if not ids:
            raise _caller(f"request {request_id!r} has no prompt tokens: at least one is needed")
        if not 0 <= min(ids) <= max(ids) < self.vocab_size:
            # vLLM does not check ids, and one outside the embedding ends its worker and every request with it.
            raise _caller(
                f"request {request_id!r} has a token id outside the model's vocabulary of {self.vocab_size}: "
                f"{min(ids) if min(ids) < 0 else max(ids)}"
            )
        prompt = engine_build.tokens_prompt(ids, salt)
        return await self._llm.add_request(request_id, prompt, params, priority=priority)

    async def _forget(self, request_id: str, collector: Any, finished: bool) -> None:
        self._live.pop(request_id, None)
        if collector is not None:
            if not finished and self._dead is None and not self._closing:
                await self._llm.abort(collector.request_id, internal=True)
            collector.close()

    def _deltas(
        self, output: Any, internal_id: str, position: int, stop_ids: frozenset[int], born: str
    ) -> Iterator[Delta]:
        """Splits what vLLM handed over (it merges steps when read late) at weight versions."""
        completion = output.outputs[0]
        ids = completion.token_ids
        logprobs = completion.logprobs.logprobs if completion.logprobs is not None else []
        reason = completion.finish_reason
        stop_kept = reason == "stop" and len(ids) > 0 and ids[-1] in stop_ids
        # vLLM notes per step which version sampled; a finished request carries the notes, a running one has them here.
        if completion.weight_versions is not None:
            starts = [(span.version, span.start) for span in completion.weight_versions]
        else:
            state = self._llm.output_processor.request_states.get(internal_id)
            starts = list(state.weight_version_starts) if state is not None else []
        pieces = spans_of(starts, position, len(ids)) or [(self._label, 0, len(ids))]
        for label, begin, end in pieces:
            last = end == len(ids)
            yield Delta(
                ids[begin:end],
                logprobs[begin:end],
                reason if last else None,
                stop_kept and last,
                parse_label(label),
                label != born and label in self._kept,
            )

    def _require_alive(self) -> None:
        if self._dead is not None:
            raise EngineError(self._dead, tool_pb2.OUTCOME_INTERNAL, tool_pb2.FAULT_INFRA)

    def _require_serving(self, life: int | None = None) -> None:
        """With `life`, what began in an earlier one is over even if the node serves again."""
        if self._why_not is not None:
            raise EngineError(self._why_not, tool_pb2.OUTCOME_INTERNAL, tool_pb2.FAULT_INFRA)
        if life is not None and life != self._life:
            raise EngineError(self._last_refusal, tool_pb2.OUTCOME_INTERNAL, tool_pb2.FAULT_INFRA)

    def _end_proof(self) -> None:
        self._proving = None
        self._proof_over.set()

    def _set_serving(self, why_not: str | None) -> None:
        changed = (why_not is None) != (self._why_not is None)
        self._why_not = why_not
        if changed:
            for listener in self.on_serving:
                listener(why_not is None, why_not or "")

    async def _control(self, what: str, call: Callable[[], Awaitable[Any]], timeout_s: float | None = None) -> Any:
        """One call to the engine's process; ends when the process does."""
        self._require_alive()
        limit = self._settings.control_timeout_s if timeout_s is None else timeout_s
        answer, end = asyncio.ensure_future(call()), asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait((answer, end), timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            self._require_alive()
            raise EngineError(
                f"the engine did not answer to {what} within {limit:.1f} s: a step or a worker is stuck",
                tool_pb2.OUTCOME_DEADLINE_EXCEEDED,
                tool_pb2.FAULT_INFRA,
            )
        except EngineError:
            raise
        except engine_build.vllm_errors() as error:
            raise self._translate(error) from error
        except Exception as error:
            # vLLM raises bare Exception for what failed in its processes.
            raise EngineError(
                f"{what} failed in the engine: {engine_build.failure_of(error)}",
                tool_pb2.OUTCOME_INTERNAL,
                tool_pb2.FAULT_INFRA,
            ) from error
        finally:
            answer.cancel()
            end.cancel()

    def _translate(self, error: BaseException) -> EngineError:
        if engine_build.is_dead_error(error):
            self._on_process_end()
            return EngineError(self._dead or str(error), tool_pb2.OUTCOME_INTERNAL, tool_pb2.FAULT_INFRA)
        if engine_build.is_bad_request(error):
            return _caller(f"the engine refuses the request: {str(error).splitlines()[0]}")
        return EngineError(
            f"the engine failed on the request: {type(error).__name__}: {error}",
            tool_pb2.OUTCOME_INTERNAL,
            tool_pb2.FAULT_INFRA,
        )

    def _on_process_end(self) -> None:
        """The engine's process has ended: vLLM itself leaves waiting requests waiting when it was killed."""
        if self._dead is not None or self._closing:
            return
        self._dead = "the vLLM engine process has ended unexpectedly: restart the rollout node (its log says why)"
        self._ended.set()
        loop = asyncio.get_running_loop()
        for sentinel in self._sentinels:
            loop.remove_reader(sentinel)
        self.refuse(self._dead)


def _caller(sentence: str) -> EngineError:
    return EngineError(sentence, tool_pb2.OUTCOME_INVALID_ARGS, tool_pb2.FAULT_CALLER)
