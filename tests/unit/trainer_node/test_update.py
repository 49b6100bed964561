import random

import pytest
import torch

from tests.unit.trainer_node.builders import tiny_policy, trajectory, version
from trainer_node.settings import TrainerSettings
from trainer_node.update import Interrupted, Item, PolicyUpdate


def settings(**fields):
    fields = {"learning_rate": 1e-3, **fields}
    return TrainerSettings(model="m", train_tasks="t", rollout_nodes=("h:1",), **fields)


def items(policy, count=12, *, shift=0.0, versions=None, seed=0):
    """Trajectories whose sampling logprobs are the policy's own, moved by `shift`."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        sampled = [rng.randrange(48) for _ in range(rng.randint(2, 9))]
        prompt = [rng.randrange(48) for _ in range(rng.randint(1, 5))]
        (values,) = policy.logprobs([prompt + sampled], [b"\0" * len(prompt) + b"\1" * len(sampled)], 1.0)
        known = [(versions[0], 1), (versions[1], len(sampled) - 1)] if versions else None
        rows.append(trajectory(prompt, sampled, logprobs=[v + shift for v in values], versions=known))
    return [Item(row, rng.choice([-1.0, 0.5, 1.0])) for row in rows]


def parameters(policy):
    return torch.cat([p.detach().flatten() for p in policy.module.parameters()])


def test_a_step_makes_good_samples_likelier_and_bad_ones_less():
    policy = tiny_policy()
    batch = items(policy)
    good, bad = [i for i in batch if i.advantage > 0], [i for i in batch if i.advantage < 0]
    update = PolicyUpdate(policy, settings())

    def likelihood(rows):
        values = policy.logprobs([r.trajectory.ids for r in rows], [r.trajectory.mask for r in rows], 1.0)
        return sum(sum(row) for row in values) / sum(len(row) for row in values)

    before = likelihood(good), likelihood(bad)
    report = update.step(batch, version(1))
    after = likelihood(good), likelihood(bad)
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert (report.sequences, report.updates) == (12, 1)
    assert report.tokens == sum(item.trajectory.trained_tokens for item in batch)
    assert report.ratio_max == pytest.approx(1.0, abs=1e-4)
    assert report.clip_share == 0


@pytest.mark.parametrize("how", ["token", "sequence", "dr_grpo"])
@pytest.mark.parametrize("old", ["sampler", "recompute"])
def test_microbatches_do_not_change_the_step(how, old):
    results = []
    for size in (8, 10_000):
        policy = tiny_policy(tokens_per_microbatch=size)
        batch = items(policy, shift=0.05)
        update = PolicyUpdate(policy, settings(loss_aggregation=how, old_policy=old, weight_decay=0.1))
        report = update.step(batch, version(1))
        results.append((parameters(policy), report.loss, report.grad_norm))
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-4)
    assert results[0][2] == pytest.approx(results[1][2], rel=1e-4)
    # One AdamW step is ± the rate wherever a gradient is near nought, so compare the bulk.
    assert (results[0][0] - results[1][0]).abs().mean() < 1e-5


def test_the_gradient_of_a_whole_step_equals_finite_differences():
    policy = tiny_policy()
    policy.module.double()
    batch = items(policy, count=4, shift=0.1)
    update = PolicyUpdate(policy, settings(grad_clip=0))
    parameter = policy.module.lm_head.weight

    def loss():
        update.optimizer.zero_grad(set_to_none=True)
        return update._minibatch(batch, list(range(4)), version(1), None, None).loss

    loss()
    gradient = parameter.grad.clone()
    index = divmod(int(gradient.abs().argmax()), gradient.shape[1])
    step = 1e-3
    with torch.no_grad():
        parameter[index] += step
    above = loss()
    with torch.no_grad():
        parameter[index] -= 2 * step
    below = loss()
    assert (above - below) / (2 * step) == pytest.approx(gradient[index].item(), rel=2e-3)


def test_the_difference_is_taken_over_tokens_of_this_version_alone():
    policy = tiny_policy()
    batch = items(policy, versions=(3, 4), shift=0.25)
    report = PolicyUpdate(policy, settings()).step(batch, version(4))
    assert report.diff.tokens == sum(item.trajectory.trained_tokens - 1 for item in batch)
    assert report.diff.mean == pytest.approx(0.25, abs=1e-4)
    assert report.diff.largest == pytest.approx(0.25, abs=1e-4)


def test_no_difference_is_taken_after_the_policy_has_changed():
    policy = tiny_policy()
    batch = items(policy)
    report = PolicyUpdate(policy, settings(minibatches=4, learning_rate=0.05)).step(batch, version(1))
    first = batch[:3]
    assert report.updates == 4
    assert report.diff.tokens == sum(item.trajectory.trained_tokens for item in first)
    assert report.diff.largest < 1e-4


def test_recompute_compares_everything_before_the_first_update():
    policy = tiny_policy()
    batch = items(policy)
    update = PolicyUpdate(policy, settings(minibatches=4, learning_rate=0.05, old_policy="recompute"))
    report = update.step(batch, version(1))
    assert report.diff.tokens == sum(item.trajectory.trained_tokens for item in batch)
    assert report.diff.largest < 1e-4
    assert report.ratio_max > 1.01  # the later minibatches


def test_compare_takes_whole_trajectories_of_the_version():
    policy = tiny_policy()
    update = PolicyUpdate(policy, settings())
    mine = [item.trajectory for item in items(policy, versions=(2, 2))]
    mixed = [item.trajectory for item in items(policy, versions=(1, 2), shift=9.0)]
    diff = update.compare(mine + mixed, version(2))
    assert diff.tokens == sum(t.trained_tokens for t in mine)
    assert diff.largest < 1e-4
    assert update.compare(mixed, version(2)).mean is None


def test_the_temperature_of_sampling_is_the_temperature_of_training():
    policy = tiny_policy()
    prompt, sampled = [1, 2, 3], [4, 5, 6, 7]
    (values,) = policy.logprobs([prompt + sampled], [b"\0\0\0\1\1\1\1"], 0.5)
    batch = [Item(trajectory(prompt, sampled, logprobs=values), 1.0)]
    assert PolicyUpdate(policy, settings(temperature=0.5)).step(batch, version(1)).diff.largest < 1e-4
    assert PolicyUpdate(tiny_policy(), settings()).step(batch, version(1)).diff.largest > 1e-2


def test_warmup_and_clipping():
    policy = tiny_policy()
    update = PolicyUpdate(policy, settings(warmup_steps=4, grad_clip=1e-3))
    rates = [update.step(items(policy, seed=i), version(1)).learning_rate for i in range(5)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])


def test_a_gradient_that_is_not_finite_changes_nothing():
    policy = tiny_policy()
    batch = [Item(item.trajectory, float("nan")) for item in items(policy)]
    before = parameters(policy)
    with pytest.raises(FloatingPointError, match="the policy was left as it was"):
        PolicyUpdate(policy, settings()).step(batch, version(1))
    assert torch.equal(parameters(policy), before)


def test_an_interrupted_step_changes_nothing():
    policy = tiny_policy()
    update = PolicyUpdate(policy, settings())
    before = parameters(policy)
    update.stop.set()
    with pytest.raises(Interrupted):
        update.step(items(policy), version(1))
    assert torch.equal(parameters(policy), before)


def test_an_empty_batch_is_no_update():
    policy = tiny_policy()
    report = PolicyUpdate(policy, settings()).step([], version(1))
    assert (report.updates, report.tokens, report.diff.mean) == (0, 0, None)
