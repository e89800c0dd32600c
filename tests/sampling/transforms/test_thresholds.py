"""sampling/transforms/thresholds.py"""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sampling.transforms import FILTER
from sampling.transforms.thresholds import from_ordered_bits, kth_largest, largest_values, ordered_bits
from tests.sampling.transforms.live import many, score


@given(st.lists(score, min_size=16, max_size=16))
@many
def test_ordered_bits_order_like_floats(values):
    scores = np.array(values, np.float32)
    order = ordered_bits(jnp.asarray(scores))
    np.testing.assert_array_equal(np.asarray(order)[:, None] < np.asarray(order)[None], scores[:, None] < scores[None])
    np.testing.assert_array_equal(from_ordered_bits(order), scores)


def test_kth_largest_is_the_same_float_on_both_paths():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(4, 1000)).astype(np.float32).round(2)
    ordered = np.sort(scores, axis=-1)[:, ::-1]
    for ks in ([1, 2, 63, 64], [1, 2, 65, 999], [1000, 1, 5, 2000]):
        found = np.asarray(kth_largest(jnp.asarray(scores), jnp.int32(ks)))
        wanted = [FILTER if k >= 1000 else ordered[i, k - 1] for i, k in enumerate(ks)]
        np.testing.assert_array_equal(found, np.float32(wanted))


@pytest.mark.parametrize(("vocab", "count"), [(5, 5), (63, 10), (64, 64), (1000, 3), (5000, 64), (5000, 100)])
def test_largest_values_are_those_of_a_sort(vocab, count):
    scores = np.random.default_rng(0).normal(size=(3, vocab)).astype(np.float32).round(1)
    scores[1, : vocab // 2] = FILTER
    scores[2] = FILTER
    found = np.asarray(largest_values(jnp.asarray(scores), count))
    np.testing.assert_array_equal(found, np.sort(scores, axis=-1)[:, ::-1][:, :count])
