"""The contract of a logits transform, the two kinds of built-in ones, and how a chain of them applies."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, ClassVar, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np

from sampling.pytrees import Node
from sampling.state import StepState

FILTER = -float("inf")
"""The score of a removed token."""


class LogitsTransform(Protocol):
    """Scores to scores: a pure function of the rows' state, float32 [rows, vocab] to the same shape."""

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array: ...


class Transform(Node):
    """Base of the built-in transforms: a frozen dataclass whose numeric fields are pytree leaves.

    Every field takes a scalar, the same for all rows, or a [rows] array; a set of ids takes [ids] or [rows, ids].
    """

    NEUTRAL: ClassVar[tuple[Any, ...]]
    """Constructor arguments with which the transform changes nothing."""
    argmax_invariant: ClassVar[bool]
    """True if the best token of every row stays the best: such a stage cannot matter to a greedy row."""
    alone: ClassVar[bool] = False
    """True for a stage that is skipped, or not, by itself: it is on in batches in which the plain ones beside it
    are off, and would make each of them look whether it is."""

    def is_neutral(self) -> jax.Array:
        """bool, a scalar or [rows]: where the transform changes nothing."""
        raise NotImplementedError

    def off(self) -> Self:
        """The same transform with its neutral value in the first field, which is enough to make it neutral."""
        first, value = next(iter(vars(self).items()))
        return self.replace(**{first: np.full_like(value, self.NEUTRAL[0])})

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        raise NotImplementedError


class RowwiseTransform(Transform):
    """A transform whose work on a row boils down to a few numbers, with which its scores are then changed one by one.

    The numbers are all that a skipped stage has to make up, so a neutral one copies no scores; and the changes of
    several such stages fuse into one pass.
    """

    def summary(self, state: StepState, logits: jax.Array) -> Any:
        """The numbers: a pytree of [rows] arrays."""
        raise NotImplementedError

    def idle(self) -> Any:
        """The numbers, as scalars in the same pytree, with which `finish` is the identity to the bit."""
        raise NotImplementedError

    def finish(self, logits: jax.Array, summary: Any) -> jax.Array:
        """The scores changed one by one; [rows, vocab]."""
        raise NotImplementedError

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        return self.finish(logits, self.summary(state, logits))


def apply(transform: LogitsTransform, state: StepState, logits: jax.Array) -> jax.Array:
    """Applies one stage; one that is neutral on every active row is skipped at run time.

    Rows on which it is neutral, and rows that are not active, keep their bits whatever the other rows ask for.
    """
    if not isinstance(transform, Transform):
        return transform(state, logits)
    neutral = transform.is_neutral() | ~state.active
    if isinstance(transform, RowwiseTransform):
        idle = jax.tree.map(lambda value: jnp.full(neutral.shape, value), transform.idle())

        def summary() -> Any:
            numbers = transform.summary(state, logits)
            return jax.tree.map(lambda rest, number: jnp.where(neutral, rest, number), idle, numbers)

        return transform.finish(logits, jax.lax.cond(jnp.all(neutral), lambda: idle, summary))

    def changed() -> jax.Array:
        return jnp.where(neutral[:, None], logits, transform(state, logits))

    return jax.lax.cond(jnp.all(neutral), lambda: logits, changed)


def apply_all(transforms: Iterable[LogitsTransform], state: StepState, logits: jax.Array) -> jax.Array:
    """Applies stages in order. A run of plain stages that are all neutral is skipped together, at the cost of one."""
    for plain, run in itertools.groupby(transforms, _is_plain):
        stages = tuple(run)

        def in_turn(logits: jax.Array, stages: tuple[LogitsTransform, ...] = stages) -> jax.Array:
            for transform in stages:
                logits = apply(transform, state, logits)
            return logits

        if plain:
            neutral = neutral_rows(stages, state)
            logits = jax.lax.cond(jnp.all(neutral), lambda logits: logits, in_turn, logits)
        else:
            logits = in_turn(logits)
    return logits


def neutral_rows(transforms: Iterable[LogitsTransform], state: StepState) -> jax.Array:
    """bool [rows]: rows on which none of the stages changes anything, or that are not active."""
    neutral = jnp.ones_like(state.active)
    for transform in transforms:
        neutral = neutral & (transform.is_neutral() if isinstance(transform, Transform) else False)
    return neutral | ~state.active


def _is_plain(transform: LogitsTransform) -> bool:
    return isinstance(transform, Transform) and not isinstance(transform, RowwiseTransform) and not transform.alone


def per_row(value: Any, dtype: Any = jnp.float32) -> jax.Array:
    """A scalar or [rows] parameter as [rows or 1, 1], to stand against [rows, vocab]."""
    return jnp.reshape(jnp.asarray(value, dtype), (-1, 1))
