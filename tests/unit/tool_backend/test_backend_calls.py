"""The calls of a process: one start per key, limits, cancellation, drain. No network and no sleeping."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from fermata.v1 import tool_pb2

from tool_backend import Tool, ToolContext, ToolError, tool
from tool_backend import calls as calls_module
from tool_backend.calls import Admission, Calls
from tool_backend.delay import chosen_delay
from tool_backend.journal import State
from tool_backend.pushback import Pushback
from tool_backend.settings import BackendSettings, DelaySettings, JournalSettings

YES, NO = tool_pb2.STARTED_YES, tool_pb2.STARTED_NO
CancelState = tool_pb2.CancelResponse


class Gate:
    """An async and a sync tool that run until they are let go, and count their starts."""

    def __init__(self) -> None:
        self.starts = 0
        self.opened = asyncio.Event()
        self.thread_opened = threading.Event()
        self.entered = asyncio.Event()

    def tool(self, **options: Any) -> Tool:
        @tool(name="gate", **options)
        async def gate(n: int = 0) -> str:
            self.starts += 1
            self.entered.set()
            await self.opened.wait()
            return f"done {n}"

        return gate

    def thread_tool(self, *, heed_cancel: bool = True, **options: Any) -> Tool:
        loop = asyncio.get_running_loop()

        @tool(name="gate", **options)
        def gate(ctx: ToolContext, n: int = 0) -> str:
            self.starts += 1
            loop.call_soon_threadsafe(self.entered.set)
            while not self.thread_opened.wait(0.005):
                if heed_cancel and ctx.cancelled:
                    return "stopped"
            return f"done {n}"

        return gate


Make = Callable[..., Calls]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[Calls] = []

    def build(*tools: Tool, **settings: Any) -> Calls:
        calls = Calls({each.name: each for each in tools}, BackendSettings(**settings), "this-instance")
        calls.open()
        made.append(calls)
        return calls

    yield build
    for calls in made:
        await calls.close(1.0)


def invoke(calls: Calls, key: str = "r/t/0/0/0", args: bytes = b"{}", name: str = "gate", **fields: Any) -> Admission:
    return calls.start_or_join(tool_pb2.Invocation(key=key, tool=name, args_json=args, **fields))


async def end(admission: Admission) -> tool_pb2.Final:
    if admission.call is not None:
        return await asyncio.wait_for(admission.call.wait(), 10)
    assert admission.final is not None
    return admission.final


async def test_many_requests_of_one_key_are_one_start(make: Make) -> None:
    gate = Gate()
    calls = make(gate.tool())
    admissions = [invoke(calls) for _ in range(20)]
    assert [each.joined for each in admissions] == [False] + [True] * 19
    gate.opened.set()
    finals = [await end(each) for each in admissions]
    assert {final.parts[0].text for final in finals} == {b"done 0"}
    assert gate.starts == 1
    later = invoke(calls)
    assert later.call is None
    assert later.joined
    assert later.final == finals[0]
    assert gate.starts == 1


async def test_whoever_waits_may_go_away(make: Make) -> None:
    gate = Gate()
    calls = make(gate.tool())
    admission = invoke(calls)
    assert admission.call is not None
    waiting = asyncio.ensure_future(admission.call.wait())
    await gate.entered.wait()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    gate.opened.set()
    assert (await end(admission)).outcome == tool_pb2.OUTCOME_OK


async def test_other_arguments_under_one_key_conflict(make: Make) -> None:
    gate = Gate()
    calls = make(gate.tool())
    first = invoke(calls)
    final = await end(invoke(calls, args=b'{"n": 1}'))
    assert (final.outcome, final.fault) == (tool_pb2.OUTCOME_KEY_CONFLICT, tool_pb2.FAULT_INFRA)
    gate.opened.set()
    assert (await end(first)).outcome == tool_pb2.OUTCOME_OK
    # The same value spelled differently is another use of the key: arguments are compared as bytes.
    assert (await end(invoke(calls, args=b"{ }"))).outcome == tool_pb2.OUTCOME_KEY_CONFLICT
    assert gate.starts == 1


@pytest.mark.parametrize(
    ("fields", "outcome", "part"),
    [
        ({"expected_instance_id": "another"}, tool_pb2.OUTCOME_NOT_STARTED, "instance another is gone"),
        ({"must_exist": True}, tool_pb2.OUTCOME_NOT_STARTED, "must exist"),
        ({"name": "nobody"}, tool_pb2.OUTCOME_UNKNOWN_TOOL, "There is no tool 'nobody' here; there is: gate."),
        ({"args": b'{"n": "x"}'}, tool_pb2.OUTCOME_INVALID_ARGS, ""),
        ({"args_sha256": b"x" * 32}, tool_pb2.OUTCOME_PROTOCOL, "args_sha256"),
        ({"key": ""}, tool_pb2.OUTCOME_PROTOCOL, "no key"),
        ({"key": "k" * 600}, tool_pb2.OUTCOME_PROTOCOL, "600 characters"),
        ({"session": tool_pb2.SessionRef(session_id="s")}, tool_pb2.OUTCOME_PROTOCOL, "no sessions"),
        ({"attempt_timeout_ms": 0}, tool_pb2.OUTCOME_ATTEMPT_TIMEOUT, "no time left"),
        ({"attempt_timeout_ms": -5}, tool_pb2.OUTCOME_ATTEMPT_TIMEOUT, "no time left"),
    ],
)
async def test_what_may_not_start_says_so_and_leaves_no_trace(
    make: Make, fields: dict[str, Any], outcome: tool_pb2.Outcome, part: str
) -> None:
    gate = Gate()
    calls = make(gate.tool())
    admission = invoke(calls, **fields)
    final = await end(admission)
    assert (final.outcome, final.started) == (outcome, NO)
    assert part in final.detail
    assert not admission.known
    assert calls.journal.entries == 0
    gate.opened.set()
    assert (await end(invoke(calls))).outcome == tool_pb2.OUTCOME_OK


async def test_the_right_instance_and_digest_are_taken(make: Make) -> None:
    gate = Gate()
    calls = make(gate.tool())
    gate.opened.set()
    digest = hashlib.sha256(b"{}").digest()
    admission = invoke(calls, expected_instance_id="this-instance", args_sha256=digest)
    assert (await end(admission)).outcome == tool_pb2.OUTCOME_OK
    assert (await end(invoke(calls, must_exist=True))).outcome == tool_pb2.OUTCOME_OK


async def test_a_tombstoned_key_is_not_started(make: Make) -> None:
    gate = Gate()
    calls = make(gate.tool())
    assert calls.journal.tombstone("r/t/0/0/0", 0.0)
    final = await end(invoke(calls))
    assert (final.outcome, final.started) == (tool_pb2.OUTCOME_NOT_STARTED, NO)
    assert gate.starts == 0


async def test_a_dropped_result_is_expired_and_never_runs_again(make: Make) -> None:
    gate = Gate()
    calls = make(gate.tool())
    gate.opened.set()
    await end(invoke(calls))
    calls.journal.forget_all_results()
    final = await end(invoke(calls))
    assert (final.outcome, final.started) == (tool_pb2.OUTCOME_RESULT_EXPIRED, YES)
    assert gate.starts == 1


@pytest.mark.parametrize("in_thread", [False, True])
async def test_concurrency_is_bounded_with_pushback(make: Make, in_thread: bool) -> None:
    gate = Gate()
    calls = make(gate.thread_tool(max_concurrency=2) if in_thread else gate.tool(max_concurrency=2))
    running = [invoke(calls, key=f"k{number}") for number in range(2)]
    final = await end(invoke(calls, key="k2"))
    assert (final.outcome, final.fault, final.started) == (tool_pb2.OUTCOME_OVERLOADED, tool_pb2.FAULT_INFRA, NO)
    assert final.retry_after_ms >= 50
    assert calls.journal.look_up("k2", b"", 0.0).state is State.UNKNOWN
    assert invoke(calls, key="k1").joined  # joining costs no slot
    gate.opened.set()
    gate.thread_opened.set()
    for each in running:
        assert (await end(each)).outcome == tool_pb2.OUTCOME_OK
    assert (await end(invoke(calls, key="k2"))).outcome == tool_pb2.OUTCOME_OK


async def test_threads_and_the_journal_are_bounds_too(make: Make) -> None:
    gate = Gate()
    calls = make(gate.thread_tool(), threads=1)
    first = invoke(calls, key="k0")
    assert "no thread is free, 1 are busy" in (await end(invoke(calls, key="k1"))).detail
    gate.thread_opened.set()
    await end(first)
    small = make(Gate().tool(), journal=JournalSettings(max_entries=1))
    invoke(small, key="k0")
    final = await end(invoke(small, key="k1"))
    assert (final.outcome, final.started) == (tool_pb2.OUTCOME_OVERLOADED, NO)
    assert "journal" in final.detail


async def test_a_thread_that_cannot_be_had_refuses_the_call_and_leaves_its_key_free(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    gate = Gate()
    calls = make(gate.thread_tool())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        refused = await end(invoke(calls))
    assert (refused.outcome, refused.started) == (tool_pb2.OUTCOME_OVERLOADED, NO)
    assert calls.journal.running == 0
    gate.thread_opened.set()
    assert (await end(invoke(calls))).outcome == tool_pb2.OUTCOME_OK


class Mute(Exception):
    def __str__(self) -> str:
        raise LookupError("no words")


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize(
    ("error", "said"),
    [(ValueError("file \udcff"), "file ?"), (Mute(), "__str__ raised LookupError"), (ToolError("\udcff"), None)],
)
async def test_an_error_whose_text_cannot_travel_is_still_the_tools(
    make: Make, in_thread: bool, error: Exception, said: str | None
) -> None:
    @tool(name="gate")
    def in_a_thread() -> str:
        raise error

    @tool(name="gate")
    async def in_the_loop() -> str:
        raise error

    final = await end(invoke(make(in_a_thread if in_thread else in_the_loop)))
    assert (final.outcome, final.fault) == (tool_pb2.OUTCOME_TOOL_ERROR, tool_pb2.FAULT_MODEL)
    assert said is None or said in final.detail


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize(
    ("options", "fields", "outcome", "fault"),
    [
        ({"default_timeout_s": 0.02}, {}, tool_pb2.OUTCOME_TOOL_TIMEOUT, tool_pb2.FAULT_MODEL),
        ({"max_timeout_s": 0.02}, {"attempt_timeout_ms": 9000}, tool_pb2.OUTCOME_TOOL_TIMEOUT, tool_pb2.FAULT_MODEL),
        ({}, {"attempt_timeout_ms": 20}, tool_pb2.OUTCOME_ATTEMPT_TIMEOUT, tool_pb2.FAULT_INFRA),
        (
            {"timeout_fault": "model"},
            {"attempt_timeout_ms": 20},
            tool_pb2.OUTCOME_ATTEMPT_TIMEOUT,
            tool_pb2.FAULT_MODEL,
        ),
    ],
)
async def test_time_limits(
    make: Make,
    in_thread: bool,
    options: dict[str, Any],
    fields: dict[str, Any],
    outcome: tool_pb2.Outcome,
    fault: tool_pb2.Fault,
) -> None:
    gate = Gate()
    calls = make(gate.thread_tool(**options) if in_thread else gate.tool(**options))
    final = await end(invoke(calls, **fields))
    assert (final.outcome, final.fault, final.started) == (outcome, fault, YES)
    assert [part.text for part in final.parts] == (
        [b"The tool ran out of time."] if outcome == tool_pb2.OUTCOME_TOOL_TIMEOUT else []
    )
    assert (await end(invoke(calls, **fields))).outcome == outcome  # the end it had is the end it keeps
    assert gate.starts == 1


async def test_a_function_that_ignores_its_end_keeps_its_slot_but_nothing_else(make: Make) -> None:
    gate = Gate()
    calls = make(gate.thread_tool(heed_cancel=False, max_concurrency=1, max_timeout_s=0.02), threads=4)
    assert (await end(invoke(calls, key="k0"))).outcome == tool_pb2.OUTCOME_TOOL_TIMEOUT
    assert await calls.wait_idle(1.0)
    assert (await end(invoke(calls, key="k1"))).outcome == tool_pb2.OUTCOME_OVERLOADED
    gate.thread_opened.set()
    await asyncio.wait(list(calls._work), timeout=5)
    assert (await end(invoke(calls, key="k1"))).outcome == tool_pb2.OUTCOME_OK


@pytest.mark.parametrize("in_thread", [False, True])
async def test_cancel_stops_the_work(make: Make, in_thread: bool) -> None:
    gate = Gate()
    calls = make(gate.thread_tool() if in_thread else gate.tool())
    admission = invoke(calls)
    await gate.entered.wait()
    assert calls.cancel("r/t/0/0/0", "no longer needed") == CancelState.CANCEL_STATE_STOPPING
    assert calls.cancel("r/t/0/0/0", "again") == CancelState.CANCEL_STATE_STOPPING
    final = await end(admission)
    assert (final.outcome, final.fault, final.started) == (tool_pb2.OUTCOME_CANCELLED, tool_pb2.FAULT_CALLER, YES)
    assert final.detail == "cancelled: no longer needed"
    assert calls.cancel("r/t/0/0/0", "") == CancelState.CANCEL_STATE_ALREADY_DONE
    assert calls.cancel("unknown", "") == CancelState.CANCEL_STATE_NOT_FOUND
    assert (await end(invoke(calls))).outcome == tool_pb2.OUTCOME_CANCELLED
    assert gate.starts == 1


async def test_cancel_of_work_that_will_not_stop(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "CANCEL_GRACE_S", 0.02)
    let_go = asyncio.Event()

    @tool
    async def stubborn() -> str:
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue
        return "finished all the same"

    calls = make(stubborn)
    admission = invoke(calls, name="stubborn")
    await asyncio.sleep(0)
    calls.cancel("r/t/0/0/0", "")
    assert (await end(admission)).outcome == tool_pb2.OUTCOME_CANCELLED
    assert await calls.close(0.02) == ["stubborn"]
    let_go.set()
    assert await calls.close(1.0) == []


async def test_events_of_a_call(make: Make) -> None:
    steps = [asyncio.Event() for _ in range(3)]

    @tool
    async def steady(ctx: ToolContext) -> str:
        for number, step in enumerate(steps):
            await step.wait()
            ctx.progress(number / 2, f"step {number}")
            ctx.progress(number / 2, f"step {number}!")
        return "end"

    calls = make(steady)
    admission = invoke(calls, name="steady")
    assert admission.call is not None
    events = admission.call.events(0.01)
    seen = []
    for step in steps:
        step.set()
        while (event := await asyncio.wait_for(anext(events), 5)).WhichOneof("event") == "heartbeat":
            pass
        seen.append((event.progress.fraction, event.progress.message))
    assert seen == [(0.0, b"step 0!"), (0.5, b"step 1!"), (1.0, b"step 2!")]  # of each burst the latest
    rest = [event.WhichOneof("event") async for event in events]
    assert rest[-1] == "final"
    assert rest.count("final") == 1


async def test_silence_is_filled_with_heartbeats(make: Make) -> None:
    gate = Gate()
    calls = make(gate.tool())
    admission = invoke(calls)
    assert admission.call is not None
    events = admission.call.events(0.005)
    kinds = [(await asyncio.wait_for(anext(events), 5)).WhichOneof("event") for _ in range(3)]
    assert kinds == ["heartbeat"] * 3
    gate.opened.set()
    assert [event.WhichOneof("event") async for event in events][-1] == "final"


async def test_a_watcher_that_goes_away_is_forgotten(make: Make) -> None:
    gate = Gate()
    calls = make(gate.tool())
    admission = invoke(calls)
    assert admission.call is not None
    watching = [admission.call.events(0.001) for _ in range(10)]
    for events in watching:
        assert (await anext(events)).WhichOneof("event") == "heartbeat"
    assert len(admission.call._watchers) == 10
    for events in watching:
        await events.aclose()
    assert not admission.call._watchers


async def test_drain_lets_running_calls_end_and_starts_nothing(make: Make) -> None:
    gate = Gate()
    calls = make(gate.tool())
    running = invoke(calls, key="k0")
    calls.drain()
    final = await end(invoke(calls, key="k1"))
    assert (final.outcome, final.started) == (tool_pb2.OUTCOME_OVERLOADED, NO)
    assert not final.HasField("retry_after_ms")
    assert not await calls.wait_idle(0.0)
    assert invoke(calls, key="k0").joined
    gate.opened.set()
    assert await calls.wait_idle(5.0)
    assert (await end(running)).outcome == tool_pb2.OUTCOME_OK


async def test_what_outlasts_the_grace_is_indeterminate(make: Make) -> None:
    gate = Gate()
    calls = make(gate.tool())
    running = invoke(calls)
    calls.drain()
    assert not await calls.wait_idle(0.01)
    assert [call.key for call in calls.abandon()] == ["r/t/0/0/0"]
    final = await end(running)
    assert (final.outcome, final.fault, final.started) == (tool_pb2.OUTCOME_INDETERMINATE, tool_pb2.FAULT_INFRA, YES)
    assert await calls.wait_idle(1.0)


async def test_nothing_starts_before_the_process_is_open() -> None:
    gate = Gate()
    calls = Calls({"gate": gate.tool()}, BackendSettings(), "this-instance")
    assert "still starting" in (await end(invoke(calls))).detail


async def test_output_is_cut_to_the_smaller_bound(make: Make) -> None:
    @tool(max_output_bytes=100)
    async def long() -> str:
        return "x" * 1000

    calls = make(long)
    for number, (asked, kept) in enumerate([(0, 100), (10, 10), (500, 100)]):
        final = await end(invoke(calls, key=f"k{number}", name="long", max_output_bytes=asked))
        assert len(final.parts[0].text) == kept
        assert (final.truncated, final.total_bytes) == (True, 1000)


@pytest.mark.parametrize("in_thread", [False, True])
async def test_a_delay_on_purpose_heeds_cancel_and_limits(make: Make, in_thread: bool) -> None:
    gate = Gate()
    gate.opened.set()
    gate.thread_opened.set()
    delay = DelaySettings(share=1.0, seconds=(60.0, 60.0))
    calls = make(gate.thread_tool() if in_thread else gate.tool(), delay=delay)
    timed = invoke(calls, key="k0", attempt_timeout_ms=20)
    assert (await end(timed)).outcome == tool_pb2.OUTCOME_ATTEMPT_TIMEOUT
    cancelled = invoke(calls, key="k1")
    await asyncio.sleep(0)
    calls.cancel("k1", "")
    assert (await end(cancelled)).outcome == tool_pb2.OUTCOME_CANCELLED
    assert gate.starts == 0


def test_which_calls_are_delayed_follows_from_the_key() -> None:
    settings = DelaySettings(share=0.25, seconds=(1.0, 3.0))
    delays = [chosen_delay(f"r/t{number}/0/0/0", settings) for number in range(4000)]
    chosen = [delay for delay in delays if delay > 0]
    assert 0.22 < len(chosen) / len(delays) < 0.28
    assert all(1.0 <= delay < 3.0 for delay in chosen)
    assert max(chosen) - min(chosen) > 1.8
    assert delays[:10] == [chosen_delay(f"r/t{number}/0/0/0", settings) for number in range(10)]
    assert chosen_delay("k", DelaySettings()) == 0.0


def test_pushback_follows_the_run_time_within_bounds() -> None:
    pushback = Pushback()
    assert pushback.retry_after_ms("t") == 50
    pushback.ended("t", 0.4)
    assert pushback.retry_after_ms("t") == 400
    pushback.ended("t", 100.0)
    assert pushback.retry_after_ms("t") == 5000
    assert pushback.retry_after_ms("other") == 50


async def test_a_thousand_calls_leave_nothing_behind(make: Make) -> None:
    @tool
    async def echo(n: int) -> int:
        return n

    calls = make(echo)
    admissions = [invoke(calls, key=f"k{n}", args=json.dumps({"n": n}).encode(), name="echo") for n in range(1000)]
    finals = [await end(each) for each in admissions]
    assert [int(final.parts[0].text) for final in finals] == list(range(1000))
    assert calls.journal.running == 0
    assert not calls._work
    assert calls._working["echo"] == 0
