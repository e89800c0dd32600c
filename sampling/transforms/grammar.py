"""What a row's grammar lets follow."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sampling.grammar.byte_automaton import NO_STATE
from sampling.grammar.tables import FREE, GrammarTables
from sampling.state import NO_TOKEN, StepState
from sampling.transforms.base import FILTER, Transform


class GrammarMask(Transform):
    """Removes the tokens that cannot follow in the row's grammar, judged by `state.automaton`.

    The ids in `eos` may be drawn exactly where the text so far is complete. Those in `stop` may be drawn there as
    well, and where their own bytes fit. A row whose given tokens have left its grammar is masked no further.

    Attributes:
        start: int32, the state in which the row begins; FREE where it has no grammar.
        eos, stop: sets of ids, as in masks.py.
        tables: of all grammars. None adds no leaves, so a policy stays small until it runs; without tables there are
            no grammars, and `lower` gives no other start than FREE.
    """

    start: ArrayLike
    eos: ArrayLike
    stop: ArrayLike
    tables: GrammarTables | None = None
    NEUTRAL = (FREE, NO_TOKEN, NO_TOKEN)
    argmax_invariant = False
    alone = True

    def is_neutral(self) -> jax.Array:
        return jnp.asarray(self.start, jnp.int32) == FREE

    def has_left(self, state: StepState) -> jax.Array:
        """bool [rows]: the row's tokens, given to it, have left its grammar."""
        return ~self.is_neutral() & (state.automaton == NO_STATE)

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        if self.tables is None:
            return logits
        (rows, vocab), left = logits.shape, self.has_left(state)[:, None]
        accepts = self.tables.accepts(state.automaton)[:, None] | left
        scores = jnp.where(self.tables.fits(state.automaton) | left, logits, FILTER)
        eos, stop = _by_row(self.eos, rows), _by_row(self.stop, rows)
        kept = [jnp.broadcast_to(accepts, eos.shape), accepts | ~jnp.isneginf(_taken(scores, stop))]
        ids, kept = jnp.concatenate([eos, stop], axis=1), jnp.concatenate(kept, axis=1)
        own = jnp.where(kept, _taken(logits, ids), FILTER)
        row = jnp.arange(rows, dtype=jnp.int32)[:, None]
        return scores.at[row, jnp.where(ids < 0, vocab, ids)].set(own, mode="drop")


def _by_row(ids: ArrayLike, rows: int) -> jax.Array:
    """A set of ids as int32 [rows, ids]."""
    ids = jnp.atleast_2d(jnp.asarray(ids, jnp.int32))
    return jnp.broadcast_to(ids, (rows, ids.shape[1]))


def _taken(scores: jax.Array, ids: jax.Array) -> jax.Array:
    """float32 [rows, ids]: the scores of some ids, of any where there is none."""
    return jnp.take_along_axis(scores, jnp.maximum(ids, 0), axis=1)
