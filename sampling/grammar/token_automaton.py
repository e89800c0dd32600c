"""TokenAutomaton: a grammar as tables over the ids of one tokenizer, each token judged by all of its bytes.

Tokens that do the same in every state share a class, so the tables are small: a class for each id, and the next state
for each state and class. A token may hold half a character, several signs of a JSON text, or the end of one part and
the beginning of the next: what counts is the state after its last byte.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from sampling.errors import ConfigError
from sampling.grammar.byte_automaton import NO_STATE, ByteAutomaton, co_reachable, renumbered
from sampling.vocabulary import Vocabulary

MOST_BYTES = 64 * 2**20
"""Tables of one grammar are refused beyond this."""


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """Deterministic. State 0 is the first; every state is on a way to acceptance.

    End-of-sequence tokens are not in the tables: they may be drawn exactly where `accepting` says.

    Attributes:
        token_class: int32 [vocab]; class 0 holds the ids that no state takes: those without text, control tokens, and
            those whose bytes fit nowhere.
        next_state: int32 [states, classes], NO_STATE where the class may not follow.
        accepting: bool [states].
        text: the same language over bytes.
    """

    token_class: np.ndarray
    next_state: np.ndarray
    accepting: np.ndarray
    text: ByteAutomaton

    @classmethod
    def of(cls, text: ByteAutomaton, vocabulary: Vocabulary, control: Sequence[int] = ()) -> Self:
        """The automaton of a language over a vocabulary's tokens.

        Args:
            control: ids that stand for no text, whatever bytes the vocabulary gives them.
        Raises:
            ConfigError: the tables would be too large, or no sequence of tokens spells a text of the language.
        """
        columns, column_of = _columns(text, vocabulary, control)
        table = columns.T.copy()
        table[table == text.num_states] = NO_STATE
        useful = co_reachable(table, text.accepting) & _reachable(table)
        if not useful[0]:
            raise ConfigError(
                "expected a grammar that the tokenizer's tokens can spell, and they cannot spell any text"
            )
        table = renumbered(table, useful, useful)
        _, first, joined = np.unique(table, axis=1, return_index=True, return_inverse=True)
        joined = joined.reshape(-1)
        # The column of ids that fit nowhere, which is the first of all, becomes class 0.
        nowhere = joined[0]
        order = np.array([nowhere, *(group for group in range(first.size) if group != nowhere)])
        number = np.argsort(order)
        return cls(
            token_class=number[joined][column_of].astype(np.int32),
            next_state=np.ascontiguousarray(table[:, first[order]]),
            accepting=text.accepting[useful],
            text=text,
        )

    @property
    def num_states(self) -> int:
        """Number of states."""
        return self.next_state.shape[0]

    @property
    def num_classes(self) -> int:
        """Number of classes, the one of ids that fit nowhere included."""
        return self.next_state.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tables."""
        return self.token_class.nbytes + self.next_state.nbytes + self.accepting.nbytes

    def step(self, state: int, token: int) -> int:
        """The state after one more token, or NO_STATE."""
        return NO_STATE if state == NO_STATE else int(self.next_state[state, self.token_class[token]])

    def states(self, tokens: Iterable[int]) -> list[int]:
        """The states before the first token and after each, NO_STATE from where the tokens leave the grammar."""
        reached = [0]
        for token in tokens:
            reached.append(self.step(reached[-1], int(token)))
        return reached

    def left_at(self, tokens: Sequence[int] | np.ndarray, eos: Sequence[int], stop: Sequence[int]) -> int | None:
        """The place of the first token that is outside the grammar; None if all are inside.

        Args:
            eos, stop: ids that may end the text where it is complete; what follows them is outside.
        """
        state = 0
        for place, token in enumerate(tokens):
            ends = self.accepting[state] and (token in eos or token in stop)
            if ends and place + 1 < len(tokens):
                return place + 1
            state = NO_STATE if token in eos else self.step(state, int(token))
            if state == NO_STATE and not ends:
                return place
        return None

    def allowed(self, state: int) -> np.ndarray:
        """int [ids]: the tokens that may follow, end-of-sequence tokens aside."""
        return np.flatnonzero(self.next_state[state, self.token_class] != NO_STATE)

    @functools.cached_property
    def goes_on(self) -> np.ndarray:
        """bool [states]: some token may follow, end-of-sequence tokens aside."""
        return (self.next_state != NO_STATE).any(axis=1)

    @functools.cached_property
    def shortest(self) -> int:
        """Tokens of the shortest text."""
        depth, queue = {0: 0}, deque([0])
        while not self.accepting[state := queue.popleft()]:
            for other in self._successors(state):
                if other not in depth:
                    depth[other] = depth[state] + 1
                    queue.append(other)
        return depth[state]

    @functools.cached_property
    def longest(self) -> int | None:
        """Tokens of the longest text; None if there is no longest."""
        successors = [self._successors(state) for state in range(self.num_states)]
        before = np.bincount(np.concatenate([*successors, []]).astype(int), minlength=self.num_states)
        ready, depth, done = [0] if before[0] == 0 else [], np.zeros(self.num_states, int), 0
        while ready:
            state, done = ready.pop(), done + 1
            for other in successors[state].tolist():
                depth[other] = max(depth[other], depth[state] + 1)
                before[other] -= 1
                if before[other] == 0:
                    ready.append(other)
        return int(depth.max()) if done == self.num_states else None

    def _successors(self, state: int) -> np.ndarray:
        row = np.unique(self.next_state[state])
        return row[row != NO_STATE]


def _columns(text: ByteAutomaton, vocabulary: Vocabulary, control: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """What tokens do, in every state of a language.

    All tokens are read side by side, byte after byte. Those whose bytes so far do the same share a column, and only
    one of them is read on.

    Returns:
        int32 [columns, states], the state after a token's bytes, `states` where they do not fit, the first column being
        the one of tokens that fit nowhere; and int [vocab], the column of each id.
    """
    flat, offsets = np.asarray(vocabulary.flat), np.asarray(vocabulary.offsets)
    nowhere = text.num_states
    table = np.full((nowhere + 1, text.next_state.shape[1]), nowhere, np.int32)
    table[:nowhere] = np.where(text.next_state == NO_STATE, nowhere, text.next_state)
    columns = [np.full(nowhere, nowhere, np.int32), np.arange(nowhere, dtype=np.int32)]
    known = {column.tobytes(): index for index, column in enumerate(columns)}

    length = np.diff(offsets)
    column_of = np.where(length > 0, 1, 0)
    column_of[list(control)] = 0
    read_on = np.flatnonzero(column_of)
    for place in range(vocabulary.max_token_bytes):
        read_on = read_on[(length[read_on] > place) & (column_of[read_on] > 0)]
        steps = np.stack([column_of[read_on], text.byte_class[flat[offsets[read_on] + place]]], axis=1)
        distinct, which = np.unique(steps, axis=0, return_inverse=True)
        reached = np.zeros(len(distinct), int)
        for index, (column, byte_class) in enumerate(distinct):
            after = table[columns[column], byte_class]
            reached[index] = known.setdefault(key := after.tobytes(), len(columns))
            if reached[index] == len(columns):
                columns.append(after)
                _require_room(len(columns), text, key)
        column_of[read_on] = reached[which.reshape(-1)]
    used, column_of = np.unique(np.append(0, column_of), return_inverse=True)
    return np.stack([columns[index] for index in used]), column_of[1:]


def _require_room(count: int, text: ByteAutomaton, column: bytes) -> None:
    if count * len(column) > MOST_BYTES:
        raise ConfigError(
            f"expected tables of at most {MOST_BYTES / 2**20:g} MiB, got more than {count:,} classes of tokens in"
            f" {text.num_states:,} states; lower the bounds of repeats (maxLength, maxItems, {{m,n}}), or drop"
            " alternatives or properties"
        )


def _reachable(table: np.ndarray) -> np.ndarray:
    """bool [states]: states that some tokens lead to; of int32 [states, classes]."""
    reached = np.zeros(table.shape[0], bool)
    reached[0], queue = True, [0]
    while queue:
        row = np.unique(table[queue.pop()])
        new = row[(row != NO_STATE) & ~reached[row]]
        reached[new] = True
        queue += new.tolist()
    return reached
