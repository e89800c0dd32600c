"""Bans on repeating a sequence of tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sampling.state import StepState
from sampling.transforms.base import FILTER, Transform


class NoRepeatNGram(Transform):
    """Removes every token that would complete an n-gram which the row already holds; size 0 is off.

    Source: Transformers' NoRepeatNGramLogitsProcessor.
    """

    size: ArrayLike
    NEUTRAL = (0,)
    argmax_invariant = False

    def is_neutral(self) -> jax.Array:
        return jnp.asarray(self.size) <= 0

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        return _without_repeats(state, logits, self.size, state.length)


class PromptNoRepeatNGram(Transform):
    """Removes every token that would complete an n-gram of the prompt; size 0 is off.

    Source: Transformers' EncoderNoRepeatNGramLogitsProcessor.
    """

    size: ArrayLike
    NEUTRAL = (0,)
    argmax_invariant = False

    def is_neutral(self) -> jax.Array:
        return jnp.asarray(self.size) <= 0

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        return _without_repeats(state, logits, self.size, state.prompt_len)


def _without_repeats(state: StepState, logits: jax.Array, size: ArrayLike, searched: jax.Array) -> jax.Array:
    """Removes the last tokens of those n-grams, ending before `searched`, whose beginning the history ends with."""
    rows, capacity = state.buffer.shape
    size = jnp.broadcast_to(jnp.asarray(size, jnp.int32), (rows,))[:, None]
    length = state.length[:, None]
    place = jnp.arange(capacity, dtype=jnp.int32)[None, :]

    def agrees(back: jax.Array, repeated: jax.Array) -> jax.Array:
        last = jnp.take_along_axis(state.buffer, jnp.maximum(length - back, 0), axis=1)
        return repeated & ((jnp.roll(state.buffer, back, axis=1) == last) | (back >= size))

    # An n-gram of size n that ends at `place` begins at place - (n - 1), and is repeated if the n - 1 tokens before
    # `place` are the last n - 1 of the history. As many steps back are taken as the rows' sizes ask for.
    possible = (size > 0) & (place < searched[:, None]) & (place >= size - 1) & (length >= size - 1)
    repeated = jax.lax.fori_loop(jnp.int32(1), jnp.max(size), agrees, possible)
    banned = jnp.where(repeated, state.buffer, logits.shape[1])
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    return logits.at[row, banned].set(FILTER, mode="drop")
