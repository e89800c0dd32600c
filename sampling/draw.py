"""One token per row: an inverse CDF in ascending token id, and the log-probabilities that belong to it.

The cumulative mass is taken in two levels, over blocks of token ids and then inside the chosen block, which reads the
scores once and never builds a cumulative sum over the whole vocabulary. Everything is float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from sampling.extremes import row_max

BLOCK = 256
"""Token ids per block of the two-level cumulative mass; part of the numerics of a draw."""


_WEIGHTLESS = -200.0
"""exp of it is 0 in float32."""


class Masses(struct.PyTreeNode):
    """Sums over softmax weights exp(score - best), all that a draw needs besides the scores themselves.

    Attributes:
        best: float32 [rows], the largest score; 0 where the row is undefined.
        blocks: float32 [rows, blocks], the weight of each block of token ids.
        total: float32 [rows], the sum of the blocks.
        defined: bool [rows], False where the scores were NaN, +inf or all removed.
    """

    best: jax.Array
    blocks: jax.Array
    total: jax.Array
    defined: jax.Array

    @classmethod
    def of(cls, scores: jax.Array) -> Masses:
        """Of scores float32 [rows, vocab], a removed token at -inf."""
        best = row_max(scores)
        defined = jnp.isfinite(best)
        best = jnp.where(defined, best, 0.0)
        blocks = sum_blocks(jnp.exp(scores - best[:, None]))
        return cls(best, blocks, jnp.sum(blocks, axis=-1), defined)


class Distribution(struct.PyTreeNode):
    """softmax(scores), with the sums that belong to it.

    Attributes:
        scores: float32 [rows, vocab]; a removed token is -inf.
        masses: sums over the scores.
    """

    scores: jax.Array
    masses: Masses

    @classmethod
    def of(cls, scores: jax.Array) -> Distribution:
        """The distribution softmax(scores), scores float32 [rows, vocab]."""
        return cls(scores, Masses.of(scores))

    def logprobs(self, tokens: jax.Array) -> jax.Array:
        """Log-probability of one token per row, float32 [rows] in nats; -inf where the token was removed."""
        score = jnp.take_along_axis(self.scores, tokens[:, None], axis=-1)[:, 0]
        return (score - self.masses.best) - jnp.log(self.masses.total)

    def probabilities(self) -> jax.Array:
        """float32 [rows, vocab], 0 where removed."""
        return jnp.exp(self.scores - self.masses.best[:, None]) / self.masses.total[:, None]

    def entropy(self) -> jax.Array:
        """float32 [rows], nats; 0 where one token is left. Its gradient is finite whatever was removed."""
        below = self.scores - self.masses.best[:, None]
        # A removed token weighs 0. Cut at a score that weighs 0 as well, it adds 0 instead of NaN, to gradients too.
        surprise = jnp.exp(below) * jnp.maximum(below, _WEIGHTLESS)
        return jnp.log(self.masses.total) - jnp.sum(sum_blocks(surprise), axis=-1) / self.masses.total


def draw(distribution: Distribution, uniform: jax.Array) -> jax.Array:
    """Draws one token per row: the first id whose cumulative mass exceeds uniform * total.

    Only ids of the support can be chosen. Where rounding leaves no such id, the last one that raised the cumulative
    mass is taken. A row whose distribution is undefined gets id 0, for the caller to discard. docs/draws.md bounds how
    far the rate of a token can be from its probability.

    Args:
        distribution: final distributions of the rows.
        uniform: float32 [rows] in [0, 1).
    Returns:
        int32 [rows].
    """
    scores, masses = distribution.scores, distribution.masses
    vocab = scores.shape[-1]
    target = uniform * masses.total
    cumulative = jnp.cumsum(masses.blocks, axis=-1)
    block = _first_above(target, cumulative, masses.blocks > 0)

    before = jnp.where(
        block > 0,
        jnp.take_along_axis(cumulative, jnp.maximum(block - 1, 0)[:, None], axis=-1)[:, 0],
        0.0,
    )
    ids = block[:, None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)[None, :]
    inside = jnp.take_along_axis(scores, jnp.minimum(ids, vocab - 1), axis=-1)
    inside = jnp.where(ids < vocab, inside, -jnp.inf)
    within = before[:, None] + jnp.cumsum(jnp.exp(inside - masses.best[:, None]), axis=-1)
    offset = _first_above(target, within, inside > -jnp.inf)
    return jnp.where(masses.defined, block * BLOCK + offset, 0).astype(jnp.int32)


def log_kept_mass(scores: jax.Array, model: Distribution) -> jax.Array:
    """Log of the model's probability mass on the tokens that `scores` leaves; float32 [rows], 0 if it leaves all."""
    weights = jnp.exp(model.scores - model.masses.best[:, None])
    kept = sum_blocks(jnp.where(jnp.isneginf(scores), 0.0, weights))
    # Summed as the model's total is, so that nothing removed gives log 1 = 0 to the bit.
    return jnp.log(jnp.sum(kept, axis=-1) / model.masses.total)


def sum_blocks(weights: jax.Array) -> jax.Array:
    """Sums over blocks of token ids: float32 [rows, vocab] to [rows, blocks]."""
    rows, vocab = weights.shape
    padded = jnp.pad(weights, ((0, 0), (0, -vocab % BLOCK)))
    return jnp.sum(padded.reshape(rows, -1, BLOCK), axis=-1)


def _first_above(target: jax.Array, cumulative: jax.Array, possible: jax.Array) -> jax.Array:
    """Index of the first possible entry whose cumulative mass exceeds the target, else of the last one that raised it.

    Cumulative sums are computed as a tree and may rise by a rounding over an empty entry: hence `possible`. What raised
    the sum last is where it first has its largest value; the entries after that are too light to be anyone's draw.

    Args:
        target: float32 [rows].
        cumulative: float32 [rows, entries].
        possible: bool [rows, entries].
    Returns:
        int32 [rows].
    """
    hit = possible & (cumulative > target[:, None])
    last = jnp.argmax(jnp.where(possible, cumulative, -jnp.inf), axis=-1)
    return jnp.where(jnp.any(hit, axis=-1), jnp.argmax(hit, axis=-1), last).astype(jnp.int32)
