import math

import pytest
import torch

from trainer_node.loss import aggregation_weights, policy_loss, surrogate_T, tis_weights_T

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.2, 1.0, -1.2, False),  # inside the higher bound that clip-higher opens
        (1.5, 1.0, -1.28, True),  # good and already likelier: bounded above
        (0.5, 1.0, -0.5, False),  # good but less likely: never bounded
        (0.5, -1.0, 0.8, True),  # bad and already less likely: bounded below
        (1.5, -1.0, 1.5, False),  # bad but likelier: never bounded
    ],
)
def test_surrogate_by_hand(ratio, advantage, loss, clipped):
    loss_T, ratio_T, clipped_T = surrogate_T(tensor(math.log(ratio)), tensor(0.0), tensor(advantage), **CLIP)
    assert loss_T.item() == pytest.approx(loss)
    assert ratio_T.item() == pytest.approx(ratio)
    assert clipped_T.item() is clipped


def test_an_absurd_ratio_does_not_poison_the_batch():
    loss_T, _, _ = surrogate_T(tensor(0.0, 0.0), tensor(-1e6, 1e6), tensor(1.0, 1.0), **CLIP)
    assert torch.isfinite(loss_T).all()


def test_tis_truncates_above_and_leaves_the_rest():
    weights = tis_weights_T(tensor(0.0, -1.0, 0.0), tensor(-5.0, -1.0, 1.0), cap=2.0)
    assert weights.tolist() == pytest.approx([2.0, 1.0, math.exp(-1.0)])


def test_tis_is_a_constant_to_the_gradient():
    logprobs = tensor(-1.0).requires_grad_()
    assert not tis_weights_T(logprobs, tensor(-2.0), cap=10.0).requires_grad


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("token", [1 / 6, 1 / 6, 1 / 6]),
        ("sequence", [1 / (3 * 1), 1 / (3 * 2), 1 / (3 * 3)]),
        ("dr_grpo", [1 / (3 * 10)] * 3),
    ],
)
def test_aggregation_by_hand(how, expected):
    assert aggregation_weights([1, 2, 3], how, dr_grpo_tokens=10) == pytest.approx(expected)


def test_aggregation_of_nothing_and_of_an_unknown_kind():
    assert aggregation_weights([0, 0], "token") == [0.0, 0.0]
    assert aggregation_weights([0, 2], "sequence") == [0.0, 0.25]
    with pytest.raises(ValueError, match="token, sequence or dr_grpo"):
        aggregation_weights([1], "mean")


def numbers():
    generator = torch.Generator().manual_seed(1)
    shape = (24,)
    sampler = -torch.rand(shape, generator=generator, dtype=torch.float64) * 3
    old = sampler + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    new = old + 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64)
    advantages = torch.randn(shape, generator=generator, dtype=torch.float64)
    weights = torch.rand(shape, generator=generator, dtype=torch.float64)
    return new, old, sampler, advantages, weights


@pytest.mark.parametrize("recompute", [False, True])
def test_the_gradient_equals_finite_differences(recompute):
    new, old, sampler, advantages, weights = numbers()
    extra = {"old_logprobs_T": old, "tis_cap": 1.5} if recompute else {}

    def loss(logprobs):
        return policy_loss(logprobs, sampler, advantages, weights, **CLIP, **extra).loss

    assert torch.autograd.gradcheck(loss, (new.requires_grad_(),), eps=1e-6, atol=1e-6)


def test_on_policy_the_gradient_is_the_policy_gradient():
    # At ratio 1: d/dθ = −A · d logprob.
    new = tensor(-1.0, -2.0).requires_grad_()
    policy_loss(new, new.detach(), tensor(3.0, -1.0), tensor(0.5, 0.5), **CLIP).loss.backward()
    assert new.grad.tolist() == [-1.5, 0.5]


def test_clipped_tokens_have_no_gradient():
    new = tensor(math.log(2.0), math.log(0.5)).requires_grad_()
    terms = policy_loss(new, tensor(0.0, 0.0), tensor(1.0, -1.0), tensor(1.0, 1.0), **CLIP)
    terms.loss.backward()
    assert new.grad.tolist() == [0.0, 0.0]
    assert (terms.clipped.item(), terms.ratio_max.item()) == (2, pytest.approx(2.0))


def test_recompute_multiplies_the_proximal_surrogate_by_the_tis_weight():
    terms = policy_loss(
        tensor(math.log(1.1)), tensor(-0.5), tensor(1.0), tensor(1.0), **CLIP, old_logprobs_T=tensor(0.0), tis_cap=10.0
    )
    assert terms.loss.item() == pytest.approx(-1.1 * math.exp(0.5))


def test_the_sampler_as_old_policy_takes_no_tis():
    terms = policy_loss(tensor(-1.0), tensor(-1.1), tensor(1.0), tensor(1.0), **CLIP, tis_cap=1.0)
    assert terms.loss.item() == pytest.approx(-math.exp(0.1))


def test_no_tokens_give_no_loss():
    empty = tensor()
    terms = policy_loss(empty, empty, empty, empty, **CLIP)
    assert (terms.loss.item(), terms.clipped.item(), terms.ratio_max.item()) == (0, 0, 0)
