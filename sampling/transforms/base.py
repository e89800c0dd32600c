"""The contract of a logits transform, and the base of the built-in ones."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

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

    def is_neutral(self) -> jax.Array:
        """bool, a scalar or [rows]: where the transform changes nothing."""
        raise NotImplementedError

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        raise NotImplementedError


def apply(transform: LogitsTransform, state: StepState, logits: jax.Array) -> jax.Array:
    """Applies one stage of a chain; a stage that is neutral on every active row is skipped at run time.

    Rows on which it is neutral keep their bits whatever the other rows ask for.
    """
    if not isinstance(transform, Transform):
        return transform(state, logits)
    neutral = jnp.broadcast_to(transform.is_neutral(), state.active.shape)

    def changed() -> jax.Array:
        return jnp.where(neutral[:, None], logits, transform(state, logits))

    return jax.lax.cond(jnp.all(neutral | ~state.active), lambda: logits, changed)


def per_row(value: Any, dtype: Any = jnp.float32) -> jax.Array:
    """A scalar or [rows] parameter as [rows or 1, 1], to stand against [rows, vocab]."""
    return jnp.reshape(jnp.asarray(value, dtype), (-1, 1))
