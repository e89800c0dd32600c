"""Filters that keep a head of the distribution: top-k, top-p, min-p. None of them sorts the vocabulary.

Numerical reference: Transformers' logits_process.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sampling.extremes import row_max
from sampling.state import StepState
from sampling.transforms.base import per_row
from sampling.transforms.cuts import Cut, CutFilter, cut_among_ties, cut_at, cut_below
from sampling.transforms.thresholds import from_ordered_bits, kth_largest, largest, nucleus_edge, ordered_bits


class TopK(CutFilter):
    """Keeps the `k` best tokens and all that tie with the k-th; 0 is off."""

    k: ArrayLike
    NEUTRAL = (0,)

    def is_neutral(self) -> jax.Array:
        return jnp.asarray(self.k) <= 0

    def summary(self, state: StepState, logits: jax.Array) -> Cut:
        rows, vocab = logits.shape
        k = jnp.broadcast_to(jnp.asarray(self.k, jnp.int32), rows)
        return cut_at(kth_largest(logits, jnp.where(k <= 0, vocab, jnp.minimum(k, vocab))))


class TopP(CutFilter):
    """Keeps the smallest head of the distribution that holds probability mass `p`; 1 is off.

    In ascending order of probability, tokens are removed while the mass removed stays <= 1 - p. Of tokens with equal
    scores the lower ids go first, as a stable ascending sort has it. The best token always stays.

    Source: nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751; Transformers' TopPLogitsWarper.
    """

    p: ArrayLike
    NEUTRAL = (1.0,)

    def is_neutral(self) -> jax.Array:
        return jnp.asarray(self.p) >= 1.0

    def summary(self, state: StepState, logits: jax.Array) -> Cut:
        mass = relative_mass(logits)
        tail = (1.0 - per_row(self.p)[:, 0]) * jnp.sum(mass, axis=-1)
        edge = nucleus_edge(mass, tail)
        tied = mass == edge[:, None]
        count = jnp.sum(tied, axis=-1, dtype=jnp.int32)

        def among_tied() -> Cut:
            # As many of the least go as fit into the tail. Equal mass need not mean equal scores.
            room = tail - jnp.sum(jnp.where(mass < edge[:, None], mass, 0.0), axis=-1)
            gone = jnp.minimum(jnp.floor(room / edge).astype(jnp.int32), count - 1)
            order = jnp.where(tied, ordered_bits(logits), jnp.iinfo(jnp.int32).max)
            least = largest(lambda bits: jnp.sum(order < bits[:, None], axis=-1) <= gone, logits.shape[0])
            score = from_ordered_bits(least)
            lower = jnp.sum(tied & (logits < score[:, None]), axis=-1, dtype=jnp.int32)
            return cut_among_ties(logits, score, lambda rank, _: rank > (gone - lower)[:, None])

        return jax.lax.cond(jnp.any(count > 1), among_tied, lambda: cut_below(logits, mass >= edge[:, None]))


class MinP(CutFilter):
    """Removes tokens less likely than `p` times the best one; 0 is off.

    Source: Nguyen et al. 2024, arXiv:2407.01082; Transformers' MinPLogitsWarper.
    """

    p: ArrayLike
    NEUTRAL = (0.0,)

    def is_neutral(self) -> jax.Array:
        return jnp.asarray(self.p) <= 0.0

    def summary(self, state: StepState, logits: jax.Array) -> Cut:
        return cut_below(logits, ~(relative_mass(logits) < per_row(self.p)))


def relative_mass(logits: jax.Array) -> jax.Array:
    """Probability relative to the best token's: float32 [rows, vocab] in [0, 1]; NaN where a row is undefined."""
    best = row_max(logits)[:, None]
    return jnp.exp(logits - jnp.where(jnp.isneginf(best), 0.0, best))
