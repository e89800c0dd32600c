"""Attention of grouped queries over keys with explicit positions."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

FEW = 4
"""One row in so many may be far ahead of the others at no cost to them."""

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


def attend_cached(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    window: int | None,
    cache_rows: jax.Array | None = None,
) -> jax.Array:
    """Softmax attention over a cache, block by block, over no more blocks than some query sees.

    A block that a query does not see changes none of its bits: its weights are 0 and its rescaling is 1. So how far the
    other rows are filled, which decides what is read, does not matter to a row.

    Args:
        queries: [rows, chunk, kv_heads, q_per_kv, head_dim].
        keys, values: one layer of a KVCache.
        positions: int32 [rows, chunk] of the queries; -1 marks padding, which sees nothing.
        window: as in `visible_keys`.
        cache_rows: int32 [rows], the cache's row that each row of queries looks at; None: its own.
    Returns:
        [rows, chunk, kv_heads, q_per_kv, head_dim] in the dtype of the values; zero for a query that sees nothing.

    Source: the online softmax of Milakov and Gimelshein 2018, as in FlashAttention (Dao et al. 2022).
    """
    rows, chunk, kv_heads, group, head_dim = queries.shape
    blocks, block_len = keys.shape[0], keys.shape[4]
    begin, end, far, longest = 0, 1, None, None
    if blocks > 1:
        ends = positions.max(axis=1) // block_len + 1
        end = jnp.max(ends)
        if window is not None:
            earliest = jnp.min(jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions)) - window + 1
            begin = jnp.clip(earliest // block_len, 0, end)
        if rows > FEW:
            far, longest = jax.lax.top_k(ends, rows // FEW + 1)
    columns = queries.transpose(0, 2, 1, 3, 4).reshape(rows, kv_heads, chunk * group, head_dim)
    nothing = jnp.zeros(columns.shape[:3], jnp.float32)
    seen = Seen(jnp.full_like(nothing, _MASKED), nothing, jnp.zeros(columns.shape, jnp.float32))
    look = partial(_look, keys, values, window)
    if far is None or longest is None:
        seen = look(begin, end, columns, positions, cache_rows, seen)
    else:
        # Blocks that few rows have reached are read for these alone, so that a long row does not hold up the others.
        shared, longest = jnp.maximum(begin, far[-1]), longest[:-1]
        seen = look(begin, shared, columns, positions, cache_rows, seen)
        own = longest if cache_rows is None else cache_rows[longest]
        sofar = jax.tree.map(lambda leaf: leaf[longest], seen)
        theirs = look(shared, end, columns[longest], positions[longest], own, sofar)
        seen = jax.tree.map(lambda leaf, few: leaf.at[longest].set(few), seen, theirs)
    mixed = seen.mixed / jnp.where(seen.total > 0, seen.total, 1.0)[..., None]
    mixed = mixed.reshape(rows, kv_heads, chunk, group, head_dim).swapaxes(1, 2)
    return mixed.astype(values.dtype)


class Seen(NamedTuple):
    """What a row's queries have seen so far: float32 [rows, kv_heads, columns], the largest score and the total of the
    weights relative to it; and [rows, kv_heads, columns, head_dim], the values times these weights."""

    best: jax.Array
    total: jax.Array
    mixed: jax.Array


def _look(
    keys: jax.Array,
    values: jax.Array,
    window: int | None,
    begin: jax.Array | int,
    end: jax.Array | int,
    columns: jax.Array,
    positions: jax.Array,
    cache_rows: jax.Array | None,
    seen: Seen,
) -> Seen:
    """Looks at the blocks from `begin` to before `end` as well.

    Args:
        columns: [rows, kv_heads, columns, head_dim], queries of each key head side by side, those of a token together.
        others: as in `attend_cached`.
    """
    rows, chunk = positions.shape
    head_dim, block_len = keys.shape[3:]
    group = columns.shape[2] // chunk

    def one_block(block: jax.Array, sofar: Seen) -> Seen:
        key = jax.lax.dynamic_index_in_dim(keys, block, keepdims=False)
        value = jax.lax.dynamic_index_in_dim(values, block, keepdims=False)
        if cache_rows is not None:
            key, value = key[cache_rows], value[cache_rows]
        scores = _scores(columns, key, few=chunk == 1) * head_dim**-0.5
        places = block * block_len + jnp.arange(block_len, dtype=jnp.int32)
        visible = visible_keys(positions, jnp.broadcast_to(places[None, :], (rows, block_len)), window)
        visible = jnp.repeat(visible, group, axis=1)[:, None]
        scores = jnp.where(visible, scores, _MASKED)
        best = jnp.maximum(sofar.best, scores.max(axis=-1))
        weights = jnp.where(visible, jnp.exp(scores - best[..., None]), 0.0)
        rescale = jnp.exp(sofar.best - best)
        # A single token sees all that its row holds. Among several, a broken value must not reach those before it.
        broken = ~jnp.isfinite(value).all(axis=-1) if chunk > 1 else None
        sound = value if broken is None else jnp.where(broken[..., None], jnp.zeros((), value.dtype), value)
        new = _mixture(weights.astype(value.dtype), sound, few=chunk == 1)
        if broken is not None:
            tainted = jnp.any(visible & broken[:, :, None, :], axis=-1)
            new = jnp.where(tainted[..., None], jnp.nan, new)
        return Seen(best, sofar.total * rescale + weights.sum(axis=-1), sofar.mixed * rescale[..., None] + new)

    return jax.lax.fori_loop(begin, end, one_block, seen)


def _scores(columns: jax.Array, keys: jax.Array, few: bool) -> jax.Array:
    """Queries times keys: [rows, kv_heads, columns, head_dim] and [rows, kv_heads, head_dim, places] to float32
    [rows, kv_heads, columns, places]."""
    if few and _sums_are_faster():
        return jnp.sum(columns[..., None].astype(jnp.float32) * keys[:, :, None].astype(jnp.float32), axis=-2)
    return jnp.einsum("rkdl,rknd->rknl", keys, columns, preferred_element_type=jnp.float32)


def _mixture(weights: jax.Array, values: jax.Array, few: bool) -> jax.Array:
    """Values times weights: [rows, kv_heads, columns, places] and [rows, kv_heads, places, head_dim] to float32
    [rows, kv_heads, columns, head_dim]."""
    if few and _sums_are_faster():
        return jnp.sum(weights[..., None].astype(jnp.float32) * values[:, :, None].astype(jnp.float32), axis=-2)
    return jnp.einsum("rknl,rkld->rknd", weights, values, preferred_element_type=jnp.float32)


def _sums_are_faster() -> bool:
    """Where columns are few, a CPU adds up products faster than it copies a block and calls a kernel for each head."""
    return jax.default_backend() == "cpu"


def attend(queries: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array) -> jax.Array:
    """Softmax attention over keys without a cache; the weights are float32, and exactly zero where a key is invisible.

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
