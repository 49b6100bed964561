"""The I/O of a recovery: ask the instances that the ledger names for a call, then let ``recovery.decide`` decide.

Invariant: an instance is known by its id: who else answers at its address is not asked and not believed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack

from fermata.v1 import tool_pb2

from node_runtime.logs import get_logger
from node_runtime.outcomes import make_final
from tool_gateway.attempts import left_s
from tool_gateway.backends import Backend, Backends
from tool_gateway.backends.attempt import ask
from tool_gateway.calls import Call, CallStart
from tool_gateway.ledger import AttemptRecord
from tool_gateway.recovery import StartAnywhere, decide, open_attempts
from tool_gateway.settings import GatewaySettings
from tool_gateway.takeover import Answer, Found, Join, NotThere, Start, Undecidable, Unreachable
from tool_gateway.takeovers import MARGIN_S

_log = get_logger(__name__)


class Recoveries:
    """Decides calls of which the ledger holds attempts, and which an earlier gateway drove."""

    def __init__(self, settings: GatewaySettings, backends: Backends) -> None:
        self._settings = settings
        self._backends = backends

    async def run(self, call: Call) -> tool_pb2.Final | Backend | None:
        """A Final (INDETERMINATE), the backend to join the call at, or None: attempt it (at `call.only` if set)."""
        attempts = open_attempts(call.recorded, foreign=bool(call.foreign))
        join_only = call.start.mode == CallStart.MODE_JOIN_ONLY
        if not attempts and not join_only:
            return None  # every attempt was refused before it began
        call.started = tool_pb2.STARTED_UNKNOWN
        call.unproven = True
        retry = self._settings.retry
        within_s = retry.rejoin_idempotent_s if call.traits.idempotent else retry.rejoin_s
        call.waiting_for = "the instances that the call was sent to"
        found = await self.find(attempts, min(within_s, left_s(call) / 2))
        call.waiting_for = ""
        if call.traits.idempotent and not join_only:
            return None
        with ExitStack() as held:  # one that leaves is not closed while it is asked
            for backend in found.values():
                held.enter_context(backend.held())
            return await self._settle(call, attempts, found, join_only)

    async def find(self, attempts: Sequence[AttemptRecord], within_s: float) -> dict[str, Backend]:
        """Where the instances answer, by their ids. One whose address is another's by now is not waited for."""
        try:
            async with asyncio.timeout(within_s):
                while not all(self._is_settled(attempt) for attempt in attempts):
                    await self._backends.changed.wait()
        except TimeoutError:
            pass  # those still missing cannot be asked
        answering = {b.instance_id: b for b in self._backends.backends.values() if b.twin_of is None}
        wanted = {attempt.instance_id for attempt in attempts}
        return {instance: backend for instance, backend in answering.items() if instance in wanted and instance}

    def _is_settled(self, attempt: AttemptRecord) -> bool:
        """The instance answers somewhere, or somebody else does where it was."""
        there = self._backends.backends.get(attempt.address)
        return self._backends.address_of(attempt.instance_id) is not None or (there is not None and there.connected)

    async def _settle(
        self, call: Call, attempts: list[AttemptRecord], found: dict[str, Backend], join_only: bool
    ) -> tool_pb2.Final | Backend | None:
        last = attempts[-1].instance_id if attempts else ""
        may_start = last in found and (found[last].serving or call.foreign)
        spared = last if may_start and not join_only else None
        async with asyncio.TaskGroup() as tasks:
            asked = {
                attempt.instance_id: tasks.create_task(
                    self._ask(call, attempt, found.get(attempt.instance_id), spared, join_only)
                )
                for attempt in attempts
            }
        answers = {instance: task.result() for instance, task in asked.items()}
        decision = decide(attempts, answers, spared=spared, join_only=join_only, margin_s=MARGIN_S)
        _log.info("call recovered", key=call.start.key, decision=type(decision).__name__, instance=last)
        match decision:
            case Join(instance):
                call.attempts = next(a.number for a in attempts if a.instance_id == instance)
                return found[instance]
            case Start(_, instance):
                call.only = (found[instance].address, instance)
            case StartAnywhere():
                call.started = tool_pb2.STARTED_NO
                call.unproven = False
            case Undecidable(detail):
                return make_final(tool_pb2.OUTCOME_INDETERMINATE, detail=detail, started=tool_pb2.STARTED_UNKNOWN)
        return None

    async def _ask(
        self, call: Call, attempt: AttemptRecord, backend: Backend | None, spared: str | None, join_only: bool
    ) -> Answer:
        if backend is None:
            there = self._backends.backends.get(attempt.address)
            other = there.instance_id if there is not None else None
            return Unreachable(f"the instance {other} answers there now" if other else "nobody answers there")
        loop = asyncio.get_running_loop()
        answer = await ask(
            backend,
            key=call.start.key,
            args_sha256=call.digest,
            tombstone=not join_only and attempt.instance_id != spared,
            timeout_s=self._settings.timeouts.control_s,
            age_s=lambda: loop.time() - attempt.started_at,
        )
        if isinstance(answer, NotThere) and answer.instance_id != attempt.instance_id:
            return Unreachable(f"the instance {answer.instance_id} answers there now")
        if isinstance(answer, Found) and backend.instance_id != attempt.instance_id:
            return Unreachable("it was replaced while it was asked")
        return answer
