"""Advantages and losses against values worked out by hand, and gradients against finite differences in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from rollout.learning.advantages import generalized_advantages, group_advantages, has_signal, overlong_penalty
from rollout.learning.losses import (
    cispo_loss,
    clipped_loss,
    effective_sample_size,
    importance_weights,
    kl_estimate,
    log_ratios,
    token_weights,
    value_loss,
)
from sampling.errors import ConfigError


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def test_group_advantages_by_hand():
    rewards = np.array([1.0, 0.0, 0.0, 1.0])
    np.testing.assert_allclose(group_advantages(rewards, scale="none"), [0.5, -0.5, -0.5, 0.5])
    std = np.sqrt(1 / 3)
    np.testing.assert_allclose(group_advantages(rewards), np.array([0.5, -0.5, -0.5, 0.5]) / (std + 1e-6))
    np.testing.assert_allclose(
        group_advantages([3.0, 0.0, 0.0], "leave_one_out", "none"), [3.0, -1.5, -1.5], atol=1e-12
    )


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.7] * 8, [5.0], [np.nan, 1.0], [np.nan, np.nan]])
def test_groups_without_variance_give_exactly_nothing(baseline, scale, rewards):
    """0.1 three times has a mean that is not 0.1 in floating point."""
    np.testing.assert_array_equal(group_advantages(rewards, baseline, scale), np.zeros(len(rewards)))
    assert not has_signal(rewards)


def test_a_sample_without_reward_is_left_out():
    np.testing.assert_allclose(group_advantages([1.0, np.nan, 0.0], scale="none"), [0.5, 0.0, -0.5])
    assert has_signal([1.0, np.nan, 0.0])


def test_b071_groups_are_kept_or_dropped_whole():
    groups = [[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
    assert [i for i, group in enumerate(groups) if has_signal(group)] == [0, 3, 4]


def test_generalized_advantages_by_hand():
    """gamma 0.9, lambda 0.5; surprises 1 + 0.9 * 1 - 0.5 = 1.4, 0 + 0.9 * 2 - 1 = 0.8, 2 + 0 - 2 = 0."""
    advantages, returns = generalized_advantages([1.0, 0.0, 2.0], [0.5, 1.0, 2.0], 0.9, 0.5)
    np.testing.assert_allclose(advantages, [1.4 + 0.45 * 0.8, 0.8, 0.0])
    np.testing.assert_allclose(returns, [1.76 + 0.5, 1.8, 2.0])
    cut, _ = generalized_advantages([0.0], [1.0], 0.9, 0.5, bootstrap=3.0)
    np.testing.assert_allclose(cut, [1.7])


def test_overlong_penalty_by_hand():
    np.testing.assert_allclose(overlong_penalty([0, 80, 90, 100, 120], 100, 20), [0, 0, -0.5, -1, -1])
    with pytest.raises(ConfigError, match=r"expected 1 \.\. 100"):
        overlong_penalty([1], 100, 0)


def test_b072_reductions():
    loss = np.array([[1.0, 0, 0, 0], [0.2, 0.2, 0.2, 0]])
    mask = np.array([[1, 0, 0, 0], [1, 1, 1, 0]])
    expected = {"sequence_mean": 0.6, "token_mean": 0.4, "constant": 0.2}
    for reduction, value in expected.items():
        assert np.sum(token_weights(mask, reduction, 4) * loss) == pytest.approx(value)
    with pytest.raises(ConfigError, match="reduction: expected sequence_mean"):
        token_weights(mask, "mean", 4)


def test_b073_micro_batches_add_up():
    """1 token of loss 1 and 9 of 0.2: 0.28 however the batch is cut, where the mean of means would give 0.6."""
    loss = np.array([1.0] + [0.2] * 9)[:, None]
    weights = token_weights(np.ones((10, 1)), "token_mean", 1)
    for cut in (1, 5, 10):
        assert np.sum(weights[:cut] * loss[:cut]) + np.sum(weights[cut:] * loss[cut:]) == pytest.approx(0.28)


def test_weights_of_an_empty_batch_or_row():
    for reduction in ("sequence_mean", "token_mean", "constant"):
        assert not token_weights(np.zeros((2, 3)), reduction, 3).any()
        one = token_weights(np.array([[1, 1, 0], [0, 0, 0]]), reduction, 3)
        assert one.sum() == pytest.approx(2 / 3 if reduction == "constant" else 1.0)


def test_b078_clips():
    advantages, ratio = jnp.array([[1.5, -1.0, -1.0, 1.5]]), jnp.array([[1.3, 5.0, 0.5, 0.5]])

    def loss(ratio, dual_clip=3.0):
        return clipped_loss(jnp.log(ratio), advantages, 0.2, 0.2, dual_clip)[0]

    np.testing.assert_allclose(loss(ratio)[0], [-1.8, 3.0, 0.8, -0.75])
    np.testing.assert_allclose(loss(ratio, None)[0], [-1.8, 5.0, 0.8, -0.75])
    gradient = jax.grad(lambda ratio: loss(ratio).sum())(ratio)
    np.testing.assert_allclose(gradient[0], [0, 0, 0, -1.5], atol=1e-12)
    assert clipped_loss(jnp.log(ratio), advantages, 0.2, 0.2, 3.0)[1][0].tolist() == [True, True, True, False]


def test_clip_higher_leaves_more_room_above():
    loss, held = clipped_loss(jnp.log(jnp.array([[1.25, 0.75]])), jnp.array([[1.0, -1.0]]), 0.2, 0.28)
    np.testing.assert_allclose(loss[0], [-1.25, 0.8])
    assert held[0].tolist() == [False, True]


def test_cispo_weighs_and_silences_nobody():
    logprobs, old = jnp.array([[-1.0, -2.0]]), jnp.array([[-3.0, -2.0]])

    def loss(logprobs):
        return cispo_loss(logprobs, logprobs - old, jnp.array([[2.0, 1.0]]), 0.2, 0.5)[0]

    np.testing.assert_allclose(loss(logprobs)[0], [1.5 * 2.0 * 1.0, 2.0])  # ratio e^2 is cut to 1.5
    gradient = jax.grad(lambda logprobs: loss(logprobs).sum())(logprobs)
    np.testing.assert_allclose(gradient[0], [-3.0, -1.0])


def test_b077_sequence_weights_by_mean_and_by_product():
    for length, product in ((1, 1.01005), (50, 1.648721), (200, 2.0)):
        padded = jnp.where(jnp.arange(256)[None] < length, 0.01, 100.0)
        mask = jnp.arange(256)[None] < length
        mean = importance_weights(padded, mask, "sequence_mean")
        np.testing.assert_allclose(mean[0, :length], 1.01005, atol=1e-5)
        whole = importance_weights(padded, mask, "sequence_product", cap=2.0)
        np.testing.assert_allclose(whole[0, :length], product, atol=1e-5)
        assert jnp.isfinite(jnp.sum(jnp.where(mask, mean * whole, 0)))


def test_importance_weights_by_token():
    log_ratio, mask = jnp.log(jnp.array([[0.5, 1.0, 4.0, jnp.nan]])), jnp.array([[True, True, True, False]])
    assert importance_weights(log_ratio, mask, "none")[0].tolist() == [1, 1, 1, 1]
    np.testing.assert_allclose(importance_weights(log_ratio, mask, "token")[0], [0.5, 1, 2, 1])
    kept = importance_weights(log_ratio, mask, "token", "mask", cap=2.0, floor=0.6)
    assert kept[0].tolist() == [0, 1, 0, 1]
    with pytest.raises(ConfigError, match="correction: expected none, token"):
        importance_weights(log_ratio, mask, "tis")
    with pytest.raises(ConfigError, match="beyond: expected truncate or mask"):
        importance_weights(log_ratio, mask, "token", "clip")


def test_effective_sample_size():
    assert effective_sample_size(np.ones(7)) == 1.0
    assert effective_sample_size([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert effective_sample_size([2.0, 1.0]) == pytest.approx(0.9)
    assert np.isnan(effective_sample_size([]))


def test_kl_estimates_by_hand_and_in_the_mean():
    mask = jnp.array([[True, False]])
    logprobs, reference = jnp.array([[-1.0, jnp.nan]]), jnp.array([[-1.5, 0.0]])
    expected = {"k1": 0.5, "k2": 0.125, "k3": np.expm1(-0.5) + 0.5}
    for estimator, value in expected.items():
        np.testing.assert_allclose(kl_estimate(logprobs, reference, mask, estimator)[0], [value, 0.0])
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.3, 0.3, 0.4])
    everywhere = jnp.ones((1, 3), bool)
    for estimator in ("k1", "k3"):
        each = kl_estimate(jnp.log(p)[None], jnp.log(q)[None], everywhere, estimator)
        assert float((p * each[0]).sum()) == pytest.approx(float((p * np.log(p / q)).sum()))


def test_value_loss_takes_the_worse_of_both():
    loss = value_loss(jnp.array([2.0, 0.0]), jnp.array([0.0, 0.0]), jnp.array([2.0, 1.0]), clip=0.5)
    np.testing.assert_allclose(loss, [0.5 * 1.5**2, 0.5])


def test_sequence_ratios_are_gspo():
    """Every token has the sequence's ratio, and the gradient of the mean is spread over the tokens."""
    logprobs, old = jnp.array([[-1.0, -2.0, 9.0]]), jnp.array([[-1.2, -2.4, jnp.nan]])
    mask = jnp.array([[True, True, False]])

    def ratios(logprobs):
        return jnp.exp(log_ratios(logprobs, old, mask, "sequence"))

    np.testing.assert_allclose(ratios(logprobs)[0, :2], np.exp(0.3))
    gradient = jax.grad(lambda logprobs: jnp.sum(jnp.where(mask, ratios(logprobs), 0)) / 2)(logprobs)
    np.testing.assert_allclose(gradient[0], [np.exp(0.3) / 2, np.exp(0.3) / 2, 0.0])


RNG = np.random.default_rng(0)
LOGPROBS, OLD, REFERENCE = (-np.abs(RNG.normal(1.0, 0.4, (3, 5))) for _ in range(3))
ADVANTAGES = RNG.normal(size=(3, 5))
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]], bool)

LOSSES = {
    "grpo": lambda x: clipped_loss(log_ratios(x, OLD, MASK, "token"), ADVANTAGES)[0],
    "dual clip": lambda x: clipped_loss(log_ratios(x, OLD, MASK, "token"), ADVANTAGES, 0.2, 0.28, 1.5)[0],
    "k1": lambda x: kl_estimate(x, REFERENCE, MASK, "k1"),
    "k2": lambda x: kl_estimate(x, REFERENCE, MASK, "k2"),
    "k3": lambda x: kl_estimate(x, REFERENCE, MASK, "k3"),
    "value": lambda x: value_loss(x, OLD, REFERENCE, 0.3),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("reduction", ["sequence_mean", "token_mean", "constant"])
def test_gradients_are_those_of_finite_differences(name, reduction):
    weights = token_weights(MASK, reduction, 5)

    def total(logprobs):
        return jnp.sum(jnp.where(MASK, LOSSES[name](logprobs) * weights, 0.0))

    check_grads(total, (jnp.asarray(LOGPROBS),), order=1, modes=("rev",), atol=1e-6, rtol=1e-6, eps=1e-7)


def test_masked_entries_reach_no_gradient():
    """NaN and huge numbers under the mask."""
    rubbish = np.where(MASK, LOGPROBS, np.nan)
    weights = token_weights(MASK, "sequence_mean", 5)
    for name, loss in LOSSES.items():
        if name != "value":
            gradient = jax.grad(lambda x, loss=loss: jnp.sum(jnp.where(MASK, loss(x) * weights, 0.0)))(rubbish)
            assert np.isfinite(gradient).all() and not gradient[~MASK].any()
