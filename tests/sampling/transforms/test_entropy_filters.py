"""sampling/transforms/entropy_filters.py"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    TopHLogitsWarper,
    TypicalLogitsWarper,
)

from sampling.draw import Distribution
from sampling.transforms import FILTER, EpsilonCutoff, EtaCutoff, Temperature, TopH, Typical
from sampling.transforms.entropy_filters import entropy
from tests.sampling.transforms.live import (
    assert_same_choice,
    batches,
    each_row,
    float32,
    kept,
    logs,
    many,
    run,
)

TINY = np.finfo(np.float32).tiny
"""Probabilities below this one are zero to XLA, and to torch they are not."""

# ---- by hand ----


def entropy_of(scores):
    log_probs = jax.nn.log_softmax(scores, axis=-1)
    return entropy(log_probs, jnp.exp(log_probs))[0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_entropy_is_that_of_the_log_probs(temperature):
    """Case B024: 0.441057 nats at T = 0.5, and always that of the distribution which the log-probs belong to."""
    scores = jnp.asarray(run(Temperature(temperature), [2.0, 1.0, 0.0]))
    log_probs = np.asarray(Distribution.of(jnp.repeat(scores, 3, axis=0)).logprobs(jnp.int32([0, 1, 2])))
    assert entropy_of(scores) == pytest.approx(-np.sum(np.exp(log_probs) * log_probs), abs=1e-6)
    if temperature == 0.5:
        assert entropy_of(scores) == pytest.approx(0.441057, abs=1e-6)


def test_entropy_of_a_row_with_a_removed_token():
    """Case B025: value and gradient are finite, and the gradient is that of central differences."""
    row = jnp.float32([[1.0, 0.0, FILTER]])
    assert entropy_of(row) == pytest.approx(0.582203, abs=1e-6)
    gradient = jax.grad(entropy_of)(row)[0]
    np.testing.assert_allclose(gradient, [-0.196612, 0.196612, 0.0], atol=1e-6)
    step = 1e-2
    for token in (0, 1):
        moved = jnp.zeros_like(row).at[0, token].set(step)
        slope = (entropy_of(row + moved) - entropy_of(row - moved)) / (2 * step)
        assert slope == pytest.approx(float(gradient[token]), abs=1e-4)


def test_typical_can_remove_the_best_token():
    """Entropy 1.505: the surprise of the best, 0.916, lies 0.589 from it, that of the others, 1.897, only 0.392."""
    assert kept(run(Typical(np.float32([0.5, 0.7])), *[logs(0.4, 0.15, 0.15, 0.15, 0.15)] * 2)) == [
        [1, 2, 3, 4],
        [0, 1, 2, 3, 4],
    ]


def test_epsilon_and_eta():
    probabilities = logs(0.5, 0.25, 0.125, 0.125)
    assert kept(run(EpsilonCutoff(0.2), probabilities)) == [[0, 1]]
    assert kept(run(EpsilonCutoff(0.6), probabilities)) == [[0]]
    # Entropy 1.2130: sqrt(0.2) * exp(-1.2130) = 0.1330, which is less than 0.2.
    assert kept(run(EtaCutoff(0.2), probabilities)) == [[0, 1]]
    # sqrt(0.1) * exp(-1.2130) = 0.0940.
    assert kept(run(EtaCutoff(0.1), probabilities)) == [[0, 1, 2, 3]]


def test_top_h_stops_at_its_share_of_the_entropy():
    """Terms 0.3466, 0.3466, 0.2599, 0.2599 of a total of 1.2130."""
    probabilities = logs(0.5, 0.25, 0.125, 0.125)
    assert kept(run(TopH(np.float32([0.1, 0.6, 0.8])), *[probabilities] * 3)) == [[0], [0, 1], [0, 1, 2]]


def test_top_h_looks_at_its_candidates_alone():
    """Of two candidates the terms are 0.295 and 0.368; of three 0.345, 0.363 and 0.313, and four fifths hold two."""
    row = [2.0, 1.0, 0.5, 1.5]
    assert kept(run(TopH(0.8, candidates=2), row)) == [[0]]
    assert kept(run(TopH(0.8, candidates=3), row)) == [[0, 3]]
    assert kept(run(TopH(0.9), [2.0, FILTER, 1.9, 1.8])) == [[0, 2]]


# ---- against Transformers ----


@given(batches(), each_row(float32(0.01, 0.99)))
@many
def test_typical_equals_transformers(batch, masses):
    ours, theirs = batch.ours(Typical(np.float32(masses))), batch.theirs(map(TypicalLogitsWarper, masses))
    assert_same_choice(batch, ours, theirs, masses, typical_allows)


def typical_allows(row, choice, wanted):
    """No token is left out that lies nearer to the entropy than the farthest one kept, which the mass still needed."""
    log_probs, probs = distribution(row)
    nats = entropy64(log_probs, probs)
    there = np.isfinite(row)
    distance = np.where(there, np.abs(-log_probs - nats), np.inf)
    # float32 rounds each surprise, and the entropy, in proportion to its size.
    rounding = np.where(there, 2e-6 * (1 + np.abs(log_probs) + nats), 0.0)
    edge = (distance - rounding)[choice].max()
    nearer = distance + rounding < edge
    enough = probs[choice].sum() >= wanted - 2e-6 or choice[there].all()
    return enough and np.all(choice[nearer]) and probs[nearer].sum() < wanted + 2e-6


@given(batches(), each_row(float32(0.0001, 0.9)))
@many
def test_epsilon_equals_transformers(batch, epsilons):
    ours, theirs = batch.ours(EpsilonCutoff(np.float32(epsilons))), batch.theirs(map(EpsilonLogitsWarper, epsilons))
    assert_same_choice(batch, ours, theirs, epsilons, cutoff_allows)


@given(batches(), each_row(float32(0.0001, 0.9)))
@many
def test_eta_equals_transformers(batch, epsilons):
    ours, theirs = batch.ours(EtaCutoff(np.float32(epsilons))), batch.theirs(map(EtaLogitsWarper, epsilons))
    assert_same_choice(batch, ours, theirs, epsilons, eta_allows)


def cutoff_allows(row, choice, low, high=None):
    """What is likelier than the threshold stays, what is less likely goes, for a threshold from `low` to `high`."""
    _, probs = distribution(row)
    best = row == row.max()
    above, below = probs > (high or low) * (1 + 1e-5), probs < low * (1 - 1e-5)
    return np.all(choice[above | best]) and not np.any(choice[below & ~best])


def eta_allows(row, choice, epsilon):
    nats, rounding = entropy64(*distribution(row)), categorical_rounding(row)
    low, high = (min(epsilon, np.sqrt(epsilon) * np.exp(-nats + error)) for error in (-rounding, rounding))
    return cutoff_allows(row, choice, low, high)


def categorical_rounding(row):
    """The reference takes the log of the sum from the scores themselves, which rounds in proportion to their size."""
    return 2e-7 * np.abs(row[np.isfinite(row)]).max()


@given(batches(), each_row(float32(0.01, 1)))
@many
def test_top_h_equals_transformers(batch, fractions):
    ours, theirs = batch.ours(TopH(np.float32(fractions))), batch.theirs(map(TopHLogitsWarper, fractions))
    assert_same_choice(batch, ours, theirs, fractions, top_h_allows)


def top_h_allows(row, choice, fraction):
    """A head of the order; its entropy lies within the share, and would not with the next token."""
    head = np.sort(row)[::-1][:100]
    log_probs, probs = distribution(head)
    terms = np.where(probs > 0, -probs * np.where(probs > 0, log_probs, 0.0), 0.0)
    cumulative, count = np.cumsum(terms), choice.sum()
    slack = 2e-6 * (1 + terms.sum()) + categorical_rounding(row)
    limit = fraction * terms.sum()
    is_head = sorted(row[choice]) == sorted(head[:count])
    fits = count == 1 or cumulative[count - 1] <= limit + slack
    ends = count == len(head) or probs[count] < TINY or cumulative[count] > limit - slack
    return is_head and fits and ends


def distribution(row):
    """Log-probabilities and probabilities in float64."""
    shifted = row - row.max()
    log_probs = shifted - np.log(np.exp(shifted).sum())
    return log_probs, np.exp(log_probs)


def entropy64(log_probs, probs):
    return -np.sum(probs * np.where(probs > 0, log_probs, 0.0))
