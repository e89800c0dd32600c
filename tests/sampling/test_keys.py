"""sampling/keys.py: the block function, the derivation of a row's key, the uniforms."""

import jax.numpy as jnp
import numpy as np
import pytest

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


# seed, prompt id, sample index, key
VECTORS = [
    (0, "", 0, 0x69C7350D, 0x829B27DE),
    (7, "basic_arithmetic-0", 0, 0x171183C3, 0xD3794ED5),
    (7, "basic_arithmetic-0", 1, 0x0A6BDFFC, 0xB1B0E33A),
    (7, "Zürich 🍕", 3, 0xB3EA3124, 0xC3B38EE6),
    (18446744073709551615, "p", 4294967295, 0x4D40505D, 0x35DCEBEA),
]
