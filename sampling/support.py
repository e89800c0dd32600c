"""RecordedSupport: the ids among which a token was drawn, kept with it where the request asks for them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import ArrayLike

from sampling.pytrees import Node
from sampling.state import NO_TOKEN, StepState


class RecordedSupport(Node):
    """Which supports are recorded.

    A learner that renormalises new scores over the old support needs the ids themselves; the log-probs do not tell
    them.

    Attributes:
        limit: int32, a scalar or [rows]: a support of at most this many ids is recorded; 0 records none.
        places: ids that there is room for (static).
    """

    limit: ArrayLike = 0
    places: int = struct.field(pytree_node=False, default=0)

    def wanted(self) -> jax.Array:
        """bool, a scalar or [rows]: whether a row asks for its supports."""
        return jnp.asarray(self.limit, jnp.int32) > 0

    def nothing(self, state: StepState) -> jax.Array:
        """int32 [rows, places] for rows whose support is not recorded."""
        return jnp.full((state.active.shape[0], self.places), NO_TOKEN, jnp.int32)

    def of(self, state: StepState, scores: jax.Array) -> jax.Array:
        """The ids that `scores` (float32 [rows, vocab]) leaves: int32 [rows, places], NO_TOKEN after them.

        Nothing where the row does not ask, or where more are left than it asks for.
        """
        if self.places == 0:
            return self.nothing(state)
        wanted = jnp.broadcast_to(self.wanted(), state.active.shape) & state.active

        def kept() -> jax.Array:
            best, ids = jax.lax.top_k(scores, min(self.places, scores.shape[-1]))
            size = jnp.sum(~jnp.isneginf(scores), axis=-1)
            few = wanted & (size <= jnp.asarray(self.limit, jnp.int32))
            ids = jnp.where(few[:, None] & ~jnp.isneginf(best), ids, NO_TOKEN)
            room = ((0, 0), (0, self.places - ids.shape[-1]))
            return jnp.pad(ids.astype(jnp.int32), room, constant_values=NO_TOKEN)

        return jax.lax.cond(jnp.any(wanted), kept, lambda: self.nothing(state))
