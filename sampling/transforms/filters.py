"""Filters that keep a head of the distribution: top-k, top-p, min-p.

Thresholds are found by bisection over the ordered bit patterns of float32, so that no filter sorts the vocabulary.
Numerical reference: Transformers' logits_process.py.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sampling.state import StepState
from sampling.transforms.base import FILTER, Transform, per_row

HEAD = 64
"""Up to this k, the k-th best score comes from `lax.top_k`; beyond it from bisection. Both give the same float."""


class TopK(Transform):
    """Keeps the `k` best tokens and all that tie with the k-th; 0 is off."""

    k: ArrayLike
    NEUTRAL = (0,)
    argmax_invariant = True

    def is_neutral(self) -> jax.Array:
        return jnp.asarray(self.k) <= 0

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        rows, vocab = logits.shape
        k = jnp.broadcast_to(jnp.asarray(self.k, jnp.int32), rows)
        k = jnp.where(k <= 0, vocab, jnp.minimum(k, vocab))
        kth = kth_largest(logits, k)
        return jnp.where(logits < kth[:, None], FILTER, logits)


class TopP(Transform):
    """Keeps the smallest head of the distribution that holds probability mass `p`; 1 is off.

    In ascending order of probability, tokens are removed while the mass removed stays <= 1 - p. Of tokens with equal
    scores the lower ids go first, as a stable ascending sort has it. The best token always stays.

    Source: nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751; Transformers' TopPLogitsWarper.
    """

    p: ArrayLike
    NEUTRAL = (1.0,)
    argmax_invariant = True

    def is_neutral(self) -> jax.Array:
        return jnp.asarray(self.p) >= 1.0

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        best = jnp.max(logits, axis=-1, keepdims=True)
        mass = jnp.exp(logits - jnp.where(jnp.isfinite(best), best, 0.0))
        tail = (1.0 - per_row(self.p).astype(jnp.float32)) * jnp.sum(mass, axis=-1, keepdims=True)
        order = ordered_bits(logits)

        def removable(threshold: jax.Array) -> jax.Array:
            below = jnp.sum(jnp.where(order < threshold[:, None], mass, 0.0), axis=-1)
            return below <= tail[:, 0]

        # The class of equal scores in which the tail ends. It is never above the best token's.
        edge = jnp.minimum(_largest(removable, logits.shape[0]), jnp.max(order, axis=-1))[:, None]
        tied = order == edge
        tied_count = jnp.sum(tied, axis=-1, keepdims=True)

        def split_ties() -> jax.Array:
            rank = jnp.cumsum(tied, axis=-1)
            room = tail - jnp.sum(jnp.where(order < edge, mass, 0.0), axis=-1, keepdims=True)
            fits = rank.astype(jnp.float32) * mass <= room
            return tied & fits & (rank < tied_count) & (tied_count > 1)

        nothing = jnp.zeros_like(tied)
        cut = jax.lax.cond(jnp.any(tied_count > 1), split_ties, lambda: nothing)
        return jnp.where((order < edge) | cut, FILTER, logits)


class MinP(Transform):
    """Removes tokens less likely than `p` times the best one; 0 is off.

    Source: Nguyen et al. 2024, arXiv:2407.01082; Transformers' MinPLogitsWarper.
    """

    p: ArrayLike
    NEUTRAL = (0.0,)
    argmax_invariant = True

    def is_neutral(self) -> jax.Array:
        return jnp.asarray(self.p) <= 0.0

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        best = jnp.max(logits, axis=-1, keepdims=True)
        relative = jnp.exp(logits - jnp.where(jnp.isfinite(best), best, 0.0))
        return jnp.where(relative < per_row(self.p).astype(jnp.float32), FILTER, logits)


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

        return from_ordered_bits(_largest(enough, rows))

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


def _largest(holds: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """The largest int32 at which a downward-closed predicate holds, per row: 32 halvings; int32 [rows]."""

    def set_bit(i: jax.Array, found: jax.Array) -> jax.Array:
        # From the sign bit down: adding 2^31 to the smallest int32 wraps to 0, which is what is wanted.
        trial = found + jax.lax.shift_left(jnp.int32(1), jnp.int32(31) - i)
        return jnp.where(holds(trial), trial, found)

    start = jnp.full(rows, jnp.iinfo(jnp.int32).min, jnp.int32)
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(32), set_bit, start)
