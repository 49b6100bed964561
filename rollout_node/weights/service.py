"""WeightSyncService on the rollout node: the control side of a weight sync.

Invariants: generation is resumed, on proven weights, or the node serves nothing and says why: there is no third end,
whatever the trainer does or stops doing. Steps run to their end even when their caller hangs up; every step and every
gap between steps is bounded in time; questions (Status) are answered while a step runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc.aio
from fermata.v1 import tool_pb2, weights_pb2_grpc
from fermata.v1 import weights_pb2 as pb

from node_runtime.logs import get_logger
from node_runtime.spans import Span, SpanWriter
from rollout_node.engine import Engine, EngineError
from rollout_node.metrics import WEIGHT_VERSION
from rollout_node.weights import handshake, proof
from rollout_node.weights.metrics import SYNC_SECONDS
from rollout_node.weights.state import SyncState, describe

DEFAULT_DEADLINE_S = 60.0
JOIN_POLL_S = 0.02
# A worker that was cut off needs a moment to say so.
ANSWER_GRACE_S = 3.0

log = get_logger(__name__)
Response = TypeVar("Response")


class StepError(Exception):
    """A step that was refused or failed: what its SyncStatus says."""

    def __init__(self, sentence: str, outcome: tool_pb2.Outcome.ValueType = tool_pb2.OUTCOME_PROTOCOL) -> None:
        super().__init__(sentence)
        self.outcome = outcome


class WeightSyncServicer(weights_pb2_grpc.WeightSyncServiceServicer):
    """One per node, over its engine. `close` before the engine closes."""

    def __init__(
        self,
        engine: Engine,
        *,
        node: str = "",
        spans: SpanWriter | None = None,
        abandon_after_s: float = 15.0,
    ) -> None:
        self._engine = engine
        self._node = node
        self._spans = spans
        self._abandon_after_s = abandon_after_s
        self.state = SyncState()
        self._step_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._abandon: asyncio.TimerHandle | None = None
        self._proof: pb.Proof | None = None  # of what is served; None: nothing proven
        self._last_proof = pb.Proof()
        self._baseline: list[tuple[str, bytes]] | None = None
        self._started = 0.0
        self._wall_started = 0.0
        self._phases: dict[str, float] = {}

    async def close(self) -> None:
        """Ends what still runs."""
        self._disarm()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # The service.

    async def Init(self, request: pb.InitRequest, context: grpc.aio.ServicerContext) -> pb.InitResponse:
        response = pb.InitResponse()
        return await self._step(request.context, response, lambda end: self._init(request, response, end))

    async def Start(self, request: pb.StartRequest, context: grpc.aio.ServicerContext) -> pb.StartResponse:
        response = pb.StartResponse()
        return await self._step(request.context, response, lambda end: self._start(request, response, end))

    async def Update(self, request: pb.UpdateRequest, context: grpc.aio.ServicerContext) -> pb.UpdateResponse:
        response = pb.UpdateResponse()
        return await self._step(request.context, response, lambda end: self._update(request, response, end))

    async def Finish(self, request: pb.FinishRequest, context: grpc.aio.ServicerContext) -> pb.FinishResponse:
        response = pb.FinishResponse()
        response = await self._step(request.context, response, lambda end: self._finish(request, response, end))
        response.serving = self._engine.serving
        return response

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        response = pb.AbortResponse()
        response = await self._step(request.context, response, lambda end: self._abort(request))
        response.serving = self._engine.serving
        return response

    async def Status(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.StatusResponse:
        response = pb.StatusResponse()
        if request.verify:
            response = await self._step(pb.SyncContext(), response, lambda end: self._verify(response, end))
        else:
            response.status.CopyFrom(_status(tool_pb2.OUTCOME_OK, self._engine.why_not))
        response.serving = self._engine.serving
        response.served.CopyFrom(self.state.served)
        response.phase = self.state.phase
        response.group_generation = self.state.group_generation
        response.last_proof.CopyFrom(self._last_proof)
        response.model_id = self._engine.model_id
        response.model_hash = self._engine.model_hash
        response.workers = self._engine.workers
        response.backends.extend(self._engine.transfer_backends)
        return response

    async def Membership(
        self, request: pb.MembershipRequest, context: grpc.aio.ServicerContext
    ) -> pb.MembershipResponse:
        response = pb.MembershipResponse()
        response = await self._step(pb.SyncContext(), response, lambda end: self._membership(request, end))
        response.group_generation = self.state.group_generation
        return response

    # The steps.

    async def _init(self, request: pb.InitRequest, response: pb.InitResponse, end: float) -> None:
        self._refuse_if(self.state.refuse_init(request.context))
        self._refuse_if(handshake.refuse(request, self._engine.workers, self._engine.transfer_backends))
        backend, info = handshake.init_info(request, timeout_s=_left(end))
        began = time.monotonic()
        self.state.left()
        await self._engine.collective("fermata_join", backend, info, timeout_s=_left(end))
        while True:
            states = await self._engine.collective("fermata_join_state")
            failed = [f"worker {rank}: {why}" for rank, (state, why) in enumerate(states) if state == "failed"]
            if failed:
                raise StepError(
                    f"the transfer group at {request.rendezvous_address}:{request.rendezvous_port} "
                    f"could not be joined: {proof.summary(failed)}",
                    tool_pb2.OUTCOME_DEADLINE_EXCEEDED if end <= time.monotonic() else tool_pb2.OUTCOME_INTERNAL,
                )
            if all(state == "joined" for state, _ in states):
                break
            if time.monotonic() >= end:
                raise StepError(
                    f"the transfer group at {request.rendezvous_address}:{request.rendezvous_port} was not complete "
                    "when the deadline passed: its sender or another worker did not come",
                    tool_pb2.OUTCOME_DEADLINE_EXCEEDED,
                )
            await asyncio.sleep(JOIN_POLL_S)
        self.state.joined(request.context)
        response.workers = self._engine.workers
        SYNC_SECONDS.labels("init").observe(time.monotonic() - began)

    async def _start(self, request: pb.StartRequest, response: pb.StartResponse, end: float) -> None:
        self._refuse_if(self.state.refuse_start(request))
        self._started, self._wall_started, self._phases = time.monotonic(), time.time(), {}
        keep_kv = request.kv_policy == pb.KV_POLICY_KEEP and self.state.phase != pb.SYNC_PHASE_FAILED
        self.state.start(request)
        try:
            await self._engine.pause(clear_cache=not keep_kv, timeout_s=_left(end))
            await self._engine.collective("fermata_start", timeout_s=_left(end))
        except EngineError as error:
            await self._give_up(f"the sync could not start: {error}")
            raise
        response.pause_us = self._phase("pause", self._started)

    async def _update(self, request: pb.UpdateRequest, response: pb.UpdateResponse, end: float) -> None:
        refusal = self.state.refuse_step("Update", request.context, pb.SYNC_PHASE_STARTED, pb.SYNC_PHASE_UPDATING)
        self._refuse_if(refusal or handshake.refuse_tensors(request.tensors))
        began = time.monotonic()
        self.state.updating()
        left = _left(end)
        info = handshake.update_info(request.tensors)
        try:
            await self._engine.collective("fermata_receive", info, left, timeout_s=left + ANSWER_GRACE_S)
        except EngineError as error:
            end_of_it = await self._give_up(f"receiving version {describe(request.context.version)} failed: {error}")
            raise StepError(end_of_it, error.outcome) from error
        response.receive_us = self._phase("receive", began)

    async def _finish(self, request: pb.FinishRequest, response: pb.FinishResponse, end: float) -> None:
        context = request.context
        self._refuse_if(self.state.refuse_step("Finish", context, pb.SYNC_PHASE_UPDATING))
        self._refuse_if(handshake.refuse_finish(request))
        self.state.proving()
        outcome = tool_pb2.OUTCOME_INTERNAL
        try:
            async with asyncio.timeout(_left(end)):
                await self._prove(request, response)
        except (EngineError, TimeoutError) as error:
            # No proof against the weights: the trainer goes on with its other nodes.
            outcome = tool_pb2.OUTCOME_INDETERMINATE
            response.proof.holds = False
            response.proof.detail = (
                str(error) or f"the proof of version {describe(context.version)} was not made within its deadline"
            )
        self._last_proof = pb.Proof()
        self._last_proof.CopyFrom(response.proof)
        response.paused_us = self._phase("paused", self._started)
        self._record(context.version, "OK" if response.proof.holds else "INTERNAL")
        if not response.proof.holds:
            self._proof = None
            self.state.failed()
            reason = f"version {describe(context.version)} failed its proof: {response.proof.detail}"
            self._engine.refuse(f"{reason}; this node serves nothing until a full sync proves itself")
            log.error(reason)
            raise StepError(reason, outcome)
        self.state.proven()
        self._proof = self._last_proof
        WEIGHT_VERSION.set(context.version.number)

    async def _prove(self, request: pb.FinishRequest, response: pb.FinishResponse) -> None:
        """Fills the proof; serves only if all of it holds."""
        engine, version, made = self._engine, request.context.version, response.proof
        began = time.monotonic()
        received = await engine.collective("fermata_finish")
        response.load_us = self._phase("load", began)
        began = time.monotonic()
        mismatches = proof.compare_received([(d.name, d.digest) for d in request.digests], received)
        made.received_equal = not mismatches
        made.received_mismatch.extend(mismatches)
        shards = await engine.collective("fermata_storage")
        made.shards.extend(proof.shard_digests(shards))
        faults = proof.storage_faults(shards)
        if mismatches or faults:
            made.detail = "; ".join(filter(None, (proof.summary(mismatches), proof.summary(faults))))
            return
        # The engine runs from here on, so that the probes go the way that ordinary requests go. Whatever else it
        # samples meanwhile is held back, and thrown away if the probes do not agree.
        await engine.begin_proof(version, keep_kv=self.state.kv_policy == pb.KV_POLICY_KEEP)
        await engine.resume()
        probes = [proof.unpack_probe(probe) for probe in request.probes]
        measured = await asyncio.gather(*(engine.prompt_logprobs(ids) for ids, _ in probes))
        worst, mean, tokens = proof.compare_probes([logprobs for _, logprobs in probes], measured)
        made.probe_max_diff, made.probe_mean_diff, made.probe_tokens = worst, mean, tokens
        tolerance = request.probe_tolerance or proof.default_tolerance(engine.dtype)
        made.holds = worst <= tolerance
        if made.holds:
            engine.serve(version)
        else:
            made.detail = (
                f"log-probabilities of {tokens} probe tokens differ from the trainer's by up to {worst:.3g} "
                f"(mean {mean:.3g}): at most {tolerance:.3g} is allowed"
            )
        response.prove_us = self._phase("prove", began)

    async def _abort(self, request: pb.AbortRequest) -> None:
        reason = request.reason or "the trainer gave it up"
        version = request.context.version
        if self.state.syncing is not None:
            if self.state.syncing.lineage == version.lineage and version != self.state.syncing:
                raise StepError(f"Abort of version {describe(version)}: {describe(self.state.syncing)} is being synced")
            await self._give_up(f"the sync of version {describe(self.state.syncing)} was aborted: {reason}")
        elif self._proof is not None and version == self.state.served:
            # Proven here, and yet not what the other nodes have: only the trainer can see that.
            self._proof = None
            self.state.failed()
            self._engine.refuse(f"version {describe(version)} was withdrawn by the trainer: {reason}")

    async def _verify(self, response: pb.StatusResponse, end: float) -> None:
        if self.state.syncing is not None:
            raise StepError("verify during a sync: its proof will say what is served")
        shards = await self._engine.collective("fermata_storage", timeout_s=_left(end))
        found = [(shard["layout"], shard["digest"]) for shard in shards]
        faults = proof.storage_faults(shards)
        if self._proof is not None:
            known = [(shard.layout_fingerprint, shard.digest) for shard in self._proof.shards]
        else:
            # Never synced: from the first look on, what the folder gave must stay as it is.
            known = self._baseline = self._baseline or found
        response.unchanged = found == known and not faults
        if not response.unchanged and self.state.phase != pb.SYNC_PHASE_FAILED:
            self._proof = None
            self.state.failed()
            what = proof.summary(faults) or "its storage is not what the last proof saw"
            self._engine.refuse(f"the weights served were tampered with ({what}): nothing is served until a full sync")
            log.error(self._engine.why_not)

    async def _membership(self, request: pb.MembershipRequest, end: float) -> None:
        if not request.leave:
            if request.group_generation != self.state.group_generation:
                raise StepError(
                    f"group generation {request.group_generation} is not the present one "
                    f"({self.state.group_generation}): Init makes the next"
                )
            return
        if self.state.syncing is not None:
            raise StepError(f"leave during the sync of version {describe(self.state.syncing)}: Abort it first")
        self.state.left()
        await self._engine.collective("fermata_leave", timeout_s=_left(end))

    async def _give_up(self, reason: str) -> str:
        """Ends the sync under way. Resumes on the old weights if they are untouched; says how it ended."""
        version = self.state.syncing
        try:
            touched = any(await self._engine.collective("fermata_abort"))
            if not touched and self._proof is not None:
                shards = await self._engine.collective("fermata_storage")
                known = [(shard.layout_fingerprint, shard.digest) for shard in self._proof.shards]
                touched = [(shard["layout"], shard["digest"]) for shard in shards] != known
        except EngineError as error:
            touched, reason = True, f"{reason}; and giving it up failed: {error}"
        usable = self.state.given_up(touched=touched)
        if usable:
            try:
                await self._engine.resume()
            except EngineError as error:
                usable, reason = False, f"{reason}; and generation could not be resumed: {error}"
                self.state.failed()
        if usable:
            ending = f"{reason}; no tensor was touched, the node goes on with version {describe(self.state.served)}"
            log.warning(ending)
        else:
            ending = f"{reason}; this node serves nothing until a full sync proves itself"
            self._proof = None
            self._engine.refuse(ending)
            log.error(ending)
        if version is not None:
            self._record(version, "CANCELLED")
        return ending

    # Running a step.

    async def _step(
        self, sync: pb.SyncContext, response: Response, work: Callable[[float], Awaitable[None]]
    ) -> Response:
        """Runs one step alone, to its end even if the caller hangs up, and writes how it went into the response."""
        end = time.monotonic() + (sync.deadline_ms / 1000 if sync.deadline_ms > 0 else DEFAULT_DEADLINE_S)
        task = asyncio.get_running_loop().create_task(self._run_step(response, work, end))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _run_step(self, response: Any, work: Callable[[float], Awaitable[None]], end: float) -> Any:
        try:
            async with asyncio.timeout(max(0.001, end - time.monotonic())):
                await self._step_lock.acquire()
        except TimeoutError:
            response.status.CopyFrom(
                _status(tool_pb2.OUTCOME_DEADLINE_EXCEEDED, "an earlier step still ran when the deadline passed")
            )
            return response
        self._disarm()
        try:
            await work(end)
            response.status.CopyFrom(_status(tool_pb2.OUTCOME_OK, ""))
        except (StepError, EngineError) as error:
            response.status.CopyFrom(_status(error.outcome, str(error)))
        except TimeoutError as error:
            response.status.CopyFrom(_status(tool_pb2.OUTCOME_DEADLINE_EXCEEDED, str(error) or "the deadline passed"))
        finally:
            self._step_lock.release()
            if self.state.syncing is not None:
                loop = asyncio.get_running_loop()
                self._abandon = loop.call_later(self._abandon_after_s, self._on_abandoned)
        return response

    def _on_abandoned(self) -> None:
        """The trainer fell silent between two steps."""
        task = asyncio.get_running_loop().create_task(self._end_abandoned())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_abandoned(self) -> None:
        async with self._step_lock:
            if self.state.syncing is not None:
                await self._give_up(f"the trainer sent no next step for {self._abandon_after_s:.0f} s")

    def _disarm(self) -> None:
        if self._abandon is not None:
            self._abandon.cancel()
            self._abandon = None

    @staticmethod
    def _refuse_if(sentence: str | None) -> None:
        if sentence is not None:
            raise StepError(sentence)

    def _phase(self, name: str, began: float) -> int:
        """Notes a phase that ends now; microseconds."""
        seconds = time.monotonic() - began
        self._phases[name] = seconds
        SYNC_SECONDS.labels(name).observe(seconds)
        return int(seconds * 1e6)

    def _record(self, version: pb.WeightVersion, outcome: str) -> None:
        if self._spans is not None:
            self._spans.record(
                Span(
                    kind="weight-sync",
                    node=self._node,
                    start=self._wall_started,
                    end=time.time(),
                    outcome=outcome,
                    weight_version=version.number,
                    attributes={"lineage": version.lineage, "seconds": dict(self._phases)},
                )
            )


def _left(end: float) -> float:
    """Seconds to the deadline. TimeoutError when it has passed."""
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("the step's deadline passed before it was done")
    return left


def _status(outcome: tool_pb2.Outcome.ValueType, detail: str) -> pb.SyncStatus:
    fault = tool_pb2.FAULT_NONE if outcome == tool_pb2.OUTCOME_OK else tool_pb2.FAULT_INFRA
    return pb.SyncStatus(outcome=outcome, fault=fault, detail=detail)
