"""Plugins for rollout: a class and a function that change scores, and a class that ends rows. It needs JAX alone.

Every parameter has a number as its default. Each row has values of its own, so within a call a parameter is an array
[rows], and what is returned for a row depends on that row only.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

LONGEST = 16
"""Tokens that SameToken looks back at most."""


@dataclass(frozen=True)
class Cooler:
    """Cools a row as it grows: the scores of token t, counted from 0, are multiplied by 1 + strength * t."""

    strength: jax.Array | float = 0.0

    argmax_invariant = True  # not annotated, hence no parameter: the best token of a row stays the best

    @staticmethod
    def check(strength: float) -> None:
        """Called with each row's numbers, on the host, before the row is drawn."""
        if strength < 0:
            raise ValueError(f"strength: expected at least 0, got {strength}")

    def is_neutral(self) -> jax.Array:
        """bool [rows]: rows that it leaves as they are. Where all rows are, it is skipped."""
        return jnp.asarray(self.strength) == 0

    def __call__(self, state, logits: jax.Array) -> jax.Array:
        """float32 [rows, vocab] to the same."""
        factor = 1 + self.strength * state.step.astype(jnp.float32)
        return logits * factor[:, None]


def no_echo(state, logits: jax.Array, penalty: float = 1.0) -> jax.Array:
    """Takes `penalty` from the score of each row's last token."""
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)
    last = state.ended_with(1)
    return jnp.where(ids[None, :] == last, logits - jnp.asarray(penalty)[:, None], logits)


@dataclass(frozen=True)
class SameToken:
    """Ends a row whose last `times` tokens are all the same, the prompt's included."""

    times: jax.Array | int = 4

    @staticmethod
    def check(times: int) -> None:
        if not 1 <= times <= LONGEST:
            raise ValueError(f"times: expected 1 .. {LONGEST}, got {times}")

    def __call__(self, state, tokens: jax.Array) -> jax.Array:
        """bool [rows]: rows that end with `tokens`, int32 [rows], which the state holds already."""
        looked_at = jnp.arange(LONGEST, dtype=jnp.int32)[None, :] < jnp.asarray(self.times)[:, None]
        return jnp.all((state.ended_with(LONGEST) == tokens[:, None]) | ~looked_at, axis=-1)
