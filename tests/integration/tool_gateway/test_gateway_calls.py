"""Calls through a real gateway to real backends: the plain ways a call can go."""

from __future__ import annotations

import asyncio

import pytest
from fermata.v1 import gateway_pb2, gateway_pb2_grpc, tool_pb2
from gateway_world import World, call, client, scrape, until
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from node_runtime.grpc_channel import open_channel
from node_runtime.runtime_settings import RuntimeSettings
from tool_gateway.client import CallOptions, Earlier

pytestmark = pytest.mark.integration


async def test_a_call_is_accepted_started_and_answered_once(world: World) -> None:
    backend = await world.backend()
    gateway = await world.gateway([[backend.address]])
    async with client(gateway.address) as gw:
        seen: list[object] = []
        result = await call(gw, "run/t/0/0/0", text="hello", chunks=2, on_event=seen.append)
        assert (result.outcome, result.fault, result.text) == (tool_pb2.OUTCOME_OK, tool_pb2.FAULT_NONE, b"hello")
        assert result.attempts == 1
        assert result.instance_id == backend.ready["instance_id"]
        kinds = [type(event).__name__ for event in seen]
        assert kinds[:2] == ["Accepted", "Started"]
        assert "Chunk" in kinds
        assert world.starts() == {"run/t/0/0/0": 1}
        # The same key again is answered from the ledger, and runs nothing.
        again = await call(gw, "run/t/0/0/0", text="hello", chunks=2)
        assert (again.text, again.from_cache) == (b"hello", False)
        assert world.starts() == {"run/t/0/0/0": 1}
        other = await call(gw, "run/t/0/0/0", text="other")
        assert other.outcome == tool_pb2.OUTCOME_KEY_CONFLICT
        gw.release(["run/t/0/0/0"])
        gone = await call(gw, "run/t/0/0/0", text="hello", chunks=2)
        assert gone.outcome == tool_pb2.OUTCOME_RESULT_EXPIRED


async def test_what_the_model_gets_wrong_never_reaches_a_backend(world: World) -> None:
    backend = await world.backend()
    gateway = await world.gateway([[backend.address]])
    async with client(gateway.address) as gw:
        unknown = await call(gw, "run/t/0/0/0", tool="eccho", text="x")
        assert (unknown.outcome, unknown.fault) == (tool_pb2.OUTCOME_UNKNOWN_TOOL, tool_pb2.FAULT_MODEL)
        assert unknown.text == b"there is no tool 'eccho'; the tools are: echo, hang, one, pay, short"
        wrong = await call(gw, "run/t/0/0/1", text=7)
        assert (wrong.outcome, wrong.fault) == (tool_pb2.OUTCOME_INVALID_ARGS, tool_pb2.FAULT_MODEL)
        assert b"'text' must be a string" in wrong.text
        grader = await call(gw, "run/t/0/0/2", tool="grade", text="x")
        assert grader.outcome == tool_pb2.OUTCOME_UNKNOWN_TOOL
        allowed = await call(gw, "run/t/0/0/3", tool="grade", options=CallOptions(grader=True), text="x")
        assert allowed.outcome == tool_pb2.OUTCOME_OK
        assert set(world.starts()) == {"run/t/0/0/3"}
        foreign = await call(gw, "other/t/0/0/0", text="x")
        assert foreign.outcome == tool_pb2.OUTCOME_PERMISSION


async def test_a_callers_faulty_callback_and_oversized_arguments_disturb_nobody(world: World) -> None:
    backend = await world.backend()
    gateway = await world.gateway([[backend.address]])

    def faulty(notice: object) -> None:
        raise ValueError("the caller's own fault")

    async with client(gateway.address) as gw:
        await gw.wait_for_tools(["echo"], 10)
        big, small, fine = await asyncio.gather(
            call(gw, "run/t/0/0/0", text="x" * (5 << 20)),
            call(gw, "run/t/0/0/1", text="x" * (2 << 20)),
            call(gw, "run/t/0/0/2", text="x", on_event=faulty),
        )
        assert (big.outcome, small.outcome) == (tool_pb2.OUTCOME_INVALID_ARGS, tool_pb2.OUTCOME_INVALID_ARGS)
        assert fine.outcome == tool_pb2.OUTCOME_OK
    assert world.starts() == {"run/t/0/0/2": 1}


async def test_a_tool_that_its_backend_serves_in_an_unusable_form_is_not_the_models_fault(world: World) -> None:
    backend = await world.backend("--broken", "echo")
    gateway = await world.gateway([[backend.address]])
    async with client(gateway.address) as caller:
        broken = await call(caller, "run/t/0/0/0", "echo", text="a")
        assert (broken.outcome, broken.fault) == (tool_pb2.OUTCOME_INTERNAL, tool_pb2.FAULT_INFRA)
        assert "the tool 'echo' of" in broken.final.detail
        assert "is left out: the schema is not JSON" in broken.final.detail
        assert (await call(caller, "run/t/0/0/1", "pay", text="b")).text == b"b", "its other tools are served"


async def test_times_that_no_message_can_hold_disturb_nobody(world: World) -> None:
    backend = await world.backend()
    gateway = await world.gateway([[backend.address]])
    async with client(gateway.address) as caller:
        held = asyncio.create_task(call(caller, "run/held/0/0/0", seconds=1.0))
        for n, (deadline_s, age_s) in enumerate(((1e30, 0.0), (float("inf"), 0.0), (20.0, 1e30))):
            options = CallOptions(earlier=Earlier(age_s)) if age_s else None
            odd = await call(caller, f"run/odd{n}/0/0/0", deadline_s=deadline_s, options=options, text="a")
            assert odd.text == b"a"
        assert (await held).outcome == tool_pb2.OUTCOME_OK


async def test_an_output_larger_than_the_tools_limit_is_cut(world: World) -> None:
    backend = await world.backend()
    gateway = await world.gateway([[backend.address]])
    async with client(gateway.address) as gw:
        result = await call(gw, "run/t/0/0/0", tool="short", text="ä" * 20)
        assert result.text == "ä".encode() * 5
        assert result.final.truncated
        assert result.final.total_bytes == 40


async def test_cancel_reaches_the_backend(world: World) -> None:
    backend = await world.backend()
    gateway = await world.gateway([[backend.address]])
    async with client(gateway.address) as gw:
        running = asyncio.create_task(call(gw, "run/t/0/0/0", tool="hang"))
        await world.until_started(["run/t/0/0/0"])
        gw.cancel("run/t/0/0/0", "not needed")
        result = await running
        assert (result.outcome, result.fault) == (tool_pb2.OUTCOME_CANCELLED, tool_pb2.FAULT_CALLER)
        await until(lambda: world.cancels() == ["run/t/0/0/0"])
        # A caller that is cancelled cancels its call as well.
        waiting = asyncio.create_task(call(gw, "run/t/0/0/1", tool="hang"))
        await world.until_started(["run/t/0/0/1"])
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: "run/t/0/0/1" in world.cancels())


async def test_a_tool_that_hangs_ends_with_the_attempt_or_the_deadline(world: World) -> None:
    backend = await world.backend()
    gateway = await world.gateway([[backend.address]])
    async with client(gateway.address) as gw:
        options = CallOptions(attempt_timeout_s=0.3)
        attempt, total = await asyncio.gather(
            call(gw, "run/t/0/0/0", tool="hang", options=options), call(gw, "run/t/0/0/1", tool="hang", deadline_s=3.0)
        )
        # The tool declares timeout_fault MODEL: the model is told.
        assert (attempt.outcome, attempt.fault) == (tool_pb2.OUTCOME_ATTEMPT_TIMEOUT, tool_pb2.FAULT_MODEL)
        assert attempt.text == b"The tool did not answer in time."
        assert (total.outcome, total.fault) == (tool_pb2.OUTCOME_DEADLINE_EXCEEDED, tool_pb2.FAULT_MODEL)
        await until(lambda: {"run/t/0/0/0", "run/t/0/0/1"} <= set(world.cancels()))


async def test_a_frozen_backend_is_noticed_by_its_heartbeat_and_an_idempotent_call_goes_elsewhere(world: World) -> None:
    frozen, other = await world.backend(), await world.backend()
    gateway = await world.gateway([[frozen.address, other.address]], "gateway.timeouts.control_s=0.5")
    async with client(gateway.address) as gw:
        await gw.wait_for_tools(["echo", "pay"], 10)
        frozen.freeze()
        options = CallOptions(heartbeat_timeout_s=0.4)
        echoes = await asyncio.gather(*(call(gw, f"run/t/0/0/{n}", text="x", options=options) for n in range(6)))
        assert {result.outcome for result in echoes} == {tool_pb2.OUTCOME_OK}
        pays = await asyncio.gather(
            *(call(gw, f"run/t/0/1/{n}", tool="pay", text="x", options=options) for n in range(6))
        )
        # Not idempotent: an attempt that went to the frozen process may start there once it thaws.
        assert {result.outcome for result in pays} <= {tool_pb2.OUTCOME_OK, tool_pb2.OUTCOME_ATTEMPT_TIMEOUT}
        assert all(result.fault == tool_pb2.FAULT_INFRA for result in pays if result.outcome != tool_pb2.OUTCOME_OK)
        frozen.thaw()
        assert max(world.starts("pay").values()) == 1


async def test_a_proven_refusal_is_retried_on_another_backend_for_any_tool(world: World) -> None:
    refusing, other = await world.backend("--refuse", "pay"), await world.backend()
    gateway = await world.gateway([[refusing.address, other.address]])
    async with client(gateway.address) as gw:
        await gw.wait_for_tools(["pay"], 10)
        results = await asyncio.gather(*(call(gw, f"run/t/0/0/{n}", tool="pay", text="x") for n in range(8)))
        assert {result.outcome for result in results} == {tool_pb2.OUTCOME_OK}
        assert {result.instance_id for result in results} == {other.ready["instance_id"]}
        assert set(world.starts().values()) == {1}


async def test_max_concurrency_is_kept_by_queueing_in_order_of_priority(world: World) -> None:
    backend = await world.backend()
    gateway = await world.gateway([[backend.address]])
    async with client(gateway.address) as gw:
        first = asyncio.create_task(call(gw, "run/t/0/0/0", tool="one", seconds=0.3))
        await world.until_started(["run/t/0/0/0"])
        later = [
            asyncio.create_task(call(gw, f"run/t/0/0/{n}", tool="one", options=CallOptions(priority=-n)))
            for n in (1, 2, 3)
        ]
        hurried = await call(gw, "run/t/0/1/0", tool="one", options=CallOptions(queue_timeout_s=0.05))
        assert (hurried.outcome, hurried.fault) == (tool_pb2.OUTCOME_QUEUE_TIMEOUT, tool_pb2.FAULT_INFRA)
        results = await asyncio.gather(first, *later)
        assert {result.outcome for result in results} == {tool_pb2.OUTCOME_OK}
        assert list(world.starts()) == [f"run/t/0/0/{n}" for n in (0, 3, 2, 1)]
        assert results[1].queue_us > 100_000


async def test_the_gateway_starts_without_backends_and_serves_when_they_come(world: World) -> None:
    backend = await world.backend()
    await backend.kill()
    gateway = await world.gateway([[backend.address]])
    async with client(gateway.address) as gw:
        await gw.wait_connected(10)
        assert gw.catalogue == {}
        early = asyncio.create_task(call(gw, "run/t/0/0/0", text="x"))
        hopeless = await call(gw, "run/t/0/0/1", text="x", deadline_s=3.0)
        assert (hopeless.outcome, hopeless.fault) == (tool_pb2.OUTCOME_DEADLINE_EXCEEDED, tool_pb2.FAULT_INFRA)
        assert backend.address in hopeless.final.detail
        await world.backend(port=backend.port)
        assert (await early).outcome == tool_pb2.OUTCOME_OK
        await gw.wait_for_tools(["echo"], 10)
    assert f"waiting for the tool backend at {backend.address}" in gateway.log()


async def test_two_versions_of_one_tool_go_to_the_first(world: World) -> None:
    one, two = await world.backend("--version", "1"), await world.backend("--version", "2")
    gateway = await world.gateway([[one.address], [two.address]])
    async with client(gateway.address) as gw:
        await until(lambda: "is served in 2 versions" in gateway.log())
        results = await asyncio.gather(*(call(gw, f"run/t/0/0/{n}", text="x") for n in range(8)))
        assert {result.instance_id for result in results} == {one.ready["instance_id"]}
        assert f"not to {two.address}" in gateway.log()


async def test_list_tools_get_call_metrics_and_reflection(world: World) -> None:
    backend = await world.backend()
    gateway = await world.gateway([[backend.address]], "runtime.metrics_port=0", f"runtime.spans_dir={world.folder}")
    channel = open_channel(gateway.address, RuntimeSettings())
    try:
        async with client(gateway.address) as gw:
            await call(gw, "run/t/0/0/0", text="secret")
            stub = gateway_pb2_grpc.ToolGatewayServiceStub(channel)
            tools = await stub.ListTools(gateway_pb2.ListToolsRequest())
            assert {e.spec.name for e in tools.tools} == {"echo", "pay", "hang", "one", "short", "grade"}
            assert all((entry.backends, entry.backends_serving) == (1, 1) for entry in tools.tools)
            only = gateway_pb2.ListToolsRequest(visibility=[tool_pb2.VISIBILITY_GRADER])
            assert [entry.spec.name for entry in (await stub.ListTools(only)).tools] == ["grade"]
            story = await stub.GetCall(gateway_pb2.GetCallRequest(key="run/t/0/0/0"))
            assert story.found
            assert story.state == gateway_pb2.GetCallResponse.CALL_STATE_DONE
            assert [(a.attempt, a.address, a.outcome) for a in story.attempts] == [
                (1, backend.address, tool_pb2.OUTCOME_OK)
            ]
            assert not story.result.final.parts
            full = await stub.GetCall(gateway_pb2.GetCallRequest(key="run/t/0/0/0", include_output=True))
            assert full.result.final.parts[0].text == b"secret"
            assert not (await stub.GetCall(gateway_pb2.GetCallRequest(key="run/t/0/0/9"))).found
            metrics = await scrape(gateway.ready["metrics_port"])
            assert 'fermata_gateway_calls_total{fault="NONE",outcome="OK",tool="echo"} 1.0' in metrics
            assert 'fermata_gateway_call_duration_seconds_bucket{fault="NONE",le="300.0",tool="echo"} 1.0' in metrics
            assert 'fermata_gateway_calls_in_flight{tool="echo"} 0.0' in metrics
            assert "fermata_gateway_streams_active 1.0" in metrics
            assert 'fermata_gateway_attempts_total{outcome="OK",pool="pool0"} 1.0' in metrics
            assert 'fermata_gateway_attempt_duration_seconds_count{pool="pool0"} 1.0' in metrics
            assert 'fermata_gateway_queue_duration_seconds_count{pool="pool0"} 1.0' in metrics
            assert 'fermata_gateway_backends{pool="pool0",state="serving"} 1.0' in metrics
            assert 'fermata_gateway_backends{pool="pool0",state="down"} 0.0' in metrics
            assert "fermata_gateway_draining 0.0" in metrics
            assert "\nfermata_gateway_event_loop_lag_seconds 0" in metrics
            assert 'fermata_gateway_backend_serving{tool="echo"} 1.0' in metrics
            reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
            try:
                await reflect.write(reflection_pb2.ServerReflectionRequest(list_services="*"))
                answer = await reflect.read()
                names = {service.name for service in answer.list_services_response.service}
                assert "fermata.v1.ToolGatewayService" in names
            finally:
                reflect.cancel()
        assert await gateway.terminate() == 0
    finally:
        await channel.close()
    from node_runtime.spans import read_spans

    spans = {span.kind: span for span in read_spans(world.folder)}
    assert set(spans) == {"tool-queue", "tool-run"}
    assert (spans["tool-run"].call_key, spans["tool-run"].outcome) == ("run/t/0/0/0", "OK")
    assert (spans["tool-run"].trajectory, spans["tool-run"].turn, spans["tool-run"].tool) == ("t", 0, "echo")


async def test_a_wrong_token_is_one_clear_sentence(world: World) -> None:
    right, wrong = world.folder / "right.txt", world.folder / "wrong.txt"
    right.write_text("right-token-0123456789\n")
    wrong.write_text("wrong-token-0123456789\n")
    right.chmod(0o600)
    wrong.chmod(0o600)
    backend = await world.backend()
    gateway = await world.gateway([[backend.address]], f"runtime.tokens.accept_file={right}")
    async with client(gateway.address, runtime=RuntimeSettings(tokens={"send_file": wrong})) as gw:  # type: ignore[arg-type]
        with pytest.raises(Exception, match="refuses this process: the token sent is not accepted here"):
            await gw.wait_connected(1.5)
        result = await call(gw, "run/t/0/0/0", text="x", deadline_s=0.2)
        assert (result.outcome, result.fault) == (tool_pb2.OUTCOME_DEADLINE_EXCEEDED, tool_pb2.FAULT_INFRA)
    async with client(gateway.address, runtime=RuntimeSettings(tokens={"send_file": right})) as gw:  # type: ignore[arg-type]
        assert (await call(gw, "run/t/0/0/0", text="x")).outcome == tool_pb2.OUTCOME_OK


async def test_two_thousand_calls_at_once_share_frames(world: World) -> None:
    backend = await world.backend()
    gateway = await world.gateway([[backend.address]], "runtime.log_level=warning")
    async with client(gateway.address) as gw:
        await gw.wait_for_tools(["echo"], 10)
        frames = gw.frames_received
        results = await asyncio.gather(
            *(call(gw, f"run/t{n}/0/0/0", text=str(n), seconds=0.5, deadline_s=50) for n in range(2000))
        )
        assert [result.text for result in results] == [str(n).encode() for n in range(2000)]
        assert set(world.starts().values()) == {1}
        assert len(world.starts()) == 2000
        # Accepted, Started and Result of 2,000 calls are 6,000 events.
        assert gw.frames_received - frames < 3000


async def test_a_port_in_use_ends_the_gateway_with_one_sentence(world: World) -> None:
    gateway = await world.gateway()
    with pytest.raises(AssertionError, match=f"port {gateway.port} on 127.0.0.1 is in use"):
        await world.gateway(port=gateway.port)
    with pytest.raises(AssertionError, match=r"ended: tool_gateway: /metrics: port \d+ .*for a free one\n$"):
        await world.gateway((), f"runtime.metrics_port={gateway.port}")


async def test_the_sdks_backend_serves_the_same_gateway(world: World) -> None:
    backend = await world.sdk_backend("calculator")
    gateway = await world.gateway([[backend.address]])
    async with client(gateway.address) as gw:
        result = await call(gw, "run/t/0/0/0", tool="calculator", expression="12*34")
        assert (result.outcome, result.text) == (tool_pb2.OUTCOME_OK, b"408")
