"""Writes land at their positions or nowhere; rows are copied whole."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sampling.models import KVCache, ModelConfig

CONFIG = ModelConfig(
    family="llama",
    vocab_size=11,
    width=8,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=2,
    ffn=6,
    norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    tied_head=True,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    sliding_windows=(None, None),
    max_position=64,
)


BLOCK = 3


def _numbered(rows: int, cache_len: int, start: int = 0) -> KVCache:
    """A cache in which every number is different."""
    empty = KVCache.empty(CONFIG, rows, cache_len, block_len=BLOCK)
    leaves, tree = jax.tree.flatten(empty)
    size = leaves[0].size
    filled = [
        (start + index * size + jnp.arange(size, dtype=jnp.float32)).reshape(leaf.shape)
        for index, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, filled)


def by_position(keys, values):
    """A layer's keys and values as [rows, kv_heads, cache_len, head_dim]."""
    blocks, rows, heads, head_dim, block_len = keys.shape
    whole = rows, heads, blocks * block_len, head_dim
    return keys.transpose(1, 2, 0, 4, 3).reshape(whole), values.transpose(1, 2, 0, 3, 4).reshape(whole)


def test_empty_has_one_array_per_layer():
    cache = KVCache.empty(CONFIG, rows=3, cache_len=5, dtype=jnp.bfloat16, block_len=3)
    assert (cache.rows, cache.cache_len, cache.block_len) == (3, 6, 3)
    assert [leaf.shape for leaf in cache.keys] == [(2, 3, 2, 2, 3)] * 2
    assert [leaf.shape for leaf in cache.values] == [(2, 3, 2, 3, 2)] * 2
    assert {leaf.dtype for leaf in jax.tree.leaves(cache)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("position", [-1, -6, 6, 7, 2**31 - 1])
def test_a_position_outside_is_dropped(position):
    """Not wrapped to the back, and not moved to the last place."""
    cache = _numbered(rows=2, cache_len=6)
    new = jnp.full((2, 1, 2, 2), -7.0)
    written = jax.jit(KVCache.write, static_argnums=1)(
        cache, 1, jnp.arange(2), jnp.array([[position], [3]], jnp.int32), new, new
    )
    for got, before in zip(by_position(*written), by_position(cache.keys[1], cache.values[1]), strict=True):
        np.testing.assert_array_equal(got[0], before[0])
        np.testing.assert_array_equal(got[1], before[1].at[:, 3].set(-7.0))


def test_a_chunk_lands_at_its_positions():
    cache = KVCache.empty(CONFIG, rows=1, cache_len=6, block_len=BLOCK)
    new = 1 + jnp.arange(12, dtype=jnp.float32).reshape(1, 3, 2, 2)
    keys, values = by_position(*cache.write(0, jnp.arange(1), jnp.array([[4, -1, 1]], jnp.int32), new, new + 100))
    expected = np.zeros((1, 2, 6, 2), np.float32)
    expected[0, :, 4], expected[0, :, 1] = new[0, 0], new[0, 2]
    np.testing.assert_array_equal(keys, expected)
    np.testing.assert_array_equal(values, np.where(expected != 0, expected + 100, 0))


def test_fill_copies_one_row_to_the_first_listed_slots():
    cache, source = _numbered(rows=4, cache_len=5), _numbered(rows=2, cache_len=5, start=1000)
    filled = jax.jit(KVCache.fill)(cache, source, jnp.int32(1), jnp.array([3, 0, 1, 1], jnp.int32), jnp.int32(2))
    for got, old, new in zip(*map(jax.tree.leaves, (filled, cache, source)), strict=True):
        np.testing.assert_array_equal(got[:, np.array([3, 0])], np.stack([new[:, 1], new[:, 1]], axis=1))
        np.testing.assert_array_equal(got[:, np.array([1, 2])], old[:, np.array([1, 2])])


@pytest.mark.parametrize("count", [0, 1, 3, 4, 6])
def test_a_fork_holds_the_first_positions_and_nothing_behind(count):
    cache = _numbered(rows=3, cache_len=6, start=1)
    forked = jax.jit(KVCache.fork)(cache, jnp.int32(2), jnp.int32(0), jnp.int32(count))
    before = by_position(cache.keys[1], cache.values[1])
    for got, old in zip(by_position(forked.keys[1], forked.values[1]), before, strict=True):
        np.testing.assert_array_equal(got[0, :, :count], old[2, :, :count])
        np.testing.assert_array_equal(got[0, :, count:], jnp.zeros_like(old[2, :, count:]))
        np.testing.assert_array_equal(got[1:], old[1:])


def test_rows_are_wiped_whole():
    cache = _numbered(rows=3, cache_len=5)
    poisoned = jax.tree.map(lambda leaf: leaf.at[:, 1].set(jnp.nan), cache)
    wiped = poisoned.wiped(jnp.array([False, True, False]))
    for got, old in zip(jax.tree.leaves(wiped), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(got[:, 1], jnp.zeros_like(old[:, 1]))
        np.testing.assert_array_equal(got[:, np.array([0, 2])], old[:, np.array([0, 2])])


def test_configuration_is_hashable():
    assert hash(CONFIG) == hash(dataclasses.replace(CONFIG))
