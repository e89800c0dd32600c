"""sampling/transforms/filters.py"""

from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from sampling.draw import Distribution, draw
from sampling.transforms import MinP, TopK, TopP, apply
from tests.sampling.transforms.live import (
    assert_equal,
    assert_same_choice,
    batches,
    each_row,
    float32,
    kept,
    logs,
    many,
    run,
    state,
)

# ---- by hand ----


def test_top_k_keeps_ties_with_the_last():
    assert kept(run(TopK(2), [1.0, 3.0, 2.0, 2.0])) == [[1, 2, 3]]


def test_top_k_of_the_vocabulary_and_beyond_keeps_all():
    assert kept(run(TopK(np.int32([64, 100_000])), *[np.arange(64)] * 2)) == [list(range(64))] * 2


def test_log_prob_of_a_drawn_token_is_that_on_the_support():
    """Case B021, the sampler's side."""
    row = [2.0, 1.9, 0.0, -1.0]
    final, whole = Distribution.of(jnp.asarray(run(TopK(2), row))), Distribution.of(jnp.float32([row]))
    assert final.logprobs(jnp.int32([1]))[0] == pytest.approx(-0.744397, abs=1e-6)
    assert whole.logprobs(jnp.int32([1]))[0] == pytest.approx(-0.837145, abs=1e-6)


def test_top_p_removes_a_tail_of_exactly_the_allowed_mass():
    """Case B008, with dyadic probabilities so that no rounding decides, and exact fractions as the reference."""
    probabilities = [Fraction(1, 2), Fraction(1, 4), Fraction(1, 8), Fraction(1, 8)]
    result = run(TopP(0.75), logs(*map(float, probabilities)))
    assert kept(result) == [exact_nucleus(probabilities, Fraction(3, 4))] == [[0, 1]]
    row = np.exp(result[0] - result[0].max())
    np.testing.assert_allclose(row / row.sum(), [2 / 3, 1 / 3, 0, 0], atol=1e-6)


def exact_nucleus(probabilities, p):
    """What stays when the ascending tail of mass <= 1 - p goes, by exact arithmetic."""
    order = sorted(range(len(probabilities)), key=lambda i: probabilities[i])
    mass, gone = Fraction(0), []
    for token in order[:-1]:
        mass += probabilities[token]
        if mass <= 1 - p:
            gone.append(token)
    return [i for i in range(len(probabilities)) if i not in gone]


def test_top_k_then_top_p():
    """Case B006: top-p acts on what top-k left, renormalised."""
    rows = state(1, 4)
    result = apply(TopP(0.55), rows, apply(TopK(2), rows, jnp.asarray([logs(0.05, 0.15, 0.35, 0.45)])))
    assert kept(result) == [[3]]
    assert Distribution.of(result).logprobs(jnp.int32([3]))[0] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_a_tiny_top_p_keeps_the_best_token(dtype):
    """Case B009: 1 - p rounds to 1, and still one token is left, for every dtype that the scores came from."""
    row = jnp.asarray([0.1, 2.0, 0.3, -1.0], dtype).astype(jnp.float32)
    result = run(TopP(np.float32([1e-8, 1e-4, 1e-3])), row, row, row)
    assert kept(result) == [[1]] * 3
    final = Distribution.of(jnp.asarray(result))
    assert final.logprobs(jnp.int32([1, 1, 1])).tolist() == [0.0] * 3
    repeated = Distribution.of(jnp.broadcast_to(result[0], (100, 4)))
    assert draw(repeated, jnp.arange(100, dtype=jnp.float32) / 100).tolist() == [1] * 100


def test_top_p_among_equals_drops_the_lower_ids():
    assert kept(run(TopP(np.float32([0.5, 1e-9])), *[[1.0, 1.0, 1.0, 1.0]] * 2)) == [[2, 3], [3]]


def test_min_p():
    assert kept(run(MinP(0.25), logs(0.5, 0.25, 0.125, 0.0625))) == [[0, 1, 2]]


# ---- against Transformers ----


@given(batches(), each_row(st.integers(1, 600)))
@many
def test_top_k_equals_transformers(batch, ks):
    assert_equal(batch.ours(TopK(np.int32(ks))), batch.theirs(map(TopKLogitsWarper, ks)))


@given(batches(), each_row(float32(0.001, 0.999)))
@many
def test_top_p_equals_transformers(batch, ps):
    ours, theirs = batch.ours(TopP(np.float32(ps))), batch.theirs(map(TopPLogitsWarper, ps))
    assert_same_choice(batch, ours, theirs, ps, top_p_allows)


def top_p_allows(row, choice, p):
    """A head of the order; its tail holds at most 1 - p, and would hold more with the next token."""
    mass = np.exp(row - row.max())
    mass /= mass.sum()
    gone, slack = mass[~choice].sum(), 2e-6
    is_head = row[~choice].max(initial=-np.inf) <= row[choice].min()
    is_longest_tail = choice.sum() == 1 or gone + mass[choice].min() > 1 - p - slack
    return is_head and gone <= 1 - p + slack and is_longest_tail


@given(batches(), each_row(float32(0.001, 1)))
@many
def test_min_p_equals_transformers(batch, ps):
    ours, theirs = batch.ours(MinP(np.float32(ps))), batch.theirs(map(MinPLogitsWarper, ps))
    assert_same_choice(batch, ours, theirs, ps, min_p_allows)


def min_p_allows(row, choice, p):
    ratio = np.exp(row - row.max())
    return np.all(ratio[choice] > p * (1 - 1e-5)) and np.all(ratio[~choice] < p * (1 + 1e-5))


def test_top_p_orders_tokens_of_equal_mass_by_their_scores():
    """exp cannot tell 0 from 1e-37; the better of the two still stays, as a sort by scores has it."""
    tiny = 1e-37
    assert kept(run(TopP(0.25), [tiny, 0.0], [0.0, tiny], [0.0, 0.0])) == [[0], [1], [1]]
    assert kept(run(TopP(0.5), [tiny, 0.0, tiny, 0.0], [0.0, 0.0, tiny, tiny])) == [[0, 2], [2, 3]]
