"""sampling/transforms/lengths.py"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as reference

from sampling.draw import Distribution, draw
from sampling.state import NO_TOKEN, StepState
from sampling.stopping import EndOfSequence, MaxNewTokens
from sampling.transforms import (
    FILTER,
    ExponentialDecayLengthPenalty,
    ForcedBOS,
    ForcedEOS,
    LogitBias,
    MinLength,
    MinNewTokens,
    apply,
)
from tests.sampling.transforms.live import (
    LONGEST,
    assert_equal,
    batches,
    each_row,
    filled,
    float32,
    many,
    with_ids,
)

# ---- against Transformers ----


@given(with_ids(batches()), each_row(st.integers(0, 2 * LONGEST)))
@many
def test_min_length_equals_transformers(case, lengths):
    batch, eos = case
    theirs = batch.theirs(map(reference.MinLengthLogitsProcessor, lengths, eos))
    assert_equal(batch.ours(MinLength(np.int32(lengths), filled(eos))), theirs)


@given(with_ids(batches()), each_row(st.integers(0, LONGEST)))
@many
def test_min_new_tokens_equals_transformers(case, counts):
    batch, eos = case
    prompt_lens = map(len, batch.prompts)
    theirs = batch.theirs(map(reference.MinNewTokensLengthLogitsProcessor, prompt_lens, counts, eos))
    assert_equal(batch.ours(MinNewTokens(np.int32(counts), filled(eos))), theirs)


@given(batches(), st.data())
@many
def test_forced_bos_equals_transformers(batch, data):
    tokens = data.draw(each_row(st.integers(0, batch.vocab - 1)))
    for row in data.draw(st.sets(st.integers(0, len(tokens) - 1))):
        batch.prompts[row], batch.drawn[row] = [0], []
    assert_equal(
        batch.ours(ForcedBOS(np.int32(tokens))), batch.theirs(map(reference.ForcedBOSTokenLogitsProcessor, tokens))
    )


@given(with_ids(batches()), each_row(st.integers(0, 2)))
@many
def test_forced_eos_equals_transformers(case, left):
    batch, eos = case
    ends = [len(history) + more for history, more in zip(batch.histories, left, strict=True)]
    theirs = batch.theirs(map(reference.ForcedEOSTokenLogitsProcessor, ends, eos))
    assert_equal(batch.ours(ForcedEOS(filled(eos), np.int32(ends))), theirs)


@given(with_ids(batches()), each_row(st.integers(0, 6)), each_row(float32(0.5, 2)))
@many
def test_exponential_decay_equals_transformers(case, starts, factors):
    batch, eos = case
    # XLA fuses product and sum, and so stays finite at the end of the range, where torch's product overflows.
    np.clip(batch.scores, -1e34, 1e34, out=batch.scores, where=np.isfinite(batch.scores))
    rows = zip(starts, factors, eos, batch.prompts, strict=True)
    theirs = batch.theirs(
        reference.ExponentialDecayLengthPenalty((start, factor), ids, len(prompt))
        for start, factor, ids, prompt in rows
    )
    ours = batch.ours(ExponentialDecayLengthPenalty(np.int32(starts), np.float32(factors), filled(eos)))
    # A sum of score and penalty that cancel is as exact as the two are.
    assert_equal(ours, theirs, np.abs(np.where(np.isneginf(batch.scores), 0.0, batch.scores)))


# ---- by hand ----


def test_decay_raises_a_negative_score_too():
    """Case B012: 3 tokens past the start, |score| * (1.5 ** 3 - 1) is added; before it nothing, and it only grows."""
    lengths = range(3, 9)
    rows = StepState.from_histories([[0] * 3] * 6, [[0] * (n - 3) for n in lengths], vocab_size=2)
    result = apply(ExponentialDecayLengthPenalty(2, 1.5, [0, 1]), rows, jnp.float32([[-2.0, 2.0]] * 6))
    assert np.asarray(result[-1]) == pytest.approx([2.75, 6.75])
    assert result[:3].tolist() == [[-2.0, 2.0]] * 3
    assert np.all(np.diff(result, axis=0) >= 0)


def test_decay_leaves_a_removed_token_removed():
    rows = StepState.from_histories([[0]], [[0] * 5], vocab_size=2)
    result = apply(ExponentialDecayLengthPenalty(0, 2.0, 1), rows, jnp.float32([[0.0, FILTER]]))
    assert result.tolist() == [[0.0, FILTER]]


def test_every_end_of_sequence_id_is_held_back():
    """Case B033: ids 2 and 9 are gone for three draws, the rest share the mass; then 9 and 2 have theirs."""
    scores = np.zeros(10, np.float32)
    scores[9], scores[2] = 5.0, 4.0
    rows = StepState.from_histories([[1]] * 4, [[1] * n for n in range(4)], vocab_size=10)
    final = Distribution.of(apply(MinNewTokens(3, [2, 9]), rows, jnp.asarray([scores] * 4)))
    probs = np.asarray(final.probabilities())
    for row in probs[:3]:
        assert row == pytest.approx([0.125, 0.125, 0, 0.125, 0.125, 0.125, 0.125, 0.125, 0.125, 0], abs=1e-6)
    assert probs[3, [9, 2]] == pytest.approx([0.703342, 0.258745], abs=1e-6)


def test_end_of_sequence_is_released_in_time():
    """Case B032: with end-of-sequence all but certain, a row draws exactly its minimum and then that token."""
    eos, minimum = 2, np.arange(6, dtype=np.int32)
    prompts = [[1] * n for n in (6, 1, 6, 3, 6, 9)]
    bias, hold = LogitBias({eos: 50.0}), MinNewTokens(minimum, [eos])

    @jax.jit
    def step(rows):
        scores = apply(hold, rows, apply(bias, rows, jnp.zeros((6, 10), jnp.float32)))
        token = draw(Distribution.of(scores), jnp.full(6, 0.5, jnp.float32))
        after = rows.commit(token)
        ended = EndOfSequence([eos])(after, token) | MaxNewTokens(20)(after, token)
        return after.replace(active=after.active & ~ended)

    rows = StepState.from_histories(prompts, [[]] * 6, 40, vocab_size=10)
    while np.any(rows.active):
        rows = step(rows)
    assert rows.step.tolist() == (minimum + 1).tolist()
    assert rows.ended_with(1)[:, 0].tolist() == [eos] * 6


def test_min_length_counts_the_prompt():
    rows = StepState.from_histories([[1, 1], [1, 1, 1]], [[1], [1]], vocab_size=3)
    result = apply(MinLength(4, 2), rows, jnp.zeros((2, 3), jnp.float32))
    assert result.tolist() == [[0.0, 0.0, FILTER], [0.0, 0.0, 0.0]]


def test_forced_eos_can_mean_the_end_of_the_rows_budget():
    rows = StepState.from_histories([[1], [1, 1], [1]], [[1], [1], [1]], vocab_size=4, limit=4)
    scores = jnp.ones((3, 4), jnp.float32)
    forced = [0.0, FILTER, FILTER, 0.0]
    assert apply(ForcedEOS([0, 3]), rows, scores).tolist() == [[1.0] * 4, forced, [1.0] * 4]
    mixed = ForcedEOS(np.int32([[0, 3], [0, 3], [NO_TOKEN, NO_TOKEN]]), np.int32([3, 0, 3]))
    assert apply(mixed, rows, scores).tolist() == [forced, forced, [1.0] * 4]
