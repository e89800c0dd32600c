"""Sets of tokens that may, or may not, be drawn.

A set is int32 [ids], the same for all rows, or [rows, ids]; its unused places hold NO_TOKEN. A single id is a set too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sampling.state import NO_TOKEN, StepState
from sampling.transforms.base import FILTER, Transform, per_row


class AllowedTokens(Transform):
    """Removes all tokens but those in `ids`; an empty set allows all."""

    ids: ArrayLike
    NEUTRAL = (NO_TOKEN,)
    argmax_invariant = False

    def is_neutral(self) -> jax.Array:
        return is_empty(self.ids)

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        return jnp.where(members(self.ids, logits.shape), logits, FILTER)


class SuppressTokens(Transform):
    """Removes the tokens in `tokens`.

    Source: Transformers' SuppressTokensLogitsProcessor.
    """

    tokens: ArrayLike
    NEUTRAL = (NO_TOKEN,)
    argmax_invariant = False

    def is_neutral(self) -> jax.Array:
        return is_empty(self.tokens)

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        return jnp.where(members(self.tokens, logits.shape), FILTER, logits)


class BeginSuppressTokens(Transform):
    """Removes the tokens in `tokens` from draw number `offset` alone, by default the first.

    Source: Transformers' SuppressTokensAtBeginLogitsProcessor, whose begin index is prompt length + offset.
    """

    tokens: ArrayLike
    offset: ArrayLike = 0
    NEUTRAL = (NO_TOKEN,)
    argmax_invariant = False

    def is_neutral(self) -> jax.Array:
        return is_empty(self.tokens)

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        now = state.step[:, None] == per_row(self.offset, jnp.int32)
        return jnp.where(now & members(self.tokens, logits.shape), FILTER, logits)


def is_empty(ids: ArrayLike) -> jax.Array:
    """bool, a scalar or [rows]: no place of the set is used."""
    return jnp.all(_as_set(ids) < 0, axis=-1)


def members(ids: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
    """bool [rows, vocab]: which tokens are in the rows' sets."""
    rows, vocab = shape
    ids = _as_set(ids)
    index = jnp.where(ids < 0, vocab, ids)
    if ids.ndim == 1:
        one = jnp.zeros(vocab, bool).at[index].set(True, mode="drop")
        return jnp.broadcast_to(one[None, :], (rows, vocab))
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    return jnp.zeros((rows, vocab), bool).at[row, index].set(True, mode="drop")


def _as_set(ids: ArrayLike) -> jax.Array:
    return jnp.atleast_1d(jnp.asarray(ids, jnp.int32))
