"""A budget for thinking: what stands between two markers ends in time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sampling.state import NO_TOKEN, StepState
from sampling.transforms.base import FILTER, Transform


class ThinkingBudget(Transform):
    """Allows the next token of `end` alone, with score 0, once a row has thought for `budget` tokens; -1 is neutral.

    A row thinks from a `start` marker in its prompt or completion on, until an `end` marker is whole. If it is the
    budget's end amid a marker that the row has begun by itself, only the rest of it is forced.

    Attributes:
        budget: int32, a scalar or [rows].
        start, end: int32 [places], or [rows, places]: ids of the markers, NO_TOKEN after them.
    """

    budget: ArrayLike
    start: ArrayLike
    end: ArrayLike
    NEUTRAL = (-1, NO_TOKEN, NO_TOKEN)
    argmax_invariant = False

    def is_neutral(self) -> jax.Array:
        return jnp.asarray(self.budget, jnp.int32) < 0

    def forces(self, state: StepState) -> jax.Array:
        """bool [rows]: the next token is one of the end marker's, and not drawn."""
        return self._forced(state) != NO_TOKEN

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        forced = self._forced(state)[:, None]
        ids = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]
        return jnp.where(forced == NO_TOKEN, logits, jnp.where(ids == forced, 0.0, FILTER))

    def _forced(self, state: StepState) -> jax.Array:
        """int32 [rows]: the token that has to follow, NO_TOKEN where there is none."""
        start, end = (jnp.atleast_2d(jnp.asarray(marker, jnp.int32)) for marker in (self.start, self.end))
        index, history = jnp.arange(state.capacity, dtype=jnp.int32)[None, :], state.history()
        ended = jnp.max(jnp.where(_begins(history, end), index + _length(end)[:, None], 0), axis=-1)
        open_ = _begins(history, start) & (index >= ended[:, None])
        first = jnp.argmax(open_, axis=-1).astype(jnp.int32)
        thought = state.total() - first - _length(start)
        spent = jnp.any(open_, axis=-1) & (thought >= jnp.asarray(self.budget, jnp.int32)) & ~self.is_neutral()
        begun = _begun(state, end)
        following = jnp.take_along_axis(jnp.broadcast_to(end, (begun.shape[0], end.shape[1])), begun[:, None], axis=1)
        return jnp.where(spent, following[:, 0], NO_TOKEN)


def _length(marker: jax.Array) -> jax.Array:
    """int32 [rows or 1]: ids of a marker."""
    return jnp.sum(marker != NO_TOKEN, axis=-1, dtype=jnp.int32)


def _begins(history: jax.Array, marker: jax.Array) -> jax.Array:
    """bool [rows, capacity]: where a whole marker begins; an empty one does everywhere."""
    capacity, places = history.shape[1], marker.shape[1]
    padded = jnp.pad(history, ((0, 0), (0, places - 1)), constant_values=NO_TOKEN)
    found = jnp.ones_like(history, bool)
    for place in range(places):
        wanted = marker[:, place : place + 1]
        found = found & ((padded[:, place : place + capacity] == wanted) | (wanted == NO_TOKEN))
    return found


def _begun(state: StepState, marker: jax.Array) -> jax.Array:
    """int32 [rows]: how many tokens of a marker, but not all, each history ends with at most."""
    places = marker.shape[1]
    tail, length, begun = state.ended_with(places), _length(marker), jnp.zeros(state.active.shape, jnp.int32)
    for count in range(1, places):
        fits = jnp.all(tail[:, :count][:, ::-1] == marker[:, :count], axis=-1) & (count < length)
        begun = jnp.where(fits, count, begun)
    return begun
