"""The largest or smallest score of each row, found in lanes that lie side by side.

XLA compares the numbers of a row one by one on a CPU, those of lanes with vectors. No order of comparing changes a bit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_LANES = 64


def row_max(scores: jax.Array) -> jax.Array:
    """`jnp.max` over the last axis: float32 [rows, vocab] to [rows]."""
    return jnp.max(_kept(jnp.max(_lanes(scores, -jnp.inf), axis=1)), axis=-1)


def row_min(scores: jax.Array) -> jax.Array:
    """`jnp.min` over the last axis: float32 [rows, vocab] to [rows]."""
    return jnp.min(_kept(jnp.min(_lanes(scores, jnp.inf), axis=1)), axis=-1)


def _lanes(scores: jax.Array, beyond: float) -> jax.Array:
    rows, vocab = scores.shape
    padded = jnp.pad(scores, ((0, 0), (0, -vocab % _LANES)), constant_values=beyond)
    return padded.reshape(rows, -1, _LANES)


def _kept(lanes: jax.Array) -> jax.Array:
    """Keeps XLA from making one reduction of two."""
    return jax.lax.optimization_barrier(lanes)
