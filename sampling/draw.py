"""One token per row: an inverse CDF in ascending token id, and the log-probabilities that belong to it.

The cumulative mass is taken in two levels, over blocks of token ids and then inside the chosen block, which reads the
scores once and never builds a cumulative sum over the whole vocabulary. Everything is float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

BLOCK = 256
"""Token ids per block of the two-level cumulative mass; part of the numerics of a draw."""


class Distribution(struct.PyTreeNode):
    """A final distribution over the vocabulary, as the draw reads it.

    Attributes:
        scores: float32 [rows, vocab]; a removed token is -inf.
        best: float32 [rows], the largest score.
        mass: float32 [rows, vocab], exp(scores - best), exactly 0 where removed.
        block_mass: float32 [rows, blocks], the mass of each block of token ids.
        total: float32 [rows], the sum of the mass.
        defined: bool [rows], False where the scores were NaN, +inf or all removed.
    """

    scores: jax.Array
    best: jax.Array
    mass: jax.Array
    block_mass: jax.Array
    total: jax.Array
    defined: jax.Array

    @classmethod
    def of(cls, scores: jax.Array) -> Distribution:
        """The distribution softmax(scores), scores float32 [rows, vocab]."""
        rows, vocab = scores.shape
        best = jnp.max(scores, axis=-1)
        defined = jnp.isfinite(best)
        safe_best = jnp.where(defined, best, 0.0)
        mass = jnp.exp(scores - safe_best[:, None])
        padded = jnp.pad(mass, ((0, 0), (0, -vocab % BLOCK)))
        block_mass = jnp.sum(padded.reshape(rows, -1, BLOCK), axis=-1)
        return cls(scores, safe_best, mass, block_mass, jnp.sum(block_mass, axis=-1), defined)

    def logprobs(self, tokens: jax.Array) -> jax.Array:
        """Log-probability of one token per row, float32 [rows] in nats; -inf where the token was removed."""
        score = jnp.take_along_axis(self.scores, tokens[:, None], axis=-1)[:, 0]
        return (score - self.best) - jnp.log(self.total)


def draw(distribution: Distribution, uniform: jax.Array) -> jax.Array:
    """Draws one token per row: the first id whose cumulative mass exceeds uniform * total.

    Only ids with mass can be chosen. Where rounding leaves no such id, the last id with mass is taken. A row whose
    distribution is undefined gets id 0, for the caller to discard.

    Args:
        distribution: final distributions of the rows.
        uniform: float32 [rows] in [0, 1).
    Returns:
        int32 [rows].
    """
    vocab = distribution.scores.shape[-1]
    target = uniform * distribution.total
    blocks = distribution.block_mass
    cumulative = jnp.cumsum(blocks, axis=-1)
    block = _first_or_last(cumulative > target[:, None], blocks > 0)

    before = jnp.where(
        block > 0,
        jnp.take_along_axis(cumulative, jnp.maximum(block - 1, 0)[:, None], axis=-1)[:, 0],
        0.0,
    )
    ids = block[:, None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)[None, :]
    inside = jnp.take_along_axis(distribution.mass, jnp.minimum(ids, vocab - 1), axis=-1)
    inside = jnp.where(ids < vocab, inside, 0.0)
    within = before[:, None] + jnp.cumsum(inside, axis=-1)
    offset = _first_or_last(within > target[:, None], inside > 0)
    token = block * BLOCK + offset
    return jnp.where(distribution.defined, token, 0).astype(jnp.int32)


def _first_or_last(reached: jax.Array, possible: jax.Array) -> jax.Array:
    """Index of the first entry that is reached and possible, else of the last possible one; int32 [rows].

    Cumulative sums are computed as a tree and may rise by a rounding over an empty entry: hence `possible`.
    """
    hit = reached & possible
    first = jnp.argmax(hit, axis=-1).astype(jnp.int32)
    last = possible.shape[-1] - 1 - jnp.argmax(possible[:, ::-1], axis=-1).astype(jnp.int32)
    return jnp.where(jnp.any(hit, axis=-1), first, last)


def log_kept_mass(model: Distribution, behaviour: Distribution) -> jax.Array:
    """Log of the model's probability mass on the support of `behaviour`; float32 [rows], 0 where nothing is removed."""
    kept = jnp.where(jnp.isneginf(behaviour.scores), 0.0, model.mass)
    vocab = kept.shape[-1]
    kept = jnp.pad(kept, ((0, 0), (0, -vocab % BLOCK))).reshape(kept.shape[0], -1, BLOCK)
    # Summed exactly as Distribution.of sums the total, so that a full support gives log 1 = 0 to the bit.
    return jnp.log(jnp.sum(jnp.sum(kept, axis=-1), axis=-1) / model.total)
