"""sampling/keys.py: the block function, the derivation of a row's key, the uniforms."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import chi2, norm

from sampling.keys import UNIFORM_BITS, row_key, threefry2x32, uniforms

# Known answers of the Random123 distribution (kat_vectors, threefry2x32 20): counter, key, result.
KNOWN_ANSWERS = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize("array", [np.array, jnp.array], ids=["numpy", "jax"])
def test_threefry_gives_the_published_answers(array):
    counters, keys, answers = (np.array(column, np.uint32) for column in zip(*KNOWN_ANSWERS, strict=True))
    np.testing.assert_array_equal(threefry2x32(array(keys), array(counters)), answers)


def test_row_keys_are_fixed_for_ever():
    """Vectors of docs/keys.md. A change here changes every sample ever recorded."""
    for seed, prompt_id, sample, first, second in VECTORS:
        assert row_key(seed, prompt_id, sample).tolist() == [first, second]


def test_every_name_matters():
    base = row_key(1, "a", 2).tolist()
    others = [row_key(2, "a", 2), row_key(1 << 32, "a", 2), row_key(1, "b", 2), row_key(1, "a", 3)]
    assert all(other.tolist() != base for other in others)


def test_samples_of_one_prompt_differ_whatever_the_split():
    """Case B038: keys come from global sample indices, so any split of a group over workers gives the same."""
    whole = [row_key(1, "p", i).tolist() for i in range(8)]
    assert len({tuple(key) for key in whole}) == 8
    for split in ([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]]):
        assert [row_key(1, "p", i).tolist() for part in split for i in part] == whole


def test_uniforms_are_on_the_grid_and_even():
    keys = np.stack([row_key(3, "p", i) for i in range(64)])
    draws = np.stack([uniforms(jnp.asarray(keys), jnp.full(64, t, jnp.int32)) for t in range(64)])
    assert draws.dtype == np.float32
    assert draws.min() >= 0 and draws.max() < 1
    assert np.all(draws * 2.0**UNIFORM_BITS % 1 == 0)
    assert abs(draws.mean() - 0.5) < 5 / np.sqrt(12 * draws.size)
    assert len(np.unique(draws)) > 0.999 * draws.size


def test_neighbouring_keys_and_draws_are_uncorrelated():
    keys = np.stack([row_key(3, "p", i) for i in range(512)])
    draws = np.stack([uniforms(jnp.asarray(keys), jnp.full(512, t, jnp.int32)) for t in range(64)])
    centred = draws.astype(np.float64) - 0.5
    bound = 5 * (1 / 12) / np.sqrt(centred.size)
    assert abs((centred[:, 1:] * centred[:, :-1]).mean()) < bound
    assert abs((centred[1:] * centred[:-1]).mean()) < bound


NAMES = {
    "sample indices": lambda i: (3, "p", i),
    "prompt ids": lambda i: (3, f"p{i}", 0),
    "prompt ids that differ in their last character": lambda i: (3, f"the same prompt {chr(0x100 + i)}", 0),
    "seeds": lambda i: (i, "p", 0),
    "high words of seeds": lambda i: (i << 32, "p", 0),
    "seed and sample index together": lambda i: (i, "p", i),
}
PAIRS = 4096


def neighbours(axis):
    """float64 [PAIRS + 1]: first uniforms of rows whose names are neighbours, or all uniforms of one row."""
    if axis == "draw indices":
        return drawn(np.repeat(row_key(3, "p", 0)[None], PAIRS + 1, axis=0), np.arange(PAIRS + 1))
    return drawn(np.stack([row_key(*NAMES[axis](i)) for i in range(PAIRS + 1)]), np.zeros(PAIRS + 1))


def drawn(keys, draw_index):
    return np.asarray(uniforms(jnp.asarray(keys), jnp.asarray(draw_index, jnp.int32)), np.float64)


def independence(first, second):
    """The probability of a chi-square as large as that of pairs on a grid of 16 x 16, and of a correlation as large."""
    cells = np.bincount((first * 16).astype(int) * 16 + (second * 16).astype(int), minlength=256)
    expected = len(first) / 256
    statistic = np.sum((cells - expected) ** 2 / expected)
    correlation = 12 * np.mean((first - 0.5) * (second - 0.5)) * np.sqrt(len(first))
    return float(chi2.sf(statistic, 255.0)), float(2 * norm.sf(abs(correlation)))


@pytest.mark.parametrize("axis", [*NAMES, "draw indices"])
def test_neighbours_are_independent(axis):
    """Uniforms next to each other, and two apart, fill the unit square evenly: significance one in a million."""
    line = neighbours(axis)
    for first, second in ((line[:-1], line[1:]), (line[:-2], line[2:])):
        assert min(independence(first, second)) > 1e-6


def test_draws_of_neighbouring_rows_are_independent_at_one_draw_index_and_across():
    keys = np.stack([row_key(3, "p", i) for i in range(PAIRS + 1)])
    now, next_ = (drawn(keys, np.full(PAIRS + 1, t)) for t in (7, 8))
    for first, second in ((now, next_), (now[1:], next_[:-1]), (now[:-1], next_[1:])):
        assert min(independence(first, second)) > 1e-6


def test_independence_can_fail():
    line = neighbours("draw indices")
    golden = np.arange(PAIRS) * 0.6180339887 % 1  # even, and each point tells the next
    noise = np.random.default_rng(0).random(PAIRS)
    assert independence(golden[:-1], golden[1:])[0] < 1e-6
    assert max(independence(line, line)) < 1e-6
    assert max(independence(noise, (noise + line[1:]) / 2)) < 1e-6
    assert independence(noise, noise[::-1] ** 1.2)[0] < 1e-6


# seed, prompt id, sample index, key
VECTORS = [
    (0, "", 0, 0x69C7350D, 0x829B27DE),
    (7, "basic_arithmetic-0", 0, 0x171183C3, 0xD3794ED5),
    (7, "basic_arithmetic-0", 1, 0x0A6BDFFC, 0xB1B0E33A),
    (7, "Zürich 🍕", 3, 0xB3EA3124, 0xC3B38EE6),
    (18446744073709551615, "p", 4294967295, 0x4D40505D, 0x35DCEBEA),
]
