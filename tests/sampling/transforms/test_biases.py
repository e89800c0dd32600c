"""sampling/transforms/biases.py"""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import NoBadWordsLogitsProcessor, SequenceBiasLogitsProcessor

from sampling.errors import ConfigError
from sampling.state import NO_TOKEN, StepState
from sampling.transforms import FILTER, LogitBias, SequenceBias, apply, bad_words, sequence_bias
from tests.sampling.transforms.live import assert_equal, batches, each_row, float32, many, run

SEQUENCES, SEQUENCE_LEN = 4, 4


def stacked(tables):
    """One SequenceBias whose rows have tables of their own, filled up to one size."""
    sequences = np.full((len(tables), SEQUENCES, SEQUENCE_LEN), NO_TOKEN, np.int32)
    lengths, bias = np.zeros(sequences.shape[:2], np.int32), np.zeros(sequences.shape[:2], np.float32)
    for row, table in enumerate(tables):
        count, longest = np.shape(table.sequences)
        sequences[row, :count, :longest] = table.sequences
        lengths[row, :count], bias[row, :count] = table.lengths, table.bias
    return SequenceBias(sequences, lengths, bias)


def words(batch):
    """Sequences over the ids of the histories, so that many of them match."""
    ids = sorted({token for history in batch.histories for token in history})
    return st.lists(st.sampled_from(ids), min_size=1, max_size=SEQUENCE_LEN)


@given(batches(), st.data())
@many
def test_sequence_bias_equals_transformers(batch, data):
    biases = float32(-10, 10) | st.just(FILTER)
    entries = data.draw(
        each_row(st.dictionaries(words(batch).map(tuple), biases, min_size=1, max_size=SEQUENCES)), "entries"
    )
    scale = 10.0 * SEQUENCES
    assert_equal(
        batch.ours(stacked(list(map(sequence_bias, entries)))),
        batch.theirs(map(SequenceBiasLogitsProcessor, entries)),
        scale,
    )


@given(batches(), st.data())
@many
def test_bad_words_equal_transformers(batch, data):
    ids = data.draw(each_row(st.lists(words(batch), min_size=1, max_size=SEQUENCES)), "words")
    eos = data.draw(each_row(st.none() | st.integers(0, batch.vocab - 1)), "eos")
    # The reference refuses a list of which nothing is left.
    for row in range(len(ids)):
        if all(word == [eos[row]] for word in ids[row]):
            eos[row] = None
    assert_equal(
        batch.ours(stacked([bad_words(w, e) for w, e in zip(ids, eos, strict=True)])),
        batch.theirs(NoBadWordsLogitsProcessor(w, e) for w, e in zip(ids, eos, strict=True)),
    )


def test_a_sequence_longer_than_the_history_is_skipped():
    """Case B010, the four histories as one batch."""
    histories = [[9], [8, 9], [7, 8, 9], [1, 7, 8, 9]]
    rows = StepState.from_histories(histories, [[]] * 4, vocab_size=10)
    scores = np.linspace(-1, 1, 10, dtype=np.float32)
    scores[3] = 1.7
    result = apply(bad_words([[7, 8, 9, 3]]), rows, jnp.asarray([scores] * 4))
    banned = scores.copy()
    banned[3] = FILTER
    np.testing.assert_array_equal(result, [scores, scores, banned, banned])


def test_biases_on_one_token_add_up():
    rows = StepState.from_histories([[1, 2]], [[]], vocab_size=4)
    table = sequence_bias([([3], 1.0), ([2, 3], 0.5), ([1, 2, 3], 0.25), ([0, 3], 8.0)])
    assert apply(table, rows, jnp.zeros((1, 4), jnp.float32)).tolist() == [[0.0, 0.0, 0.0, 1.75]]


def test_single_end_of_sequence_tokens_are_not_bad_words():
    assert bad_words([[2], [5], [2, 5]], eos_id=2).lengths.tolist() == [1, 2]
    assert bad_words([[2], [9], [5]], eos_id=np.int32([2, 9])).lengths.tolist() == [1]
    assert bad_words([[2]], eos_id=2).is_neutral()


def test_logit_bias():
    assert run(LogitBias({1: 2.5, 2: FILTER}), [0.0, 1.0, 2.0]).tolist() == [[0.0, 3.5, FILTER]]
    per_row = LogitBias(np.int32([[0, NO_TOKEN], [1, 2]]), np.float32([[1, 5], [2, 3]]))
    assert run(per_row, [0.0, 0.0, FILTER], [0.0, 0.0, FILTER]).tolist() == [[1.0, 0.0, FILTER], [0.0, 2.0, FILTER]]
    assert LogitBias({}).is_neutral()


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: sequence_bias([]), "sequence_bias: expected at least one"),
        (lambda: sequence_bias([([], 1.0)]), r"sequence_bias: expected a sequence of token ids >= 0, got \[\]"),
        (lambda: sequence_bias([([1, -1], 1.0)]), r"got \[1, -1\]"),
        (lambda: sequence_bias([([1], 1.0), ([1], 2.0)]), r"the sequence \[1\] is given more than once"),
        (lambda: sequence_bias({(1,): np.nan}), r"expected a number or -inf for \[1\], got nan"),
        (lambda: sequence_bias({(1,): np.inf}), r"got inf"),
        (lambda: bad_words([]), "bad_words: expected at least one"),
        (lambda: bad_words([[3], []]), "bad_words: expected a sequence of token ids >= 0"),
    ],
)
def test_a_table_that_cannot_be_meant_is_refused(build, expected):
    with pytest.raises(ConfigError, match=expected):
        build()
