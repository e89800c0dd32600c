"""Bans on repeating a sequence of tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import ArrayLike

from sampling.state import StepState
from sampling.transforms.base import FILTER, Transform

MAX_NGRAM = 16
"""Largest n-gram size that the compiled programs look for, unless a transform is made with another `longest`."""


class NoRepeatNGram(Transform):
    """Removes every token that would complete an n-gram which the row already holds; size 0 is off.

    Source: Transformers' NoRepeatNGramLogitsProcessor.
    """

    size: ArrayLike
    longest: int = struct.field(pytree_node=False, default=MAX_NGRAM)
    NEUTRAL = (0,)
    argmax_invariant = False

    def is_neutral(self) -> jax.Array:
        return jnp.asarray(self.size) <= 0

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        return _without_repeats(state, logits, self.size, self.longest, state.length)


class PromptNoRepeatNGram(Transform):
    """Removes every token that would complete an n-gram of the prompt; size 0 is off.

    Source: Transformers' EncoderNoRepeatNGramLogitsProcessor.
    """

    size: ArrayLike
    longest: int = struct.field(pytree_node=False, default=MAX_NGRAM)
    NEUTRAL = (0,)
    argmax_invariant = False

    def is_neutral(self) -> jax.Array:
        return jnp.asarray(self.size) <= 0

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        return _without_repeats(state, logits, self.size, self.longest, state.prompt_len)


def _without_repeats(
    state: StepState, logits: jax.Array, size: ArrayLike, longest: int, searched: jax.Array
) -> jax.Array:
    """Removes the last tokens of those n-grams, ending before `searched`, whose beginning the history ends with."""
    rows, capacity = state.buffer.shape
    size = jnp.broadcast_to(jnp.asarray(size, jnp.int32), (rows,))[:, None]
    place = jnp.arange(capacity, dtype=jnp.int32)[None, :]
    # An n-gram of size n that ends at `place` begins at place - (n - 1), and is repeated if the n - 1 tokens before
    # `place` are the last n - 1 of the history.
    repeated = (place < searched[:, None]) & (place >= size - 1) & (state.length[:, None] >= size - 1)
    suffix = state.ended_with(longest - 1)
    for back in range(1, longest):
        same = jnp.roll(state.buffer, back, axis=1) == suffix[:, back - 1 : back]
        repeated &= same | (back > size - 1)
    banned = jnp.where(repeated & (size > 0), state.buffer, state.vocab_size)
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    return logits.at[row, banned].set(FILTER, mode="drop")
