"""Checkpoints, the progress feed and other files that a run leaves."""

import json
import math
import random

import pytest
import torch

from node_runtime.errors import NodeError
from tests.unit.trainer_node.builders import sample, tiny_policy, version
from tests.unit.trainer_node.test_update import items, parameters, settings
from trainer_node import checkpoint
from trainer_node.evaluation import summarise
from trainer_node.progress import ProgressFeed, write_json
from trainer_node.record import versions
from trainer_node.update import PolicyUpdate

PROGRESS = checkpoint.Progress(step=3, frontier=40, seed=7, lineage="l", version=4, untrained=(31, 39))


def test_a_resumed_run_goes_on_exactly_where_it_was(tmp_path):
    policy = tiny_policy()
    update = PolicyUpdate(policy, settings())
    batches = [items(policy, seed=seed, shift=0.1) for seed in range(3)]
    update.step(batches[0], version(1))
    torch.manual_seed(5)
    random.seed(5)
    folder = tmp_path / "checkpoint"
    checkpoint.save(folder, PROGRESS, policy.module.state_dict(), update.state_dict())
    drawn = torch.rand(3), random.random()
    for batch in batches[1:]:
        update.step(batch, version(1))

    again = tiny_policy()
    resumed = PolicyUpdate(again, settings())
    progress, policy_state, update_state = checkpoint.load(folder)
    assert progress == PROGRESS
    again.module.load_state_dict(policy_state)
    resumed.load_state_dict(update_state)
    assert torch.equal(torch.rand(3), drawn[0])
    assert random.random() == drawn[1]
    for batch in batches[1:]:
        resumed.step(batch, version(1))
    assert torch.equal(parameters(policy), parameters(again))
    assert resumed.updates == 3


def test_an_older_checkpoint_is_replaced_and_a_torn_one_never_seen(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint"
    checkpoint.save(folder, PROGRESS, {}, {})
    later = checkpoint.Progress(step=4, frontier=50, seed=7, lineage="l", version=5)
    checkpoint.save(folder, later, {}, {})
    assert checkpoint.load(folder)[0] == later
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]

    def full_disk(*_):
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(folder, PROGRESS, {}, {})
    monkeypatch.undo()
    assert checkpoint.load(folder)[0] == later


def test_a_crash_between_the_renames_leaves_the_older_one(tmp_path):
    folder = tmp_path / "checkpoint"
    checkpoint.save(folder, PROGRESS, {}, {})
    folder.rename(tmp_path / "checkpoint.old")
    assert checkpoint.load(folder)[0] == PROGRESS


def test_no_checkpoint_and_a_broken_one(tmp_path):
    folder = tmp_path / "checkpoint"
    assert checkpoint.load(folder) is None
    folder.mkdir()
    (folder / "state.pt").write_bytes(b"nothing")
    with pytest.raises(NodeError, match="cannot be read") as caught:
        checkpoint.load(folder)
    assert caught.value.exit_code == 2


def test_the_feed_is_json_lines_without_nan(tmp_path):
    feed = ProgressFeed(tmp_path / "run" / "progress.jsonl")
    feed.write("step", "train", step=1, reward_mean=math.nan, rows=[{"x": math.inf}])
    feed.write("end", "end")
    lines = (tmp_path / "run" / "progress.jsonl").read_text().splitlines()
    feed.close()
    first = json.loads(lines[0])
    assert (first["event"], first["phase"], first["reward_mean"], first["rows"]) == (
        "step",
        "train",
        None,
        [{"x": None}],
    )
    assert json.loads(lines[1])["t"] >= first["t"]


def test_summaries_are_whole_or_absent(tmp_path):
    write_json(tmp_path / "summary.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "summary.json", {"a": object()})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"a": 1}


def test_accuracy_is_over_scored_samples_and_by_kind():
    samples = [sample(1.0), sample(0.0), sample(0.5), sample(1.0)]
    result = summarise("before", samples, 3, 1.0, 2.0)
    assert (result.accuracy, result.reward_mean, result.scored, result.masked) == (0.5, 0.625, 4, 3)
    assert result.accuracy_by_kind == {"kind": 0.5}
    assert "samples" not in result.report()


def test_versions_are_those_installed():
    found = versions()
    assert found["torch"] == torch.__version__.partition("+")[0] or found["torch"] == torch.__version__
    assert {"python", "transformers", "grpcio"} <= found.keys()
