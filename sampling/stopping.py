"""Stopping rules: when a row ends, and why."""

from __future__ import annotations

from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sampling.grammar.tables import GrammarTables
from sampling.param_checks import GRAMMAR_ENDS
from sampling.pytrees import Node
from sampling.state import NO_TOKEN, StepState
from sampling.types import StopReason


class Stopping(Protocol):
    """A pure function of the state after a token was committed, and of that token: which rows end now.

    Args of a call: `state`; `tokens` int32 [rows], the tokens just committed. Returns bool [rows].
    """

    def __call__(self, state: StepState, tokens: jax.Array) -> jax.Array: ...


class StoppingRule(Node):
    """Base of the built-in rules: a frozen dataclass of leaves, and the reason that its rows end with."""

    reason: ClassVar[StopReason]

    def __call__(self, state: StepState, tokens: jax.Array) -> jax.Array:
        raise NotImplementedError


class EndOfSequence(StoppingRule):
    """Ends a row that drew one of the ids in `eos`: int32 [ids], or [rows, ids] filled up with NO_TOKEN.

    Source: Transformers' EosTokenCriteria.
    """

    eos: ArrayLike
    reason = StopReason.EOS

    def __call__(self, state: StepState, tokens: jax.Array) -> jax.Array:
        return _among(tokens, self.eos)


class StopTokens(StoppingRule):
    """Ends a row that drew one of the request's own `tokens`: int32 [ids], or [rows, ids] filled up with NO_TOKEN."""

    tokens: ArrayLike
    reason = StopReason.STOP_TOKEN

    def __call__(self, state: StepState, tokens: jax.Array) -> jax.Array:
        return _among(tokens, self.tokens)


class GrammarDone(StoppingRule):
    """Ends a row by its grammar.

    Attributes:
        when: int32, place in param_checks.GRAMMAR_ENDS; a scalar or [rows].
        tables: as in GrammarMask; without them no row ends.
    """

    when: ArrayLike
    tables: GrammarTables | None = None
    reason = StopReason.GRAMMAR_DONE

    def must_end(self, state: StepState) -> jax.Array:
        """bool [rows]: nothing but an end-of-sequence token may follow, and the row does not wait for one."""
        if self.tables is None:
            return jnp.zeros_like(state.active)
        full = self.tables.accepts(state.automaton) & ~self.tables.can_go_on(state.automaton)
        return full & (jnp.asarray(self.when, jnp.int32) != GRAMMAR_ENDS.index("eos"))

    def __call__(self, state: StepState, tokens: jax.Array) -> jax.Array:
        if self.tables is None:
            return jnp.zeros_like(state.active)
        early = jnp.asarray(self.when, jnp.int32) == GRAMMAR_ENDS.index("accepted")
        return self.must_end(state) | (early & self.tables.accepts(state.automaton))


class MaxNewTokens(StoppingRule):
    """Ends a row once it holds `count` drawn tokens; a scalar or [rows]."""

    count: ArrayLike
    reason = StopReason.LENGTH

    def __call__(self, state: StepState, tokens: jax.Array) -> jax.Array:
        return state.step >= jnp.asarray(self.count, jnp.int32)


class MaxLength(StoppingRule):
    """Ends a row once prompt and completion together hold `length` tokens; a scalar or [rows].

    Source: Transformers' MaxLengthCriteria.
    """

    length: ArrayLike
    reason = StopReason.LENGTH

    def __call__(self, state: StepState, tokens: jax.Array) -> jax.Array:
        return state.total() >= jnp.asarray(self.length, jnp.int32)


def _among(tokens: jax.Array, ids: ArrayLike) -> jax.Array:
    ids = jnp.asarray(ids, jnp.int32)
    ids = ids if ids.ndim == 2 else jnp.reshape(ids, (1, -1))
    return jnp.any((tokens[:, None] == ids) & (ids != NO_TOKEN), axis=-1)
