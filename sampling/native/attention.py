"""Attention of a decode step in native code, where there is any; sampling.models.attention has what it computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from sampling.native.library import registered

TAKES = ("float32", 1)
"""The dtype and the number of devices of models that native code serves."""


def serves(queries: jax.Array, keys: jax.Array) -> bool:
    """Whether native code attends to these, shaped as `attend` takes them."""
    return queries.shape[1] == 1 and queries.dtype == keys.dtype == TAKES[0] and bool(registered())


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    window: int | None,
    cache_rows: jax.Array,
) -> jax.Array:
    """Softmax attention of one query a row over a cache.

    Args:
        queries: float32 [rows, 1, kv_heads, q_per_kv, head_dim].
        keys, values: float32, one layer of a KVCache.
        positions: int32 [rows, 1] of the queries; -1 marks padding, which sees nothing.
        window: number of keys seen, the query's own included; None sees all.
        cache_rows: int32 [rows], the cache's row that each row of queries looks at.
    Returns:
        float32 [rows, 1, kv_heads, q_per_kv, head_dim]; zero for a query that sees nothing.
    """
    asked = queries[:, 0]
    call = jax.ffi.ffi_call(registered(), jax.ShapeDtypeStruct(asked.shape, jnp.float32))
    scale = np.float32(asked.shape[-1] ** -0.5)
    return call(asked, keys, values, positions[:, 0], cache_rows, window=np.int64(window or 0), scale=scale)[:, None]
