"""Penalties on tokens that the row already holds.

Repetition penalties as in Transformers, once per distinct id; frequency and presence as in vLLM and OpenAI's API, over
drawn tokens only.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sampling.state import StepState
from sampling.transforms.base import Transform, per_row


class RepetitionPenalty(Transform):
    """Divides positive scores, and multiplies negative ones, of every id in prompt or completion; 1 is neutral.

    Source: CTRL, Keskar et al. 2019, arXiv:1909.05858; Transformers' RepetitionPenaltyLogitsProcessor.
    """

    penalty: ArrayLike
    NEUTRAL = (1.0,)
    argmax_invariant = False

    def is_neutral(self) -> jax.Array:
        return jnp.asarray(self.penalty) == 1.0

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        return jnp.where(state.in_prompt | (state.counts > 0), _weakened(logits, per_row(self.penalty)), logits)


class PromptRepetitionPenalty(Transform):
    """Strengthens ids of the prompt by the inverse of what RepetitionPenalty would do; 1 is neutral.

    Source: Transformers' EncoderRepetitionPenaltyLogitsProcessor.
    """

    penalty: ArrayLike
    NEUTRAL = (1.0,)
    argmax_invariant = False

    def is_neutral(self) -> jax.Array:
        return jnp.asarray(self.penalty) == 1.0

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        return jnp.where(state.in_prompt, _weakened(logits, 1.0 / per_row(self.penalty)), logits)


class FrequencyPenalty(Transform):
    """Subtracts `penalty` from an id's score for every time it was drawn; 0 is neutral."""

    penalty: ArrayLike
    NEUTRAL = (0.0,)
    argmax_invariant = False

    def is_neutral(self) -> jax.Array:
        return jnp.asarray(self.penalty) == 0.0

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        return logits - per_row(self.penalty) * state.counts.astype(jnp.float32)


class PresencePenalty(Transform):
    """Subtracts `penalty` from the score of every id that was drawn at all; 0 is neutral."""

    penalty: ArrayLike
    NEUTRAL = (0.0,)
    argmax_invariant = False

    def is_neutral(self) -> jax.Array:
        return jnp.asarray(self.penalty) == 0.0

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        return logits - per_row(self.penalty) * (state.counts > 0).astype(jnp.float32)


def _weakened(logits: jax.Array, penalty: jax.Array) -> jax.Array:
    return jnp.where(logits < 0, logits * penalty, logits / penalty)
