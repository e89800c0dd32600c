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
    scale = queries.shape[-1] ** -0.5
    scores = jnp.einsum("rckgd,rkld->rkcgl", queries, keys, preferred_element_type=jnp.float32) * scale
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
