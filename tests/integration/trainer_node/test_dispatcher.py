"""The dispatcher against scripted rollout nodes on real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from fermata.v1 import rollout_pb2 as pb
from fermata.v1 import tool_pb2

from fermata_cli.cluster.certificates import write_secret
from node_runtime.errors import EXIT_UNAVAILABLE, NodeError
from node_runtime.grpc_server import NodeServer
from node_runtime.runtime_settings import RuntimeSettings, TokenSettings
from node_runtime.segments import Columns
from tests.integration.trainer_node.scripted_node import ScriptedNode
from trainer_node import syncs
from trainer_node.dispatcher import Completed, Dispatcher, Masked
from trainer_node.run import beside
from trainer_node.settings import DispatchSettings

pytestmark = pytest.mark.integration

QUICK = {"reconnect_base_s": 0.02, "reconnect_max_s": 0.1, "reconnect_grace_s": 0.3, "startup_timeout_s": 5.0}


async def answer_at_once(node, start, snapshot):
    node.finish(start, node.first_turn(), "408")


@contextlib.asynccontextmanager
async def dispatching(*nodes: ScriptedNode, synced: bool = True, **fields):
    settings = DispatchSettings(**{**QUICK, **fields})
    dispatcher = Dispatcher(
        [node.address for node in nodes], settings, RuntimeSettings(), run_id="run", epoch=1, seed=0
    )
    try:
        async with beside(dispatcher.serve()):
            async with asyncio.timeout(10):
                while len(dispatcher.members()) < len(nodes):
                    await dispatcher._next_change(1.0)
            if synced:
                dispatcher.synced(dispatcher.members())
            yield dispatcher
    finally:
        for node in nodes:
            await node.kill()


def member(dispatcher: Dispatcher, node: ScriptedNode) -> str:
    return dispatcher._core.nodes[node.address].member


async def started(*scripts, **fields) -> list[ScriptedNode]:
    nodes = [ScriptedNode(script, **fields) for script in scripts]
    for node in nodes:
        await node.start()
    return nodes


def start(name="t1", order=1, **fields):
    return pb.RunRequest.Start(run_id="run", trajectory_id=name, order=order, tools=["calculator"], **fields)


async def test_a_trajectory_comes_back_whole_and_is_acknowledged():
    (node,) = await started(answer_at_once)
    async with dispatching(node) as dispatcher:
        ended = await dispatcher.run(start(), deadline_s=10)
        assert isinstance(ended, Completed)
        assert list(ended.trajectory.ids) == [1, 2, 3, 10, 11]
        assert ended.trajectory.answer == "408"
        await node.until(lambda: node.acks)
        assert (node.acks[0].trajectory_id, node.acks[0].snapshot_seq, node.acks[0].stored) == ("t1", 1, True)
        assert node.starts[0].generation == 0
        assert 0 < node.starts[0].deadline_ms <= 10_000
        assert node.hellos[0].epoch == 1


async def test_nothing_is_given_to_a_node_without_proven_weights():
    (node,) = await started(answer_at_once)
    async with dispatching(node, synced=False) as dispatcher:
        assert dispatcher.joined.is_set()
        waiting = asyncio.create_task(dispatcher.run(start(), deadline_s=10))
        dispatcher.synced(())
        assert not node.starts
        dispatcher.synced(dispatcher.members())
        assert not dispatcher.joined.is_set()
        assert isinstance(await waiting, Completed)


async def test_many_are_spread_over_nodes_least_loaded_first():
    gate = asyncio.Event()

    async def wait_for_gate(node, start, snapshot):
        await gate.wait()
        node.finish(start, node.first_turn(), "")

    nodes = await started(wait_for_gate, wait_for_gate)
    async with dispatching(*nodes) as dispatcher:
        runs = [asyncio.create_task(dispatcher.run(start(f"t{i}", i), deadline_s=10)) for i in range(20)]
        for node in nodes:
            await node.until(lambda node=node: len(node.starts) == 10)
        gate.set()
        assert all(isinstance(ended, Completed) for ended in await asyncio.gather(*runs))
        assert dispatcher.in_flight == 0


async def test_a_parked_trajectory_is_resumed_elsewhere_from_its_stored_snapshot():
    async def park(node, start, snapshot):
        node.park(start, node.first_turn(), node.key(start))

    async def go_on(node, start, snapshot):
        assert snapshot is not None
        columns = Columns.unpack(snapshot.segments)
        held = len(columns.segments)
        columns.append(pb.SEGMENT_KIND_TOOL, [20, 21], turn=1, call_key=snapshot.pending[0].key)
        columns.append(pb.SEGMENT_KIND_MODEL, [30], logprobs=[-0.5], version=node.version, turn=1)
        node.finish(start, columns, "408", keys=[snapshot.pending[0].key], base=held)

    first, second = await started(park, go_on)
    async with dispatching(first, second) as dispatcher:
        dispatcher.synced([member(dispatcher, first)])
        run = asyncio.create_task(dispatcher.run(start(), deadline_s=10))
        await first.until(lambda: first.acks)
        assert first.acks[0].stored
        dispatcher.synced(dispatcher.members())
        await first.kill()
        ended = await run
        assert isinstance(ended, Completed)
        assert list(ended.trajectory.ids) == [1, 2, 3, 10, 11, 20, 21, 30]
        assert ended.trajectory.generation == 1
        resume = second.resumes[0]
        assert resume.start.generation == 1
        assert resume.snapshot.pending[0].key == "run/t1/0/0/0"
        assert resume.held_ms >= 0
        assert (dispatcher.moves, dispatcher.resumes) == (1, 1)
        assert dispatcher.calls.by_outcome == {"OK": 1}
        assert dispatcher.calls.lost_total == 0


async def test_without_a_snapshot_it_is_run_again_from_its_start():
    async def say_nothing(node, start, snapshot):
        pass

    first, second = await started(say_nothing, answer_at_once)
    async with dispatching(first, second) as dispatcher:
        dispatcher.synced([member(dispatcher, first)])
        run = asyncio.create_task(dispatcher.run(start(), deadline_s=10))
        await first.until(lambda: first.starts)
        dispatcher.synced(dispatcher.members())
        await first.kill()
        assert isinstance(await run, Completed)
        assert second.starts[0].generation == 1
        assert (dispatcher.moves, dispatcher.resumes) == (1, 0)


async def test_a_broken_stream_to_a_living_node_keeps_its_trajectories_there():
    gate = asyncio.Event()
    begun: set[tuple[str, int]] = set()

    async def once(node, start, snapshot):
        owner = (start.trajectory_id, start.generation)
        if owner in begun:
            return  # said again after the stream broke: known already
        begun.add(owner)
        await gate.wait()
        node.finish(start, node.first_turn(), "408")

    (node,) = await started(once)
    async with dispatching(node, reconnect_grace_s=10) as dispatcher:
        run = asyncio.create_task(dispatcher.run(start(), deadline_s=10))
        await node.until(lambda: node.starts)
        node.cut()
        await node.until(lambda: len(node.starts) == 2)
        assert node.hellos[1].epoch == node.hellos[0].epoch
        gate.set()
        ended = await run
        assert isinstance(ended, Completed)
        assert ended.trajectory.generation == 0
        assert dispatcher.moves == 0


async def test_a_node_that_starts_anew_is_given_the_work_only_after_a_sync():
    async def say_nothing(node, start, snapshot):
        pass

    (node,) = await started(say_nothing)
    port = int(node.address.rpartition(":")[2])
    async with dispatching(node, reconnect_grace_s=10) as dispatcher:
        run = asyncio.create_task(dispatcher.run(start(), deadline_s=10))
        await node.until(lambda: node.starts)
        await node.kill()
        node.script = answer_at_once
        await node.start(port)
        async with asyncio.timeout(10):
            await dispatcher.joined.wait()
        assert len(node.starts) == 1
        dispatcher.synced(dispatcher.members())
        assert isinstance(await run, Completed)
        assert node.starts[-1].generation == 1


async def test_what_an_earlier_owner_still_says_is_ignored_but_acknowledged():
    gate = asyncio.Event()

    async def late(node, start, snapshot):
        await gate.wait()
        columns = node.first_turn(sampled=[66, 66])
        node.finish(start, columns, "stale", keys=["stale"])

    async def hold(node, start, snapshot):
        node.park(start, node.first_turn(), node.key(start))

    first, second = await started(late, hold)
    async with dispatching(first, second, reconnect_grace_s=0.05) as dispatcher:
        dispatcher.synced([member(dispatcher, first)])
        run = asyncio.create_task(dispatcher.run(start(), deadline_s=10))
        await first.until(lambda: first.starts)
        # Out of reach longer than the grace, but alive.
        dispatcher.synced([member(dispatcher, second)])
        dispatcher._streams[first.address]._settings = DispatchSettings(reconnect_base_s=1.0, reconnect_max_s=1.0)
        dispatcher.on_broken(first.address, "cut off")
        await second.until(lambda: second.acks)
        first.send(load=pb.RunResponse.Load(serving=True))
        gate.set()
        await first.until(lambda: first.acks)
        assert first.acks[0].generation == 0
        # Not as stored: the present owner may still have to fetch the results that this one had.
        assert not first.acks[0].stored
        assert not run.done()
        second.finish(second.starts[0], second.first_turn(), "408", keys=[second.key(second.starts[0])], seq=2)
        ended = await run
        assert isinstance(ended, Completed)
        assert ended.trajectory.answer == "408"
        assert dispatcher.calls.by_outcome == {"OK": 1}
        # And once nobody works on it any more, its results may go.
        late_again = first.starts[0]
        first.finish(late_again, first.first_turn(), "stale")
        await first.until(lambda: len(first.acks) == 2)
        assert first.acks[1].stored


@pytest.mark.parametrize("reason", [0, 77])
async def test_an_end_for_a_reason_that_is_not_known_is_masked(reason):
    async def newer(node, start, snapshot):
        node.finish(start, node.first_turn(), "408", reason=reason)

    (node,) = await started(newer)
    async with dispatching(node) as dispatcher:
        ended = await dispatcher.run(start(), deadline_s=10)
        assert isinstance(ended, Masked)
        assert ended.cause == "PROTOCOL"
        assert "which this trainer does not know" in ended.reason


async def test_a_node_that_could_not_be_synced_asks_for_it_after_a_while_and_ever_more_seldom(monkeypatch):
    monkeypatch.setattr(syncs, "RESYNC_S", 0.1)
    nodes = await started(answer_at_once, answer_at_once)
    async with dispatching(*nodes, synced=False) as dispatcher:
        one, other = (member(dispatcher, node) for node in nodes)
        # Who came after the sync began is still to be served.
        dispatcher.synced([one], asked=[one])
        assert dispatcher.joined.is_set()
        # Who was asked and did not manage waits for the next.
        for least_s in (0.1, 0.2):
            began = time.monotonic()
            dispatcher.synced([one], asked=[one, other])
            assert not dispatcher.joined.is_set()
            async with asyncio.timeout(10):
                await dispatcher.joined.wait()
            assert time.monotonic() - began >= least_s * 0.99
        dispatcher.synced([one, other], asked=[one, other])
        assert not dispatcher.joined.is_set()


async def test_a_rejection_is_retried_after_the_time_it_names():
    async def twice_full(node, start, snapshot):
        if len(node.starts) <= 2:
            node.reject(start, retry_after_ms=30)
        else:
            node.finish(start, node.first_turn(), "408")

    (node,) = await started(twice_full)
    async with dispatching(node) as dispatcher:
        assert isinstance(await dispatcher.run(start(), deadline_s=10), Completed)
        assert dispatcher.rejections == 2
        assert [given.generation for given in node.starts] == [0, 1, 2]


async def test_refused_by_every_node_is_masked_with_the_reason():
    async def never(node, start, snapshot):
        node.reject(start, retry_after_ms=-1)

    nodes = await started(never, never)
    async with dispatching(*nodes) as dispatcher:
        ended = await dispatcher.run(start(), deadline_s=10)
        assert isinstance(ended, Masked)
        assert ended.cause == "rejected"
        assert "no room" in ended.reason


async def test_an_infrastructure_fault_is_masked_with_outcome_and_tool():
    async def broken_tool(node, start, snapshot):
        node.park(start, node.first_turn(), node.key(start))
        node.fail(start, tool_pb2.OUTCOME_INDETERMINATE, keys=[node.key(start)])

    (node,) = await started(broken_tool)
    async with dispatching(node) as dispatcher:
        ended = await dispatcher.run(start(), deadline_s=10)
        assert ended == Masked("INDETERMINATE", "calculator", "the tool's host is gone")
        assert dispatcher.calls.by_outcome == {"INDETERMINATE": 1}
        assert dispatcher.calls.lost_total == 0
        await node.until(lambda: len(node.acks) == 2)  # the end too, or the node would keep it


async def test_a_call_that_no_end_accounts_for_is_lost():
    async def forgets(node, start, snapshot):
        node.park(start, node.first_turn(), node.key(start))
        node.finish(start, node.first_turn(), "408", seq=2)

    (node,) = await started(forgets)
    async with dispatching(node) as dispatcher:
        await dispatcher.run(start(), deadline_s=10)
        assert dispatcher.calls.lost == ["run/t1/0/0/0"]


async def test_a_handed_over_trajectory_goes_to_another_node():
    async def leave(node, start, snapshot):
        columns = node.first_turn()
        snapshot = pb.Snapshot(snapshot_seq=1, segments=columns.pack(), total_tokens=len(columns))
        node.send(
            handed_over=pb.RunResponse.HandedOver(
                trajectory_id=start.trajectory_id, generation=start.generation, snapshot=snapshot
            )
        )

    leaving, staying = await started(leave, answer_at_once)
    async with dispatching(leaving, staying) as dispatcher:
        dispatcher.synced([member(dispatcher, leaving)])
        run = asyncio.create_task(dispatcher.run(start(), deadline_s=10))
        await leaving.until(lambda: leaving.acks)
        dispatcher.synced(dispatcher.members())
        assert isinstance(await run, Completed)
        assert staying.resumes[0].start.generation == 1
        assert len(leaving.starts) == 1


async def test_a_snapshot_that_does_not_fit_is_masked_and_the_stream_lives():
    async def nonsense(node, start, snapshot):
        if start.trajectory_id == "bad":
            node.finish(start, node.first_turn(), "", base=2)
        else:
            node.finish(start, node.first_turn(), "408")

    (node,) = await started(nonsense)
    async with dispatching(node) as dispatcher:
        ended = await dispatcher.run(start("bad"), deadline_s=10)
        assert isinstance(ended, Masked)
        assert ended.cause == "PROTOCOL"
        assert isinstance(await dispatcher.run(start("good", 2), deadline_s=10), Completed)
        assert len(node.hellos) == 1


async def test_cancelling_reaches_the_node_and_its_calls_are_counted():
    async def park(node, start, snapshot):
        node.park(start, node.first_turn(), node.key(start))
        await node.until(lambda: node.cancels)
        node.fail(start, tool_pb2.OUTCOME_CANCELLED, keys=[node.key(start)])

    (node,) = await started(park)
    async with dispatching(node) as dispatcher:
        run = asyncio.create_task(dispatcher.run(start(), deadline_s=10))
        await node.until(lambda: node.acks)
        run.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await run
        await dispatcher.settle()
        assert node.cancels == ["t1"]
        assert dispatcher.calls.by_outcome == {"CANCELLED": 1}
        assert (dispatcher.calls.lost_total, dispatcher.in_flight) == (0, 0)


async def test_settling_is_bounded_where_a_node_says_nothing():
    async def say_nothing(node, start, snapshot):
        pass

    (node,) = await started(say_nothing)
    async with dispatching(node, stop_grace_s=0.1) as dispatcher:
        run = asyncio.create_task(dispatcher.run(start(), deadline_s=10))
        await node.until(lambda: node.starts)
        run.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await run
        await dispatcher.settle()
        assert dispatcher.in_flight == 0


async def test_a_silent_node_is_taken_for_dead():
    async def say_nothing(node, start, snapshot):
        pass

    silent, other = await started(say_nothing, answer_at_once)
    other.keep_talking(0.05)
    async with dispatching(silent, other, silence_timeout_s=1.0, reconnect_grace_s=0.0001) as dispatcher:
        dispatcher.synced([member(dispatcher, silent)])
        run = asyncio.create_task(dispatcher.run(start(), deadline_s=10))
        await silent.until(lambda: silent.starts)
        dispatcher.synced([member(dispatcher, other)])
        assert isinstance(await run, Completed)


async def test_no_node_is_one_sentence_after_a_message():
    dispatcher = Dispatcher(["127.0.0.1:1"], DispatchSettings(**QUICK), RuntimeSettings(), run_id="run")
    async with beside(dispatcher.serve()):
        with pytest.raises(NodeError, match=r"no rollout node answered within 0\.3 s: 127\.0\.0\.1:1") as caught:
            await dispatcher.wait_for_nodes(0.3, lambda sentence: None)
    assert caught.value.exit_code == 3


async def test_nodes_that_all_refuse_the_trainer_are_not_waited_for(tmp_path):
    write_secret(tmp_path / "token", b"of-the-node\n")
    tokens = TokenSettings(accept_file=tmp_path / "token", send_file=tmp_path / "token")
    nodes = [NodeServer(RuntimeSettings(tokens=tokens)) for _ in range(2)]
    addresses = [f"127.0.0.1:{await node.start()}" for node in nodes]
    dispatcher = Dispatcher(addresses, DispatchSettings(**QUICK), RuntimeSettings(), run_id="run")
    try:
        async with beside(dispatcher.serve()):
            with pytest.raises(NodeError) as refused:
                await dispatcher.wait_for_nodes(60, lambda sentence: None)
    finally:
        for node in nodes:
            await node.stop(0)
    assert refused.value.exit_code == EXIT_UNAVAILABLE
    assert str(refused.value).startswith("no rollout node lets this trainer in: ")
    assert all(f"{address} refuses this process: no token was sent" in str(refused.value) for address in addresses)


async def test_a_node_that_refuses_the_trainer_is_told_once_while_another_serves(tmp_path, caplog):
    caplog.set_level("WARNING")
    write_secret(tmp_path / "token", b"of-the-node\n")
    refusing = NodeServer(RuntimeSettings(tokens=TokenSettings(accept_file=tmp_path / "token")))
    serving = ScriptedNode(answer_at_once)
    addresses = [f"127.0.0.1:{await refusing.start()}", await serving.start()]
    dispatcher = Dispatcher(addresses, DispatchSettings(**QUICK), RuntimeSettings(), run_id="run")
    try:
        async with beside(dispatcher.serve()), asyncio.timeout(30):
            await dispatcher.wait_for_nodes(20, lambda sentence: None)
            while "does not let this trainer in" not in caplog.text:
                await dispatcher._next_change(0.1)
            for _ in range(10):  # it is tried again and again
                await dispatcher._next_change(0.1)
    finally:
        await refusing.stop(0)
        await serving.kill()
    told = [line for line in caplog.text.splitlines() if "does not let this trainer in" in line]
    assert len(told) == 1
    assert addresses[0] in told[0]


async def test_a_node_that_comes_up_later_is_waited_for():
    node = ScriptedNode(answer_at_once)
    address = await node.start()
    await node.kill()
    dispatcher = Dispatcher([address], DispatchSettings(**QUICK), RuntimeSettings(), run_id="run")
    async with beside(dispatcher.serve()):
        waiting = asyncio.create_task(dispatcher.wait_for_nodes(10, lambda sentence: None))
        await dispatcher._next_change(5.0)
        await node.start(int(address.rpartition(":")[2]))
        await waiting
    await node.kill()


async def test_a_tool_that_nobody_serves_ends_with_one_sentence():
    (node,) = await started(answer_at_once)
    said = []
    async with dispatching(node) as dispatcher:
        with pytest.raises(NodeError, match="task a7 names the tool 'python', which no rollout node offers") as caught:
            await dispatcher.wait_for_tools({"calculator": "a1", "python": "a7"}, 0.3, said.append)
    assert caught.value.exit_code == 2
    assert said


async def test_a_tool_that_comes_later_is_waited_for():
    (node,) = await started(answer_at_once)
    async with dispatching(node) as dispatcher:
        waiting = asyncio.create_task(dispatcher.wait_for_tools({"python": "a7"}, 10, lambda sentence: None))
        node.tools.append("python")
        await waiting
        assert "python" in dispatcher.tools()


async def test_all_nodes_gone_for_too_long_ends_the_run():
    async def say_nothing(node, start, snapshot):
        pass

    (node,) = await started(say_nothing)

    async def outlive() -> None:
        async with dispatching(node, node_timeout_s=0.2) as dispatcher:
            run = asyncio.create_task(dispatcher.run(start(), deadline_s=30))
            await node.until(lambda: node.starts)
            await node.kill()
            await run

    with pytest.raises(NodeError, match=r"no rollout node has been there for 0\.2 s"):
        await outlive()
