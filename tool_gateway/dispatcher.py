"""Admission and ends of calls: what a client's event does to the ledger, and which session hears of it.

Invariant: each admitted key has one Call and one task here until its outcome is in the ledger; the outcome is told to
the session that owns the key at that moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from dataclasses import replace
from typing import Any

from fermata.v1 import gateway_pb2, tool_pb2

from node_runtime.logs import get_logger
from node_runtime.outcomes import make_final
from node_runtime.spans import SpanWriter
from tool_gateway.attempts import max_output_bytes
from tool_gateway.backends import Backend, Backends
from tool_gateway.backends.attempt import cancel
from tool_gateway.calls import Call, CallStart, margin_s, read_start, total_timeout_s
from tool_gateway.driver import Driver
from tool_gateway.hub import Attached, SessionHub, goodbye
from tool_gateway.ledger import (
    CallRecord,
    Conflict,
    Created,
    Creation,
    Ending,
    Exists,
    Fenced,
    Full,
    Gone,
    LedgerStore,
    LedgerUnavailable,
)
from tool_gateway.leftovers import Leftovers, may_have_started
from tool_gateway.metrics import CALL_DURATION, CALLS, fault_label, outcome_label
from tool_gateway.policy import cut_output
from tool_gateway.session import Session
from tool_gateway.settings import GatewaySettings

_log = get_logger(__name__)
Event = gateway_pb2.ServerFrame.Event
Result = gateway_pb2.ServerFrame.Result
_LEAVING = "the gateway is leaving: send the call to another"
_STORE_AGAIN_S = 1.0


class Dispatcher:
    """``run`` must be awaited for as long as calls are admitted; it owns every task made here."""

    def __init__(
        self, settings: GatewaySettings, ledger: LedgerStore, backends: Backends, hub: SessionHub, spans: SpanWriter
    ) -> None:
        self._settings = settings
        self.ledger = ledger
        self._backends = backends
        self._hub = hub
        self.running: dict[str, Call] = {}
        self.draining = False
        self._admitting: dict[str, Call] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._leftovers = Leftovers(settings, ledger, backends)
        self._driver = Driver(settings, ledger, backends, spans, self._tell, self._cancel_in_background)

    async def run(self) -> None:
        """Owns the calls' tasks until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            await asyncio.Event().wait()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def oldest_age_s(self) -> float:
        """Age of the call in flight that came first; 0 without calls."""
        oldest = min((call.received_at for call in self.running.values()), default=None)
        return 0.0 if oldest is None else self._now() - oldest

    # -- what clients ask for ----------------------------------------------------------------------------------------

    def submit(self, attached: Attached, start: CallStart) -> None:
        """Take a CallStart; what becomes of it is told to the session."""
        attached.unaccepted += 1
        read = read_start(start, run_id=attached.session.run_id, limits=self._settings.limits)
        if isinstance(read[1], str):
            outcome, sentence = read
            text = sentence if outcome == tool_pb2.OUTCOME_INVALID_ARGS else None
            self._refuse(attached, start, make_final(outcome, detail=sentence, text=text, started=tool_pb2.STARTED_NO))
            return
        key, digest = read
        now = self._now()
        total_s = total_timeout_s(start, self._backends.tools.get(start.tool), self._settings.timeouts)
        call = Call(
            key=key,
            start=start,
            digest=digest,
            received_at=now,
            stamped_after=attached.welcomed_at,
            deadline_at=now + total_s - margin_s(total_s, self._settings.timeouts),
            tenant=attached.session.tenant,
            session_id=attached.session.session_id,
        )
        self._admitting.setdefault(start.key, call)
        self._spawn(self._admit(attached, call), f"call {start.key}")

    def cancel(self, attached: Attached, key: str, reason: str) -> None:
        reason = reason or "the caller cancelled the call"
        session_id = attached.session.session_id
        call = self.running.get(key)
        if call is not None and call.session_id == session_id:
            self._cancel(call, reason)
        elif (admitting := self._admitting.get(key)) is not None and admitting.session_id == session_id:
            admitting.cancelled = reason  # it may become the owner of what runs for another one now

    def ack(self, attached: Attached, seq: int) -> None:
        keys = attached.session.ack(seq)
        if keys:
            self._spawn(self._store_ack(attached.session.session_id, keys), "ack")
            self._hub.acked.raise_()
        if attached.session.ready:
            attached.wake()

    async def _store_ack(self, session_id: str, keys: list[str]) -> None:
        try:
            await self.ledger.ack(session_id, keys)
        except LedgerUnavailable as problem:  # then these results are not the first to go
            _log.debug("acknowledgements were not stored", results=len(keys), why=str(problem))

    async def release(self, attached: Attached, release: gateway_pb2.ClientFrame.Release) -> None:
        run_id = attached.session.run_id
        try:
            running = await self.ledger.release(run_id, release.keys) if release.keys else []
            if release.trajectory_id:
                running += await self.ledger.release_trajectory(run_id, release.trajectory_id, release.generation)
        except LedgerUnavailable as problem:  # retention ends what the release would have ended sooner
            _log.warning("a release was not stored", run=run_id, trajectory=release.trajectory_id, why=str(problem))
            return
        for key in running:
            if (call := self.running.get(key)) is not None:
                call.release_when_done = True
        self._cancel_all(running, "the call was released while it ran")

    async def fence(self, attached: Attached, fence: gateway_pb2.ClientFrame.FenceTrajectory) -> None:
        """Raises LedgerUnavailable: late writers would not be refused, so the client has to say it again."""
        session = attached.session
        if fence.run_id and fence.run_id != session.run_id:
            _log.warning("a fence for another run was refused", run=session.run_id, other=fence.run_id)
            return
        fenced = await self.ledger.fence(session.run_id, fence.trajectory_id, fence.generation, fence.keep_keys)
        if isinstance(fenced, Fenced):
            late = f"generation {fence.generation} came after {fenced.generation}"
            _log.warning("a late fence was refused", trajectory=fence.trajectory_id, why=late)
            return
        self._cancel_all(fenced, f"generation {fence.generation} owns the trajectory {fence.trajectory_id} now")

    def cancel_session(self, attached: Attached, reason: str) -> None:
        """The client is gone for good: stop what runs for it, and what ran for it at an earlier gateway."""
        self._cancel_all(list(attached.calls), reason)
        self._spawn(self._abandon_session(attached.session.session_id, reason), "abandon a session")

    async def unacknowledged(self, session: Session) -> list[Result]:
        """For a client that counts in another incarnation: every result of its that it has not acknowledged."""
        results = []
        for head in await self.ledger.list_session(session.session_id):
            if head.done and not head.acked and head.run_id == session.run_id:
                try:
                    record = await self.ledger.load(head.key)
                except LedgerUnavailable as problem:
                    _log.error("a result cannot be given again", key=head.key, why=str(problem))
                    continue
                if isinstance(record, CallRecord) and record.session_id == session.session_id:
                    results.append(record.to_result())
        return results

    # -- admission ---------------------------------------------------------------------------------------------------

    async def _admit(self, attached: Attached, call: Call) -> None:
        try:
            creation = await self._create(attached, call)
        except LedgerUnavailable as problem:
            self._refuse(attached, call.start, _overloaded(str(problem), 1000))
            return
        finally:
            if self._admitting.get(call.start.key) is call:
                del self._admitting[call.start.key]
        if creation is not None:
            await self._answer(attached, call, creation)

    async def _create(self, attached: Attached, call: Call) -> Creation | None:
        key = call.start.key
        if self.draining and key not in self.running and await self.ledger.load(key) is None:
            self._refuse(attached, call.start, _overloaded(_LEAVING, 500))
            return None
        return await self.ledger.create(call.record(attached.session.session_id))

    async def _answer(self, attached: Attached, call: Call, creation: Creation) -> None:
        key = call.start.key
        match creation:
            case Created():
                await self._run(attached, call)
            case Exists(record, previous):
                if record.done or key in self.running:
                    self._join(attached, call, record, previous)
                elif self.draining:
                    self._refuse(attached, call.start, _overloaded(_LEAVING, 500))
                else:  # the gateway that drove it is gone
                    call.resume(record)
                    await self._run(attached, call)
            case Conflict(record):
                self._refuse(
                    attached,
                    call.start,
                    make_final(
                        tool_pb2.OUTCOME_KEY_CONFLICT,
                        detail=f"the key {key} was used before, for {record.tool} with other arguments",
                        started=tool_pb2.STARTED_NO,
                    ),
                )
            case Fenced(generation):
                self._refuse(
                    attached,
                    call.start,
                    make_final(
                        tool_pb2.OUTCOME_FENCED,
                        detail=f"generation {generation} owns the trajectory {call.key.trajectory_id}, "
                        f"this call came from generation {call.generation}",
                    ),
                )
            case Gone(state):
                how = gateway_pb2.GetCallResponse.CallState.Name(state).removeprefix("CALL_STATE_").lower()
                self._refuse(
                    attached,
                    call.start,
                    make_final(
                        tool_pb2.OUTCOME_RESULT_EXPIRED,
                        detail=f"the call {key} was run, and its result is {how}",
                        started=tool_pb2.STARTED_UNKNOWN,
                    ),
                )
            case Full(detail):
                _log.warning(detail)
                self._refuse(attached, call.start, _overloaded(detail, 1000))

    async def _run(self, attached: Attached, call: Call) -> None:
        key = call.start.key
        call.task = asyncio.current_task()
        self.running[key] = call
        attached.calls.add(key)
        self._idle.clear()
        self._accept(attached, call, joined=call.foreign is not None)
        call.count_in_flight(call.tool_label)
        try:
            try:
                if call.cancelled is not None:
                    final = self._never_run(call, call.cancelled)
                else:
                    final = await self._driver.run(call)
            except Exception as error:  # noqa: BLE001 (a fault of ours must end this call, not all calls)
                _log.error("a call failed inside the gateway", key=key, exc_info=error)
                final = make_final(
                    tool_pb2.OUTCOME_INTERNAL,
                    detail=f"the gateway failed with {type(error).__name__}: {error}",
                    started=call.started,
                )
            await self._finish(call, final)
        finally:
            call.count_in_flight(None)

    def _never_run(self, call: Call, reason: str) -> tool_pb2.Final:
        """The end of a call that was cancelled before it was run here. It may run since an earlier gateway's time."""
        if call.recorded:
            call.started = may_have_started(call.recorded)
            self._stop_in_background(call, reason)
        elif call.resent:
            call.started = tool_pb2.STARTED_UNKNOWN
            address = self._backends.address_of(call.start.last_instance_id)
            if address is not None:
                self._cancel_in_background(self._backends.backends[address], call.start.key, reason)
        return make_final(tool_pb2.OUTCOME_CANCELLED, detail=reason, started=call.started)

    def _join(self, attached: Attached, asking: Call, record: CallRecord, previous: str) -> None:
        key = record.key
        session = attached.session
        running = self.running.get(key)
        if running is not None:
            old = self._hub.sessions.get(previous)
            if old is not None:
                old.calls.discard(key)
            attached.calls.add(key)  # also where the session is the same, forgotten and come back
            running.session_id = session.session_id
            if asking.cancelled is not None:
                self._cancel(running, asking.cancelled)
        self._accept(attached, asking, joined=True, deadline_at=record.deadline_at)
        if record.done:
            if not (previous == session.session_id and session.holds_result(key)):
                session.add_result(record.to_result())
        elif running is not None and running.attempts:
            event = Event()
            event.started.key = key
            event.started.attempt = running.attempts
            event.started.instance_id = running.instance_id
            attached.say(event)
        attached.wake()

    def _accept(self, attached: Attached, call: Call, *, joined: bool, deadline_at: float | None = None) -> None:
        attached.unaccepted = max(0, attached.unaccepted - 1)
        event = Event()
        event.accepted.key = call.start.key
        event.accepted.durability = self.ledger.durability
        left_s = (call.deadline_at if deadline_at is None else deadline_at) - self._now()
        event.accepted.remaining_ms = max(0, int(left_s * 1000))
        event.accepted.joined = joined
        if attached.streaming:
            attached.say(event)

    def _refuse(self, attached: Attached, start: CallStart, final: tool_pb2.Final) -> None:
        """A result for this request alone; the ledger does not change."""
        attached.unaccepted = max(0, attached.unaccepted - 1)
        CALLS.labels(
            tool=start.tool if start.tool in self._backends.tools else "unknown",
            outcome=outcome_label(final.outcome),
            fault=fault_label(final.fault),
        ).inc()
        if attached.session.add_refusal(Result(key=start.key, tool=start.tool, final=final)):
            attached.wake()
            return
        # It may come back for what waits, and send again what has no answer then.
        attached.end(
            goodbye(
                tool_pb2.OUTCOME_OVERLOADED, "too many refusals wait for the client, which does not acknowledge them"
            )
        )

    # -- ends --------------------------------------------------------------------------------------------------------

    async def _finish(self, call: Call, final: tool_pb2.Final) -> None:
        key = call.start.key
        now = self._now()
        ending = Ending(
            cut_output(final, max_output_bytes(call, self._settings)),
            queue_us=int(call.queued_s * 1e6),
            run_us=int(call.run_s * 1e6),
            instance_id=call.instance_id,
            attempts=call.attempts,
        )
        record = await self._store(call, ending, now)
        if call.finished:
            return
        call.finished = True
        self.running.pop(key, None)
        if not self.running:
            self._idle.set()
        if record is not None and record.outcome is not None:
            final = record.outcome.final  # an outcome that was stored before this one stays
            self._deliver(record)
        fault = fault_label(final.fault)
        CALLS.labels(tool=call.tool_label, outcome=outcome_label(final.outcome), fault=fault).inc()
        CALL_DURATION.labels(tool=call.tool_label, fault=fault).observe(now - call.received_at)
        if call.release_when_done:
            try:
                await self.ledger.release(call.key.run_id, [key])
            except LedgerUnavailable as problem:
                _log.debug("a release was not stored", key=key, why=str(problem))

    def _deliver(self, record: CallRecord) -> None:
        attached = self._hub.sessions.get(record.session_id)
        if attached is not None:
            attached.calls.discard(record.key)
            attached.session.add_result(record.to_result())
            attached.wake()

    async def _store(self, call: Call, ending: Ending, now: float) -> CallRecord | None:
        """The record with its one outcome. A result that cannot be stored now reaches its session all the same, and is
        marked."""
        key = call.start.key
        try:
            return await self.ledger.finish(key, ending, now)
        except LedgerUnavailable as problem:
            _log.warning("a result was not stored", key=key, why=str(problem))
            self._spawn(self._store_later(key, ending, now), f"store {key}")
            told = tool_pb2.Final()
            told.CopyFrom(ending.final)
            told.detail = f"{told.detail}; it is not stored: {problem}".removeprefix("; ")
            return replace(call.record(call.session_id), outcome=replace(ending, final=told), finished_at=now)

    async def _store_later(self, key: str, ending: Ending, now: float) -> None:
        """Until it is stored. Meanwhile new calls are refused: there are no more of these than calls ran at once."""
        while True:
            await asyncio.sleep(_STORE_AGAIN_S)
            try:
                await self.ledger.finish(key, ending, now)
            except LedgerUnavailable:
                continue
            return

    def _cancel_all(self, keys: Collection[str], reason: str) -> None:
        for key in keys:
            if (call := self.running.get(key)) is not None:
                self._cancel(call, reason)
            else:
                self._spawn(self._abandon(key, reason), f"abandon {key}")

    async def _abandon_session(self, session_id: str, reason: str) -> None:
        left = await self._leftovers.of_session(session_id)
        self._cancel_all([key for key in left if key not in self.running], reason)

    async def _abandon(self, key: str, reason: str) -> None:
        record = await self._leftovers.end(key, reason)
        if record is not None:
            self._deliver(record)
            await self._leftovers.stop(key, record.attempts, reason)

    def _cancel(self, call: Call, reason: str) -> None:
        if call.cancelled is None and not call.finished:
            call.cancelled = reason
            self._spawn(self._finish_cancelled(call, reason), f"cancel {call.start.key}")

    async def _finish_cancelled(self, call: Call, reason: str) -> None:
        if call.task is not None:
            call.task.cancel()
            await asyncio.wait({call.task})
        if call.finished:
            return
        if call.at is not None:
            self._cancel_in_background(call.at, call.start.key, reason)
        elif call.recorded:
            self._stop_in_background(call, reason)
        await self._finish(call, make_final(tool_pb2.OUTCOME_CANCELLED, detail=reason, started=call.started))

    def _cancel_in_background(self, backend: Backend, key: str, reason: str) -> None:
        self._spawn(self._tell_backend(backend, key, reason), f"backend cancel {key}")

    def _stop_in_background(self, call: Call, reason: str) -> None:
        key = call.start.key
        self._spawn(self._leftovers.stop(key, call.recorded, reason), f"backend cancel {key}")

    async def _tell_backend(self, backend: Backend, key: str, reason: str) -> None:
        problem = await cancel(backend, key, reason, self._settings.timeouts.control_s)
        if problem is not None:
            _log.info("a cancel did not reach the backend", key=key, address=backend.address, why=problem)

    # -- small parts -------------------------------------------------------------------------------------------------

    def _tell(self, call: Call, event: Event) -> None:
        """Started, Progress and Chunk of a running call, to whichever session owns it and has a stream."""
        attached = self._hub.sessions.get(call.session_id)
        if attached is None or not attached.streaming:
            return  # the client learns of Started when it comes back and sends the call again
        kind = event.WhichOneof("event")
        if kind == "progress":
            attached.session.add_progress(event)
        elif kind == "chunk":
            attached.session.add_chunk(event)
        else:
            attached.say(event)
        attached.wake()

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        if self._tasks is None:
            coroutine.close()
            raise RuntimeError("Dispatcher.run() is not being awaited")
        self._tasks.create_task(_guarded(coroutine, name), name=name)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


async def _guarded(coroutine: Coroutine[Any, Any, None], name: str) -> None:
    """A fault of ours in one call's bookkeeping must not take the other calls with it."""
    try:
        await coroutine
    except Exception as error:  # noqa: BLE001 (logged; the call ends at its caller's deadline)
        _log.error("a task failed inside the gateway", task=name, exc_info=error)


def _overloaded(detail: str, retry_after_ms: int) -> tool_pb2.Final:
    return make_final(
        tool_pb2.OUTCOME_OVERLOADED, detail=detail, started=tool_pb2.STARTED_NO, retry_after_ms=retry_after_ms
    )
