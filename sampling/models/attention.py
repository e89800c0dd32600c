"""Attention of grouped queries over keys with explicit positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_MASKED = -1e30
"""Score of an invisible key: finite, so that a row without any visible key stays free of NaN."""


def visible_keys(query_positions: jax.Array, key_positions: jax.Array, window: int | None) -> jax.Array:
    """Which keys each query may attend to: those up to its own position, within the sliding window.

    Args:
        query_positions: int32 [rows, chunk]; -1 marks padding, which sees nothing.
        key_positions: int32 [rows, key_len]; -1 marks padding, which nobody sees.
        window: number of keys seen, the query's own included; None sees all.
    Returns:
        bool [rows, chunk, key_len].
    """
    query, key = query_positions[:, :, None], key_positions[:, None, :]
    visible = (key >= 0) & (key <= query)
    return visible if window is None else visible & (key > query - window)


def attend(queries: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array) -> jax.Array:
    """Softmax attention; the weights are float32, and exactly zero where a key is invisible.

    Args:
        queries: [rows, chunk, kv_heads, q_per_kv, head_dim].
        keys, values: [rows, kv_heads, key_len, head_dim].
        visible: bool [rows, chunk, key_len].
    Returns:
        [rows, chunk, kv_heads, q_per_kv, head_dim] in the dtype of the values; zero for a query
        that sees nothing.
    """
    rows, chunk, kv_heads, group, head_dim = queries.shape
    columns = queries.transpose(0, 2, 4, 1, 3).reshape(rows, kv_heads, head_dim, chunk * group)
    scores = jnp.einsum("rkld,rkdn->rkln", keys, columns, preferred_element_type=jnp.float32)
    # Keys times queries reads the cache in the order it lies in. Without the barrier XLA folds the swap of axes into
    # the product, turns it around and transposes all keys: twice the time of a decode step's attention on a CPU.
    scores = jax.lax.optimization_barrier(scores).swapaxes(2, 3)
    scores = scores.reshape(rows, kv_heads, chunk, group, -1) * head_dim**-0.5
    seen = visible[:, None, :, None, :]
    scores = jnp.where(seen, scores, _MASKED)
    best = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - best), 0.0)
    total = weights.sum(axis=-1)
    mixed = jnp.einsum(
        "rkcgl,rkld->rkcgd",
        weights.astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
    )
    # Dividing the mixture instead of the weights touches head_dim numbers per query instead of key_len.
    mixed = mixed / jnp.where(total > 0, total, 1.0)[..., None]
    return mixed.swapaxes(1, 2).astype(values.dtype)
