"""Stages that change no preference: repair of broken scores, and normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sampling.state import StepState
from sampling.transforms.base import Transform, per_row


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


class Renormalize(Transform):
    """Scores as log-probabilities. The draw is indifferent to it; stages after it see normalised scores.

    Source: Transformers' LogitNormalization.
    """

    enabled: ArrayLike = True
    NEUTRAL = (False,)
    argmax_invariant = True

    def is_neutral(self) -> jax.Array:
        return ~jnp.asarray(self.enabled)

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        return jnp.where(per_row(self.enabled, bool), jax.nn.log_softmax(logits, axis=-1), logits)
