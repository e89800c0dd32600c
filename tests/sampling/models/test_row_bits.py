"""What makes a row its own world, at one fixed shape of a compiled decode step:

1. Permuting the rows permutes the output, bit for bit.
2. What lies beyond a row's last position does not change a bit of it.
3. Neither does what the other rows hold, nor how far they are filled.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sampling.models import KVCache
from sampling.models.mesh import times

ROWS, CACHE_LEN, BLOCK_LEN = 5, 17, 4
POSITIONS = jnp.array([[3], [16], [0], [9], [11]], jnp.int32)


@pytest.fixture(params=["llama", "qwen3", "mistral"])
def step(request, load_kind):
    """A compiled decode step (tokens, positions, cache) to (logits, cache), and a cache of random content."""
    loaded = load_kind(request.param)

    @jax.jit
    def decode(tokens, positions, cache):
        hidden, cache = loaded.model.apply({"params": loaded.params}, tokens, positions, cache)
        return loaded.model.apply({"params": loaded.params}, hidden, method="logits"), cache

    return decode, _random_cache(loaded.model.config, seed=0)


def _random_cache(config, seed: int, scale: float = 1.0) -> KVCache:
    leaves, tree = jax.tree.flatten(KVCache.empty(config, ROWS, CACHE_LEN, block_len=BLOCK_LEN))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(
        tree, [scale * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    )


TOKENS = jnp.array([[7], [100], [201], [44], [7]], jnp.int32)


def test_permuted_rows_give_permuted_bits(step):
    decode, cache = step
    order = jnp.array([4, 2, 0, 3, 1])
    logits, after = decode(TOKENS, POSITIONS, cache)
    permuted, permuted_after = decode(TOKENS[order], POSITIONS[order], jax.tree.map(lambda leaf: leaf[:, order], cache))
    np.testing.assert_array_equal(permuted, logits[order])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[:, order]), permuted_after, after)


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e6])
def test_masked_cache_content_does_not_change_a_bit(step, scale):
    decode, cache = step
    stale = jax.tree.map(lambda leaf: scale * jax.random.normal(jax.random.key(9), leaf.shape, leaf.dtype), cache)
    places = jnp.arange(cache.cache_len).reshape(-1, 1, 1, 1, BLOCK_LEN)  # of keys; values lie the other way round
    beyond = places >= POSITIONS[None, :, :, None, None]

    def soiled(old: tuple, new: tuple, beyond: jax.Array) -> tuple:
        return tuple(jnp.where(beyond, dirt, clean) for clean, dirt in zip(old, new, strict=True))

    dirty = KVCache(soiled(cache.keys, stale.keys, beyond), soiled(cache.values, stale.values, beyond.swapaxes(3, 4)))
    np.testing.assert_array_equal(decode(TOKENS, POSITIONS, dirty)[0], decode(TOKENS, POSITIONS, cache)[0])


def test_other_rows_do_not_change_a_bit(step):
    decode, cache = step
    mine = jnp.arange(ROWS) == 3
    other = jax.tree.map(lambda leaf: jnp.where(mine[None, :, None, None, None], leaf, 2 * leaf[:, ::-1] + 1), cache)
    tokens = jnp.where(mine[:, None], TOKENS, 13)
    positions = jnp.where(mine[:, None], POSITIONS, jnp.array([[-1], [2], [16], [0], [-1]], jnp.int32))
    np.testing.assert_array_equal(decode(tokens, positions, other)[0][3], decode(TOKENS, POSITIONS, cache)[0][3])


@pytest.mark.parametrize("farthest", [9, 11, 12, 16])
def test_how_far_other_rows_are_filled_does_not_change_a_bit(step, farthest):
    """Attention reads as many blocks as the fullest row has; the others' bits must not notice."""
    decode, cache = step
    alone = jnp.where(jnp.arange(ROWS)[:, None] == 3, POSITIONS, -1)
    beside = POSITIONS.at[1].set(farthest)
    np.testing.assert_array_equal(decode(TOKENS, beside, cache)[0][3], decode(TOKENS, alone, cache)[0][3])


@pytest.mark.parametrize("tokens", [2, 5, 17, 33, 40, 55])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_column_of_a_product_does_not_depend_on_its_place(tokens, dtype):
    """Kernels take whole vectors of columns at a time; those that are left over must be added up in the same order."""
    matrix = jax.random.normal(jax.random.key(0), (96, 577), dtype)
    column = jax.random.normal(jax.random.key(1), (577, 1), dtype)
    product = jax.jit(times)(matrix, jnp.tile(column, tokens))
    np.testing.assert_array_equal(product, jnp.tile(product[:, :1], tokens))
    exact = np.asarray(matrix, np.float64) @ np.asarray(column, np.float64)
    np.testing.assert_allclose(product[:, :1], exact, rtol=0, atol=1e-3)
