"""sampling/draw.py: the exact rate of every token, against the bound of docs/draws.md.

The uniform takes 2^24 values and the token rises with it, so a token's rate is the distance between two thresholds on
that grid. They are found by bisection, with no luck involved.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sampling.draw import BLOCK, Distribution, draw, sum_blocks
from sampling.keys import UNIFORM_BITS

INF = np.float32(np.inf)
GRID = 1 << UNIFORM_BITS
STEP = 2.0**-UNIFORM_BITS
"""Distance of two uniforms, and the relative rounding of float32: both are 2^-24."""

CHAIN = 64
"""Roundings that a term of any sum passes through, at most; checked at the end of this file."""

LARGE = 262144
CHUNK = 512


@jax.jit
def at(row, grid):
    """The tokens of one distribution [1, vocab] at uniforms grid * 2^-24; uint32 [n] to int32 [n]."""
    return jax.vmap(lambda point: draw(row, (point.astype(jnp.float32) * jnp.float32(STEP))[None])[0])(grid)


def tokens_at(row, grid):
    padded = np.pad(np.asarray(grid, np.uint32), (0, -len(grid) % CHUNK)).reshape(-1, CHUNK)
    return np.concatenate([at(row, jnp.asarray(part)) for part in padded])[: len(grid)]


def thresholds(row, ids):
    """For each id the first grid point at which it, or a higher one, is drawn; 2^24 if there is none."""
    low, high = np.zeros(len(ids), np.int64), np.full(len(ids), GRID)
    while (low < high).any():
        middle = (low + high) // 2
        reached = tokens_at(row, np.minimum(middle, GRID - 1)) >= ids
        high = np.where(reached, np.minimum(middle, high), high)
        low = np.where(~reached & (low < high), middle + 1, low)
    return low


def one_row(scores):
    return Distribution.of(jnp.asarray(scores, jnp.float32)[None])


def exact_rates(scores, ids=None):
    """P(drawn) of each id (by default of all), a multiple of 2^-24."""
    ids = np.arange(len(scores)) if ids is None else np.asarray(ids)
    edges, place = np.unique(np.concatenate([ids, ids + 1]), return_inverse=True)
    first = thresholds(one_row(scores), edges)[place]
    return (first[len(ids) :] - first[: len(ids)]) * STEP


def softmax(scores):
    weights = np.exp(np.asarray(scores, np.float64) - np.max(scores))
    return weights / weights.sum()


def entropy(p):
    return -np.sum(p[p > 0] * np.log(p[p > 0]))


def depths(scores):
    """How far each score lies under the best one; 0 where removed."""
    return np.where(np.isfinite(scores), np.max(scores) - np.asarray(scores, np.float64), 0)


def bound(scores):
    """The bound of docs/draws.md on |P(drawn) - p|, for each id."""
    p = softmax(scores)
    ends = np.cumsum(p)
    starts = ends - p
    mass = np.add.reduceat(p, np.arange(0, len(p), BLOCK))
    block = np.arange(len(p)) // BLOCK
    block_end = np.cumsum(mass)[block]
    block_start = block_end - mass[block]
    edge = STEP * (2 * CHAIN + 1 + 2 * CHAIN * mass[block])
    within = STEP * (4 + 2 * CHAIN * mass[block]) + p * STEP * (depths(scores) + entropy(p) + 4 + 2 * CHAIN)
    at_edges = (starts <= block_start + edge).astype(float) + (ends >= block_end - edge)
    return within + edge * at_edges + STEP * 2 * CHAIN * (ends >= 1 - STEP * 2 * CHAIN)


def with_probability(scores, token, p):
    """The scores with that of one token changed such that its probability is p."""
    scores = np.array(scores, np.float64)
    others = np.delete(scores, token)
    scores[token] = others.max() + np.log(np.exp(others - others.max()).sum() * p / (1 - p))
    return scores.astype(np.float32)


def keeping(ids, scores):
    return np.where(np.isin(np.arange(len(scores)), ids), scores, -INF).astype(np.float32)


def noise(vocab, scale, seed=0):
    return (np.random.default_rng(seed).normal(size=vocab) * scale).astype(np.float32)


def flat_but(vocab, score, place):
    scores = np.full(vocab, score, np.float32)
    scores[place] = 0
    return scores


def block_tails(vocab, score):
    scores = noise(vocab, 1)
    scores[BLOCK - 1 :: BLOCK] = score
    return scores


CASES = {
    "one id": [0.5],
    "two ids": [-3.0, 4.0],
    "peaked": noise(1000, 8),
    "cold": noise(1000, 2) / np.float32(0.02),
    "flat": np.zeros(1024),
    "flat, odd size": np.full(777, -3.3),
    "many tiny masses before a large one": flat_but(4096, -16, -1),
    "many tiny masses after a large one": flat_but(4096, -16, 0),
    "tiny masses around a large one": flat_but(4096, -16, 2048),
    "masses below float32 before a large one": flat_but(4096, -200, -1),
    "thirty orders of magnitude, rising": np.linspace(-69, 0, 2000),
    "thirty orders of magnitude, falling": np.linspace(0, -69, 2000),
    "thirty orders of magnitude, mixed": np.random.default_rng(1).permutation(np.linspace(-69, 0, 2000)),
    "sums that round one way": flat_but(49152, -11.1586, 0),
    "blocks that end with next to nothing": block_tails(4000, -100),
    "half below float32": np.where(np.random.default_rng(3).random(1500) < 0.5, -200, noise(1500, 1)),
    "half removed": keeping(np.random.default_rng(2).permutation(1000)[:500], noise(1000, 4)),
    "blocks removed": keeping(np.r_[256:300, 1100:1111], noise(1500, 3)),
    "first and last blocks removed": keeping(np.arange(512, 900), noise(1500, 1)),
    "first and last left": keeping([0, 1499], noise(1500, 1)),
}
CASES |= {f"only id {i} left": keeping([i], noise(1500, 1)) for i in (0, 255, 256, 700, 1499)}


@pytest.mark.parametrize("name", CASES)
def test_the_rate_of_every_token_is_within_the_bound(name):
    """All 2^24 uniforms, 0 and 1 - 2^-24 among them. A removed token has rate 0, and so has one without mass."""
    scores = np.asarray(CASES[name], np.float32)
    rates = exact_rates(scores)
    assert rates.min() >= 0 and rates.sum() == 1
    assert not rates[np.isneginf(scores)].any()
    assert not rates[softmax(scores) < 1e-38].any()
    error = np.abs(rates - softmax(scores))
    assert np.all(error <= bound(scores))
    assert error.max() <= 16 * STEP and error.sum() / 2 <= 1e-3  # what docs/draws.md says of these cases


BACKGROUNDS = {
    "noise": noise(LARGE, 1.5),
    "flat": np.zeros(LARGE, np.float32),
    "peaked": with_probability(noise(LARGE, 3), 100_000, 0.6),
}
PLACES = {"first": 0, "block end": 255, "block start": 256, "middle": 131200, "group end": 131071, "last": LARGE - 1}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("background", BACKGROUNDS)
def test_one_in_a_million_among_262144_ids(background, place):
    token = PLACES[place]
    scores = with_probability(BACKGROUNDS[background], token, 1e-6)
    near = np.clip(np.arange(token - 3, token + 4), 0, LARGE - 1)
    others = np.random.default_rng(token).integers(0, LARGE, 40)
    ids = np.unique(np.concatenate([[token], near, others, others // BLOCK * BLOCK, others | (BLOCK - 1)]))
    rates, p = exact_rates(scores, ids), softmax(scores)[ids]
    error = np.abs(rates - p)
    assert p[ids == token] == pytest.approx(1e-6, rel=1e-5)
    assert np.all(error <= bound(scores)[ids])
    assert error.max() <= 16 * STEP
    assert error[ids == token] <= 4 * STEP  # what docs/draws.md says of this token


def test_the_bound_can_fail():
    """The rates of a distribution that is warmer by a thousandth are out of bounds, and those of the next id too."""
    scores = CASES["peaked"]
    rates = exact_rates(scores)
    for other in (scores * np.float32(0.999), np.roll(scores, 1)):
        assert np.any(np.abs(rates - softmax(other)) > bound(other))


def test_the_guard_takes_no_token_without_mass():
    """Rounding leaves the last block a few uniforms here: they go to the last id that raised the sum."""
    scores = noise(151936, 1)
    scores[-300:] = -100
    row = one_row(scores)
    assert row.masses.total[0] > jnp.cumsum(row.masses.blocks, axis=-1)[0, -1]
    rates = exact_rates(scores, np.arange(151936 - 310, 151936))
    assert rates[:10].all() and not rates[10:].any()
    assert tokens_at(row, [GRID - 1]) == 151936 - 301


def test_the_uniform_zero_takes_the_first_id_that_has_mass():
    """So the first id of the support comes at 2^-24, however small its probability."""
    scores = noise(1000, 1)
    scores[:4] = -INF, -INF, -200, -40
    assert exact_rates(scores, np.arange(4)).tolist() == [0, 0, 0, STEP]


def test_the_token_rises_with_the_uniform():
    rng = np.random.default_rng(3)
    for _ in range(40):
        scores = noise(1500, rng.choice([0.01, 1, 10, 60]), int(rng.integers(1000)))
        scores[rng.random(1500) < rng.choice([0, 0.5, 0.99])] = -INF
        scores[rng.integers(1500)] = rng.choice([0, 3])
        points = np.sort(rng.choice(GRID, 4 * CHUNK - 3, replace=False))
        assert np.all(np.diff(tokens_at(one_row(scores), np.r_[0, points, GRID - 1, GRID - 1])) >= 0)


def test_thresholds_are_those_of_a_batch_of_rows():
    """One distribution at many uniforms and many rows with one uniform each: the same bits."""
    row = one_row(CASES["half removed"])
    first = thresholds(row, np.arange(1, 1000))
    points = np.concatenate([first, first - 1])
    points = points[(points >= 0) & (points < GRID)]
    batch = jax.tree.map(lambda leaf: jnp.repeat(leaf, len(points), axis=0), row)
    tokens = jax.jit(draw)(batch, jnp.asarray(points * STEP, jnp.float32))
    np.testing.assert_array_equal(tokens, tokens_at(row, points))


def test_no_uniform_falls_outside_the_thresholds():
    """Around every threshold, and at 2^17 uniforms in between, the token is the one that bisection says."""
    row = one_row(CASES["peaked"])
    first = thresholds(row, np.arange(1000))
    around = (first[:, None] + np.arange(-8, 9)).ravel()
    points = np.concatenate([around, np.random.default_rng(4).integers(0, GRID, 1 << 17)])
    points = points[(points >= 0) & (points < GRID)]
    np.testing.assert_array_equal(tokens_at(row, points), np.searchsorted(first, points, side="right") - 1)


@pytest.mark.parametrize("name", CASES)
def test_recorded_log_probs_are_those_of_the_distribution_and_not_of_the_grid(name):
    scores = np.asarray(CASES[name], np.float32)
    row, exact = one_row(scores), softmax(scores)
    ids = np.flatnonzero(exact > 1e-30)
    recorded = np.asarray(jax.vmap(lambda token: row.logprobs(token[None])[0])(jnp.asarray(ids)))
    log_p, log_total = np.log(exact[ids]), np.log(float(row.masses.total[0]))
    limit = STEP * (depths(scores)[ids] - log_p + entropy(exact) + 2 * log_total + 4 + 2 * CHAIN)
    assert np.all(np.abs(recorded - log_p) <= limit)
    assert limit.max() < 2e-5


def longest_chain(total, entries):
    """Roundings that a term of `total`, float32 [rows, entries] to [rows], passes through at most.

    Two terms 2^60 and -2^60 swallow every 1 that joins one of them before they meet; what is left tells how many terms
    have met when these two do, and that for all pairs tells the whole tree (FPRev, arXiv:2411.00442).
    """

    def met(first, others):
        probes = np.ones((len(others), entries), np.float32)
        probes[:, first] = 2.0**60
        probes[np.arange(len(others)), others] = -(2.0**60)
        probes = np.pad(probes, ((0, -len(others) % 32), (0, 0))).reshape(-1, 32, entries)
        return entries - np.concatenate([total(jnp.asarray(part)) for part in probes])[: len(others)].astype(int)

    def chain(terms):
        if len(terms) == 1:
            return 0
        sizes, longest = met(terms[0], terms[1:]), 0
        for size in np.unique(sizes):
            longest = max(longest, chain(terms[1:][sizes == size])) + 1
        return longest

    return chain(np.arange(entries))


SUMS = {
    "weights of a block": (lambda terms: sum_blocks(terms)[:, 0], BLOCK),
    "weights inside a block": (lambda terms: jnp.cumsum(terms, axis=-1)[:, -1], BLOCK),
    "masses of blocks": (lambda terms: jnp.sum(terms, axis=-1), LARGE // BLOCK),
    "masses up to a block": (lambda terms: jnp.cumsum(terms, axis=-1)[:, -2], LARGE // BLOCK),
}


@pytest.mark.parametrize("name", SUMS)
def test_no_sum_has_a_longer_chain(name):
    total, entries = SUMS[name]
    assert 8 <= longest_chain(jax.jit(total), entries) <= CHAIN


def test_a_sum_from_left_to_right_is_one_long_chain():
    """The counting itself: a loop over n terms has a chain of n - 1."""

    def loop(terms):
        return jax.lax.fori_loop(0, 40, lambda i, total: total + terms[:, i], jnp.zeros(terms.shape[0]))

    assert longest_chain(jax.jit(loop), 40) == 39
