"""The sender over several nodes, real gloo and real gRPC: dead, frozen and dying nodes cost the others no proof."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from fermata.v1 import weights_pb2 as pb

from tests.integration.weights.fake_node import FakeNode, fake_nodes
from trainer_node.weights import SyncReport, WeightSync, control

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

TENSORS = [(f"t{i}", torch.arange(1000 * (i + 1), dtype=torch.float32)) for i in range(6)]
OPTIONS: dict[str, Any] = {
    "bucket_bytes": 10_000,
    "find_timeout_s": 1.0,
    "join_timeout_s": 10.0,
    "start_timeout_s": 1.0,
    "step_timeout_s": 5.0,
}


@pytest.fixture(autouse=True)
def short_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MARGIN_S", 0.5)


async def push(sync: WeightSync, number: int, **changes: Any) -> SyncReport:
    arguments: dict[str, Any] = {
        "version": pb.WeightVersion(lineage="l", number=number),
        "named_tensors": lambda: TENSORS,
        "probes": [[1, 2, 3, 4]],
        "probe_logprobs": lambda rows: [[-1.0] * (len(row) - 1) for row in rows],
    }
    return await sync.push(**{**arguments, **changes})


def assert_has_all(node: FakeNode) -> None:
    assert all(torch.equal(node.tensors[name], tensor) for name, tensor in TENSORS)


async def test_every_node_gets_every_byte_and_the_group_is_kept() -> None:
    nodes = [FakeNode("a"), FakeNode("b"), FakeNode("c")]
    async with fake_nodes(*nodes) as channels:
        sync = await WeightSync.open(channels, **OPTIONS)
        for number in (1, 2):
            report = await push(sync, number)
            assert report.holds, report.failed
            assert report.digests_verified == 3 * len(TENSORS)
        for node in nodes:
            assert_has_all(node)
            assert node.calls.count("Init") == 1
        await sync.close()
        assert all(node.state.group_lineage is None for node in nodes)


async def test_membership_that_changes_makes_the_group_anew() -> None:
    a, b = FakeNode("a"), FakeNode("b")
    async with fake_nodes(a, b) as channels:
        sync = await WeightSync.open({"a": channels["a"]}, **OPTIONS)
        assert (await push(sync, 1)).holds
        sync.set_members(channels)
        report = await push(sync, 2)
        assert set(report.nodes) == {"a", "b"}
        assert report.holds, report.failed
        assert_has_all(b)
        sync.set_members({"b": channels["b"]})
        assert (await push(sync, 3)).holds
        assert a.state.served.number == 2
        await sync.close()


async def test_a_node_started_anew_at_its_address_is_taken_in_again() -> None:
    a, b = FakeNode("a"), FakeNode("b")
    async with fake_nodes(a, b) as channels:
        sync = await WeightSync.open(channels, **OPTIONS)
        assert (await push(sync, 1)).holds
        b.close_group()
        b.state = type(b.state)()  # what a new process knows
        report = await push(sync, 2)
        assert report.holds, report.failed
        await sync.close()


@pytest.mark.parametrize(
    ("step", "how"),
    [
        ("Status", "hang"),
        ("Status", "die"),
        ("Init", "die"),
        ("Start", "hang"),
        ("Start", "die"),
        ("Update", "die"),
        ("Update", "hang"),
        ("Finish", "die"),
    ],
)
async def test_a_node_that_fails_in_any_step_costs_the_others_nothing(step: str, how: str) -> None:
    good, other = FakeNode("good"), FakeNode("other")
    bad = FakeNode("bad", **{step: how})
    async with fake_nodes(good, bad, other) as channels:
        sync = await WeightSync.open(channels, **OPTIONS)
        began = time.monotonic()
        report = await push(sync, 1)
        assert time.monotonic() - began < 25
        assert not report.holds
        assert set(report.failed) == {"bad"}, report.failed
        assert report.nodes["bad"].error
        assert not report.nodes["bad"].reached
        assert report.nodes["good"].holds
        assert report.nodes["other"].holds
        assert_has_all(good)
        # And the next sync is made without it.
        sync.set_members({"good": channels["good"], "other": channels["other"]})
        assert (await push(sync, 2)).holds
        await sync.close()


async def test_a_node_that_refuses_is_reported_with_its_sentence() -> None:
    good, bad = FakeNode("good"), FakeNode("bad", Start="refuse")
    async with fake_nodes(good, bad) as channels:
        sync = await WeightSync.open(channels, **OPTIONS)
        report = await push(sync, 1)
        assert report.nodes["good"].holds
        assert report.failed == {"bad": "bad answered Start: bad does not want to"}
        assert report.nodes["bad"].reached
        await sync.close()


async def test_no_node_at_all_is_a_report_that_does_not_hold() -> None:
    dead = FakeNode("dead", Status="die")
    async with fake_nodes(dead) as channels:
        sync = await WeightSync.open(channels, **OPTIONS)
        report = await push(sync, 1)
        assert not report.holds
        assert "did not answer Status" in report.failed["dead"]


async def test_shards_that_differ_between_equal_layouts_are_withdrawn() -> None:
    a, b, c = FakeNode("a"), FakeNode("b"), FakeNode("c")
    c.shard = b"other"
    async with fake_nodes(a, b, c) as channels:
        sync = await WeightSync.open(channels, **OPTIONS)
        report = await push(sync, 1)
        assert set(report.failed) == {"c"}
        assert "other bytes than nodes with the same layout" in report.failed["c"]
        assert c.calls[-1] == "Abort"
        assert "Abort" not in a.calls + b.calls
        await sync.close()


async def test_tensors_that_change_between_the_passes_raise_and_nobody_waits() -> None:
    node = FakeNode("a")
    passes: list[int] = []

    def changing() -> list[tuple[str, torch.Tensor]]:
        passes.append(1)
        return TENSORS if len(passes) == 1 else TENSORS[:-1]

    async with fake_nodes(node) as channels:
        sync = await WeightSync.open(channels, **OPTIONS)
        with pytest.raises(ValueError, match="were declared"):
            await push(sync, 1, named_tensors=changing)
        assert (await push(sync, 2)).holds
        await sync.close()
