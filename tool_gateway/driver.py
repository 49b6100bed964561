"""Drives one call to its Final: find the tool, check the arguments, take over or start, attempt, rejoin, retry.

Invariant: nothing is invoked before the ledger holds attempt → instance, and what follows an attempt's end is the
policy's decision alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from fermata.v1 import gateway_pb2, tool_pb2

from node_runtime.logs import get_logger
from node_runtime.outcomes import make_final, outcome_name
from node_runtime.spans import Span, SpanWriter
from tool_gateway.backends import Backend, Backends, Lease, NoSuchTool
from tool_gateway.backends.attempt import ask, attach, invoke
from tool_gateway.calls import Call, CallStart, attempt_timeout_s, margin_s
from tool_gateway.catalogue import unknown_tool_sentence
from tool_gateway.ledger import AttemptRecord, Fenced, LedgerStore
from tool_gateway.metrics import ATTEMPTS
from tool_gateway.policy import (
    AttemptEnd,
    Done,
    InstanceGone,
    Lost,
    Rejoin,
    RetryPolicy,
    TimedOut,
    timeout_final,
)
from tool_gateway.settings import GatewaySettings
from tool_gateway.takeover import Answer, Join, Start, Suspect, Undecidable, Unreachable, choose, decide

_log = get_logger(__name__)
Event = gateway_pb2.ServerFrame.Event
TAKEOVER_MARGIN_S = 0.25
"""An instance must have been up this much longer than the call is old: the age travelled, clocks only tick."""


class Tell(Protocol):
    """How the driver reaches the call's session, whichever that is by now."""

    def __call__(self, call: Call, event: Event) -> None: ...


class Driver:
    """One for all calls; holds no call state of its own."""

    def __init__(
        self,
        settings: GatewaySettings,
        ledger: LedgerStore,
        backends: Backends,
        spans: SpanWriter,
        tell: Tell,
        in_background: Callable[[Backend, str, str], None],
        policy: RetryPolicy | None = None,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._backends = backends
        self._spans = spans
        self._tell = tell
        self._cancel_in_background = in_background
        self._policy = policy or RetryPolicy(settings.retry)

    async def run(self, call: Call) -> tool_pb2.Final:
        """The call's Final, within its deadline. Cancelled from outside, it leaves `call.lease` for the canceller."""
        try:
            async with asyncio.timeout_at(call.deadline_at) as deadline:
                return await self._run(call)
        except TimeoutError:
            if not deadline.expired():
                raise
            if call.lease is not None:
                self._cancel_in_background(call.lease.backend, call.start.key, "the call's deadline is over")
            waited = f" while waiting for {call.waiting_for}" if call.waiting_for else ""
            total = call.deadline_at - call.received_at
            detail = f"the call's {total:.1f} s are over{waited}"
            return timeout_final(tool_pb2.OUTCOME_DEADLINE_EXCEEDED, call.traits, detail, call.started)
        finally:
            if call.lease is not None:
                self._backends.give_back(call.lease)

    async def _run(self, call: Call) -> tool_pb2.Final:
        refusal = await self._find_and_check(call)
        if refusal is not None:
            return refusal
        if call.resent:
            final = await self._take_over(call)
            if final is not None:
                return final
        avoid: str | None = None
        prefer: str | None = None
        if call.start.resend:
            last = call.start.last_instance_id
            suspects = self._backends.suspects(call.start.tool)
            prefer = next((backend.address for backend in suspects if last and backend.instance_id == last), None)
        first = call.attempts
        while True:
            lease = await self._acquire(call, avoid, prefer)
            if lease is None:
                return make_final(
                    tool_pb2.OUTCOME_QUEUE_TIMEOUT,
                    detail=f"no backend of {call.start.tool} had room within the queue timeout",
                    started=call.started,
                )
            try:
                final, rejected = await self._attempt(call, lease, call.attempts - first + 1)
            finally:
                self._give_back(call)
            if final is not None:
                return final
            avoid, prefer = lease.backend.address, None
            call.waiting_for = "the next attempt"
            await asyncio.sleep(rejected)

    # -- before the first attempt ------------------------------------------------------------------------------------

    async def _find_and_check(self, call: Call) -> tool_pb2.Final | None:
        name = call.start.tool
        if not self._backends.catalogue_known:
            call.waiting_for = f"the tool backends at {', '.join(self._backends.silent_addresses())}"
        try:
            tool = await self._backends.find(name)
        except NoSuchTool:
            return self._unknown(call)
        call.waiting_for = ""
        if tool.spec.visibility in (tool_pb2.VISIBILITY_GRADER, tool_pb2.VISIBILITY_HIDDEN) and not call.start.grader:
            return self._unknown(call)
        call.tool = tool
        problem = tool.validator.check(call.start.args_json)
        if problem is not None:
            return make_final(tool_pb2.OUTCOME_INVALID_ARGS, detail=problem, text=problem, started=tool_pb2.STARTED_NO)
        return None

    def _unknown(self, call: Call) -> tool_pb2.Final:
        shown = (tool_pb2.VISIBILITY_MODEL, tool_pb2.VISIBILITY_UNSPECIFIED)
        names = [name for name, tool in self._backends.tools.items() if tool.spec.visibility in shown]
        sentence = unknown_tool_sentence(call.start.tool[:100], names)
        return make_final(tool_pb2.OUTCOME_UNKNOWN_TOOL, detail=sentence, text=sentence, started=tool_pb2.STARTED_NO)

    async def _take_over(self, call: Call) -> tool_pb2.Final | None:
        """None: the call may be attempted (at `call.only`, unless it is idempotent)."""
        join_only = call.start.mode == CallStart.MODE_JOIN_ONLY
        call.attempts = call.start.last_attempt
        if call.traits.idempotent and not join_only:
            return None
        call.started = tool_pb2.STARTED_UNKNOWN
        suspects = self._backends.suspects(call.start.tool)
        call.waiting_for = "the backends that may have started the call"
        await self._wait_for_all(suspects, min(self._settings.retry.rejoin_s, self._left(call) / 2))
        seen = [Suspect(backend.address, backend.instance_id) for backend in suspects]
        least = min((b for b in suspects if b.serving), key=lambda b: b.in_flight, default=None)
        chosen = choose(seen, call.start.last_instance_id, least.address if least is not None else None)
        answers = await self._ask_all(call, suspects, chosen, join_only)
        decision = decide(
            seen,
            answers,
            chosen=chosen,
            last_instance_id=call.start.last_instance_id,
            join_only=join_only,
            margin_s=TAKEOVER_MARGIN_S,
        )
        _log.info("takeover", key=call.start.key, decision=type(decision).__name__, chosen=chosen)
        match decision:
            case Undecidable(detail):
                return make_final(tool_pb2.OUTCOME_INDETERMINATE, detail=detail, started=tool_pb2.STARTED_UNKNOWN)
            case Start(address):
                instance = self._backends.backends[address].instance_id
                if instance is None:
                    return make_final(
                        tool_pb2.OUTCOME_NOT_STARTED,
                        detail=f"the backend at {address} was lost before the call could start there",
                        started=tool_pb2.STARTED_NO,
                    )
                call.only = (address, instance)
                call.started = tool_pb2.STARTED_NO
                return None
            case Join(address):
                return await self._join(call, address)

    async def _ask_all(
        self, call: Call, suspects: list[Backend], chosen: str | None, join_only: bool
    ) -> dict[str, Answer]:
        """First the instance last heard of, alone: where the call is found, nobody else need be asked."""
        timeout_s = self._settings.timeouts.control_s

        def age_s() -> float:
            return call.start.age_ms / 1000 + (asyncio.get_running_loop().time() - call.received_at)

        async def ask_one(backend: Backend) -> Answer:
            if not backend.connected:
                return Unreachable("nobody answers there")
            return await ask(
                backend,
                key=call.start.key,
                args_sha256=call.digest,
                tombstone=not join_only and backend.address != chosen,
                timeout_s=timeout_s,
                age_s=age_s,
            )

        answers: dict[str, Answer] = {}
        last = next((b for b in suspects if b.instance_id and b.instance_id == call.start.last_instance_id), None)
        if last is not None:
            answers[last.address] = await ask_one(last)
            if not isinstance(answers[last.address], Unreachable) and decide(
                [Suspect(last.address, last.instance_id)],
                answers,
                chosen=chosen,
                last_instance_id="",
                join_only=True,
                margin_s=0,
            ) == Join(last.address):
                return answers
        async with asyncio.TaskGroup() as tasks:
            asked = {b.address: tasks.create_task(ask_one(b)) for b in suspects if b.address not in answers}
        return answers | {address: task.result() for address, task in asked.items()}

    async def _join(self, call: Call, address: str) -> tool_pb2.Final:
        """The call was found: wait for its end there. A cut is survived as in any attempt."""
        backend = self._backends.backends[address]
        tool = call.tool
        assert tool is not None
        backend.in_flight += 1
        backend.in_flight_by_tool[tool.spec.name] += 1
        call.lease = Lease(backend, backend.instance_id or "", tool)
        call.attempts = max(1, call.attempts)
        call.started = tool_pb2.STARTED_UNKNOWN
        call.waiting_for = ""
        try:
            record = AttemptRecord(call.attempts, call.lease.instance_id, address, asyncio.get_running_loop().time())
            committed = await self._ledger.begin_attempt(call.start.key, record)
            if isinstance(committed, Fenced):
                return self._fenced(call, committed)
            self._tell_started(call, call.lease)
            final, _ = await self._follow(
                call, call.lease, Lost("the gateway before this one is gone", joined=True), last=True
            )
            return final or make_final(tool_pb2.OUTCOME_INDETERMINATE, detail="the call was lost while it was joined")
        finally:
            self._give_back(call)

    # -- attempts ----------------------------------------------------------------------------------------------------

    async def _acquire(self, call: Call, avoid: str | None, prefer: str | None) -> Lease | None:
        loop = asyncio.get_running_loop()
        since = loop.time()
        call.waiting_for = f"a backend of {call.start.tool} with room"
        queue_s = call.start.queue_timeout_ms / 1000 if call.start.HasField("queue_timeout_ms") else None
        try:
            async with asyncio.timeout(queue_s) as queue:
                lease = await self._backends.acquire(
                    call.start.tool, priority=call.start.priority, avoid=avoid, prefer=prefer, only=call.only
                )
        except TimeoutError:
            if not queue.expired():
                raise
            return None
        finally:
            call.queued_s += loop.time() - since
            self._span(call, "tool-queue", since, "", call.attempts + 1)
        call.lease = lease
        call.waiting_for = ""
        return lease

    def _give_back(self, call: Call) -> None:
        lease, call.lease = call.lease, None
        if lease is not None:
            self._backends.give_back(lease)

    async def _attempt(self, call: Call, lease: Lease, nth: int) -> tuple[tool_pb2.Final | None, float]:
        """The Final, or None and the pause before the next attempt."""
        loop = asyncio.get_running_loop()
        call.attempts += 1
        number = call.attempts
        record = AttemptRecord(number, lease.instance_id, lease.backend.address, loop.time())
        committed = await self._ledger.begin_attempt(call.start.key, record)
        if isinstance(committed, Fenced):
            return self._fenced(call, committed), 0.0
        if committed is None or committed.outcome is not None:
            return committed.outcome.final if committed and committed.outcome else make_final(
                tool_pb2.OUTCOME_CANCELLED
            ), 0.0
        call.instance_id = lease.instance_id
        self._tell_started(call, lease)
        timeout_s, is_deadline = attempt_timeout_s(call.start, lease.tool, self._left(call), self._settings.timeouts)
        began_as, call.started = call.started, tool_pb2.STARTED_UNKNOWN
        end = await invoke(
            lease.backend,
            self._invocation(call, lease, timeout_s),
            timeout_s=timeout_s,
            heartbeat_s=self._heartbeat_s(call),
            on_event=lambda event: self._pass_on(call, event),
        )
        final, pause_s = await self._follow(call, lease, end, nth=nth, is_deadline=is_deadline, since=record.started_at)
        if final is None:
            call.started = began_as if not call.traits.idempotent else tool_pb2.STARTED_UNKNOWN
        return final, pause_s

    async def _follow(
        self,
        call: Call,
        lease: Lease,
        end: AttemptEnd,
        *,
        nth: int = 1,
        is_deadline: bool = False,
        since: float | None = None,
        last: bool = False,
    ) -> tuple[tool_pb2.Final | None, float]:
        """What follows the end of an attempt: rejoin as long as the policy says so, then a Final or a pause."""
        loop = asyncio.get_running_loop()
        since = loop.time() if since is None else since
        rejoins = 0
        while True:
            decision = self._policy.after(end, call.traits, attempt=nth, remaining_s=self._left(call), rejoins=rejoins)
            if not isinstance(decision, Rejoin):
                break
            rejoins += 1
            end = await self._rejoin(call, lease, decision.within_s, str(getattr(end, "detail", "")))
        if isinstance(end, TimedOut):
            self._cancel_in_background(lease.backend, call.start.key, "the attempt's time is over")
            if is_deadline:
                detail = f"{end.detail}; the call's own time is over"
                decision = Done(timeout_final(tool_pb2.OUTCOME_DEADLINE_EXCEEDED, call.traits, detail))
        shown = decision.final if isinstance(decision, Done) else self._policy.final_of(end, call.traits)
        await self._ledger.end_attempt(call.start.key, call.attempts, shown.outcome, shown.started, shown.detail)
        call.run_s += loop.time() - since
        ATTEMPTS.labels(tool=call.tool_label, outcome=outcome_name(shown.outcome)).inc()
        self._span(call, "tool-run", since, outcome_name(shown.outcome), call.attempts)
        if isinstance(decision, Done):
            return decision.final, 0.0
        if last:
            return shown, 0.0
        _log.info(
            "attempt failed, another follows",
            key=call.start.key,
            attempt=call.attempts,
            outcome=outcome_name(shown.outcome),
            why=shown.detail,
        )
        return None, decision.delay_s

    async def _rejoin(self, call: Call, lease: Lease, within_s: float, why: str) -> AttemptEnd:
        """Seek the instance until it is reached, is known to be gone, or `within_s` are over."""
        loop = asyncio.get_running_loop()
        backend = lease.backend
        until = loop.time() + within_s
        tries = 0
        while True:
            try:
                async with asyncio.timeout_at(until) as seeking:
                    if tries:
                        await asyncio.sleep(self._policy.pause(tries))
                    await backend.wait_until_connected()
            except TimeoutError:
                if not seeking.expired():
                    raise
                return InstanceGone(f"{why}; the instance was not reached again within {within_s:.1f} s")
            tries += 1
            if backend.instance_id != lease.instance_id:
                return InstanceGone(f"{why}; another instance answers at {backend.address} now")
            if "attach" not in backend.features:
                return InstanceGone(f"{why}; the backend has no Attach to rejoin the call")
            end = await attach(
                backend,
                key=call.start.key,
                args_sha256=call.digest,
                instance_id=lease.instance_id,
                tombstone=not call.traits.idempotent,
                timeout_s=max(0.001, self._left(call)),
                heartbeat_s=self._heartbeat_s(call),
                on_event=lambda event: self._pass_on(call, event),
            )
            if not isinstance(end, Lost) or end.joined:
                return end

    # -- small parts -------------------------------------------------------------------------------------------------

    async def _wait_for_all(self, suspects: list[Backend], within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                for backend in suspects:
                    await backend.wait_until_connected()
        except TimeoutError:
            return  # those still missing are Unreachable

    def _left(self, call: Call) -> float:
        return max(0.0, call.deadline_at - asyncio.get_running_loop().time())

    def _heartbeat_s(self, call: Call) -> float:
        if call.start.HasField("heartbeat_timeout_ms"):
            return max(0.01, call.start.heartbeat_timeout_ms / 1000)
        return self._settings.timeouts.heartbeat_s

    def _invocation(self, call: Call, lease: Lease, timeout_s: float) -> tool_pb2.Invocation:
        start = call.start
        handed_s = max(0.001, timeout_s - margin_s(timeout_s, self._settings.timeouts))
        invocation = tool_pb2.Invocation(
            key=start.key,
            call_id=start.call_id,
            attempt=call.attempts,
            tool=start.tool,
            args_json=start.args_json,
            args_sha256=call.digest,
            expected_instance_id=lease.instance_id,
            attempt_timeout_ms=int(handed_s * 1000) or 1,
            heartbeat_timeout_ms=int(self._heartbeat_s(call) * 1000) or 1,
            max_output_bytes=self.max_output_bytes(call),
            tenant=call.tenant,
            run_id=call.key.run_id,
            context=start.context,
            traceparent=start.traceparent,
        )
        if start.HasField("session"):
            invocation.session.CopyFrom(start.session)
        return invocation

    def max_output_bytes(self, call: Call) -> int:
        spec = call.tool.spec if call.tool is not None else None
        bounds = (
            self._settings.limits.max_output_bytes,
            call.start.max_output_bytes,
            spec.max_output_bytes if spec else 0,
        )
        return min(bound for bound in bounds if bound > 0)

    def _tell_started(self, call: Call, lease: Lease) -> None:
        event = Event()
        event.started.key = call.start.key
        event.started.attempt = call.attempts
        event.started.instance_id = lease.instance_id
        call.instance_id = lease.instance_id
        self._tell(call, event)

    def _pass_on(self, call: Call, event: tool_pb2.CallEvent) -> None:
        out = Event()
        if event.WhichOneof("event") == "progress":
            out.progress.key = call.start.key
            out.progress.progress.CopyFrom(event.progress)
        else:
            out.chunk.key = call.start.key
            out.chunk.chunk.CopyFrom(event.chunk)
        self._tell(call, out)

    def _fenced(self, call: Call, fenced: Fenced) -> tool_pb2.Final:
        return make_final(
            tool_pb2.OUTCOME_FENCED,
            detail=f"generation {fenced.generation} owns the trajectory {call.key.trajectory_id} now",
            started=call.started,
        )

    def _span(self, call: Call, kind: str, since: float, outcome: str, attempt: int) -> None:
        end = time.time()
        self._spans.record(
            Span(
                kind=kind,
                node=self._spans.node,
                start=end - (asyncio.get_running_loop().time() - since),
                end=end,
                trajectory=call.key.trajectory_id,
                generation=call.key.generation,
                turn=call.key.turn,
                tool=call.start.tool,
                call_key=call.start.key,
                outcome=outcome,
                attempt=attempt,
            )
        )
