"""Sets of tokens that may, or may not, be drawn. Unused places of a set hold NO_TOKEN."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sampling.state import NO_TOKEN, StepState
from sampling.transforms.base import FILTER, Transform, per_row


class AllowedTokens(Transform):
    """Removes all tokens but those in `ids`, int32 [ids] or [rows, ids]; an empty set allows all."""

    ids: ArrayLike
    argmax_invariant = False

    def is_neutral(self) -> jax.Array:
        return is_empty(self.ids)

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        return jnp.where(members(self.ids, logits.shape), logits, FILTER)


class SuppressTokens(Transform):
    """Removes the tokens in `tokens`, int32 [ids] or [rows, ids].

    Source: Transformers' SuppressTokensLogitsProcessor.
    """

    tokens: ArrayLike
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
    argmax_invariant = False

    def is_neutral(self) -> jax.Array:
        return is_empty(self.tokens)

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        now = state.step[:, None] == per_row(self.offset).astype(jnp.int32)
        return jnp.where(now & members(self.tokens, logits.shape), FILTER, logits)


def is_empty(ids: ArrayLike) -> jax.Array:
    """bool, a scalar or [rows]: no place of the set is used."""
    return jnp.all(jnp.asarray(ids) == NO_TOKEN, axis=-1)


def members(ids: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
    """bool [rows, vocab]: which tokens are in the rows' sets, given as int32 [ids] or [rows, ids]."""
    rows, vocab = shape
    ids = jnp.asarray(ids, jnp.int32)
    index = jnp.where(ids == NO_TOKEN, vocab, ids)
    if ids.ndim == 1:
        one = jnp.zeros(vocab, bool).at[index].set(True, mode="drop")
        return jnp.broadcast_to(one[None, :], (rows, vocab))
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    return jnp.zeros((rows, vocab), bool).at[row, index].set(True, mode="drop")
