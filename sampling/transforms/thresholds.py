"""Thresholds without sorting: bisection over the ordered bit patterns of float32."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from sampling.transforms.base import FILTER

HEAD = 64
"""Up to this k, the k-th best score comes from `lax.top_k`; beyond it from bisection. Both give the same float."""


def kth_largest(scores: jax.Array, k: jax.Array) -> jax.Array:
    """The k-th largest score of each row, counting ties; -inf where k reaches the vocabulary.

    Args:
        scores: float32 [rows, vocab].
        k: int32 [rows], at least 1.
    Returns:
        float32 [rows].
    """
    rows, vocab = scores.shape
    head = min(HEAD, vocab)

    def from_head() -> jax.Array:
        best, _ = jax.lax.top_k(scores, head)
        return jnp.take_along_axis(best, jnp.minimum(k, head)[:, None] - 1, axis=-1)[:, 0]

    def from_search() -> jax.Array:
        order = ordered_bits(scores)

        def enough(threshold: jax.Array) -> jax.Array:
            return jnp.sum(order >= threshold[:, None], axis=-1) >= k

        return from_ordered_bits(largest(enough, rows))

    kth = jax.lax.cond(jnp.all((k <= head) | (k >= vocab)), from_head, from_search)
    return jnp.where(k >= vocab, FILTER, kth)


def ordered_bits(scores: jax.Array) -> jax.Array:
    """int32 with the order of the float32 scores; -0.0 and 0.0 share a value, as they compare equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0.0, 0.0, scores), jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def from_ordered_bits(order: jax.Array) -> jax.Array:
    """The float32 scores behind `ordered_bits`."""
    bits = order ^ ((order >> 31) & 0x7FFFFFFF)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def largest(holds: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """The largest int32 at which a downward-closed predicate holds, per row: 32 halvings; int32 [rows]."""

    def set_bit(i: jax.Array, found: jax.Array) -> jax.Array:
        # From the sign bit down: adding 2^31 to the smallest int32 wraps to 0, which is what is wanted.
        trial = found + jax.lax.shift_left(jnp.int32(1), jnp.int32(31) - i)
        return jnp.where(holds(trial), trial, found)

    start = jnp.full(rows, jnp.iinfo(jnp.int32).min, jnp.int32)
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(32), set_bit, start)
