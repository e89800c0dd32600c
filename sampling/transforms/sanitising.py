"""Stages that change no preference: repair of broken scores, and normalisation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from sampling.extremes import row_max
from sampling.pytrees import Node
from sampling.state import StepState
from sampling.transforms.base import RowwiseTransform, Transform, per_row


class RemoveInvalidValues(Transform):
    """Maps NaN to 0 and infinities to the ends of the float32 range. Nothing else repairs a broken distribution.

    Source: Transformers' InfNanRemoveLogitsProcessor.
    """

    enabled: ArrayLike = True
    NEUTRAL = (False,)
    argmax_invariant = False

    def is_neutral(self) -> jax.Array:
        return ~jnp.asarray(self.enabled)

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        return jnp.where(per_row(self.enabled, bool), jnp.nan_to_num(logits, nan=0.0), logits)


class LogTotal(Node):
    """The log of each row's sum of exp(score), in two parts of which the first is the best score. float32 [rows]."""

    best: Any
    rest: Any

    @classmethod
    def of(cls, logits: jax.Array) -> LogTotal:
        """Of scores [rows, vocab]."""
        best = row_max(logits)
        shifted = jnp.exp(logits - jax.lax.stop_gradient(best)[:, None])
        return cls(jax.lax.stop_gradient(best), jnp.log(jnp.sum(shifted, axis=-1)))

    @classmethod
    def zero(cls) -> LogTotal:
        """The total, as scalars, that leaves scores as they are."""
        return cls(np.float32(0), np.float32(0))

    def normalize(self, logits: jax.Array) -> jax.Array:
        """Scores as log-probabilities, [rows, vocab]."""
        return (logits - self.best[:, None]) - self.rest[:, None]


class Renormalize(RowwiseTransform):
    """Scores as log-probabilities. The draw is indifferent to it; stages after it see normalised scores.

    Source: Transformers' LogitNormalization.
    """

    enabled: ArrayLike = True
    NEUTRAL = (False,)
    argmax_invariant = True

    def is_neutral(self) -> jax.Array:
        return ~jnp.asarray(self.enabled)

    def summary(self, state: StepState, logits: jax.Array) -> LogTotal:
        on = jnp.asarray(self.enabled)
        return jax.tree.map(lambda number: jnp.where(on, number, 0.0), LogTotal.of(logits))

    def idle(self) -> LogTotal:
        return LogTotal.zero()

    def finish(self, logits: jax.Array, summary: LogTotal) -> jax.Array:
        return summary.normalize(logits)
