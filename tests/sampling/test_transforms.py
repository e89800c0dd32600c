"""sampling/transforms: values by hand, the live Transformers processors as reference, the rules of the contract."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as reference

from sampling import FILTER, Greedy, MinP, StepState, Temperature, TopK, TopP
from sampling.draw import Distribution, draw
from sampling.transforms import apply
from sampling.transforms.thresholds import from_ordered_bits, kth_largest, ordered_bits

VOCAB = 64


def state(rows):
    return StepState.from_histories([[0]] * rows, [[]] * rows, vocab_size=VOCAB)


jitted = jax.jit(apply)


def run(transform, *rows):
    scores = jnp.asarray(rows, jnp.float32)
    return np.asarray(jitted(transform, state(len(rows)), scores))


def logs(*probabilities):
    return np.log(np.array(probabilities, np.float32))


def kept(scores):
    return [np.flatnonzero(np.isfinite(row)).tolist() for row in scores]


# ---- by hand ----


def test_temperature_divides_the_scores():
    assert run(Temperature(2.0), [2.0, 1.0, 0.0]).tolist() == [[1.0, 0.5, 0.0]]


def test_log_probs_under_temperature_are_those_of_a_distribution():
    """Case B017: -0.68027 at T = 2, and the whole row sums to one at every temperature."""
    row = Distribution.of(jnp.asarray(run(Temperature(2.0), [2.0, 1.0, 0.0])))
    assert row.logprobs(jnp.int32([0]))[0] == pytest.approx(-0.68027, abs=1e-5)
    for temperature in (0.1, 0.5, 1.0, 3.0):
        scaled = Distribution.of(jnp.asarray(run(Temperature(temperature), *[[2.0, 1.0, 0.0]] * 3)))
        assert np.exp(scaled.logprobs(jnp.int32([0, 1, 2]))).sum() == pytest.approx(1, abs=1e-5)


def test_top_k_keeps_ties_with_the_last():
    assert kept(run(TopK(2), [1.0, 3.0, 2.0, 2.0])) == [[1, 2, 3]]


def test_top_k_beyond_the_vocabulary_keeps_all():
    assert kept(run(TopK(100_000), np.arange(VOCAB))) == [list(range(VOCAB))]
    assert kept(run(TopK(VOCAB), np.arange(VOCAB))) == [list(range(VOCAB))]


def test_top_p_removes_a_tail_of_exactly_the_allowed_mass():
    """Case B008, with dyadic probabilities so that no rounding decides, and exact fractions as the reference."""
    probabilities = [Fraction(1, 2), Fraction(1, 4), Fraction(1, 8), Fraction(1, 8)]
    result = run(TopP(0.75), logs(*map(float, probabilities)))
    assert kept(result) == [exact_nucleus(probabilities, Fraction(3, 4))] == [[0, 1]]
    row = np.exp(result[0] - result[0].max())
    np.testing.assert_allclose(row / row.sum(), [2 / 3, 1 / 3, 0, 0], atol=1e-6)


def test_top_k_then_top_p():
    """Case B006: top-p acts on what top-k left, renormalised."""
    row = jnp.asarray([logs(0.05, 0.15, 0.35, 0.45)])
    rows = state(1)
    result = apply(TopP(0.55), rows, apply(TopK(2), rows, row))
    assert kept(result) == [[3]]
    assert Distribution.of(result).logprobs(jnp.int32([3]))[0] == pytest.approx(0, abs=1e-6)


def test_a_tiny_top_p_keeps_the_best_token():
    """Case B009: 1 - p rounds to 1, and still one token is left, for every dtype that the scores came from."""
    for dtype in (jnp.float32, jnp.float16, jnp.bfloat16):
        row = jnp.asarray([0.1, 2.0, 0.3, -1.0], dtype).astype(jnp.float32)
        for p in (1e-8, 1e-4, 1e-3):
            result = jnp.asarray(run(TopP(p), row))
            assert kept(result) == [[1]]
            final = Distribution.of(result)
            assert final.logprobs(jnp.int32([1])).tolist() == [0.0]
            uniforms = np.arange(100, dtype=np.float32) / 100
            repeated = Distribution.of(jnp.broadcast_to(result, (100, 4)))
            assert draw(repeated, jnp.asarray(uniforms)).tolist() == [1] * 100


def test_top_p_among_equals_drops_the_lower_ids():
    assert kept(run(TopP(0.5), [1.0, 1.0, 1.0, 1.0])) == [[2, 3]]
    assert kept(run(TopP(1e-9), [1.0, 1.0, 1.0, 1.0])) == [[3]]


def test_min_p():
    assert kept(run(MinP(0.25), logs(0.5, 0.25, 0.125, 0.0625))) == [[0, 1, 2]]


def test_greedy_is_a_distribution_on_the_best_token():
    assert run(Greedy(), [1.0, 3.0, 2.0]).tolist() == [[FILTER, 0.0, FILTER]]
    assert run(Greedy(), [3.0, 1.0, 3.0]).tolist() == [[0.0, FILTER, FILTER]]


@pytest.mark.parametrize("bad", [[np.nan, 1.0], [np.inf, 1.0], [FILTER, FILTER]])
def test_greedy_passes_a_broken_row_through(bad):
    np.testing.assert_array_equal(run(Greedy(), bad, [0.0, 1.0])[0], np.array(bad, np.float32))


# ---- against Transformers ----

# XLA counts subnormal floats as zero, so scores that differ by less than 1e-38 tie here and not in torch.
finite = st.floats(-30, 30, width=32, allow_subnormal=False)
ties = st.sampled_from([0.0, -0.0, 1.0, 1.5, -2.0])
score = st.one_of(finite, ties, st.just(FILTER))
row_strategy = st.lists(score, min_size=VOCAB, max_size=VOCAB).filter(lambda row: max(row) > FILTER)
batch = st.lists(row_strategy, min_size=3, max_size=3)


def theirs(processor, row):
    scores = torch.tensor([row], dtype=torch.float32)
    return processor(torch.zeros((1, 1), dtype=torch.long), scores).numpy()[0]


@given(batch, st.lists(st.integers(1, VOCAB + 5), min_size=3, max_size=3))
@settings(max_examples=60, deadline=None)
def test_top_k_equals_transformers(rows, ks):
    ours = run(TopK(np.int32(ks)), *rows)
    for mine, row, k in zip(ours, rows, ks, strict=True):
        np.testing.assert_array_equal(mine, theirs(reference.TopKLogitsWarper(k), row))


@given(batch, st.lists(st.floats(0.01, 0.99), min_size=3, max_size=3))
@settings(max_examples=60, deadline=None)
def test_min_p_equals_transformers(rows, ps):
    ours = run(MinP(np.float32(ps)), *rows)
    for mine, row, p in zip(ours, rows, ps, strict=True):
        other = theirs(reference.MinPLogitsWarper(p), row)
        for token in np.flatnonzero(np.isfinite(mine) != np.isfinite(other)):
            ratio = np.exp(np.float64(row[token]) - max(row))
            assert abs(ratio / p - 1) < 1e-5, "differs away from the threshold"


@given(batch, st.lists(st.floats(0.01, 0.999), min_size=3, max_size=3))
@settings(max_examples=100, deadline=None)
def test_top_p_equals_transformers(rows, ps):
    ours = run(TopP(np.float32(ps)), *rows)
    for mine, row, p in zip(ours, rows, ps, strict=True):
        other = theirs(reference.TopPLogitsWarper(p), row)
        if not same_up_to_equal_scores(row, kept([mine])[0], kept([other])[0]):
            assert_threshold_within_rounding(row, p, kept([mine])[0], kept([other])[0])
        both = np.isfinite(mine) & np.isfinite(other)
        np.testing.assert_array_equal(mine[both], other[both])


def same_up_to_equal_scores(row, mine, other):
    """Torch's sort is not stable, so which of several equal scores goes is arbitrary there; how many is not."""
    return sorted(row[i] for i in mine) == sorted(row[i] for i in other)


def exact_nucleus(probabilities, p):
    """What stays when the ascending tail of mass <= 1 - p goes, by exact arithmetic."""
    order = sorted(range(len(probabilities)), key=lambda i: probabilities[i])
    mass, gone = Fraction(0), []
    for token in order[:-1]:
        mass += probabilities[token]
        if mass <= 1 - p:
            gone.append(token)
    return [i for i in range(len(probabilities)) if i not in gone]


def assert_threshold_within_rounding(row, p, mine, other):
    """Both sets are heads of the same order, and the mass between them lies at 1 - p within float32 rounding."""
    masses = np.exp(np.array(row, np.float64) - max(row))
    masses /= masses.sum()
    slack = 2e-6
    for smaller, larger in [(mine, other)] if len(mine) < len(other) else [(other, mine)]:
        least_extra = sorted(masses[larger])[: len(larger) - len(smaller)]
        removed_by_larger = 1 - masses[larger].sum()
        assert abs(removed_by_larger + sum(least_extra) - (1 - p)) < slack or sum(least_extra) < slack


# ---- the rules of the contract ----

CHAIN = [Temperature(0.7), TopK(5), TopP(0.8), MinP(0.1)]


@pytest.mark.parametrize("transform", CHAIN, ids=lambda t: type(t).__name__)
@given(rows=batch)
@settings(max_examples=25, deadline=None)
def test_what_every_transform_keeps(transform, rows):
    """1. The best token stays the best. 2. A removed token stays removed. 3. Neutral is the identity, to the bit.
    4. A row does not see its neighbours."""
    scores = np.array(rows, np.float32)
    result = run(transform, *rows)
    best = scores.max(-1, keepdims=True)
    assert np.all(np.isfinite(result[np.arange(3), VOCAB - 1 - (scores == best)[:, ::-1].argmax(-1)]))
    assert np.all(np.isneginf(result[np.isneginf(scores)]))
    neutral = type(transform)(*type(transform).NEUTRAL)
    np.testing.assert_array_equal(run(neutral, *rows), scores)
    for mine, row in zip(result, rows, strict=True):
        np.testing.assert_array_equal(mine, run(transform, *[row] * 3)[0])


@pytest.mark.parametrize("transform", CHAIN, ids=lambda t: type(t).__name__)
def test_a_neutral_row_keeps_its_bits_beside_one_that_is_not(transform):
    value = next(iter(jax.tree.leaves(transform)))
    mixed = type(transform)(np.array([value, type(transform).NEUTRAL[0]]))
    row = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32)
    result = run(mixed, row, row)
    np.testing.assert_array_equal(result[0], run(transform, row)[0])
    np.testing.assert_array_equal(result[1], row)


@pytest.mark.parametrize("transform", [*CHAIN, Greedy()], ids=lambda t: type(t).__name__)
def test_gradients_are_finite_where_scores_are_removed(transform):
    row = jnp.asarray([[1.0, 0.0, FILTER, 2.0]])

    def chosen(scores):
        return Distribution.of(apply(transform, state(1), scores)).logprobs(jnp.int32([3]))[0]

    assert np.all(np.isfinite(jax.grad(chosen)(row)))


# ---- thresholds ----


@given(st.lists(score, min_size=1, max_size=200))
@settings(max_examples=100, deadline=None)
def test_ordered_bits_order_like_floats(values):
    scores = np.array(values, np.float32)
    order = np.asarray(ordered_bits(jnp.asarray(scores)))
    np.testing.assert_array_equal(order[:, None] < order[None], scores[:, None] < scores[None])
    np.testing.assert_array_equal(from_ordered_bits(ordered_bits(jnp.asarray(scores))), scores)


def test_kth_largest_is_the_same_float_on_both_paths():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(4, 1000)).astype(np.float32).round(2)
    ordered = np.sort(scores, axis=-1)[:, ::-1]
    for ks in ([1, 2, 63, 64], [1, 2, 65, 999], [1000, 1, 5, 2000]):
        found = np.asarray(kth_largest(jnp.asarray(scores), jnp.int32(ks)))
        wanted = [FILTER if k >= 1000 else ordered[i, k - 1] for i, k in enumerate(ks)]
        np.testing.assert_array_equal(found, np.float32(wanted))
