"""sampling/transforms/sanitising.py"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import InfNanRemoveLogitsProcessor, LogitNormalization

from sampling.transforms import FILTER, RemoveInvalidValues, Renormalize
from tests.sampling.transforms.live import ROWS, assert_equal, batches, each_row, many, run

GREATEST = np.finfo(np.float32).max


def test_invalid_values_become_zero_and_the_ends_of_the_range():
    result = run(RemoveInvalidValues(), [np.nan, -np.nan, np.inf, FILTER, 1.5])
    assert result.tolist() == [[0.0, 0.0, GREATEST, -GREATEST, 1.5]]


@given(batches(), st.data())
@many
def test_remove_invalid_values_equals_transformers(batch, data):
    for row, broken in enumerate(data.draw(each_row(st.sampled_from([np.nan, np.inf, FILTER, 0.0])))):
        batch.scores[row, data.draw(st.integers(0, batch.vocab - 1))] = broken
    assert_equal(batch.ours(RemoveInvalidValues()), batch.theirs([InfNanRemoveLogitsProcessor()] * ROWS))


def test_renormalized_scores_are_log_probs():
    assert np.exp(run(Renormalize(), [2.0, 1.0, 0.0]))[0] == pytest.approx([0.665241, 0.244728, 0.090031], abs=1e-6)


@given(batches())
@many
def test_renormalize_equals_transformers(batch):
    assert_equal(batch.ours(Renormalize()), batch.theirs([LogitNormalization()] * ROWS))
