"""Temperature and its limit, the greedy choice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sampling.state import StepState
from sampling.transforms.base import FILTER, Transform, per_row


class Temperature(Transform):
    """Divides the scores by `value` > 0; 1 is neutral. Temperature 0 is `Greedy`, not a division."""

    value: ArrayLike
    NEUTRAL = (1.0,)
    argmax_invariant = True

    def is_neutral(self) -> jax.Array:
        return jnp.asarray(self.value) == 1.0

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        return logits / per_row(self.value)


class Greedy(Transform):
    """The best token as a distribution: score 0 on it and -inf elsewhere; ties go to the lowest id.

    A row without a distribution (NaN, +inf or nothing left) passes through undefined, for the draw to refuse.
    """

    enabled: ArrayLike = True
    NEUTRAL = (False,)
    argmax_invariant = True

    def is_neutral(self) -> jax.Array:
        return ~jnp.asarray(self.enabled)

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        best = jnp.argmax(logits, axis=-1)
        ids = jnp.arange(logits.shape[-1], dtype=best.dtype)
        chosen = jnp.where(ids[None, :] == best[:, None], 0.0, FILTER)
        defined = jnp.isfinite(jnp.max(logits, axis=-1))
        return jnp.where(per_row(self.enabled, bool) & defined[:, None], chosen, logits)
