"""GrammarShelf: which grammars an engine's tables hold, and where."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np

from sampling.capacity import Capacity
from sampling.errors import ConfigError
from sampling.grammar.grammar import Grammar
from sampling.grammar.stepped import Followed, SteppedGrammar
from sampling.grammar.tables import FREE, GrammarTables, sizes
from sampling.grammar.token_automaton import TokenAutomaton
from sampling.models.mesh import ModelMesh, placed
from sampling.params import SamplingParams

MOST_BYTES = 256 * 2**20
"""Tables of all grammars in use together; more are refused."""


class GrammarShelf:
    """Tables of the capacity's size. A grammar keeps its place until `rearrange`, which drops those not in use.

    Args:
        vocab: ids of the model's head.
        capacity: sizes of the tables.
        mesh: the devices that hold them; None: the default one.
    """

    def __init__(self, vocab: int, capacity: Capacity, mesh: ModelMesh | None = None) -> None:
        self._vocab, self._mesh = vocab, mesh
        self._uses: Counter[Grammar] = Counter()
        self._automata: dict[Grammar, TokenAutomaton] = {}
        self._first: dict[Grammar, int] = {}
        self.rearrange(capacity)

    def take(self, grammar: Grammar | None, automaton: Followed | None, capacity: Capacity) -> Capacity | None:
        """Counts one more use of a grammar, and puts it behind the others if there is room; one stepped needs none.

        Args:
            capacity: of the tables.
        Returns:
            None if the grammar is in its place; else the capacity that it and all in use need, with which `rearrange`
            finds a place.
        Raises:
            ConfigError: they need more than MOST_BYTES.
        """
        if grammar is None or not isinstance(automaton, TokenAutomaton):
            return None
        needed = None
        if grammar not in self._first:
            grammars, states, cells = sizes([automaton])
            if not self._has_room(capacity, grammars, states - 1, cells):  # FREE is there already
                needed = self._needed(grammar, automaton, capacity)
            self._automata[grammar] = automaton
            if needed is None:
                self._append(grammar)
                self.tables = placed(self._mesh, self._host)
        self._uses[grammar] += 1
        return needed

    def rearrange(self, capacity: Capacity) -> dict[int, int]:
        """Lays the grammars in use out anew. Returns, for each state that had a place and has one, the new number."""
        before = {grammar: first for grammar, first in self._first.items() if self._uses[grammar]}
        self._host = GrammarTables.empty(
            self._vocab, capacity.grammars, capacity.grammar_states, capacity.grammar_cells
        )
        self._first, self._filled = {}, (0, 1, 0)
        self._automata = {grammar: self._automata[grammar] for grammar in self._uses}
        for grammar in self._automata:
            self._append(grammar)
        self.tables = placed(self._mesh, self._host)
        return {
            first + state: self._first[grammar] + state
            for grammar, first in before.items()
            for state in range(self._automata[grammar].num_states)
        }

    def release(self, grammar: Grammar | None) -> None:
        """Takes back one use."""
        if grammar is not None:
            self._uses[grammar] -= 1
            self._uses += Counter()  # drops what nobody uses

    def release_all(self) -> None:
        """Nothing is in use any more."""
        self._uses.clear()

    def first_state(self, grammar: Grammar | None, automaton: Followed | None) -> int:
        """Where a row with this grammar begins; FREE without one."""
        if isinstance(automaton, SteppedGrammar):
            return automaton.start
        return FREE if grammar is None else self._first[grammar]

    def states(self, grammar: Grammar | None, automaton: Followed | None, tokens: Any) -> np.ndarray:
        """int32 [tokens + 1]: the states before the first of some tokens and after each."""
        if isinstance(automaton, SteppedGrammar):
            return np.array(automaton.walk(tokens)[0], np.int32)
        if grammar is None:
            return np.full(len(tokens) + 1, FREE, np.int32)
        local = np.array(self._automata[grammar].states(tokens), np.int32)
        return np.where(local < 0, local, local + self._first[grammar])

    def _append(self, grammar: Grammar) -> None:
        automaton, (index, state, cell) = self._automata[grammar], self._filled
        self._host.write(automaton, index, state, cell)
        self._first[grammar] = state
        self._filled = index + 1, state + automaton.num_states, cell + automaton.next_state.size

    def _has_room(self, capacity: Capacity, *more: int) -> bool:
        """Whether so many more grammars, states and cells fit behind what is filled."""
        places = capacity.grammars, capacity.grammar_states, capacity.grammar_cells
        return all(have + want <= size for have, want, size in zip(self._filled, more, places, strict=True))

    def _needed(self, grammar: Grammar, automaton: TokenAutomaton, capacity: Capacity) -> Capacity:
        """The capacity for everything in use and one more grammar."""
        wanted = {used: self._automata[used] for used in self._uses} | {grammar: automaton}
        grammars, states, cells = sizes(wanted.values())
        tables = {"grammars": grammars, "grammar_states": states, "grammar_cells": cells}
        needed = capacity.grown_for(dataclasses.replace(Capacity.needed(SamplingParams()), **tables))
        size = 4 * (needed.grammars * self._vocab + needed.grammar_cells)
        if size > MOST_BYTES:
            raise ConfigError(
                f"sampling.{grammar.kind}: {len(wanted)} grammars in use need tables of {size / 2**20:.0f} MiB, and at"
                f" most {MOST_BYTES >> 20} MiB are held; ask for fewer different grammars at a time, or lower the"
                " bounds of their repeats"
            )
        return needed
