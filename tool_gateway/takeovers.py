"""The I/O of a takeover: ask every backend that may have started the call, then let ``takeover.decide`` decide.

Invariant: no backend is asked to lay a tombstone at the instance where the call may still be started.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

from fermata.v1 import tool_pb2

from node_runtime.logs import get_logger
from node_runtime.outcomes import make_final
from tool_gateway.attempts import left_s
from tool_gateway.backends import Backend, Backends
from tool_gateway.backends.attempt import ask
from tool_gateway.calls import Call, CallStart
from tool_gateway.settings import GatewaySettings
from tool_gateway.takeover import Answer, Found, Join, Start, Suspect, Undecidable, Unreachable, choose, decide

_log = get_logger(__name__)
MAX_ATTEMPT = 1 << 30
"""What a client may say of earlier attempts: there is room to count on from it."""
MARGIN_S = 0.25
"""An instance must have been up this much longer than the call is old: clocks of two machines tick unequally."""


class Takeovers:
    """Decides calls that this gateway has no record of and that may have been started before."""

    def __init__(self, settings: GatewaySettings, backends: Backends) -> None:
        self._settings = settings
        self._backends = backends

    async def run(self, call: Call) -> tool_pb2.Final | Backend | None:
        """A Final (INDETERMINATE), the backend to join the call at, or None: start it (at `call.only` if set)."""
        join_only = call.start.mode == CallStart.MODE_JOIN_ONLY
        call.attempts = min(call.start.last_attempt, MAX_ATTEMPT)
        call.unproven = True
        if call.traits.idempotent and not join_only:
            return None
        call.started = tool_pb2.STARTED_UNKNOWN
        call.waiting_for = "the backends that may have started the call"
        await self._wait_for_all(call.start.tool, min(self._settings.retry.rejoin_s, left_s(call) / 2))
        call.waiting_for = ""
        with ExitStack() as held:  # one that leaves is not closed while it is asked
            suspects = self._backends.suspects(call.start.tool)
            complete = self._backends.suspects_complete(call.start.tool)
            for backend in suspects:
                held.enter_context(backend.held())
            return await self._settle(call, suspects, complete, join_only)

    async def _settle(
        self, call: Call, suspects: list[Backend], complete: bool, join_only: bool
    ) -> tool_pb2.Final | Backend | None:
        seen = [Suspect(backend.address, backend.instance_id) for backend in suspects]
        least = min((b for b in suspects if b.serving), key=lambda b: b.in_flight, default=None)
        chosen = choose(seen, call.start.last_instance_id, least.address if least is not None else None)
        spared = next((s.instance_id for s in seen if s.address == chosen), None) if complete else None
        answers = await self._ask_all(call, suspects, spared, join_only)
        decision = decide(
            seen,
            answers,
            chosen=chosen,
            last_instance_id=call.start.last_instance_id,
            join_only=join_only,
            margin_s=MARGIN_S,
            complete=complete,
        )
        _log.info("call taken over", key=call.start.key, decision=type(decision).__name__, chosen=chosen)
        match decision:
            case Join(address):
                return next(backend for backend in suspects if backend.address == address)
            case Undecidable(detail):
                return make_final(tool_pb2.OUTCOME_INDETERMINATE, detail=detail, started=tool_pb2.STARTED_UNKNOWN)
            case Start(address, instance_id):
                call.only = (address, instance_id)
                call.started = tool_pb2.STARTED_NO
                call.unproven = False
                return None

    async def _wait_for_all(self, tool: str, within_s: float) -> None:
        """Gives a gateway that has just started the time to find its backends."""
        try:
            async with asyncio.timeout(within_s):
                await self._backends.wait_for_suspects(tool)
        except TimeoutError:
            return  # those still missing are Unreachable

    async def _ask_all(
        self, call: Call, suspects: list[Backend], spared: str | None, join_only: bool
    ) -> dict[str, Answer]:
        """First the instance last heard of, alone: where the call is found, nobody else need be asked."""
        last = call.start.last_instance_id
        answers: dict[str, Answer] = {}
        for backend in suspects:
            if last and backend.instance_id == last:
                answers[backend.address] = await self._ask(call, backend, spared, join_only)
                if isinstance(answers[backend.address], Found):
                    return answers
        async with asyncio.TaskGroup() as tasks:
            asked = {
                backend.address: tasks.create_task(self._ask(call, backend, spared, join_only))
                for backend in suspects
                if backend.address not in answers
            }
        return answers | {address: task.result() for address, task in asked.items()}

    async def _ask(self, call: Call, backend: Backend, spared: str | None, join_only: bool) -> Answer:
        """`spared`: the instance where the call may still start, which must not lay a tombstone."""
        if not backend.connected:
            return Unreachable("nobody answers there")
        loop = asyncio.get_running_loop()
        return await ask(
            backend,
            key=call.start.key,
            args_sha256=call.digest,
            tombstone=not join_only and backend.instance_id != spared,
            timeout_s=self._settings.timeouts.control_s,
            age_s=lambda: max(0, call.start.age_ms) / 1000 + (loop.time() - call.stamped_after),
        )
