"""sampling/transforms/penalties.py"""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    EncoderRepetitionPenaltyLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from sampling.state import StepState
from sampling.transforms import FrequencyPenalty, PresencePenalty, PromptRepetitionPenalty, RepetitionPenalty, apply
from tests.sampling.transforms.live import assert_equal, batches, each_row, float32, many

penalties = float32(0.1, 5)


@given(batches(), each_row(penalties))
@many
def test_repetition_penalty_equals_transformers(batch, values):
    theirs = batch.theirs(map(RepetitionPenaltyLogitsProcessor, values))
    assert_equal(batch.ours(RepetitionPenalty(np.float32(values))), theirs)


@given(batches(), each_row(penalties))
@many
def test_prompt_repetition_penalty_equals_transformers(batch, values):
    pairs = zip(values, batch.prompts, strict=True)
    theirs = batch.theirs(EncoderRepetitionPenaltyLogitsProcessor(v, torch.tensor([prompt])) for v, prompt in pairs)
    assert_equal(batch.ours(PromptRepetitionPenalty(np.float32(values))), theirs)


def test_repetition_counts_an_id_once():
    """Case B002: 3 / 1.2 and 1 / 1.2, however often the id stands in the history."""
    histories = [[0, 1], [0, 0, 0, 1], [0] * 100 + [1]]
    rows = StepState.from_histories(histories, [[]] * 3, vocab_size=3)
    result = np.asarray(apply(RepetitionPenalty(1.2), rows, jnp.float32([[3.0, 1.0, 0.2]] * 3)))
    assert result[0] == pytest.approx([2.5, 0.833333, 0.2], abs=1e-6)
    np.testing.assert_array_equal(result, result[[0, 0, 0]])


def test_additive_penalties_count_drawn_tokens_only():
    """Case B004: 0.8 for the prompt's ids, and 0.8 - 2 * 0.4 - 0.3 for the one drawn twice; vLLM's formula."""
    rows = StepState.from_histories([[1, 1, 2], [1, 1, 2]], [[3, 3], []], vocab_size=5)
    scores = jnp.ones((2, 5), jnp.float32)
    repeated = apply(RepetitionPenalty(1.25), rows, scores)
    result = apply(PresencePenalty(0.3), rows, apply(FrequencyPenalty(0.4), rows, repeated))
    assert np.asarray(result[0]) == pytest.approx([1.0, 0.8, 0.8, -0.3, 1.0], abs=1e-6)
    np.testing.assert_array_equal(result[1], repeated[1])


@given(batches(), each_row(float32(-2, 2)), each_row(float32(-2, 2)))
@many
def test_additive_penalties_follow_the_formula(batch, frequency, presence):
    """score - count * frequency - [count > 0] * presence, as OpenAI's reference has it, over drawn tokens."""
    counts = np.array([np.bincount(np.array(drawn, int), minlength=batch.vocab) for drawn in batch.drawn])
    by_count, by_presence = np.array(frequency)[:, None] * counts, np.array(presence)[:, None] * (counts > 0)
    assert_equal(batch.ours(FrequencyPenalty(np.float32(frequency))), np.float32(batch.scores - by_count), by_count)
    assert_equal(batch.ours(PresencePenalty(np.float32(presence))), np.float32(batch.scores - by_presence), by_presence)


@given(st.lists(st.integers(0, 6), max_size=12), st.lists(st.integers(0, 6), max_size=12))
@many
def test_statistics_carried_by_commits_are_those_of_the_history(first, second):
    """The penalties read counts that grow with each drawn token; they must say what the history says."""
    rows = StepState.from_histories([[1, 2]], [first], 32, vocab_size=7)
    for token in second:
        rows = rows.commit(jnp.int32([token]))
    whole = StepState.from_histories([[1, 2]], [first + second], 32, vocab_size=7)
    np.testing.assert_array_equal(rows.counts, whole.counts)
    np.testing.assert_array_equal(rows.in_prompt, whole.in_prompt)
