"""Drives one call to its Final: find the tool, check the arguments, take it over or start it, attempt by attempt.

Invariant: ``run`` returns by the call's deadline, and no backend sees arguments that do not fit the tool's schema.
"""

from __future__ import annotations

import asyncio
import time

from fermata.v1 import tool_pb2

from node_runtime.outcomes import make_final
from node_runtime.spans import SpanWriter
from tool_gateway.attempts import Again, Attempts, CancelBackend, Tell, left_s, record_span
from tool_gateway.backends import Backends, InstanceReplaced, Lease, NoSuchTool, ToolLeftOut
from tool_gateway.calls import Call
from tool_gateway.catalogue import Tool, unknown_tool_sentence
from tool_gateway.ledger import LedgerStore
from tool_gateway.metrics import QUEUE_DURATION
from tool_gateway.policy import timeout_final, vouch
from tool_gateway.recoveries import Recoveries
from tool_gateway.recovery import open_attempts
from tool_gateway.settings import GatewaySettings
from tool_gateway.takeovers import Takeovers

_GRADERS_ONLY = (tool_pb2.VISIBILITY_GRADER, tool_pb2.VISIBILITY_HIDDEN)


class Driver:
    """One for all calls; holds no call state of its own."""

    def __init__(
        self,
        settings: GatewaySettings,
        ledger: LedgerStore,
        backends: Backends,
        spans: SpanWriter,
        tell: Tell,
        cancel_backend: CancelBackend,
    ) -> None:
        self._backends = backends
        self._spans = spans
        self._cancel_backend = cancel_backend
        self._attempts = Attempts(settings, ledger, spans, tell, cancel_backend)
        self._takeovers = Takeovers(settings, backends)
        self._recoveries = Recoveries(settings, backends)

    async def run(self, call: Call) -> tool_pb2.Final:
        """The call's Final. Cancelled from outside, it leaves ``call.at`` to whoever cancelled."""
        try:
            async with asyncio.timeout_at(call.deadline_at) as deadline:
                if left_s(call) <= 0:
                    await asyncio.Event().wait()  # until the time-out, which is due: nothing is started without time
                return vouch(await self._run(call), unproven=call.unproven)
        except TimeoutError:
            if not deadline.expired():
                raise
        if call.at is not None:
            self._cancel_backend(call.at, call.start.key, "the call's deadline is over")
        waited = f" while waiting for {call.waiting_for}" if call.waiting_for else ""
        detail = f"the call's {call.deadline_at - call.received_at:.1f} s are over{waited}"
        # Time spent waiting, or seeking a lost instance, is no fault of the tool's.
        infra = call.started == tool_pb2.STARTED_NO or call.disturbed or bool(call.waiting_for)
        return timeout_final(tool_pb2.OUTCOME_DEADLINE_EXCEEDED, call.traits, detail, started=call.started, infra=infra)

    async def _run(self, call: Call) -> tool_pb2.Final:
        tool = await self._find_and_check(call)
        if isinstance(tool, tool_pb2.Final):
            return _unless_begun(call, tool)
        prefer: str | None = None
        if call.recorded or call.resent:
            earlier = self._recoveries if call.recorded else self._takeovers
            taken = await earlier.run(call)
            if isinstance(taken, tool_pb2.Final):
                return taken
            if taken is not None:
                return await self._on_lease(call, self._backends.lease_at(taken, tool))
            prefer = self._backends.address_of(call.instance_id or call.start.last_instance_id)
        avoid: str | None = None
        nth = sum(attempt.outcome != tool_pb2.OUTCOME_UNSPECIFIED for attempt in call.recorded)
        while True:
            try:
                lease = await self._acquire(call, avoid, prefer)
            except InstanceReplaced as gone:
                return make_final(tool_pb2.OUTCOME_NOT_STARTED, detail=str(gone), started=call.started)
            if lease is None:
                detail = f"no backend of {call.start.tool} had room within the queue timeout"
                return make_final(tool_pb2.OUTCOME_QUEUE_TIMEOUT, detail=detail, started=call.started)
            nth += 1
            try:
                ended = await self._attempts.run(call, lease, nth)
            finally:
                self._backends.give_back(lease)
            if not isinstance(ended, Again):
                return ended
            avoid, prefer = lease.backend.address, None
            call.waiting_for = "the next attempt"
            await asyncio.sleep(ended.pause_s)

    async def _on_lease(self, call: Call, lease: Lease) -> tool_pb2.Final:
        try:
            return await self._attempts.join(call, lease, begun=bool(call.recorded))
        finally:
            self._backends.give_back(lease)

    async def _find_and_check(self, call: Call) -> tool_pb2.Final | Tool:
        name = call.start.tool
        if not self._backends.catalogue_known:
            call.waiting_for = f"the tool backends at {', '.join(self._backends.silent_addresses())}"
        try:
            tool = await self._backends.find(name)
        except NoSuchTool:
            return self._unknown(call)
        except ToolLeftOut as left_out:  # the backend's fault: the model that calls the tool has done nothing wrong
            return make_final(tool_pb2.OUTCOME_INTERNAL, detail=str(left_out), started=tool_pb2.STARTED_NO)
        call.waiting_for = ""
        if tool.spec.visibility in _GRADERS_ONLY and not call.start.grader:
            return self._unknown(call)
        call.tool = tool
        call.count_in_flight(call.tool_label)
        problem = tool.validator.check(call.start.args_json)
        if problem is None:
            return tool
        return make_final(tool_pb2.OUTCOME_INVALID_ARGS, detail=problem, text=problem, started=tool_pb2.STARTED_NO)

    def _unknown(self, call: Call) -> tool_pb2.Final:
        tools = self._backends.tools.items()
        names = [name for name, tool in tools if call.start.grader or tool.spec.visibility not in _GRADERS_ONLY]
        sentence = unknown_tool_sentence(call.start.tool[:100], names)
        return make_final(tool_pb2.OUTCOME_UNKNOWN_TOOL, detail=sentence, text=sentence, started=tool_pb2.STARTED_NO)

    async def _acquire(self, call: Call, avoid: str | None, prefer: str | None) -> Lease | None:
        """A place on a backend; None where the caller's queue timeout was quicker."""
        start = call.start
        since = time.monotonic()
        call.waiting_for = f"a backend of {start.tool} with room"
        queue_s = start.queue_timeout_ms / 1000 if start.HasField("queue_timeout_ms") else None
        lease = None
        try:
            async with asyncio.timeout(queue_s) as queue:
                lease = await self._backends.acquire(
                    start.tool, priority=start.priority, avoid=avoid, prefer=prefer, only=call.only
                )
        except TimeoutError:
            if not queue.expired():
                raise
            return None
        finally:
            queued_s = time.monotonic() - since
            call.queued_s += queued_s
            pool = lease.backend.pool if lease is not None else self._backends.pool_of(start.tool)
            QUEUE_DURATION.labels(pool=pool).observe(queued_s)
            record_span(self._spans, call, "tool-queue", since, "", call.attempts + 1)
        call.waiting_for = ""
        return lease


def _unless_begun(call: Call, refusal: tool_pb2.Final) -> tool_pb2.Final:
    """What the catalogue refuses now may have run while it said otherwise: then it is no fault of the model's."""
    if not open_attempts(call.recorded, foreign=bool(call.foreign)):
        return refusal
    detail = f"the call may have run, and the tool {call.start.tool} has changed since: {refusal.detail}"
    return make_final(tool_pb2.OUTCOME_INDETERMINATE, detail=detail, started=tool_pb2.STARTED_UNKNOWN)
