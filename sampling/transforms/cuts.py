"""Cuts: filters that are decided by one score per row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sampling.extremes import row_min
from sampling.pytrees import Node
from sampling.state import StepState
from sampling.transforms.base import FILTER, RowwiseTransform


class Cut(Node):
    """Where a filter cuts the rows: all tokens above `score` stay, and of those equal to it the ids first .. last.

    Attributes:
        score: float32 [rows].
        first, last: int32 [rows].
    """

    score: Any
    first: Any
    last: Any


ALL_IDS = (0, 2**31 - 1)
"""First and last of a cut that keeps all ties."""


class CutFilter(RowwiseTransform):
    """A filter that keeps the best tokens: `summary` says how far down they reach."""

    argmax_invariant = True

    def summary(self, state: StepState, logits: jax.Array) -> Cut:
        raise NotImplementedError

    def idle(self) -> Cut:
        return Cut(np.float32(FILTER), *map(np.int32, ALL_IDS))

    def finish(self, logits: jax.Array, summary: Cut) -> jax.Array:
        score, first, last = summary.score[:, None], summary.first[:, None], summary.last[:, None]
        ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, :]
        cut_tie = (logits == score) & ((ids < first) | (ids > last))
        return jnp.where((logits < score) | cut_tie, FILTER, logits)


def cut_at(score: jax.Array) -> Cut:
    """A cut that keeps all ties; score float32 [rows]."""
    return Cut(score, *(jnp.full(score.shape, end, jnp.int32) for end in ALL_IDS))


def cut_below(logits: jax.Array, kept: jax.Array) -> Cut:
    """The cut that keeps the tokens in `kept`, bool [rows, vocab]: with each also all of better or equal score."""
    return cut_at(row_min(jnp.where(kept, logits, jnp.inf)))


def cut_among_ties(logits: jax.Array, score: jax.Array, kept: Callable[[jax.Array, jax.Array], jax.Array]) -> Cut:
    """A cut at `score` [rows] that keeps some of several tokens of just that score.

    Args:
        kept: from the rank of a tied token, 1 being the lowest id, int32 [rows, vocab], and the number of tied tokens,
            int32 [rows, 1], to whether it stays. The ranks that stay follow one another, and there is at least one.
    """
    tied = logits == score[:, None]
    count = jnp.sum(tied, axis=-1, keepdims=True, dtype=jnp.int32)
    every = cut_at(score)

    def some() -> Cut:
        stays = tied & kept(jnp.cumsum(tied, axis=-1, dtype=jnp.int32), count)
        first = jnp.argmax(stays, axis=-1).astype(jnp.int32)
        last = (logits.shape[-1] - 1 - jnp.argmax(stays[:, ::-1], axis=-1)).astype(jnp.int32)
        several = count[:, 0] > 1
        return Cut(score, jnp.where(several, first, every.first), jnp.where(several, last, every.last))

    return jax.lax.cond(jnp.any(count > 1), some, lambda: every)
