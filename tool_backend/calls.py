"""All calls of this process: admission, the journal, limits, cancellation and drain.

Invariant: looking a key up and starting it is one step without a wait in between, so a key starts at most once however
many requests race; and the work belongs to this object, never to the request that brought it, so a caller that goes
away stops nothing and finds the result later.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Mapping

from fermata.v1 import tool_pb2

from node_runtime.keys import MAX_KEY_LENGTH, args_sha256
from node_runtime.logs import get_logger
from node_runtime.outcomes import make_final
from tool_backend import execute
from tool_backend.call import Call
from tool_backend.context import ToolContext
from tool_backend.delay import chosen_delay
from tool_backend.journal import Begin, Journal, JournalLimits, State
from tool_backend.metrics import ToolMetrics
from tool_backend.pushback import Pushback
from tool_backend.results import limit_final
from tool_backend.settings import BackendSettings
from tool_backend.signature import InvalidArguments
from tool_backend.threads import ThreadPool
from tool_backend.tool import Tool

_log = get_logger(__name__)

CANCEL_GRACE_S = 2.0  # for a cancelled tool to end by itself before the call is ended without it

CallJournal = Journal[Call, tool_pb2.Final]


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """What became of a request: a call to watch, or the end it has already. ``joined``: the key was here before."""

    call: Call | None = None
    final: tool_pb2.Final | None = None
    joined: bool = False
    known: bool = False
    """The key is in the journal, so the request counts as accepted."""


class Calls:
    """The calls of one backend process. Lives on one event loop."""

    def __init__(self, tools: Mapping[str, Tool], settings: BackendSettings, instance_id: str) -> None:
        self.instance_id = instance_id
        self.tools = tools
        self.journal: CallJournal = Journal(JournalLimits(**settings.journal.model_dump()))
        self._settings = settings
        self._threads = ThreadPool(settings.threads)
        self._working: Counter[str] = Counter()  # functions that run, those of ended calls among them
        self._pushback = Pushback()
        self._metrics = {name: ToolMetrics(name) for name in tools}
        self._unknown_tool = ToolMetrics("unknown")
        self._work: dict[asyncio.Future[tool_pb2.Final], Call] = {}
        self._closed_because: str | None = "is still starting"
        self._idle = asyncio.Event()
        self._idle.set()

    # Admission ------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin to accept calls."""
        self._closed_because = None

    def start_or_join(self, invocation: tool_pb2.Invocation) -> Admission:
        """Start the call, join it where it runs, or say how it ended or why it may not start. Never waits."""
        now = time.monotonic()
        if (problem := self._malformed(invocation)) is not None:
            return _refuse(tool_pb2.OUTCOME_PROTOCOL, problem)
        expected = invocation.expected_instance_id
        if expected and expected != self.instance_id:
            return _refuse(tool_pb2.OUTCOME_NOT_STARTED, f"instance {expected} is gone; this one is {self.instance_id}")
        digest = invocation.args_sha256 or args_sha256(invocation.args_json)
        known = self.known(invocation.key, digest, now)
        if known is not None:
            return known
        if invocation.must_exist:
            return _refuse(tool_pb2.OUTCOME_NOT_STARTED, f"key '{invocation.key}' is not known here and must exist")
        return self._start(invocation, digest, now)

    def known(self, key: str, digest: bytes, now: float) -> Admission | None:
        """What the journal says of a key; None where it does not know it."""
        found = self.journal.look_up(key, digest, now)
        if found.state is State.UNKNOWN:
            return None
        if found.state is State.RUNNING and found.entry is not None:
            return Admission(call=found.entry.owner, joined=True, known=True)
        if found.state is State.DONE and found.entry is not None:
            return Admission(final=found.entry.result, joined=True, known=True)
        if found.state is State.CONFLICT:
            detail = f"key '{key}' was used with other arguments before; a key belongs to one call"
            return Admission(final=make_final(tool_pb2.OUTCOME_KEY_CONFLICT, detail=detail, started=_YES))
        if found.state is State.TOMBSTONED:
            return _refuse(tool_pb2.OUTCOME_NOT_STARTED, f"key '{key}' is tombstoned here and can never start")
        detail = f"key '{key}' ended here and its result is no longer kept"
        return Admission(final=make_final(tool_pb2.OUTCOME_RESULT_EXPIRED, detail=detail, started=_YES))

    def _malformed(self, invocation: tool_pb2.Invocation) -> str | None:
        if not invocation.key:
            return "the invocation has no key; a key is run/trajectory/generation/turn/ordinal"
        if len(invocation.key) > MAX_KEY_LENGTH:
            return f"the key has {len(invocation.key)} characters, at most {MAX_KEY_LENGTH} are allowed"
        if invocation.args_sha256 and invocation.args_sha256 != args_sha256(invocation.args_json):
            return "args_sha256 is not the SHA-256 of args_json"
        if invocation.HasField("session"):
            return f"tool '{invocation.tool}' has no sessions; call it without one"
        return None

    def _start(self, invocation: tool_pb2.Invocation, digest: bytes, now: float) -> Admission:
        if self._closed_because is not None:
            return self._overloaded(f"this backend {self._closed_because}", None)
        tool = self.tools.get(invocation.tool)
        if tool is None:
            self._unknown_tool.refused(tool_pb2.OUTCOME_UNKNOWN_TOOL)
            names = ", ".join(sorted(self.tools))
            sentence = f"There is no tool '{invocation.tool}' here; there is: {names}."
            return Admission(
                final=make_final(tool_pb2.OUTCOME_UNKNOWN_TOOL, text=sentence, detail=sentence, started=_NO)
            )
        try:
            arguments = tool.signature.bind(invocation.args_json)
        except InvalidArguments as error:
            self._metrics[tool.name].refused(tool_pb2.OUTCOME_INVALID_ARGS)
            return Admission(final=make_final(tool_pb2.OUTCOME_INVALID_ARGS, text=str(error), started=_NO))
        seconds, own_limit = _time_limit(tool, invocation)
        if seconds <= 0:
            return _refuse(tool_pb2.OUTCOME_ATTEMPT_TIMEOUT, "the call arrived with no time left")
        bound = tool.options.max_concurrency
        if bound and self._working[tool.name] >= bound:
            return self._overloaded(f"{bound} calls of tool '{tool.name}' run already, its bound", tool)
        # The thread is there before the key is in the journal: whatever can be refused is refused before the start.
        if not tool.is_async and not self._threads.make_ready():
            return self._overloaded(f"no thread is free, {self._threads.busy} are busy", tool)
        call = Call(key=invocation.key, tool=tool, started_at=now)
        begun = self.journal.begin(invocation.key, digest, call, now, idempotent=tool.idempotent)
        if begun is not Begin.STARTED:
            return self._overloaded("the journal of this backend is full", tool)
        self._run(call, invocation, arguments, seconds, own_limit=own_limit)
        return Admission(call=call, known=True)

    def _overloaded(self, why: str, tool: Tool | None) -> Admission:
        retry_after_ms = None if tool is None else self._pushback.retry_after_ms(tool.name)
        if tool is not None:
            self._metrics[tool.name].refused(tool_pb2.OUTCOME_OVERLOADED)
        final = make_final(tool_pb2.OUTCOME_OVERLOADED, detail=why, started=_NO, retry_after_ms=retry_after_ms)
        return Admission(final=final)

    # Running --------------------------------------------------------------------------------------------------------

    def _run(
        self,
        call: Call,
        invocation: tool_pb2.Invocation,
        arguments: dict[str, object],
        seconds: float,
        *,
        own_limit: bool,
    ) -> None:
        tool = call.tool
        loop = asyncio.get_running_loop()
        context = ToolContext(
            key=call.key,
            tool=tool.name,
            deadline=call.started_at + seconds,
            attempt=invocation.attempt or 1,
            context=invocation.context,
            on_progress=call.report,
        )
        call.context = context
        asked = invocation.max_output_bytes
        max_bytes = min(tool.options.max_output_bytes, asked) if asked else tool.options.max_output_bytes
        delay_s = chosen_delay(call.key, self._settings.delay)
        self._idle.clear()
        self._working[tool.name] += 1
        self._metrics[tool.name].started()
        work: asyncio.Future[tool_pb2.Final]
        if tool.is_async:
            work = loop.create_task(execute.run_async(tool, arguments, context, delay_s, max_bytes), name=call.key)
        else:
            work = self._threads.submit(
                functools.partial(execute.run_sync, tool, arguments, context, delay_s, max_bytes)
            )
        call.work = work
        self._work[work] = call
        work.add_done_callback(self._work_ended)
        call.timer = loop.call_later(seconds, self._out_of_time, call, seconds, own_limit)

    def _work_ended(self, work: asyncio.Future[tool_pb2.Final]) -> None:
        call = self._work.pop(work)
        self._working[call.tool.name] -= 1
        error = None if work.cancelled() else work.exception()
        if error is not None:
            _log.error("a call ended without a result", tool=call.tool.name, key=call.key, exc_info=error)
        if call.ended:
            return  # its limit ended it before; only the function was still running
        if call.stop_as is not None:
            self._end(call, call.stop_as)
        elif work.cancelled() or error is not None:
            detail = f"the backend lost the call of tool '{call.tool.name}': {error or 'it was cancelled from outside'}"
            self._end(call, make_final(tool_pb2.OUTCOME_INTERNAL, detail=detail, started=_YES))
        else:
            self._end(call, work.result())

    def _end(self, call: Call, final: tool_pb2.Final) -> None:
        now = time.monotonic()
        seconds = now - call.started_at
        final.usage.run_us = round(seconds * 1e6)
        if final.usage.cost:
            final.usage.cost_unit = call.tool.options.cost_unit
        self.journal.finish(call.key, final, final.ByteSize(), now)
        self._pushback.ended(call.tool.name, seconds)
        self._metrics[call.tool.name].ended(final.outcome, seconds)
        call.end(final)
        if self.journal.running == 0:
            self._idle.set()

    def _out_of_time(self, call: Call, seconds: float, own_limit: bool) -> None:
        detail = f"tool '{call.tool.name}' did not end within {seconds:g} s"
        if call.stop_as is None:
            if own_limit:
                call.stop_as = limit_final(tool_pb2.OUTCOME_TOOL_TIMEOUT, f"{detail}, its own limit")
            else:
                fault = call.tool.spec.timeout_fault
                detail = f"{detail}, the time of this attempt"
                call.stop_as = make_final(tool_pb2.OUTCOME_ATTEMPT_TIMEOUT, detail=detail, started=_YES, fault=fault)
        self._stop_work(call)
        self._end(call, call.stop_as)

    # Stopping -------------------------------------------------------------------------------------------------------

    def cancel(self, key: str, reason: str) -> tool_pb2.CancelResponse.CancelState:
        """Stop a running call; its end is CANCELLED, at the latest ``CANCEL_GRACE_S`` from now."""
        found = self.journal.look_up(key, b"", time.monotonic())
        if found.state in (State.DONE, State.ENDED):
            return tool_pb2.CancelResponse.CANCEL_STATE_ALREADY_DONE
        if found.state is not State.RUNNING or found.entry is None or found.entry.owner is None:
            return tool_pb2.CancelResponse.CANCEL_STATE_NOT_FOUND
        call = found.entry.owner
        if call.stop_as is None:
            detail = f"cancelled: {reason}" if reason else "cancelled"
            self._stop(call, make_final(tool_pb2.OUTCOME_CANCELLED, detail=detail[:1000], started=_YES))
        return tool_pb2.CancelResponse.CANCEL_STATE_STOPPING

    def _stop(self, call: Call, stop_as: tool_pb2.Final) -> None:
        call.stop_as = stop_as
        loop = asyncio.get_running_loop()
        if call.timer is not None:
            call.timer.cancel()
            grace = min(call.timer.when(), loop.time() + CANCEL_GRACE_S)
            call.timer = loop.call_at(grace, self._end, call, stop_as)
        self._stop_work(call)

    def _stop_work(self, call: Call) -> None:
        if call.context is not None:
            call.context._cancel()
        if isinstance(call.work, asyncio.Task):
            call.work.cancel()

    def drain(self) -> None:
        """Accept no new keys from now on; what runs goes on, and results are still handed out."""
        self._closed_because = "is shutting down"

    async def wait_idle(self, seconds: float) -> bool:
        """Wait until no call runs; False where ``seconds`` were not enough."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def abandon(self) -> list[Call]:
        """End what still runs, because the process ends: nobody can say what such a call has done."""
        abandoned = [call for call in self._work.values() if not call.ended]
        for call in abandoned:
            detail = f"the backend shut down while tool '{call.tool.name}' was running"
            if call.stop_as is None:  # else it was cancelled and is on its way to that end
                call.stop_as = make_final(tool_pb2.OUTCOME_INDETERMINATE, detail=detail, started=_YES)
            self._stop_work(call)
            self._end(call, call.stop_as)
        return abandoned

    async def close(self, seconds: float) -> list[str]:
        """Let go of the threads and tasks; the names of tools whose functions still run after ``seconds``."""
        for call in list(self._work.values()):
            self._stop_work(call)
        self._threads.close()
        if self._work:
            await asyncio.wait(list(self._work), timeout=seconds)
        return sorted({call.tool.name for call in self._work.values()})


_NO = tool_pb2.STARTED_NO
_YES = tool_pb2.STARTED_YES


def _refuse(outcome: tool_pb2.Outcome, detail: str) -> Admission:
    return Admission(final=make_final(outcome, detail=detail, started=_NO))


def _time_limit(tool: Tool, invocation: tool_pb2.Invocation) -> tuple[float, bool]:
    """Seconds this call may take, and whether it is the tool's own limit that sets them."""
    if not invocation.HasField("attempt_timeout_ms"):
        return tool.options.default_seconds, True
    asked = invocation.attempt_timeout_ms / 1000
    return (tool.options.max_timeout_s, True) if asked >= tool.options.max_timeout_s else (asked, False)
