import subprocess
import sys

import pydantic
import pytest

from trainer_node.settings import TrainerSettings

NEEDED = {"model": "m", "train_tasks": "t", "rollout_nodes": ("h:1",)}


def test_what_must_be_given_and_the_defaults():
    settings = TrainerSettings(**NEEDED)
    assert (settings.groups_per_step, settings.group_size, settings.clip_low, settings.clip_high) == (16, 8, 0.2, 0.28)
    assert settings.open_groups == 32
    assert settings.eval.tasks == 200
    for name in NEEDED:
        with pytest.raises(pydantic.ValidationError, match=name):
            TrainerSettings(**{key: value for key, value in NEEDED.items() if key != name})


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"in_flight_groups": 8}, "a step could never be filled"),
        ({"minibatches": 17}, "must not exceed groups_per_step"),
        ({"target_accuracy": 0.9}, r"needs eval\.every"),
        ({"group_size": 1}, "greater than or equal to 2"),
        ({"clip_low": 1.0}, "less than 1"),
        ({"loss_aggregation": "mean"}, "token"),
        ({"rollout_nodes": ()}, "at least 1"),
        ({"epochs": 2}, "epochs"),
    ],
)
def test_what_could_not_be_run_is_refused(fields, says):
    with pytest.raises(pydantic.ValidationError, match=says):
        TrainerSettings(**{**NEEDED, **fields})


def test_settings_need_neither_torch_nor_transformers():
    code = "import sys, trainer_node.settings; sys.exit(bool({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
