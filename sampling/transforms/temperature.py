"""Temperature and its limit, the greedy choice."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from sampling.extremes import row_max
from sampling.state import NO_TOKEN, StepState
from sampling.transforms.base import FILTER, RowwiseTransform


class Temperature(RowwiseTransform):
    """Divides the scores by `value` > 0; 1 is neutral. Temperature 0 is `Greedy`, not a division."""

    value: ArrayLike
    NEUTRAL = (1.0,)
    argmax_invariant = True

    def is_neutral(self) -> jax.Array:
        return jnp.asarray(self.value) == 1.0

    def summary(self, state: StepState, logits: jax.Array) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(self.value, jnp.float32), logits.shape[:1])

    def idle(self) -> Any:
        return np.float32(1)

    def finish(self, logits: jax.Array, summary: jax.Array) -> jax.Array:
        return logits / summary[:, None]


class Greedy(RowwiseTransform):
    """The best token as a distribution: score 0 on it and -inf elsewhere; ties go to the lowest id.

    A row without a distribution (NaN, +inf or nothing left) passes through undefined, for the draw to refuse.
    """

    enabled: ArrayLike = True
    NEUTRAL = (False,)
    argmax_invariant = True

    def is_neutral(self) -> jax.Array:
        return ~jnp.asarray(self.enabled)

    def summary(self, state: StepState, logits: jax.Array) -> jax.Array:
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        defined = jnp.isfinite(row_max(logits))
        return jnp.where(defined & jnp.asarray(self.enabled), best, NO_TOKEN)

    def idle(self) -> Any:
        return np.int32(NO_TOKEN)

    def finish(self, logits: jax.Array, summary: jax.Array) -> jax.Array:
        best = summary[:, None]
        ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, :]
        return jnp.where(best == NO_TOKEN, logits, jnp.where(ids == best, 0.0, FILTER))
