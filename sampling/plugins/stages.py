"""A plugin in a policy: a stage or a rule that a row has switched on, or not, with parameters of its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import ArrayLike

from sampling.plugins.loading import Plugin
from sampling.state import StepState
from sampling.stopping import StoppingRule
from sampling.transforms import Transform
from sampling.types import StopReason


class PluginStage(Transform):
    """A transform from outside.

    Attributes:
        on: bool, a scalar or [rows], the row names it.
        values: its parameters, scalars or [rows].
        plugin: which it is (static).
    """

    on: ArrayLike
    values: dict[str, ArrayLike]
    plugin: Plugin = struct.field(pytree_node=False)
    NEUTRAL = (False,)
    alone = True

    @property
    def argmax_invariant(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The plugin says so."""
        return self.plugin.argmax_invariant

    def is_neutral(self) -> jax.Array:
        says: Any = getattr(self.plugin.made(self.values), "is_neutral", None)
        return ~jnp.asarray(self.on) | (says() if says else False)

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        return self.plugin.made(self.values)(state, logits)


class PluginRule(StoppingRule):
    """A stopping rule from outside; attributes as those of PluginStage."""

    on: ArrayLike
    values: dict[str, ArrayLike]
    plugin: Plugin = struct.field(pytree_node=False)
    reason = StopReason.PLUGIN

    def __call__(self, state: StepState, tokens: jax.Array) -> jax.Array:
        on = jnp.broadcast_to(jnp.asarray(self.on), tokens.shape)

        def ends() -> jax.Array:
            return self.plugin.made(self.values)(state, tokens) & on

        return jax.lax.cond(jnp.any(on), ends, lambda: jnp.zeros_like(on))
