"""Backend processes as a gateway meets them: real processes, real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from backend_process import Backend, backend, run_to_end
from fermata.v1 import tool_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

pytestmark = pytest.mark.integration

ODD = "odd_tools:everything"
SERVICE = "fermata.v1.ToolBackendService"
Outcome, Fault = tool_pb2.Outcome, tool_pb2.Fault
TOMBSTONE = tool_pb2.AttachRequest.IF_ABSENT_TOMBSTONE


class Held:
    """Arguments of the tools that hold, their ledger, and the file that lets them go."""

    def __init__(self, folder: Path) -> None:
        self.ledger = folder / "ledger"
        self.until = folder / "until"
        self.arguments = {"ledger": str(self.ledger), "until": str(self.until)}

    def let_go(self) -> None:
        self.until.touch()

    def starts(self) -> list[str]:
        return [line.split(" ", 1)[1] for line in self.ledger.read_text().splitlines()] if self.ledger.exists() else []


@pytest.fixture
def held(tmp_path: Path) -> Held:
    return Held(tmp_path)


@pytest.fixture
async def odd(tmp_path: Path) -> AsyncIterator[Backend]:
    async with backend(tmp_path, ODD) as running:
        yield running


async def next_kind(stream: Any) -> str:
    response = await stream.read()
    assert response is not grpc.aio.EOF
    return str(response.event.WhichOneof("event"))


async def until_progress(stream: Any) -> None:
    """The tool's own code runs when its first progress is here."""
    while await next_kind(stream) != "progress":
        pass


async def rest_of(stream: Any) -> list[tool_pb2.CallEvent]:
    """The events that are still to come. A stream is read in one way only, so there is no ``async for`` here."""
    events = []
    while (response := await stream.read()) is not grpc.aio.EOF:
        events.append(response.event)
    return events


async def test_the_built_in_tools_answer(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "title": "zorbla", "text": "The code is 417."}\n')
    options = ("--set", f"backend.search.corpus={corpus}", "--set", "backend.search.top_k=1")
    async with backend(tmp_path, "calculator", "search", *options, "--set", "runtime.metrics_port=0") as running:
        final = await running.invoke("calculator", {"expression": "12*34"}, key="r/t/0/0/0")
        assert (final.outcome, final.parts[0].text) == (Outcome.OUTCOME_OK, b"408")
        final = await running.invoke("search", {"query": "zorbla"}, key="r/t/0/0/1")
        assert final.parts[0].text == b"zorbla: The code is 417."
        final = await running.invoke("calculator", {"expression": "9**9**9"}, key="r/t/0/0/2")
        assert (final.outcome, final.fault) == (Outcome.OUTCOME_TOOL_ERROR, Fault.FAULT_MODEL)
        described = await running.describe()
        assert [spec.name for spec in described.tools] == ["calculator", "search"]
        assert described.instance_id == running.instance_id
        assert described.journal.durability == tool_pb2.DURABILITY_MEMORY
        assert described.uptime_ms > 0
        assert set(described.features) == {"invoke_stream", "attach", "cancel"}
        metrics = await scrape(running.ready["metrics_port"])
        assert 'fermata_backend_calls_total{outcome="OK",tool="calculator"} 1.0' in metrics
        assert 'fermata_backend_calls_total{outcome="TOOL_ERROR",tool="calculator"} 1.0' in metrics
        assert 'fermata_backend_call_duration_seconds_count{tool="search"} 1.0' in metrics
        assert 'fermata_backend_calls_in_flight{tool="calculator"} 0.0' in metrics


async def scrape(port: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    body = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return body.decode()


async def test_health_and_reflection(odd: Backend) -> None:
    health = health_pb2_grpc.HealthStub(odd.channel)
    for service in (SERVICE, ""):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    stub = reflection_pb2_grpc.ServerReflectionStub(odd.channel)
    call = stub.ServerReflectionInfo(timeout=10)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    listed = await call.read()
    assert SERVICE in [service.name for service in listed.list_services_response.service]
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_racing_requests_of_one_key_start_once(odd: Backend, held: Held) -> None:
    racing = [asyncio.ensure_future(odd.invoke("held", held.arguments, key="r/t/0/0/0")) for _ in range(20)]
    stream = odd.stream("held", held.arguments, key="r/t/0/0/0")
    await until_progress(stream)
    # It runs: requests that may only join find it. Sent earlier, one could overtake the request that starts it.
    racing += [
        asyncio.ensure_future(odd.invoke("held", held.arguments, key="r/t/0/0/0", must_exist=True)) for _ in range(20)
    ]
    held.let_go()
    finals = await asyncio.gather(*racing)
    assert {final.parts[0].text for final in finals} == {b"held r/t/0/0/0"}
    assert held.starts() == ["r/t/0/0/0"]
    assert (await odd.invoke("held", held.arguments, key="r/t/0/0/0")).outcome == Outcome.OUTCOME_OK
    conflict = await odd.invoke("held", {**held.arguments, "until": "/"}, key="r/t/0/0/0")
    assert (conflict.outcome, conflict.fault) == (Outcome.OUTCOME_KEY_CONFLICT, Fault.FAULT_INFRA)
    assert held.starts() == ["r/t/0/0/0"]


async def test_a_stream_tells_the_life_of_a_call(odd: Backend, held: Held) -> None:
    stream = odd.stream("held", held.arguments, key="k", heartbeat_timeout_ms=150)
    first = (await stream.read()).event.accepted
    assert first.instance_id == odd.instance_id
    assert not first.joined
    kinds = [await next_kind(stream) for _ in range(3)]
    assert kinds.count("progress") == 1
    assert kinds.count("heartbeat") == 2
    held.let_go()
    rest = [event.WhichOneof("event") for event in await rest_of(stream)]
    assert rest[-1] == "final"
    assert set(rest[:-1]) <= {"heartbeat"}


async def test_a_caller_that_goes_away_finds_the_result_by_attach(odd: Backend, held: Held) -> None:
    stream = odd.stream("held", held.arguments, key="k")
    await until_progress(stream)
    stream.cancel()
    unary = asyncio.ensure_future(odd.invoke("held", held.arguments, key="k"))
    answers = odd.stub.Attach(tool_pb2.AttachRequest(key="k", heartbeat_timeout_ms=100), timeout=30)
    accepted = await answers.read()
    assert accepted.event.accepted.joined
    assert (await answers.read()).event.progress.message == b"waiting"
    assert (await answers.read()).event.WhichOneof("event") == "heartbeat"
    held.let_go()
    rest = await rest_of(answers)
    assert rest[-1].final.parts[0].text == b"held k"
    assert (await unary).parts[0].text == b"held k"
    done = await odd.attach("k", if_absent=TOMBSTONE)
    assert [answer.event.WhichOneof("event") for answer in done] == ["accepted", "final"]
    assert held.starts() == ["k"]


async def test_attach_proves_that_a_key_never_started(odd: Backend, held: Held) -> None:
    [answer] = await odd.attach("k", expected_instance_id="its-predecessor", if_absent=TOMBSTONE)
    assert answer.absent.instance_mismatch
    assert not answer.absent.tombstoned
    [answer] = await odd.attach("k")
    assert not answer.absent.tombstoned
    assert answer.absent.instance_id == odd.instance_id
    [answer] = await odd.attach("k", expected_instance_id=odd.instance_id, if_absent=TOMBSTONE)
    assert answer.absent.tombstoned
    assert answer.absent.uptime_ms > 0
    held.let_go()
    final = await odd.invoke("held", held.arguments, key="k")
    assert (final.outcome, final.started) == (Outcome.OUTCOME_NOT_STARTED, tool_pb2.STARTED_NO)
    assert (await odd.invoke("held", held.arguments, key="other")).outcome == Outcome.OUTCOME_OK
    assert held.starts() == ["other"]
    [conflict] = await odd.attach("other", args_sha256=b"x" * 32)
    assert conflict.event.final.outcome == Outcome.OUTCOME_KEY_CONFLICT


async def test_a_start_and_a_tombstone_that_race_agree(odd: Backend, held: Held) -> None:
    held.let_go()
    keys = [f"race-{number}" for number in range(60)]
    invoked, attached = [], []
    for number, key in enumerate(keys):  # either may be sent first
        if number % 2:
            invoked.append(asyncio.ensure_future(odd.invoke("held", held.arguments, key=key)))
        attached.append(asyncio.ensure_future(odd.attach(key, if_absent=TOMBSTONE)))
        if not number % 2:
            invoked.append(asyncio.ensure_future(odd.invoke("held", held.arguments, key=key)))
    starts = set()
    for key, final, answers in zip(keys, await asyncio.gather(*invoked), await asyncio.gather(*attached), strict=True):
        if answers[0].WhichOneof("result") == "absent":
            assert answers[0].absent.tombstoned
            assert (final.outcome, final.started) == (Outcome.OUTCOME_NOT_STARTED, tool_pb2.STARTED_NO)
        else:
            assert answers[-1].event.final.parts[0].text == final.parts[0].text
            starts.add(key)
    assert sorted(held.starts()) == sorted(starts)


async def test_another_instance_refuses(odd: Backend, held: Held) -> None:
    held.let_go()
    final = await odd.invoke("held", held.arguments, key="k", expected_instance_id="its-predecessor")
    assert (final.outcome, final.fault, final.started) == (
        Outcome.OUTCOME_NOT_STARTED,
        Fault.FAULT_INFRA,
        tool_pb2.STARTED_NO,
    )
    assert held.starts() == []
    assert (await odd.invoke("held", held.arguments, key="k", expected_instance_id=odd.instance_id)).outcome == 1


@pytest.mark.parametrize("tool", ["held", "held_in_thread"])
async def test_cancel_stops_the_work(odd: Backend, held: Held, tool: str) -> None:
    running = odd.stream(tool, held.arguments, key="k")
    assert await next_kind(running) == "accepted"
    assert await odd.cancel("k") == tool_pb2.CancelResponse.CANCEL_STATE_STOPPING
    events = await rest_of(running)
    assert events[-1].final.outcome == Outcome.OUTCOME_CANCELLED
    assert events[-1].final.fault == Fault.FAULT_CALLER
    assert await odd.cancel("k") == tool_pb2.CancelResponse.CANCEL_STATE_ALREADY_DONE
    assert await odd.cancel("never") == tool_pb2.CancelResponse.CANCEL_STATE_NOT_FOUND
    if tool == "held_in_thread":
        assert held.starts() == ["k", "stopped k"]


async def test_tools_at_their_worst_get_their_outcome_and_the_neighbours_run_on(odd: Backend, held: Held) -> None:
    neighbour = asyncio.ensure_future(odd.invoke("held", held.arguments, key="neighbour"))
    cases: list[tuple[str, dict[str, Any], Outcome, bytes]] = [
        ("hangs", {}, Outcome.OUTCOME_TOOL_TIMEOUT, b"The tool ran out of time."),
        ("hangs_async", {}, Outcome.OUTCOME_TOOL_TIMEOUT, b"The tool ran out of time."),
        ("raises", {"message": "secret"}, Outcome.OUTCOME_TOOL_ERROR, b"internal error (RuntimeError)"),
        ("refuses", {"message": "no seat"}, Outcome.OUTCOME_TOOL_ERROR, b"no seat"),
        ("leaves", {"code": 3}, Outcome.OUTCOME_TOOL_ERROR, b"internal error (SystemExit)"),
        ("rubbish", {"kind": "object"}, Outcome.OUTCOME_TOOL_ERROR, b"not a result"),
        ("rubbish", {"kind": "nested"}, Outcome.OUTCOME_TOOL_ERROR, b"not a result"),
        ("rubbish", {"kind": "nan"}, Outcome.OUTCOME_TOOL_ERROR, b"not a result"),
        ("rubbish", {"kind": "none"}, Outcome.OUTCOME_TOOL_ERROR, b"internal error (KeyError)"),
        ("nobody", {}, Outcome.OUTCOME_UNKNOWN_TOOL, b"There is no tool 'nobody' here"),
        ("raises", {}, Outcome.OUTCOME_INVALID_ARGS, b"message"),
    ]
    finals = await asyncio.gather(
        *(odd.invoke(tool, arguments, key=f"case-{number}") for number, (tool, arguments, *_) in enumerate(cases))
    )
    for (tool, _, outcome, part), final in zip(cases, finals, strict=True):
        assert (final.outcome, final.fault) == (outcome, Fault.FAULT_MODEL), tool
        assert part in final.parts[0].text, tool
        assert b"secret" not in final.parts[0].text
        assert b"\n" not in final.parts[0].text
    assert "RuntimeError: secret" in odd.log()
    assert "Traceback" in odd.log()
    final = await odd.invoke("rubbish", {"kind": "bytes"}, key="bytes")
    assert (final.outcome, final.invalid_utf8) == (Outcome.OUTCOME_OK, True)
    assert final.parts[0].text == b"\xff\xfe\x00 tail"
    held.let_go()
    assert (await neighbour).outcome == Outcome.OUTCOME_OK
    # A thread and a task never end, and still the process leaves orderly.
    odd.process.terminate()
    assert await asyncio.wait_for(odd.process.wait(), 10) == 0
    assert "ignore their cancellation" in odd.log()


async def test_twenty_mebibytes_are_cut(odd: Backend) -> None:
    final = await odd.invoke("large", {"megabytes": 20}, key="k")
    assert final.outcome == Outcome.OUTCOME_OK
    assert final.total_bytes == 20 * 1024 * 1024
    assert final.truncated
    assert len(final.parts[0].text) == 1024 * 1024
    assert not final.invalid_utf8
    small = await odd.invoke("large", {"megabytes": 1}, key="small", max_output_bytes=7)
    assert small.parts[0].text == "äää".encode()


async def test_printing_does_not_reach_standard_output(odd: Backend) -> None:
    assert (await odd.invoke("prints", {"text": "loud"}, key="k")).outcome == Outcome.OUTCOME_OK
    odd.process.terminate()
    assert odd.process.stdout is not None
    assert await asyncio.wait_for(odd.process.stdout.read(), 10) == b""
    assert await odd.process.wait() == 0
    for printed in ("printed while the module is imported", "loud\n", "loud by descriptor", "loud by a child"):
        assert printed in odd.log()


async def test_one_at_a_time_is_overloaded_with_pushback(odd: Backend, held: Held) -> None:
    first = odd.stream("one_at_a_time", held.arguments, key="k0")
    assert await next_kind(first) == "accepted"
    final = await odd.invoke("one_at_a_time", held.arguments, key="k1")
    assert (final.outcome, final.started) == (Outcome.OUTCOME_OVERLOADED, tool_pb2.STARTED_NO)
    assert final.retry_after_ms > 0
    held.let_go()
    assert (await rest_of(first))[-1].final.outcome == Outcome.OUTCOME_OK
    assert (await odd.invoke("one_at_a_time", held.arguments, key="k1")).outcome == Outcome.OUTCOME_OK


async def test_an_attempt_that_runs_out_of_time(odd: Backend, held: Held) -> None:
    final = await odd.invoke("held", held.arguments, key="k", attempt_timeout_ms=50)
    assert (final.outcome, final.fault, final.started) == (
        Outcome.OUTCOME_ATTEMPT_TIMEOUT,
        Fault.FAULT_INFRA,
        tool_pb2.STARTED_YES,
    )


async def test_sessions_and_many_are_not_here(odd: Backend) -> None:
    opened = await odd.stub.OpenSession(tool_pb2.OpenSessionRequest(session_id="s", epoch=3), timeout=10)
    renewed = await odd.stub.RenewSession(tool_pb2.RenewSessionRequest(session_id="s"), timeout=10)
    closed = await odd.stub.CloseSession(tool_pb2.CloseSessionRequest(session_id="s"), timeout=10)
    for response in (opened, renewed, closed):
        assert (response.status.outcome, response.status.fault) == (Outcome.OUTCOME_PROTOCOL, Fault.FAULT_INFRA)
        assert "not implemented" in response.status.detail
    many = odd.stub.InvokeMany(timeout=10)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await many.read()
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_drain_ends_what_runs_and_takes_nothing_new(odd: Backend, held: Held) -> None:
    health = health_pb2_grpc.HealthStub(odd.channel)
    watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=30)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    running = odd.stream("held", held.arguments, key="k0")
    await until_progress(running)
    odd.process.send_signal(signal.SIGTERM)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    refused = await odd.invoke("held", held.arguments, key="k1")
    assert (refused.outcome, refused.started) == (Outcome.OUTCOME_OVERLOADED, tool_pb2.STARTED_NO)
    attached = odd.stub.Attach(tool_pb2.AttachRequest(key="k0"), timeout=30)
    assert (await attached.read()).event.accepted.joined
    held.let_go()
    for stream in (running, attached):
        events = await rest_of(stream)
        assert events[-1].final.outcome == Outcome.OUTCOME_OK
    assert await asyncio.wait_for(odd.process.wait(), 10) == 0
    assert held.starts() == ["k0"]


async def test_an_idle_backend_that_leaves_still_refuses_what_was_on_its_way(odd: Backend, held: Held) -> None:
    """Sent before the gateway could hear of the drain, over a connection that a stopping server would just end."""
    health = health_pb2_grpc.HealthStub(odd.channel)
    watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=30)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    odd.process.send_signal(signal.SIGTERM)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    late = await asyncio.gather(*(odd.invoke("held", held.arguments, key=f"k{n}") for n in range(50)))
    assert {(final.outcome, final.started) for final in late} == {(Outcome.OUTCOME_OVERLOADED, tool_pb2.STARTED_NO)}
    assert await asyncio.wait_for(odd.process.wait(), 10) == 0
    assert held.starts() == []


async def test_what_outlasts_the_grace_is_indeterminate(tmp_path: Path, held: Held) -> None:
    async with backend(tmp_path, ODD, "--set", "runtime.shutdown_grace_s=2") as running:
        stream = running.stream("held", held.arguments, key="k")
        await until_progress(stream)
        running.process.terminate()
        events = await rest_of(stream)
        final = events[-1].final
        assert (final.outcome, final.started) == (Outcome.OUTCOME_INDETERMINATE, tool_pb2.STARTED_YES)
        assert await asyncio.wait_for(running.process.wait(), 10) == 0


async def test_a_killed_backend_is_a_new_instance_that_refuses_its_predecessors_keys(
    tmp_path: Path, held: Held
) -> None:
    async with backend(tmp_path, ODD) as first:
        stream = first.stream("held", held.arguments, key="k")
        await until_progress(stream)
        first.process.kill()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest_of(stream)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    async with backend(tmp_path, ODD) as second:
        assert second.instance_id != first.instance_id
        final = await second.invoke("held", held.arguments, key="k", expected_instance_id=first.instance_id)
        assert (final.outcome, final.started) == (Outcome.OUTCOME_NOT_STARTED, tool_pb2.STARTED_NO)
        [answer] = await second.attach("k", expected_instance_id=first.instance_id, if_absent=TOMBSTONE)
        assert answer.absent.instance_mismatch
        assert not answer.absent.tombstoned
    assert held.starts() == ["k"]


async def test_slow_on_purpose(tmp_path: Path) -> None:
    delay = "backend.delay={share: 1.0, seconds: [0.3, 0.3]}"
    async with backend(tmp_path, "calculator", "--set", delay) as running:
        began = time.monotonic()
        final = await running.invoke("calculator", {"expression": "1+1"}, key="k")
        assert time.monotonic() - began >= 0.3
        assert final.usage.run_us >= 300_000
        final = await running.invoke("calculator", {"expression": "1+1"}, key="k2", attempt_timeout_ms=100)
        assert final.outcome == Outcome.OUTCOME_ATTEMPT_TIMEOUT


async def test_two_hundred_calls_at_once_over_the_wire(tmp_path: Path) -> None:
    async with backend(tmp_path, "calculator") as running:
        finals = await asyncio.gather(
            *(running.invoke("calculator", {"expression": f"{n}*{n}"}, key=f"k{n}") for n in range(200))
        )
        assert [int(final.parts[0].text) for final in finals] == [n * n for n in range(200)]


BROKEN = {
    "two_of_one_name.py": "from tool_backend import tool\n@tool(name='x')\ndef a() -> str: ...\n"
    "@tool(name='x')\ndef b() -> str: ...\ntools = [a, b]\n",
    "raises_at_import.py": "print('loud')\nraise ValueError('no key given')\n",
    "bad_schema.py": "from tool_backend import tool\n@tool(schema={'type': 'strin'})\ndef tools() -> str: ...\n",
}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("two_of_one_name:tools",), "two tools are named 'x'"),
        (("raises_at_import:tools",), "raised ValueError"),
        (("bad_schema:tools",), "tool 'tools': its schema is not JSON Schema"),
        (("calculater",), "no built-in tool"),
        (("search",), "backend.search.corpus"),
        (("search", "--set", "backend.search.corpus=CORPUS"), "corpus.jsonl, line 2: this is not JSON"),
        (("search", "--set", "backend.search.corpus=missing.jsonl"), "missing.jsonl cannot be read"),
        (("calculator", "--set", "backend.prot=1"), "unknown key 'backend.prot': did you mean 'port'"),
        (("calculator", "--set", "backend.delay.seconds=[3, 1]"), "[shortest, longest]"),
        ((), "name at least one tool"),
    ],
)
async def test_bad_things_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], part: str
) -> None:
    for name, source in BROKEN.items():
        (tmp_path / name).write_text(source)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "title": "t", "text": "x"}\n{"id"\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, out, err = await run_to_end(*(each.replace("CORPUS", str(corpus)) for each in arguments))
    assert code == 2, err
    assert out == ""
    sentence = err.strip().splitlines()[-1]
    assert part in sentence
    assert sentence.startswith(("tool_backend: ", "python -m tool_backend"))


async def test_ctrl_c_while_a_tools_module_is_still_being_imported_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "slow_tools.py").write_text(
        "import signal, threading\nprint('importing', flush=True)\nthreading.Event().wait(50)\n"
    )
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tool_backend",
        "slow_tools:tool",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}"},
    )
    assert child.stderr is not None
    try:
        async with asyncio.timeout(30):
            assert await child.stderr.readline() == b"importing\n"  # what a tool prints never reaches stdout
            child.send_signal(signal.SIGINT)
            assert (await child.stderr.read()).decode() == "tool_backend: interrupted while starting\n"
            assert await child.wait() == 130
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def test_a_port_in_use_is_one_sentence(odd: Backend) -> None:
    code, out, err = await run_to_end("calculator", "--set", f"backend.port={odd.ready['port']}")
    assert code == 3
    assert out == ""
    assert str(odd.ready["port"]) in err.strip().splitlines()[-1]


async def test_a_script_of_ones_own_serves(tmp_path: Path) -> None:
    script = tmp_path / "adder.py"
    script.write_text(
        "from tool_backend import serve, tool\n\n"
        "@tool(idempotent=True)\n"
        "def add(a: int, b: int) -> int:\n"
        '    """Add two integers."""\n'
        "    return a + b\n\n"
        'if __name__ == "__main__":\n'
        "    serve(add)\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        "--set",
        "backend.port=0",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 30))
        running = Backend(process, ready, tmp_path / "none")
        final = await running.invoke("add", b'{"a": 1, "b": 2.0}', key="k")
        assert final.parts[0].text == b"3"
        await running.channel.close()
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 10) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
