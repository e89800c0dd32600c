"""GrammarTables: the automata of several grammars end to end in arrays of a fixed size; each row follows its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from sampling.grammar.byte_automaton import NO_STATE
from sampling.grammar.token_automaton import TokenAutomaton

FREE = 0
"""The state of a row without a grammar. That of a row whose tokens have left its grammar is NO_STATE."""


class GrammarTables(struct.PyTreeNode):
    """States are numbered through all grammars, from 1 on. Leaves are NumPy arrays until they are put on a device.

    Attributes:
        token_class: int32 [grammars, vocab].
        next_state: int32 [cells], the rows of all states one after the other; NO_STATE where a class may not follow.
        first_cell: int32 [states], where a state's row begins.
        grammar: int32 [states].
        accepting: bool [states].
        goes_on: bool [states], some token may follow, end-of-sequence tokens aside.
    """

    token_class: Any
    next_state: Any
    first_cell: Any
    grammar: Any
    accepting: Any
    goes_on: Any

    @classmethod
    def empty(cls, vocab: int, grammars: int, states: int, cells: int) -> Self:
        """Tables with room for some grammars, and with none in them."""
        return cls(
            token_class=np.zeros((grammars, vocab), np.int32),
            next_state=np.full(cells, NO_STATE, np.int32),
            first_cell=np.zeros(states, np.int32),
            grammar=np.zeros(states, np.int32),
            accepting=np.zeros(states, bool),
            goes_on=np.zeros(states, bool),
        )

    @classmethod
    def of(cls, automata: Iterable[TokenAutomaton], vocab: int) -> Self:
        """Tables that hold just these automata, over `vocab` ids."""
        automata = tuple(automata)
        tables = cls.empty(vocab, *sizes(automata))
        state, cell = 1, 0
        for index, automaton in enumerate(automata):
            tables.write(automaton, index, state, cell)
            state, cell = state + automaton.num_states, cell + automaton.next_state.size
        return tables

    def write(self, automaton: TokenAutomaton, index: int, first_state: int, first_cell: int) -> None:
        """Writes one automaton into NumPy leaves, at places of its own."""
        states = slice(first_state, first_state + automaton.num_states)
        cells = slice(first_cell, first_cell + automaton.next_state.size)
        table = automaton.next_state
        self.token_class[index] = automaton.token_class
        self.next_state[cells] = np.where(table == NO_STATE, NO_STATE, table + first_state).reshape(-1)
        self.first_cell[states] = np.arange(cells.start, cells.stop, automaton.num_classes)
        self.grammar[states] = index
        self.accepting[states] = automaton.accepting
        self.goes_on[states] = automaton.goes_on

    def fits(self, state: jax.Array) -> jax.Array:
        """bool [rows, vocab]: which tokens may follow; of rows in a state of a grammar, int32 [rows]."""
        state = jnp.maximum(state, 0)
        classes = jnp.asarray(self.token_class)[jnp.asarray(self.grammar)[state]]
        cells = jnp.asarray(self.first_cell)[state][:, None] + classes
        return jnp.asarray(self.next_state)[cells] != NO_STATE

    def accepts(self, state: jax.Array) -> jax.Array:
        """bool [rows]: the text so far belongs to the grammar, so end-of-sequence tokens may follow."""
        return (state > FREE) & jnp.asarray(self.accepting)[jnp.maximum(state, 0)]

    def can_go_on(self, state: jax.Array) -> jax.Array:
        """bool [rows]: another token may follow."""
        return (state > FREE) & jnp.asarray(self.goes_on)[jnp.maximum(state, 0)]

    def step(self, state: jax.Array, tokens: jax.Array) -> jax.Array:
        """int32 [rows]: the states after one more token each; a row without a grammar, or out of it, stays so."""
        inside = jnp.maximum(state, 0)
        classes = jnp.asarray(self.token_class)[jnp.asarray(self.grammar)[inside], tokens]
        after = jnp.asarray(self.next_state)[jnp.asarray(self.first_cell)[inside] + classes]
        return jnp.where(state > FREE, after, state)


def sizes(automata: Iterable[TokenAutomaton]) -> tuple[int, int, int]:
    """Grammars, states (one of which is FREE) and cells that some automata fill; at least one of each."""
    automata = tuple(automata)
    states = 1 + sum(automaton.num_states for automaton in automata)
    return max(len(automata), 1), states, max(sum(automaton.next_state.size for automaton in automata), 1)
