"""sampling/transforms/masks.py"""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import SuppressTokensAtBeginLogitsProcessor, SuppressTokensLogitsProcessor

from sampling.draw import Distribution
from sampling.state import NO_TOKEN, StepState
from sampling.transforms import FILTER, AllowedTokens, BeginSuppressTokens, SuppressTokens, apply
from tests.sampling.transforms.live import assert_equal, batches, each_row, filled, kept, many, run, with_ids


@given(with_ids(batches()))
@many
def test_suppress_tokens_equals_transformers(case):
    batch, sets = case
    assert_equal(batch.ours(SuppressTokens(filled(sets))), batch.theirs(map(SuppressTokensLogitsProcessor, sets)))


@given(with_ids(batches()), each_row(st.integers(0, 2)))
@many
def test_begin_suppress_tokens_equals_transformers(case, offsets):
    batch, sets = case
    begins = [len(prompt) + offset for prompt, offset in zip(batch.prompts, offsets, strict=True)]
    theirs = batch.theirs(map(SuppressTokensAtBeginLogitsProcessor, sets, begins))
    assert_equal(batch.ours(BeginSuppressTokens(filled(sets), np.int32(offsets))), theirs)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["as given", "reversed"])
def test_a_constrained_row_beside_a_free_one(order):
    """Case B045: the free row keeps its distribution; the other has one token of probability 1."""
    allowed = AllowedTokens(np.int32([[NO_TOKEN], [2]])[order])
    final = Distribution.of(jnp.asarray(run(allowed, *[[1.0, 2.0, 3.0]] * 2)))
    probs = np.asarray(final.probabilities())[order]
    assert probs[0] == pytest.approx([0.090031, 0.244728, 0.665241], abs=1e-6)
    assert probs[1].tolist() == [0.0, 0.0, 1.0]
    assert np.asarray(final.logprobs(jnp.int32([2, 2])))[order][1] == 0.0


def test_a_set_can_be_one_id_or_a_list_or_one_per_row():
    row = [0.0, 0.0, 0.0]
    assert kept(run(SuppressTokens(1), row, row)) == [[0, 2], [0, 2]]
    assert kept(run(SuppressTokens([0, 1]), row, row)) == [[2], [2]]
    assert kept(run(SuppressTokens(np.int32([[0, 1], [2, NO_TOKEN]])), row, row)) == [[2], [0, 1]]
    assert kept(run(SuppressTokens([]), row)) == kept(run(AllowedTokens([]), row)) == [[0, 1, 2]]


def test_begin_means_the_rows_own_first_draw():
    rows = StepState.from_histories([[1], [1, 1, 1], [1]], [[], [], [1]], vocab_size=2)
    result = apply(BeginSuppressTokens([0]), rows, jnp.zeros((3, 2), jnp.float32))
    assert result.tolist() == [[FILTER, 0.0], [FILTER, 0.0], [0.0, 0.0]]
