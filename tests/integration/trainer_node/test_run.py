"""Whole runs: real gRPC, a real (tiny) model that learns, scripted rollout nodes."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from prometheus_client import REGISTRY

from node_runtime.errors import NodeError
from node_runtime.runtime_settings import RuntimeSettings
from node_runtime.spans import read_spans
from tests.integration.trainer_node.bandit import BanditNode, DirectPusher
from tests.unit.trainer_node.builders import tiny_module
from trainer_node import publish
from trainer_node.run import TrainerRun
from trainer_node.settings import TrainerSettings

pytestmark = pytest.mark.integration

REWARD = "tests.integration.trainer_node.bandit:good_first_token"


def write_inputs(tmp_path, *, tools=("calculator",)):
    model = tmp_path / "model"
    tiny_module().save_pretrained(model)
    for name, count in (("train", 40), ("eval", 60)):
        rows = [
            {
                "id": f"{name}{i}",
                "messages": [{"role": "user", "content": "go"}],
                "tools": list(tools),
                "kind": "bandit",
            }
            for i in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return model


def make_settings(tmp_path, addresses, **fields) -> TrainerSettings:
    fields = {
        "reward": REWARD,
        "steps": 12,
        "groups_per_step": 8,
        "group_size": 8,
        "learning_rate": 0.05,
        "max_staleness": 4,
        "eval": {"tasks": 60},
        "dispatch": {
            "reconnect_base_s": 0.02,
            "reconnect_max_s": 0.1,
            "reconnect_grace_s": 0.2,
            "startup_timeout_s": 5.0,
            "tools_timeout_s": 0.3,
            "stop_grace_s": 5.0,
        },
        **fields,
    }
    values = {
        "model": str(tmp_path / "model"),
        "train_tasks": str(tmp_path / "train.jsonl"),
        "eval_tasks": str(tmp_path / "eval.jsonl"),
        "rollout_nodes": addresses,
        "run_dir": str(tmp_path / "run"),
        **fields,
    }
    return TrainerSettings.model_validate_json(json.dumps(values))


class Running:
    """A run with its nodes."""

    def __init__(
        self, tmp_path, *nodes: BanditNode, spoil_push: int = 0, refuse_at: int = -1, tools=("calculator",), **fields
    ) -> None:
        self.tmp_path, self.nodes, self.spoil_push, self.fields = tmp_path, nodes, spoil_push, fields
        self.refuse_at = refuse_at
        self.pusher: DirectPusher | None = None
        self.run: TrainerRun | None = None
        write_inputs(tmp_path, tools=tools)

    async def __aenter__(self) -> Running:
        addresses = [await node.start() for node in self.nodes]
        settings = make_settings(self.tmp_path, addresses, **self.fields)
        self.run = TrainerRun(
            settings, RuntimeSettings(node_name="trainer", spans_dir=self.tmp_path / "spans"), make_pusher=self._pusher
        )
        return self

    def _pusher(self, model, settings, runtime) -> DirectPusher:
        self.pusher = DirectPusher(model, self.nodes, spoil_push=self.spoil_push, refuse_at=self.refuse_at)
        return self.pusher

    async def __aexit__(self, *_exc: object) -> None:
        for node in self.nodes:
            await node.kill()

    @property
    def summary(self):
        return json.loads((self.tmp_path / "run" / "trainer_summary.json").read_text())

    @property
    def events(self):
        return [json.loads(line) for line in (self.tmp_path / "run" / "progress.jsonl").read_text().splitlines()]

    async def until(self, event: str, **fields) -> None:
        """Until the feed has this event."""
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(FileNotFoundError):
                    if any(e["event"] == event and fields.items() <= e.items() for e in self.events):
                        return
                await asyncio.sleep(0.02)


async def test_a_run_learns_and_its_summary_is_what_was_measured(tmp_path):
    before = REGISTRY.get_sample_value("fermata_trainer_steps_total") or 0
    async with Running(tmp_path, BanditNode(), BanditNode()) as running:
        await running.run.run()
        summary = running.summary
        assert summary["outcome"] == "finished"
        assert summary["accuracy_before"] < 0.6
        assert summary["accuracy_after"] > 0.9
        assert summary["accuracy_without_tools"] == 0
        assert summary["steps"] == 12
        assert summary["syncs"] == running.pusher.pushes >= 10
        assert summary["checksums_verified"]["equal"] is True
        assert summary["checksums_verified"]["count"] > 0
        assert summary["calls_lost"] == 0
        assert summary["calls"]["OK"] >= summary["trajectories"]
        assert summary["logprob_diff_from"] == "trajectories"
        assert 0 < summary["logprob_diff_mean"] <= summary["logprob_diff_max"] < 1e-4
        assert 0.7 < summary["parked_share"] < 0.8
        assert summary["tokens_per_second"] > 0
        assert summary["masked_share"] == 0
        assert len(summary["learning_curve"]) == 12
        assert {"wait", "train", "sync", "eval_before", "eval_after", "training"} <= summary["seconds"].keys()
        assert {"torch", "transformers", "python"} <= summary["versions"].keys()
        assert (tmp_path / "run" / "model" / "model.safetensors").exists()
        events = running.events
        assert events[-1]["event"] == "end"
        steps = [event for event in events if event["event"] == "step"]
        assert [event["step"] for event in steps] == list(range(1, 13))
        assert all(event["staleness_max"] <= 4 for event in steps)
        kinds = {span.kind for span in read_spans(tmp_path / "spans")}
        assert {"train", "weight-sync", "reward", "eval"} <= kinds
        assert REGISTRY.get_sample_value("fermata_trainer_steps_total") == before + 12
        # A node that joined was given the weights under their number: only changes count.
        version = summary["weights"]["version"]
        assert REGISTRY.get_sample_value("fermata_trainer_weight_version") == version <= running.pusher.pushes
        assert running.pusher.closed


async def test_a_sync_whose_proof_fails_stops_the_run_with_a_sentence(tmp_path):
    async with Running(tmp_path, BanditNode(), spoil_push=3) as running:
        with pytest.raises(NodeError, match=r"weight sync 3 failed its proof at .*lm_head\.weight differs") as caught:
            await running.run.run()
        assert caught.value.exit_code == 4
        assert running.summary["outcome"] == "failed"
        assert "lm_head.weight differs" in running.summary["error"]
        assert running.summary["checksums_verified"]["equal"] is False
        assert running.summary["steps"] == 1


async def test_masked_samples_are_replaced_and_counted(tmp_path):
    async with Running(
        tmp_path, BanditNode(faulty_share=0.1), steps=4, eval={"before": False, "after": False}
    ) as running:
        await running.run.run()
        summary = running.summary
        assert summary["outcome"] == "finished"
        assert 0.05 < summary["masked_share"] < 0.15
        assert summary["masked"]["by_cause"].keys() == {"INDETERMINATE"}
        assert summary["masked"]["by_tool"].keys() == {"calculator"}
        assert summary["calls"]["INDETERMINATE"] > 0
        assert summary["calls_lost"] == 0
        # Every group was filled up again.
        assert "too_small" not in summary["groups_dropped"]


async def test_too_many_masked_samples_stop_the_run_and_say_so(tmp_path):
    async with Running(tmp_path, BanditNode(faulty_share=0.6), eval={"before": False}) as running:
        with pytest.raises(NodeError, match=r"samples were masked, the limit is 30% \(causes: INDETERMINATE"):
            await running.run.run()
        assert running.summary["outcome"] == "failed"


async def test_a_reward_that_raises_masks_and_never_scores_nought(tmp_path):
    reward = "tests.integration.trainer_node.bandit:broken"
    async with Running(tmp_path, BanditNode(), reward=reward, eval={"before": False}) as running:
        with pytest.raises(NodeError, match="reward_error"):
            await running.run.run()
        assert running.summary["masked"]["by_cause"].keys() == {"reward_error"}
        assert running.summary["steps"] == 0


@pytest.mark.parametrize("phase", ["eval_before", "wait"])
async def test_stopping_in_any_phase_writes_what_there_is(tmp_path, phase):
    async with Running(tmp_path, BanditNode(), steps=10_000) as running:
        work = asyncio.create_task(running.run.run())
        await running.until("eval" if phase == "wait" else "synced")
        if phase == "wait":
            await running.until("step")
        running.run.interrupt()
        work.cancel()
        async with asyncio.timeout(10):
            with contextlib.suppress(asyncio.CancelledError):
                await work
        assert running.summary["outcome"] == "interrupted"
        assert running.summary["calls_lost"] == 0
        assert running.events[-1]["event"] == "end"


async def test_a_node_killed_in_the_middle_costs_nothing_but_time(tmp_path):
    first, second = BanditNode(), BanditNode()
    async with Running(tmp_path, first, second, eval={"before": False, "tasks": 20}) as running:
        work = asyncio.create_task(running.run.run())
        await running.until("step", step=2)
        port = int(first.address.rpartition(":")[2])
        await first.kill()
        await running.until("step", step=5)
        await first.start(port)
        await work
        summary = running.summary
        assert summary["outcome"] == "finished"
        assert summary["masked_share"] == 0
        assert summary["moves"] > 0
        assert summary["calls_lost"] == 0


async def test_an_evaluation_goes_on_with_the_node_that_comes_for_the_one_it_lost(tmp_path):
    node = BanditNode()
    held = asyncio.Event()
    play = node.script

    async def hold(_node, start, snapshot):
        if not held.is_set():
            held.set()
            return  # what the node had when it was killed
        await play(_node, start, snapshot)

    node.script = hold
    eval_settings = {"tasks": 20, "after": False, "without_tools": False}
    async with Running(tmp_path, node, steps=1, eval=eval_settings) as running:
        work = asyncio.create_task(running.run.run())
        await held.wait()
        port = int(node.address.rpartition(":")[2])
        await node.kill()
        await node.start(port)
        async with asyncio.timeout(20):
            await work
        summary = running.summary
        assert summary["outcome"] == "finished"
        assert summary["evals"]["before"]["scored"] == 20
        assert summary["masked_share"] == 0
        # The first sync, the one for the node that came, and the step's: but two sets of weights.
        assert (running.pusher.pushes, summary["weights"]["version"]) == (3, 2)


async def test_a_node_that_refuses_a_sync_costs_the_others_nothing(tmp_path):
    quick = {"before": False, "after": False, "without_tools": False}
    async with Running(tmp_path, BanditNode(), BanditNode(), refuse_at=1, steps=3, eval=quick) as running:
        await running.run.run()
        summary = running.summary
        assert summary["outcome"] == "finished"
        assert summary["checksums_verified"]["equal"] is True
        assert running.pusher.refused >= 3


async def test_a_sync_that_every_node_refuses_is_tried_again_and_then_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "TRY_PAUSE_S", 0.01)
    async with Running(tmp_path, BanditNode(), refuse_at=0) as running:
        with pytest.raises(NodeError, match=r"could be given the weights in 6 tries: .*its engine has ended"):
            await running.run.run()
        assert running.pusher.refused == 6
        assert running.summary["checksums_verified"] == {"count": 0, "equal": False}


async def test_targets_end_a_run_early(tmp_path):
    async with Running(
        tmp_path, BanditNode(), steps=200, target_reward=0.8, target_window=2, eval={"before": False, "after": False}
    ) as running:
        await running.run.run()
        assert running.summary["outcome"] == "target_reached"
        assert running.summary["steps"] < 50


async def test_a_checkpoint_is_gone_on_from(tmp_path):
    quick = {"before": False, "after": False, "without_tools": False}
    async with Running(tmp_path, BanditNode(), steps=3, checkpoint_every=3, eval=quick) as running:
        await running.run.run()
        lineage = running.summary["weights"]["lineage"]
    async with Running(tmp_path, BanditNode(), steps=5, resume=True, eval=quick) as running:
        await running.run.run()
        assert [row["step"] for row in running.summary["learning_curve"]] == [4, 5]
        assert running.summary["weights"]["lineage"] != lineage


async def test_a_tool_that_nobody_serves_ends_the_run_before_anything(tmp_path):
    async with Running(tmp_path, BanditNode(), tools=["python"]) as running:
        with pytest.raises(NodeError, match="task train0 names the tool 'python'") as caught:
            await running.run.run()
        assert caught.value.exit_code == 2
        assert running.pusher is None


async def test_a_node_that_is_not_there_is_waited_for_and_then_named(tmp_path):
    write_inputs(tmp_path)
    settings = make_settings(tmp_path, ["127.0.0.1:1"], dispatch={"startup_timeout_s": 0.3})
    run = TrainerRun(settings, RuntimeSettings(), make_pusher=lambda *_: pytest.fail("nothing to push to"))
    with pytest.raises(NodeError, match=r"no rollout node answered within 0\.3 s: 127\.0\.0\.1:1") as caught:
        await run.run()
    assert caught.value.exit_code == 3
