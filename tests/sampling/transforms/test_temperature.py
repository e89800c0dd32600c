"""sampling/transforms/temperature.py"""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from transformers.generation.logits_process import TemperatureLogitsWarper

from sampling.draw import Distribution, draw
from sampling.transforms import FILTER, Greedy, Temperature, apply
from tests.sampling.transforms.live import assert_equal, batches, each_row, float32, many, run, state


def test_temperature_divides_the_scores():
    assert run(Temperature(2.0), [2.0, 1.0, 0.0]).tolist() == [[1.0, 0.5, 0.0]]


@given(batches(), each_row(float32(0.01, 100)))
@many
def test_temperature_equals_transformers(batch, values):
    assert_equal(batch.ours(Temperature(np.float32(values))), batch.theirs(map(TemperatureLogitsWarper, values)))


def test_log_probs_under_temperature_are_those_of_a_distribution():
    """Case B017: -0.68027 at T = 2, and the whole row sums to one at every temperature."""
    row = Distribution.of(jnp.asarray(run(Temperature(2.0), [2.0, 1.0, 0.0])))
    assert row.logprobs(jnp.int32([0]))[0] == pytest.approx(-0.68027, abs=1e-5)
    for temperature in (0.1, 0.5, 1.0, 3.0):
        scaled = Distribution.of(jnp.asarray(run(Temperature(temperature), *[[2.0, 1.0, 0.0]] * 3)))
        assert np.exp(scaled.logprobs(jnp.int32([0, 1, 2]))).sum() == pytest.approx(1, abs=1e-5)


def test_greedy_is_a_distribution_on_the_best_token():
    assert run(Greedy(), [1.0, 3.0, 2.0]).tolist() == [[FILTER, 0.0, FILTER]]
    assert run(Greedy(), [3.0, 1.0, 3.0]).tolist() == [[0.0, FILTER, FILTER]]


@pytest.mark.parametrize("bad", [[np.nan, 1.0], [-np.nan, 1.0], [np.inf, 1.0], [FILTER, FILTER]])
def test_greedy_passes_a_broken_row_through(bad):
    np.testing.assert_array_equal(run(Greedy(), bad, [0.0, 1.0])[0], np.array(bad, np.float32))


@pytest.mark.parametrize("greedy", [[True, False], [False, True]])
def test_a_greedy_row_beside_one_that_is_not(greedy):
    """Case B022: the greedy law is deterministic, log-prob 0; the other row has the model's own, in either order."""
    rows = state(2, 3)
    scores = jnp.float32([[1.0, 3.0, 2.0]] * 2)
    final = Distribution.of(apply(Greedy(np.array(greedy)), rows, apply(Temperature(np.ones(2)), rows, scores)))
    assert draw(final, jnp.float32([0.5, 0.5])).tolist() == [1, 1]
    logprobs = final.logprobs(jnp.int32([1, 1])).tolist()
    assert logprobs[greedy.index(True)] == 0.0
    assert logprobs[greedy.index(False)] == pytest.approx(-0.407606, abs=1e-6)
