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

OPEN, COMPLETE, FULL = -2, -3, -4
"""States of a row whose grammar is stepped on the host: its text is not complete; it is, and may go on; it is, and may
not. All that is known of such a row beyond that is its mask."""


class GrammarTables(struct.PyTreeNode):
    """States are numbered through all grammars, from 1 on. Leaves are NumPy arrays until they are put on a device.

    Attributes:
        token_class: int32 [grammars, vocab].
        next_state: int32 [cells], the rows of all states one after the other; NO_STATE where a class may not follow.
        first_cell: int32 [states], where a state's row begins.
        grammar: int32 [states].
        accepting: bool [states].
        goes_on: bool [states], some token may follow, end-of-sequence tokens aside.
        masks: uint32 [rows, ceil(vocab / 32)], the ids that may follow in rows that are stepped on the host, the lowest
            id in the lowest bit; None where there are no such rows, and then it adds no leaf.
    """

    token_class: Any
    next_state: Any
    first_cell: Any
    grammar: Any
    accepting: Any
    goes_on: Any
    masks: Any = None

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

    def of_rows(self, rows: jax.Array) -> Self:
        """Tables for some rows alone; int32 [n]."""
        return self if self.masks is None else self.replace(masks=self.masks[rows])

    def fits(self, state: jax.Array) -> jax.Array:
        """bool [rows, vocab]: which tokens may follow; of rows in a state of a grammar, int32 [rows]."""
        inside = jnp.maximum(state, 0)
        classes = jnp.asarray(self.token_class)[jnp.asarray(self.grammar)[inside]]
        cells = jnp.asarray(self.first_cell)[inside][:, None] + classes
        fits = jnp.asarray(self.next_state)[cells] != NO_STATE
        if self.masks is None:
            return fits
        bits = jnp.asarray(self.masks)[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :] & 1
        return jnp.where((state <= OPEN)[:, None], bits.reshape(fits.shape[0], -1)[:, : fits.shape[1]] == 1, fits)

    def accepts(self, state: jax.Array) -> jax.Array:
        """bool [rows]: the text so far belongs to the grammar, so end-of-sequence tokens may follow."""
        accepts = (state > FREE) & jnp.asarray(self.accepting)[jnp.maximum(state, 0)]
        return accepts if self.masks is None else accepts | (state <= COMPLETE)

    def can_go_on(self, state: jax.Array) -> jax.Array:
        """bool [rows]: another token may follow."""
        goes_on = (state > FREE) & jnp.asarray(self.goes_on)[jnp.maximum(state, 0)]
        return goes_on if self.masks is None else goes_on | (state == OPEN) | (state == COMPLETE)

    def step(self, state: jax.Array, tokens: jax.Array) -> jax.Array:
        """int32 [rows]: the states after one more token each; a row without a grammar, or out of it, stays so.

        A row that is stepped on the host is out of its grammar, or OPEN until the host knows better.
        """
        inside = jnp.maximum(state, 0)
        classes = jnp.asarray(self.token_class)[jnp.asarray(self.grammar)[inside], tokens]
        after = jnp.asarray(self.next_state)[jnp.asarray(self.first_cell)[inside] + classes]
        if self.masks is not None:
            words = jnp.take_along_axis(jnp.asarray(self.masks), (tokens >> 5)[:, None], axis=1)[:, 0]
            fits = (words >> (tokens & 31).astype(jnp.uint32) & 1) == 1
            state = jnp.where(state <= OPEN, jnp.where(fits, OPEN, NO_STATE), state)
        return jnp.where(state > FREE, after, state)


def no_masks(rows: int, vocab: int) -> np.ndarray:
    """Masks for rows none of which is stepped on the host."""
    return np.zeros((rows, -(-vocab // 32)), np.uint32)


def sizes(automata: Iterable[TokenAutomaton]) -> tuple[int, int, int]:
    """Grammars, states (one of which is FREE) and cells that some automata fill; at least one of each."""
    automata = tuple(automata)
    states = 1 + sum(automaton.num_states for automaton in automata)
    return max(len(automata), 1), states, max(sum(automaton.next_state.size for automaton in automata), 1)
