"""sampling/draw.py: the inverse CDF, its guards, and the log-probabilities that go with it."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling.draw import BLOCK, Distribution, draw, log_kept_mass
from sampling.keys import row_key, uniforms

INF = np.float32(np.inf)


def distribution(*rows):
    return Distribution.of(jnp.asarray(rows, jnp.float32))


def test_the_uniform_picks_by_cumulative_mass():
    scores = np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32))
    for uniform, token in [(0.0, 0), (0.09, 0), (0.11, 1), (0.29, 1), (0.31, 2), (0.59, 2), (0.61, 3), (0.9999, 3)]:
        assert draw(distribution(scores), jnp.float32([uniform])).tolist() == [token]


def test_the_worked_example():
    """Scores (1.875, 1.5) after penalties and temperature, the third token cut: the uniform 0.63 selects B."""
    final = distribution([1.875, 1.5, -INF])
    assert np.exp(final.logprobs(jnp.int32([0])))[0] == pytest.approx(0.593, abs=5e-4)
    assert np.exp(final.logprobs(jnp.int32([1])))[0] == pytest.approx(0.407, abs=5e-4)
    assert draw(final, jnp.float32([0.63])).tolist() == [1]
    assert draw(final, jnp.float32([0.59])).tolist() == [0]


def test_a_removed_token_is_never_drawn():
    """Also at the ends of the range of the uniform, at block borders, and when all mass sits in one block."""
    rng = np.random.default_rng(0)
    vocab = 3 * BLOCK + 17
    uniforms = [0.0, 2.0**-24, 0.5, 1 - 2.0**-24]
    for _ in range(50):
        scores = rng.normal(size=vocab).astype(np.float32) * 4
        scores[rng.random(vocab) < rng.choice([0.5, 0.99, 0.999])] = -INF
        scores[rng.integers(vocab)] = 0.0
        row = distribution(*[scores] * 4)
        for token in np.asarray(draw(row, jnp.float32(uniforms))):
            assert np.isfinite(scores[token])


@given(st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40), st.integers(0, 2**24 - 1))
@settings(max_examples=200, deadline=None)
def test_draw_matches_float64(values, grid):
    uniform = grid * 2.0**-24
    scores = np.array(values, np.float32)
    token = int(
        draw(distribution(np.pad(scores, (0, 40 - scores.size), constant_values=-INF)), jnp.float32([uniform]))[0]
    )
    exact = np.cumsum(np.exp(scores.astype(np.float64) - scores.max()))
    exact /= exact[-1]
    low, high = (exact[token - 1] if token else 0.0), exact[token]
    assert low - 1e-6 <= uniform <= high + 1e-6


@pytest.mark.parametrize("bad", [np.nan, INF, None], ids=["nan", "inf", "nothing left"])
def test_a_broken_row_is_undefined_and_alone(bad):
    broken = np.zeros(5, np.float32) if bad is not None else np.full(5, -INF, np.float32)
    if bad is not None:
        broken[2] = bad
    sound = np.log(np.array([0.1, 0.2, 0.3, 0.2, 0.2], np.float32))
    rows = distribution(broken, sound)
    assert rows.masses.defined.tolist() == [False, True]
    assert draw(rows, jnp.float32([0.5, 0.5])).tolist()[1] == 2
    assert rows.logprobs(jnp.int32([0, 2]))[1] == pytest.approx(np.log(0.3), abs=1e-6)


def test_greedy_scores_have_log_prob_zero_exactly():
    row = distribution([-INF, 0.0, -INF])
    assert draw(row, jnp.float32([0.999])).tolist() == [1]
    assert row.logprobs(jnp.int32([1])).tolist() == [0.0]


def test_log_probs_sum_to_one():
    rng = np.random.default_rng(1)
    scores = rng.normal(size=(4, 49152)).astype(np.float32) * 5
    row = Distribution.of(jnp.asarray(scores))
    every = row.scores - row.masses.best[:, None] - jnp.log(row.masses.total)[:, None]
    np.testing.assert_allclose(np.exp(np.asarray(every, np.float64)).sum(-1), 1, atol=1e-6)


def test_log_kept_mass():
    raw = distribution(np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32)))
    assert log_kept_mass(raw.scores, raw).tolist() == [0.0]
    kept = distribution([np.log(0.5), np.log(0.25), -INF, -INF])
    assert log_kept_mass(kept.scores, raw)[0] == pytest.approx(np.log(0.75), abs=1e-6)


def test_drawing_from_bfloat16_scores_is_unbiased():
    """Case B041: scores are widened before anything random happens, so equal bfloat16 scores stay equally likely."""
    keys = jnp.asarray(np.stack([row_key(0, "b041", i) for i in range(5000)]))
    u = uniforms(keys, jnp.zeros(5000, jnp.int32))
    flat = jnp.zeros((1, 10000), jnp.bfloat16).astype(jnp.float32)
    peaked = flat.at[0, 5000].set(9.21034)

    def every(row):
        batch = Distribution.of(jnp.broadcast_to(row, (500, 10000)))
        return np.concatenate([draw(batch, part) for part in jnp.split(u, 10)])

    tokens = every(flat)
    assert abs(tokens.mean() - 4999.5) < 5 * 10000 / np.sqrt(12 * 5000)
    assert abs((tokens < 1000).mean() - 0.1) < 0.022
    assert abs((every(peaked) == 5000).mean() - 0.5) < 0.028
