"""ByteAutomaton: a language as a deterministic automaton that reads UTF-8 byte by byte.

Nodes become an automaton with choices (states with edges for ranges of bytes, and edges that read nothing), and that
becomes a deterministic one, over classes of bytes that no state tells apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np

from sampling.errors import ConfigError
from sampling.grammar.nodes import Both, Chars, Either, Node, Repeated, Sequence
from sampling.grammar.utf8 import utf8_sequences

NO_STATE = -1
"""Stands where nothing of the language can follow. Compare with it; never index with it."""

MOST_STATES = 50_000
"""A grammar with more states is refused: its tables could not be held, and it would take minutes to compile."""


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """Deterministic, every state reachable from state 0 and, unless the language is empty, on a way to acceptance.

    Attributes:
        byte_class: uint8 [256].
        next_state: int32 [states, byte classes], NO_STATE where the language has nothing.
        accepting: bool [states].
    """

    byte_class: np.ndarray
    next_state: np.ndarray
    accepting: np.ndarray

    @classmethod
    def of(cls, node: Node) -> Self:
        """The automaton of a node, with as few states as its language needs.

        Raises:
            ConfigError: it needs more than MOST_STATES.
        """
        choices = _Choices()
        last = choices.new_state()
        try:
            first = choices.add(node, last)
        except RecursionError as error:
            raise ConfigError("expected a grammar of less than some hundred nested or optional parts") from error
        edges = [(low, high) for outgoing in choices.edges for low, high, _ in outgoing]
        byte_class, ranges = _byte_classes(edges)
        moves = [[(*ranges[low, high], target) for low, high, target in outgoing] for outgoing in choices.edges]
        closures: dict[int, frozenset[int]] = {}

        def closure(states: Iterable[int]) -> frozenset[int]:
            return frozenset().union(*(choices.closure(state, closures) for state in states))

        def successors(states: frozenset[int]) -> dict[int, frozenset[int]]:
            reached: dict[int, set[int]] = {}
            for state in states:
                for low, high, target in moves[state]:
                    for index in range(low, high):
                        reached.setdefault(index, set()).add(target)
            known: dict[frozenset[int], frozenset[int]] = {}
            for targets in map(frozenset, reached.values()):
                known[targets] = known.get(targets) or closure(targets)
            return {index: known[frozenset(targets)] for index, targets in reached.items()}

        return cls._explored(closure([first]), successors, lambda states: last in states, byte_class)

    @classmethod
    def _explored(cls, start: object, successors: Callable, accepts: Callable, byte_class: np.ndarray) -> Self:
        """Numbers what can be reached from `start`, then drops what leads nowhere and joins what does the same.

        Args:
            successors: of a state, the next state by class of bytes.
            accepts: whether a state accepts.
        """
        numbers, order, rows = {start: 0}, [start], []
        for state in order:
            row = np.full(int(byte_class.max()) + 1, NO_STATE, np.int32)
            for index, reached in successors(state).items():
                if reached not in numbers:
                    numbers[reached] = len(order)
                    order.append(reached)
                row[index] = numbers[reached]
            rows.append(row)
            if len(order) > MOST_STATES:
                raise ConfigError(
                    f"expected a grammar of at most {MOST_STATES:,} states, and this one has more;"
                    " lower the bounds of its repeats (maxLength, maxItems, {m,n}) or drop alternatives"
                )
        accepting = np.array([accepts(state) for state in order])
        return cls(byte_class, np.stack(rows), accepting)._trimmed()._minimal()

    @property
    def num_states(self) -> int:
        """Number of states."""
        return self.next_state.shape[0]

    @property
    def is_empty(self) -> bool:
        """True if no text belongs to the language."""
        return not self.accepting.any()

    def step(self, state: int, byte: int) -> int:
        """The state after one more byte, or NO_STATE."""
        return NO_STATE if state == NO_STATE else int(self.next_state[state, self.byte_class[byte]])

    def accepts(self, text: bytes) -> bool:
        """Whether a text belongs to the language."""
        state = functools.reduce(self.step, text, 0)
        return state != NO_STATE and bool(self.accepting[state])

    def combined(self, other: ByteAutomaton, excluded: bool) -> Self:
        """Texts of both; or, where `excluded`, texts of this one that are none of the other's."""
        pairs = np.stack([self.byte_class, other.byte_class], axis=1)
        classes, byte_class = np.unique(pairs, axis=0, return_inverse=True)

        def successors(pair: tuple[int, int]) -> dict[int, tuple[int, int]]:
            reached = {}
            for index, (ours, theirs) in enumerate(classes):
                first = int(self.next_state[pair[0], ours])
                second = NO_STATE if pair[1] == NO_STATE else int(other.next_state[pair[1], theirs])
                if first != NO_STATE and (excluded or second != NO_STATE):
                    reached[index] = first, second
            return reached

        def accepts(pair: tuple[int, int]) -> bool:
            second = pair[1] != NO_STATE and bool(other.accepting[pair[1]])
            return bool(self.accepting[pair[0]]) and second != excluded

        return self._explored((0, 0), successors, accepts, byte_class.reshape(-1).astype(np.uint8))

    def _trimmed(self) -> Self:
        """Without the states from which nothing is accepted; state 0 stays."""
        useful = co_reachable(self.next_state, self.accepting)
        kept = useful.copy()
        kept[0] = True
        return type(self)(self.byte_class, renumbered(self.next_state, kept, useful), self.accepting[kept])

    def _minimal(self) -> Self:
        """With states joined that accept the same from here on.

        Source: Moore's partition refinement; a group is told by a random sum over its row, checked in the end.
        """
        weights = np.random.default_rng(0).integers(1, 2**63, self.next_state.shape[1] + 1, dtype=np.uint64)
        group, count = np.unique(self.accepting, return_inverse=True)[1], 0
        while count < (count := int(group.max()) + 1):
            rows = np.column_stack([np.append(group, NO_STATE)[self.next_state], group]).astype(np.uint64)
            group = np.unique((rows * weights).sum(axis=1, dtype=np.uint64), return_inverse=True)[1]
        _, first, group = np.unique(group, return_index=True, return_inverse=True)
        order = np.argsort(first)  # state 0 stays the first
        number = np.argsort(order)[group]
        table = np.append(number, NO_STATE)[self.next_state]
        chosen = first[order]
        joined, accepting = table[chosen], self.accepting[chosen]
        assert (joined[number] == table).all() and (accepting[number] == self.accepting).all()
        return type(self)(self.byte_class, joined.astype(np.int32), accepting)


def co_reachable(next_state: np.ndarray, accepting: np.ndarray) -> np.ndarray:
    """bool [states]: states on a way to acceptance. Args: int32 [states, classes], bool [states]."""
    source, _ = np.nonzero(next_state != NO_STATE)
    target = next_state[next_state != NO_STATE]
    pairs = np.unique(np.stack([source, target], axis=1), axis=0)
    before: dict[int, list[int]] = {}
    for start, end in pairs.tolist():
        before.setdefault(end, []).append(start)
    useful, queue = accepting.copy(), np.flatnonzero(accepting).tolist()
    while queue:
        for state in before.get(queue.pop(), ()):
            if not useful[state]:
                useful[state] = True
                queue.append(state)
    return useful


def renumbered(next_state: np.ndarray, kept: np.ndarray, useful: np.ndarray) -> np.ndarray:
    """The rows of `kept` states, with the numbers that `useful` ones have among them; all others become NO_STATE."""
    number = np.where(useful, np.cumsum(kept) - 1, NO_STATE)
    return np.append(number, NO_STATE)[next_state[kept]].astype(np.int32)


class _Choices:
    """An automaton with choices, built from its end: `add` is given the state that follows, and returns the first.

    Attributes:
        edges: of each state: first and last byte, and the state that one of them leads to.
        free: of each state, those that it may become without reading.
    """

    def __init__(self) -> None:
        self.edges: list[list[tuple[int, int, int]]] = []
        self.free: list[list[int]] = []
        self._built: dict[tuple[object, int], tuple[Node, int]] = {}

    def new_state(self) -> int:
        self.edges.append([])
        self.free.append([])
        if len(self.edges) > 6 * MOST_STATES:
            raise ConfigError("expected a smaller grammar: lower the bounds of its repeats or drop alternatives")
        return len(self.edges) - 1

    def add(self, node: Node, after: int) -> int:
        """The state in which `node` begins, if `after` is where it ends. One node before one state is built once."""
        key = (node if isinstance(node, Chars) else id(node), after)
        if key not in self._built:
            self._built[key] = node, self._build(node, after)  # holding the node keeps its id its own
        return self._built[key][1]

    def _build(self, node: Node, after: int) -> int:
        match node:
            case Chars(ranges):
                if len(ranges) == 1 and ranges[0][1] < 0x80:
                    first = self.new_state()
                    self.edges[first].append((*ranges[0], after))
                    return first
                return self._copy(_chars_automaton(ranges), after)
            case Sequence(parts):
                for part in reversed(parts):
                    after = self.add(part, after)
                return after
            case Either(options):
                first = self.new_state()
                self.free[first] += [self.add(option, after) for option in options]
                return first
            case Repeated(inner, least, most):
                if most is None:
                    again = self.new_state()
                    self.free[again] += [after, self.add(inner, again)]
                    after = again
                else:
                    end = after
                    for _ in range(most - least):
                        maybe = self.new_state()
                        self.free[maybe] += [end, self.add(inner, after)]
                        after = maybe
                for _ in range(least):
                    after = self.add(inner, after)
                return after
            case Both(first, second, excluded):
                combined = ByteAutomaton.of(first).combined(ByteAutomaton.of(second), excluded)
                return self._copy(combined, after)

    def _copy(self, automaton: ByteAutomaton, after: int) -> int:
        """A deterministic automaton as part of this one."""
        states = [self.new_state() for _ in range(automaton.num_states)]
        for state, row in zip(states, automaton.next_state[:, automaton.byte_class], strict=True):
            starts = np.flatnonzero(np.diff(row, prepend=NO_STATE - 1))
            for low, high in zip(starts, [*starts[1:], 256], strict=True):
                if row[low] != NO_STATE:
                    self.edges[state].append((int(low), int(high) - 1, states[row[low]]))
        for state in np.flatnonzero(automaton.accepting):
            self.free[states[state]].append(after)
        return states[0]

    def closure(self, state: int, known: dict[int, frozenset[int]]) -> frozenset[int]:
        """All states that one may become without reading, itself included."""
        if state not in known:
            reached, queue = {state}, [state]
            while queue:
                for other in self.free[queue.pop()]:
                    if other not in reached:
                        reached.add(other)
                        queue.append(other)
            known[state] = frozenset(reached)
        return known[state]


@functools.lru_cache(maxsize=256)
def _chars_automaton(ranges: tuple[tuple[int, int], ...]) -> ByteAutomaton:
    """One character out of the ranges."""
    sequences = [parts for low, high in ranges for parts in utf8_sequences(low, high)]
    byte_class, classes = _byte_classes([pair for parts in sequences for pair in parts])

    def successors(rest: frozenset) -> dict[int, frozenset]:
        reached: dict[int, set] = {}
        for parts in rest:
            for index in range(*classes[parts[0]]) if parts else ():
                reached.setdefault(index, set()).add(parts[1:])
        return {index: frozenset(tails) for index, tails in reached.items()}

    start = frozenset(map(tuple, sequences))
    return ByteAutomaton._explored(start, successors, lambda rest: () in rest, byte_class)


def _byte_classes(
    edges: Iterable[tuple[int, int]],
) -> tuple[np.ndarray, dict[tuple[int, int], tuple[int, int]]]:
    """Classes of bytes that no edge tells apart, uint8 [256], and each edge as a range of classes, its end excluded."""
    edges = set(edges)
    bounds = sorted({0, *(low for low, _ in edges), *(high + 1 for _, high in edges)} - {256})
    byte_class = np.searchsorted(bounds, np.arange(256), side="right") - 1
    ranges = {(low, high): (int(byte_class[low]), int(byte_class[high]) + 1) for low, high in edges}
    return byte_class.astype(np.uint8), ranges
