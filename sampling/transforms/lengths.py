"""When a row may end, and when it must: minimum lengths, forced tokens, growing pressure to stop.

Every `eos` is a set of token ids, as in masks.py.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sampling.state import NO_TOKEN, StepState
from sampling.transforms.base import FILTER, Transform, per_row
from sampling.transforms.masks import is_empty, members


class MinLength(Transform):
    """Removes `eos` while prompt and completion together hold fewer than `length` tokens; 0 is neutral.

    Source: Transformers' MinLengthLogitsProcessor.
    """

    length: ArrayLike
    eos: ArrayLike
    NEUTRAL = (0, NO_TOKEN)
    argmax_invariant = False

    def is_neutral(self) -> jax.Array:
        return (jnp.asarray(self.length) <= 0) | is_empty(self.eos)

    def holds_back(self, state: StepState) -> jax.Array:
        """bool [rows]: the row may not end with its next token."""
        return state.total() < jnp.asarray(self.length, jnp.int32)

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        return jnp.where(self.holds_back(state)[:, None] & members(self.eos, logits.shape), FILTER, logits)


class MinNewTokens(Transform):
    """Removes `eos` while the completion holds fewer than `count` tokens; 0 is neutral.

    Source: Transformers' MinNewTokensLengthLogitsProcessor.
    """

    count: ArrayLike
    eos: ArrayLike
    NEUTRAL = (0, NO_TOKEN)
    argmax_invariant = False

    def is_neutral(self) -> jax.Array:
        return (jnp.asarray(self.count) <= 0) | is_empty(self.eos)

    def holds_back(self, state: StepState) -> jax.Array:
        """bool [rows]: the row may not end with its next token."""
        return state.step < jnp.asarray(self.count, jnp.int32)

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        return jnp.where(self.holds_back(state)[:, None] & members(self.eos, logits.shape), FILTER, logits)


class ForcedBOS(Transform):
    """Allows `token` alone, with score 0, where the history is a single token; NO_TOKEN is off.

    Source: Transformers' ForcedBOSTokenLogitsProcessor.
    """

    token: ArrayLike
    NEUTRAL = (NO_TOKEN,)
    argmax_invariant = False

    def is_neutral(self) -> jax.Array:
        return jnp.asarray(self.token) == NO_TOKEN

    def forces(self, state: StepState) -> jax.Array:
        """bool [rows]: the next token is not drawn."""
        return ~self.is_neutral() & (state.total() == 1)

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        ids = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]
        forced = jnp.where(ids == per_row(self.token, jnp.int32), 0.0, FILTER)
        return jnp.where((state.total() == 1)[:, None], forced, logits)


class ForcedEOS(Transform):
    """Allows the ids of `eos` alone, each with score 0, for the token that fills the row up to `max_length`.

    `max_length` counts the prompt; None, or a value <= 0, means the end of the row's own budget.

    Source: Transformers' ForcedEOSTokenLogitsProcessor.
    """

    eos: ArrayLike
    max_length: Any = None
    NEUTRAL = (NO_TOKEN,)
    argmax_invariant = False

    def is_neutral(self) -> jax.Array:
        return is_empty(self.eos)

    def forces(self, state: StepState) -> jax.Array:
        """bool [rows]: the next token is one of `eos`, whatever the model says."""
        own = jnp.asarray(0 if self.max_length is None else self.max_length, jnp.int32)
        end = jnp.where(own > 0, own, state.limit)
        return ~self.is_neutral() & (state.total() == end - 1)

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        forced = jnp.where(members(self.eos, logits.shape), 0.0, FILTER)
        return jnp.where(self.forces(state)[:, None], forced, logits)


class ExponentialDecayLengthPenalty(Transform):
    """Raises the scores of `eos` by |score| * (factor ** excess - 1), excess being the tokens drawn beyond `start`.

    A removed or infinite score stays as it is. Factor 1 is neutral.

    Source: Transformers' ExponentialDecayLengthPenalty.
    """

    start: ArrayLike
    factor: ArrayLike
    eos: ArrayLike
    NEUTRAL = (0, 1.0, NO_TOKEN)
    argmax_invariant = False

    def is_neutral(self) -> jax.Array:
        return (jnp.asarray(self.factor) == 1.0) | is_empty(self.eos)

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        excess = state.step - jnp.asarray(self.start, jnp.int32)
        growth = jnp.power(jnp.asarray(self.factor, jnp.float32), jnp.maximum(excess, 0).astype(jnp.float32)) - 1.0
        touched = (excess > 0)[:, None] & members(self.eos, logits.shape) & jnp.isfinite(logits)
        return jnp.where(touched, logits + jnp.abs(logits) * growth[:, None], logits)
