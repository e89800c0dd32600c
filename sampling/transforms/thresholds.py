"""Thresholds without sorting: bisection over the ordered bit patterns of float32."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from sampling.transforms.base import FILTER

HEAD = 64
"""Best scores that are fetched as such. What lies beyond is searched by bisection, with the same result."""

_GROUP = 64
"""Ids that `largest_values` looks at as one."""


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
        best = largest_values(scores, head)
        return jnp.take_along_axis(best, jnp.minimum(k, head)[:, None] - 1, axis=-1)[:, 0]

    def from_search() -> jax.Array:
        order = ordered_bits(scores)

        def enough(threshold: jax.Array) -> jax.Array:
            return jnp.sum(order >= threshold[:, None], axis=-1) >= k

        return from_ordered_bits(largest(enough, rows))

    kth = jax.lax.cond(jnp.all((k <= head) | (k >= vocab)), from_head, from_search)
    return jnp.where(k >= vocab, FILTER, kth)


def largest_values(scores: jax.Array, count: int) -> jax.Array:
    """The `count` largest scores of each row, descending, as `lax.top_k` gives them; scores float32 [rows, vocab].

    They lie in the `count` groups of ids with the largest peaks, so only those are sorted: an eighth of the time at
    49,152 ids. A group's ids are far apart, so that neighbouring groups are compared side by side.
    """
    rows, vocab = scores.shape
    groups = jnp.pad(scores, ((0, 0), (0, -vocab % _GROUP)), constant_values=FILTER).reshape(rows, _GROUP, -1)
    if groups.shape[2] > count:
        _, highest = jax.lax.top_k(jnp.max(groups, axis=1), count)
        groups = jnp.take_along_axis(groups, highest[:, None, :], axis=2)
    values, _ = jax.lax.top_k(groups.reshape(rows, -1), count)
    return values


def nucleus_edge(mass: jax.Array, tail: jax.Array) -> jax.Array:
    """The largest entry of each row below which the row holds at most `tail`; never more than the row's largest.

    A guess from the head of the row is checked against the mass below it, and taken if it is right, as it is for most
    rows that a nucleus of few tokens serves; the others are searched. What a row gets never depends on other rows.

    Args:
        mass: float32 [rows, vocab], not negative; the largest entry of a row is 1.
        tail: float32 [rows].
    Returns:
        float32 [rows].
    """
    rows, vocab = mass.shape

    def fits(edge: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(mass < edge[:, None], mass, 0.0), axis=-1) <= tail

    head = largest_values(mass, min(HEAD, vocab))
    rest = jnp.sum(mass, axis=-1, keepdims=True) - jnp.cumsum(head, axis=-1)
    reached = rest <= tail[:, None]
    guess = jnp.take_along_axis(head, jnp.argmax(reached, axis=-1)[:, None], axis=-1)[:, 0]
    above = jnp.min(jnp.where(head > guess[:, None], head, jnp.inf), axis=-1)
    right = jnp.any(reached, axis=-1) & fits(guess) & (jnp.isinf(above) | ~fits(above))

    def searched() -> jax.Array:
        # The bits of floats that are not negative have their order; 30 of them reach from 0 to just below 2.
        found = largest(lambda bits: fits(jax.lax.bitcast_convert_type(bits, jnp.float32)), rows, bits=30)
        edge = jnp.minimum(jax.lax.bitcast_convert_type(found, jnp.float32), head[:, 0])
        return jnp.where(right, guess, edge)

    return jax.lax.cond(jnp.all(right), lambda: guess, searched)


def ordered_bits(scores: jax.Array) -> jax.Array:
    """int32 with the order of the float32 scores; -0.0 and 0.0 share a value, as they compare equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0.0, 0.0, scores), jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def from_ordered_bits(order: jax.Array) -> jax.Array:
    """The float32 scores behind `ordered_bits`."""
    bits = order ^ ((order >> 31) & 0x7FFFFFFF)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def largest(holds: Callable[[jax.Array], jax.Array], rows: int, bits: int = 32) -> jax.Array:
    """The largest number at which a downward-closed predicate holds, per row, by halving; int32 [rows].

    Args:
        holds: int32 [rows] to bool [rows]; taken to be true of the smallest number.
        bits: of the numbers searched: 32 for every int32, fewer for 0 .. 2 ** bits - 1.
    """
    start = jnp.full(rows, jnp.iinfo(jnp.int32).min if bits == 32 else 0, jnp.int32)

    def set_bit(i: jax.Array, found: jax.Array) -> jax.Array:
        # From the highest bit down: adding 2^31 to the smallest int32 wraps to 0, which is what is wanted.
        trial = found + jax.lax.shift_left(jnp.int32(1), jnp.int32(bits - 1) - i)
        return jnp.where(holds(trial), trial, found)

    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(bits), set_bit, start)
