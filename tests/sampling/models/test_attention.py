"""Which keys a query sees, and what the invisible ones weigh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sampling.models.attention import attend, attend_cached, visible_keys


def test_a_window_counts_the_querys_own_key():
    """Case B052: with a window of 3, the queries of 6 tokens see 1, 2, 3, 3, 3, 3 keys."""
    positions = jnp.arange(6)[None]
    visible = visible_keys(positions, positions, window=3)
    np.testing.assert_array_equal(visible.sum(-1), [[1, 2, 3, 3, 3, 3]])
    np.testing.assert_array_equal(visible[0, -1], [False, False, False, True, True, True])


def test_no_window_sees_everything_before():
    positions = jnp.arange(4)[None]
    np.testing.assert_array_equal(visible_keys(positions, positions, None)[0], np.tri(4, dtype=bool))


def test_padding_neither_sees_nor_is_seen():
    positions = jnp.array([[-1, 0, 1, -1]])
    visible = visible_keys(positions, positions, None)[0]
    np.testing.assert_array_equal(visible.sum(-1), [0, 1, 2, 0])
    assert not visible[:, [0, 3]].any()


def _random(*shape: int, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def test_equals_softmax_over_repeated_keys():
    rows, chunk, kv_heads, group, length, head_dim = 2, 3, 2, 5, 7, 4
    queries = _random(rows, chunk, kv_heads, group, head_dim, seed=0)
    keys = _random(rows, kv_heads, length, head_dim, seed=1)
    values = _random(rows, kv_heads, length, head_dim, seed=2)
    visible = jnp.arange(length)[None, None, :] <= jnp.array([2, 4, 6])[None, :, None]
    visible = jnp.broadcast_to(visible, (rows, chunk, length))
    got = attend(queries, keys, values, visible)
    for row, query, head, member in np.ndindex(rows, chunk, kv_heads, group):
        kept = np.asarray(visible[row, query])
        scores = np.asarray(keys[row, head])[kept] @ np.asarray(queries[row, query, head, member])
        weights = np.exp(scores / 2) / np.exp(scores / 2).sum()
        expected = weights @ np.asarray(values[row, head])[kept]
        np.testing.assert_allclose(got[row, query, head, member], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("block_len", [2, 4, 12])
def test_attention_by_blocks_is_attention(block_len, window):
    """Case B052 as well: windows begin in the middle of a block."""
    rows, chunk, kv_heads, group, length, head_dim = 3, 2, 2, 3, 12, 4
    queries = _random(rows, chunk, kv_heads, group, head_dim, seed=0)
    keys = _random(rows, kv_heads, length, head_dim, seed=1)
    values = _random(rows, kv_heads, length, head_dim, seed=2)
    positions = jnp.array([[4, 5], [8, -1], [-1, -1]])
    blocks = length // block_len
    split = (rows, kv_heads, blocks, block_len, head_dim)
    got = attend_cached(
        queries,
        keys.reshape(split).transpose(2, 0, 1, 4, 3),
        values.reshape(split).transpose(2, 0, 1, 3, 4),
        positions,
        window,
    )
    visible = visible_keys(positions, jnp.broadcast_to(jnp.arange(length)[None], (rows, length)), window)
    np.testing.assert_allclose(got, attend(queries, keys, values, visible), rtol=0, atol=1e-6)
    np.testing.assert_array_equal(got[2], jnp.zeros_like(got[2]))


def test_a_broken_value_reaches_no_query_before_it():
    """Within one chunk: NaN times a weight of zero would."""
    keys, values = _random(2, 1, 1, 4, 3, seed=1), _random(2, 1, 1, 3, 4, seed=2)
    queries, positions = _random(1, 3, 1, 2, 4, seed=0), jnp.array([[2, 3, 4]])
    clean = attend_cached(queries, keys, values, positions, None)
    broken = attend_cached(queries, keys, values.at[1, 0, 0, 0].set(jnp.nan), positions, None)
    np.testing.assert_array_equal(broken[0, 0], clean[0, 0])
    assert np.isnan(broken[0, 1:]).all()


@pytest.mark.parametrize("noise", [1e4, -1e4, 1e30])
def test_invisible_keys_weigh_exactly_nothing(noise):
    queries, keys = _random(1, 1, 1, 2, 4, seed=0), _random(1, 1, 6, 4, seed=1)
    values = _random(1, 1, 6, 4, seed=2)
    visible = jnp.array([[[True, True, False, True, False, False]]])
    hidden = ~visible[0, 0][None, None, :, None]
    clean = attend(queries, keys, values, visible)
    stale = attend(queries, jnp.where(hidden, 3.0, keys), jnp.where(hidden, jnp.float32(noise), values), visible)
    np.testing.assert_array_equal(clean, stale)


def test_a_query_that_sees_nothing_gives_zero_and_finite_gradients():
    queries, keys = _random(1, 1, 1, 2, 4, seed=0), _random(1, 1, 6, 4, seed=1)
    nothing = jnp.zeros((1, 1, 6), bool)
    np.testing.assert_array_equal(attend(queries, keys, keys, nothing), jnp.zeros_like(queries))
    grads = jax.grad(lambda q, k: attend(q, k, k, nothing).sum(), argnums=(0, 1))(queries, keys)
    assert all(np.isfinite(grad).all() for grad in grads)
