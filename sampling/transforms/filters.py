"""Filters that keep a head of the distribution: top-k, top-p, min-p.

Thresholds are found by bisection over the ordered bit patterns of float32, so that no filter sorts the vocabulary.
Numerical reference: Transformers' logits_process.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sampling.state import StepState
from sampling.transforms.base import FILTER, Transform, per_row
from sampling.transforms.thresholds import kth_largest, largest, ordered_bits


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
        tail = (1.0 - per_row(self.p)) * jnp.sum(mass, axis=-1, keepdims=True)
        order = ordered_bits(logits)

        def removable(threshold: jax.Array) -> jax.Array:
            below = jnp.sum(jnp.where(order < threshold[:, None], mass, 0.0), axis=-1)
            return below <= tail[:, 0]

        # The class of equal scores in which the tail ends. It is never above the best token's.
        edge = jnp.minimum(largest(removable, logits.shape[0]), jnp.max(order, axis=-1))[:, None]
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
        return jnp.where(relative < per_row(self.p), FILTER, logits)
