"""rollout/scoring/ratios.py against values worked out by hand."""

import math

import numpy as np
import pytest

from rollout.scoring.ratios import KlSums, QuantileSketch, effective_sample_size, sequence_ratios, token_log_ratios

LOG2, LOG3, LOG4 = math.log(2), math.log(3), math.log(4)


def array(*values):
    return np.array(values, np.float64)


def test_a_log_ratio_is_scored_minus_recorded_in_float64():
    scored, recorded = np.float32([-0.5, -np.inf, -1e-8]), np.float32([-1.5, -2.0, -1.0])
    ratios = token_log_ratios(scored, recorded)
    assert ratios.dtype == np.float64
    assert ratios[0] == 1.0 and ratios[1] == -np.inf
    assert ratios[2] == 1.0 - float(np.float32(1e-8))  # in float32 this would be 1


def test_ratios_of_a_completion():
    """Token ratios 2, 1/4, 1.25 and 1: the whole is 0.625."""
    found = sequence_ratios(array(LOG2, -LOG4, math.log(1.25), 0), cap=2.0, epsilon=0.2)
    assert found.log_ratio == pytest.approx(math.log(0.625), abs=1e-15)
    assert found.mean_log_ratio == pytest.approx(math.log(0.625) / 4, abs=1e-15)
    assert found.clipped_ratio == pytest.approx(0.625, abs=1e-15)
    assert found.ppo_clip_fraction == 0.75  # 2, 1/4 and 1.25 are further than 0.2 from 1


def test_a_ratio_above_the_cap_is_cut():
    found = sequence_ratios(array(LOG2, LOG2), cap=3.0, epsilon=0.2)
    assert found.log_ratio == pytest.approx(LOG4) and found.clipped_ratio == 3.0


@pytest.mark.parametrize(("ratio", "share"), [(1.19, 0.0), (1.21, 1.0), (0.81, 0.0), (0.79, 1.0)])
def test_the_clip_range_is_on_both_sides_of_one(ratio, share):
    assert sequence_ratios(array(math.log(ratio)), cap=2.0, epsilon=0.2).ppo_clip_fraction == share


def test_a_removed_token_makes_the_whole_impossible():
    found = sequence_ratios(array(LOG2, -np.inf), cap=2.0, epsilon=0.2)
    assert found.log_ratio == found.mean_log_ratio == -np.inf
    assert found.clipped_ratio == 0.0 and found.ppo_clip_fraction == 1.0


def test_a_ratio_beyond_float64_is_cut_like_any_other():
    found = sequence_ratios(array(600.0, 600.0), cap=2.0, epsilon=0.2)
    assert found.log_ratio == 1200.0 and found.clipped_ratio == 2.0 and found.ppo_clip_fraction == 1.0


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([], 0.0),
        ([0.3], 1.0),
        ([0.0], 0.0),
        ([0.0, 0.0], 0.0),
        ([2.0, 2.0, 2.0], 3.0),
        ([1.0, 0.0], 1.0),
        ([1.0, 3.0], 1.6),  # 4^2 / (1 + 9)
        ([1.0, 2.0, 3.0, 0.0], 36 / 14),
    ],
)
def test_effective_sample_size(weights, expected):
    logs = array(*(math.log(w) if w else -np.inf for w in weights))
    assert effective_sample_size(logs) == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("shift", [-5000.0, -800.0, 800.0])
def test_weights_outside_the_range_of_float64_keep_their_proportions(shift):
    assert effective_sample_size(array(0.0, LOG3) + shift) == pytest.approx(1.6, abs=1e-9)


def test_kl_estimates():
    """Ratios 2 and 1/2. k1: (-log 2 + log 2) / 2. k2: log(2)^2 / 2. k3: (1 - log 2 - 1/2 + log 2) / 2."""
    sums = KlSums()
    sums.add(array(LOG2))
    sums.add(array(-LOG2))
    found = sums.estimates()
    assert found.k1 == 0.0
    assert found.k2 == pytest.approx(LOG2**2 / 2, abs=1e-15)
    assert found.k3 == pytest.approx(0.25, abs=1e-15)


def test_kl_of_a_known_pair_of_laws():
    """Drawn from (1/4, 3/4) in exact proportion, scored under (1/2, 1/2): k1 and k3 are the KL itself."""
    sums = KlSums()
    sums.add(array(LOG2, *[math.log(2 / 3)] * 3))
    exact = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert sums.estimates().k1 == pytest.approx(exact, abs=1e-15)
    assert sums.estimates().k3 == pytest.approx(exact, abs=1e-15)


def test_no_tokens_give_no_kl():
    sums = KlSums()
    sums.add(array())
    assert sums.estimates() is None


def test_quantiles_of_a_hundred_values_are_within_a_percent():
    sketch = QuantileSketch()
    values = np.arange(1, 101) / 10
    for part in np.array_split(values[::-1], 7):
        sketch.add(part)
    assert sketch.count == 100 and sketch.max == 10.0 and sketch.mean == pytest.approx(5.05)
    for share, expected in ((0.0, 0.1), (0.5, 5.0), (0.9, 9.0), (0.99, 9.9), (1.0, 10.0)):
        assert sketch.quantile(share) == pytest.approx(expected, rel=0.0101)


def test_quantiles_over_many_orders_of_magnitude():
    sketch = QuantileSketch()
    sketch.add(array(0.0, 1e-12, 1e-6, 1.0, 1e6))
    assert [sketch.quantile(share) for share in (0.2, 0.4)] == [0.0, 0.0]
    for share, expected in ((0.6, 1e-6), (0.8, 1.0), (1.0, 1e6)):
        assert sketch.quantile(share) == pytest.approx(expected, rel=0.0101)


def test_no_values_give_no_quantiles():
    sketch = QuantileSketch()
    sketch.add(array())
    assert sketch.mean is None and sketch.quantile(0.5) is None and sketch.count == 0
