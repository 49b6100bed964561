"""One attempt from its commit in the ledger to what follows its end: invoke, rejoin after cuts, a Final or a pause.

Invariant: nothing is invoked or joined before the ledger holds attempt → instance, and what follows an attempt's end is
the policy's decision alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fermata.v1 import gateway_pb2, tool_pb2

from node_runtime.logs import get_logger
from node_runtime.outcomes import make_final, outcome_name
from node_runtime.spans import Span, SpanWriter
from tool_gateway.backends import Backend, Lease
from tool_gateway.backends.attempt import attach, invoke
from tool_gateway.calls import Call, attempt_timeout_s, margin_s
from tool_gateway.ledger import AttemptRecord, CallRecord, Fenced, LedgerStore, LedgerUnavailable
from tool_gateway.metrics import ATTEMPT_DURATION, ATTEMPTS, RETRIES, outcome_label
from tool_gateway.policy import AttemptEnd, Done, InstanceGone, Lost, Rejoin, RetryPolicy, TimedOut, timeout_final
from tool_gateway.settings import GatewaySettings

_log = get_logger(__name__)
Event = gateway_pb2.ServerFrame.Event
Tell = Callable[[Call, Event], None]
"""How a call's session is reached, whichever that is by now."""
CancelBackend = Callable[[Backend, str, str], None]
"""Backend, key, reason: sent in the background."""


@dataclass(frozen=True, slots=True)
class Again:
    """Another attempt may follow after this pause."""

    pause_s: float


class Attempts:
    """Runs attempts of all calls; holds no call state of its own."""

    def __init__(
        self,
        settings: GatewaySettings,
        ledger: LedgerStore,
        spans: SpanWriter,
        tell: Tell,
        cancel_backend: CancelBackend,
        policy: RetryPolicy | None = None,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._spans = spans
        self._tell = tell
        self._cancel_backend = cancel_backend
        self._policy = policy or RetryPolicy(settings.retry)

    async def run(self, call: Call, lease: Lease, nth: int) -> tool_pb2.Final | Again:
        """The `nth` attempt of this gateway, on this lease."""
        call.attempts += 1
        refused = await self._begin(call, lease)
        if refused is not None:
            return refused
        timeout_s, by_deadline = attempt_timeout_s(call.start, lease.tool, left_s(call), self._settings.timeouts)
        ends_at = asyncio.get_running_loop().time() + timeout_s
        since = time.monotonic()
        with _cut_off_is_counted(call, lease, since):
            end = await invoke(
                lease.backend,
                self._invocation(call, lease, timeout_s),
                timeout_s=timeout_s,
                heartbeat_s=self._heartbeat_s(call),
                on_event=lambda event: self._pass_on(call, event),
            )
            return await self._follow(call, lease, end, nth=nth, ends_at=ends_at, by_deadline=by_deadline, since=since)

    async def join(self, call: Call, lease: Lease, *, begun: bool = False) -> tool_pb2.Final:
        """The call was found at this lease's instance, begun by an earlier gateway: wait for its end there.

        `begun`: the ledger holds that attempt.
        """
        call.attempts = max(1, call.attempts)
        if begun:
            self._announce(call, lease)
        elif (refused := await self._begin(call, lease)) is not None:
            return refused
        found = Lost("the gateway that began the call is gone", joined=True)
        most = self._settings.retry.attempts  # no attempt may follow: what it was given cannot be told any more
        since = time.monotonic()
        with _cut_off_is_counted(call, lease, since):
            ended = await self._follow(
                call, lease, found, nth=most, ends_at=call.deadline_at, by_deadline=True, since=since
            )
        if isinstance(ended, Again):
            raise AssertionError("the policy allowed an attempt after the last one")
        return ended

    async def _begin(self, call: Call, lease: Lease) -> tool_pb2.Final | None:
        """Commit attempt → instance, then tell. A Final: the call may not be attempted."""
        now = asyncio.get_running_loop().time()
        record = AttemptRecord(call.attempts, lease.instance_id, lease.backend.address, now)
        committed = await self._commit(call, record)
        if isinstance(committed, Fenced):
            return make_final(
                tool_pb2.OUTCOME_FENCED,
                detail=f"generation {committed.generation} owns the trajectory {call.key.trajectory_id} now",
                started=call.started,
            )
        if committed is None:
            return make_final(tool_pb2.OUTCOME_CANCELLED, detail="the call was released", started=call.started)
        if committed.outcome is not None:
            return committed.outcome.final
        self._announce(call, lease)
        return None

    async def _commit(self, call: Call, record: AttemptRecord) -> CallRecord | Fenced | None:
        """Waits for as long as the ledger cannot be written: without its word nothing is invoked."""
        tries = 0
        while True:
            try:
                committed = await self._ledger.begin_attempt(call.start.key, record)
            except LedgerUnavailable as problem:
                call.waiting_for = f"the ledger: {problem}"
                tries += 1
                await asyncio.sleep(self._policy.pause(tries))
            else:
                call.waiting_for = ""
                return committed

    def _announce(self, call: Call, lease: Lease) -> None:
        call.at = lease.backend
        call.instance_id = lease.instance_id
        call.started = tool_pb2.STARTED_UNKNOWN
        event = Event()
        event.started.key = call.start.key
        event.started.attempt = call.attempts
        event.started.instance_id = lease.instance_id
        self._tell(call, event)

    async def _follow(
        self,
        call: Call,
        lease: Lease,
        end: AttemptEnd,
        *,
        nth: int,
        ends_at: float,
        by_deadline: bool,
        since: float,
    ) -> tool_pb2.Final | Again:
        """Rejoin for as long as the policy says so; then the attempt has ended."""
        rejoins = 0
        while True:
            decision = self._policy.after(end, call.traits, attempt=nth, remaining_s=left_s(call), rejoins=rejoins)
            if not isinstance(decision, Rejoin):
                break
            rejoins += 1
            call.disturbed = True
            end = await self._rejoin(call, lease, decision.within_s, ends_at, end)
        if isinstance(end, TimedOut):
            self._cancel_backend(lease.backend, call.start.key, "the attempt's time is over")
            if by_deadline and not end.heartbeat:
                final = timeout_final(tool_pb2.OUTCOME_DEADLINE_EXCEEDED, call.traits, end.detail, infra=call.disturbed)
                decision = Done(final)
        call.at = None
        call.disturbed = False
        shown = decision.final if isinstance(decision, Done) else self._policy.final_of(end, call.traits)
        if not isinstance(decision, Done):
            await self._end(call, shown)  # else it ends with the call, in one step
        call.run_s += time.monotonic() - since
        outcome = outcome_name(shown.outcome)
        _count(lease, outcome_label(shown.outcome), since)
        record_span(self._spans, call, "tool-run", since, outcome, call.attempts)
        if isinstance(decision, Done):
            return decision.final
        if shown.started != tool_pb2.STARTED_NO:
            call.unproven = True
        if not call.traits.idempotent:
            call.started = tool_pb2.STARTED_NO  # proven, or the policy would not have said Retry
        RETRIES.labels(pool=lease.backend.pool, reason=outcome_label(shown.outcome)).inc()
        _log.info(
            "another attempt follows", key=call.start.key, attempt=call.attempts, outcome=outcome, why=shown.detail
        )
        return Again(decision.delay_s)

    async def _end(self, call: Call, shown: tool_pb2.Final) -> None:
        try:
            await self._ledger.end_attempt(call.start.key, call.attempts, shown.outcome, shown.started, shown.detail)
        except LedgerUnavailable as problem:  # the ledger takes the attempt for one that may still run: that is safe
            _log.debug("an attempt's end was not stored", key=call.start.key, why=str(problem))

    async def _rejoin(self, call: Call, lease: Lease, within_s: float, ends_at: float, lost: AttemptEnd) -> AttemptEnd:
        """Seek the instance until it is reached, is known to be gone, or `within_s` are over."""
        loop = asyncio.get_running_loop()
        backend = lease.backend
        why = lost.detail if isinstance(lost, Lost) else ""
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
                return InstanceGone(f"{why}; the backend has no Attach by which to rejoin the call")
            end = await attach(
                backend,
                key=call.start.key,
                args_sha256=call.digest,
                instance_id=lease.instance_id,
                tombstone=not call.traits.idempotent,
                timeout_s=max(0.001, ends_at - loop.time()),
                heartbeat_s=self._heartbeat_s(call),
                on_event=lambda event: self._pass_on(call, event),
            )
            if not isinstance(end, Lost) or end.joined:
                return end

    def _heartbeat_s(self, call: Call) -> float:
        if call.start.HasField("heartbeat_timeout_ms"):
            return min(max(0.01, call.start.heartbeat_timeout_ms / 1000), self._settings.timeouts.max_call_s)
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
            max_output_bytes=max_output_bytes(call, self._settings),
            tenant=call.tenant,
            run_id=call.key.run_id,
            context=start.context,
            traceparent=start.traceparent,
        )
        if start.HasField("session"):
            invocation.session.CopyFrom(start.session)
        return invocation

    def _pass_on(self, call: Call, event: tool_pb2.CallEvent) -> None:
        out = Event()
        if event.WhichOneof("event") == "progress":
            out.progress.key = call.start.key
            out.progress.progress.CopyFrom(event.progress)
        else:
            out.chunk.key = call.start.key
            out.chunk.chunk.CopyFrom(event.chunk)
        self._tell(call, out)


@contextmanager
def _cut_off_is_counted(call: Call, lease: Lease, since: float) -> Iterator[None]:
    """An attempt that its call's deadline or a cancel cuts off has ended too: whoever sums up attempts misses none."""
    try:
        yield
    except asyncio.CancelledError:
        late = call.cancelled is None and left_s(call) <= 0
        _count(lease, "DEADLINE_EXCEEDED" if late else "CANCELLED", since)
        raise


def _count(lease: Lease, outcome: str, since: float) -> None:
    ATTEMPTS.labels(pool=lease.backend.pool, outcome=outcome).inc()
    ATTEMPT_DURATION.labels(pool=lease.backend.pool).observe(time.monotonic() - since)


def left_s(call: Call) -> float:
    """Time to the call's deadline."""
    return max(0.0, call.deadline_at - asyncio.get_running_loop().time())


def max_output_bytes(call: Call, settings: GatewaySettings) -> int:
    """The smallest of the gateway's, the caller's and the tool's own limit."""
    tool = call.tool.spec.max_output_bytes if call.tool is not None else 0
    return min(most for most in (settings.limits.max_output_bytes, call.start.max_output_bytes, tool) if most > 0)


def record_span(spans: SpanWriter, call: Call, kind: str, since: float, outcome: str, attempt: int) -> None:
    """A span from `since` (monotonic) to now."""
    end = time.time()
    spans.record(
        Span(
            kind=kind,
            node=spans.node,
            start=end - (time.monotonic() - since),
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
