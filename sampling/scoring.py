"""Scoring by forward passes: the record of every token of a known sequence, many tokens at a time.

A pass reads PASS_TOKENS tokens in lanes. A long sequence takes all lanes, short ones share them, and samples of one
prompt read it once. Every position becomes a row of its own, in the state in which the sequence was when its
next token was due, and goes through the same chain and the same `choose` as in a decode step. What differs from a
replay is the shape of the matrix products, and so their rounding. Nothing of the size [tokens, vocab] outlives a block
of BLOCK_TOKENS.

A score depends on its sequence alone: a position has the same place in its lane whoever reads beside it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from sampling.capacity import Capacity
from sampling.decode import TokenRecord, choose
from sampling.grammar import SteppedGrammar
from sampling.grammar.tables import GrammarTables, no_masks
from sampling.lanes import Lanes, lane_shape, read_lanes
from sampling.models import KVCache, Transformer
from sampling.models.mesh import made, shapes
from sampling.params import SamplingParams
from sampling.policy import Policy, lower, stack
from sampling.programs import is_lost
from sampling.state import StepState
from sampling.vocabulary import Vocabulary

BLOCK_TOKENS = 64
"""Positions whose scores over the vocabulary exist at the same time; a divisor of a pass's."""

PASS_TOKENS = 256
"""Tokens of a pass. More gain little: 1.9 ms a token with 256 or 512 on two cores, 2.5 with 64."""

ROWS = 4
"""Sequences under way at the same time."""

FORWARD_BOUND = {"float32": (0.999, 1e-4), "bfloat16": (0.95, 0.5)}
"""By dtype: the share of the tokens whose log-prob, computed in other shapes of the same products, lies within so many
nats of its record. The rest are knife edges, where rounding carries an id across a filter's threshold or past the best
(docs/exactness.md has the distances measured)."""


class Pass(struct.PyTreeNode):
    """What a pass reads, and all that its scores depend on.

    Attributes:
        lanes: stretches of the sequences.
        buffer: int32 [rows, cache_len], prompts and completions.
        prompt_len, length, limit: int32 [rows]; length of both together; total length at which the budget ends.
        policy: leaves [rows, ...].
        automaton: int32 [rows, cache_len + 1], the state of the row's grammar before the token at each place.
        masks: uint32 [PASS_TOKENS, words], what GrammarTables.masks are to the token that follows each position; None
            where no grammar is stepped on the host.
    """

    lanes: Lanes
    buffer: Any
    prompt_len: Any
    length: Any
    limit: Any
    policy: Policy
    automaton: Any
    masks: Any = None


class Scored(struct.PyTreeNode):
    """What positions tell of the tokens that follow them. Entries of positions within a prompt are unused.

    Attributes:
        record: leaves [lanes, lane_len, ...] of a pass; [completion_len, ...] of a sequence.
        stop: int32, StopReason.code with which the policy's rules end the row after the token, or 0.
    """

    record: TokenRecord
    stop: Any


@dataclass(frozen=True)
class KnownSequence:
    """A completion to be scored under a policy.

    Attributes:
        prompt_tokens, completion_tokens: int32 [prompt_len], [completion_len], at least one token each.
        params: the policy, as `resolved` leaves it.
        limit: total length at which its budget ends.
        automaton: int32 [completion_len + 1], the states of its grammar before the first token and after each.
        stepped: the grammar, if it is stepped on the host.
    """

    prompt_tokens: np.ndarray
    completion_tokens: np.ndarray
    params: SamplingParams
    limit: int
    automaton: np.ndarray
    stepped: SteppedGrammar | None = None


@dataclass
class _Reading:
    """A sequence in a row: the places to read, all but its last, what those from the last prompt token on told, and the
    masks of its completion's tokens if its grammar is stepped on the host."""

    sequence: KnownSequence
    tag: Any
    tokens: np.ndarray
    policy: Policy
    unread: range
    parts: list[Scored]
    masks: np.ndarray | None

    def shares_prompt(self, sequence: KnownSequence) -> bool:
        return np.array_equal(self.sequence.prompt_tokens, sequence.prompt_tokens)


class Scorer:
    """Scores sequences with one set of weights. Compiles two programs when it is made, and none afterwards.

    Args:
        model, tokenizer_len, params, vocabulary, grammars: those of the engine.
        cache_len: tokens of the longest sequence.
        capacity: sizes of the policies' tables.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer_len: int,
        cache_len: int,
        capacity: Capacity,
        params: Any,
        vocabulary: Vocabulary,
        grammars: GrammarTables,
    ) -> None:
        self._cache_len, self._capacity, self._vocab = cache_len, capacity, model.config.vocab_size
        empty = partial(KVCache.empty, model.config, ROWS, cache_len, model.dtype)
        self._empty_cache = partial(made, model.mesh, empty)
        self._cache = self._empty_cache()
        self._neutral = lower(SamplingParams(), capacity)
        self._waiting: deque[tuple[KnownSequence, Any]] = deque()
        self._rows: list[_Reading | None] = [None] * ROWS
        mesh = model.mesh
        places = mesh and mesh.of_state(self._cache)
        one, work = shapes(mesh, jax.ShapeDtypeStruct((), jnp.int32)), shapes(mesh, self._work())
        program = partial(score_pass, model, tokenizer_len)
        with jax.default_matmul_precision(model.matmul_precision):
            scoring = jax.jit(program, donate_argnums=1, out_shardings=mesh and (places, mesh.whole))
            self._pass = scoring.lower(params, self._cache, vocabulary, grammars, work).compile()
        fork = jax.jit(KVCache.fork, donate_argnums=0, out_shardings=places)
        self._fork = fork.lower(self._cache, one, one, one).compile()

    def add(self, sequence: KnownSequence, tag: Any) -> None:
        """Puts a sequence at the end of the queue; its scores come back beside its tag."""
        self._waiting.append((sequence, tag))

    @property
    def waiting(self) -> int:
        """Sequences that nobody has begun to read."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """True if nothing waits and nothing is being read."""
        return not self._waiting and all(row is None or not row.unread for row in self._rows)

    def abort(self) -> None:
        """Forgets every sequence."""
        self._waiting.clear()
        self._rows = [None] * ROWS
        if is_lost(self._cache):
            self._cache = self._empty_cache()

    def restart(self) -> None:
        """Puts every sequence that is being read back into the queue: nothing read so far counts."""
        begun = [reading for reading in self._rows if reading and reading.unread]
        self._waiting.extendleft((reading.sequence, reading.tag) for reading in reversed(begun))
        self._rows = [None] * ROWS

    def step(self, params: Any, vocabulary: Vocabulary, grammars: GrammarTables) -> list[tuple[Any, Scored]]:
        """One pass; returns what it finished: tags and scores, leaves NumPy [completion_len, ...]."""
        self._seat_waiting()
        work = self._work()
        self._cache, scored = self._pass(params, self._cache, vocabulary, grammars, work)
        scored, lanes = jax.device_get(scored), work.lanes
        readers = [self._reading(row) for row in lanes.row[lanes.begin < lanes.end]]
        for lane, reading in enumerate(readers):
            first = max(int(lanes.begin[lane]), reading.sequence.prompt_tokens.size - 1) - int(lanes.start[lane])
            told = slice(first, int(lanes.end[lane]) - int(lanes.start[lane]))
            reading.parts.append(jax.tree.map(lambda leaf, lane=lane, told=told: leaf[lane, told], scored))
        for row, left in lanes.left_of(self._unread()).items():
            self._reading(row).unread = left
        finished = []
        for reading in {id(reading): reading for reading in readers}.values():
            if not reading.unread:
                joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *reading.parts)
                finished.append((reading.tag, joined))
                reading.parts.clear()
        return finished

    def _seat_waiting(self) -> None:
        """Gives free rows to waiting sequences, each with its prompt read already where another row has read it."""
        while self._waiting:
            sequence, tag = self._waiting[0]
            known = sequence.prompt_tokens.size - 1
            kin = [row for row, other in enumerate(self._rows) if other and other.shares_prompt(sequence)]
            ready = [row for row in kin if self._reading(row).unread.start >= known]
            if kin and not ready:
                return  # its prompt is being read
            free = [row for row, other in enumerate(self._rows) if other is None or not other.unread]
            if not free:
                return
            # A row that nobody needs as a source goes first.
            target = next((row for row in free if row not in ready), free[0])
            source, count = (ready[0], known) if ready else (target, 0)
            self._cache = self._fork(self._cache, np.int32(source), np.int32(target), np.int32(count))
            tokens = np.concatenate([sequence.prompt_tokens, sequence.completion_tokens])
            policy = lower(sequence.params, self._capacity, int(sequence.automaton[0]))
            masks = sequence.stepped.walk(sequence.completion_tokens)[1] if sequence.stepped else None
            self._rows[target] = _Reading(sequence, tag, tokens, policy, range(count, tokens.size - 1), [], masks)
            self._waiting.popleft()

    def _reading(self, row: int) -> _Reading:
        reading = self._rows[row]
        assert reading is not None
        return reading

    def _unread(self) -> dict[int, range]:
        return {row: reading.unread for row, reading in enumerate(self._rows) if reading}

    def _work(self) -> Pass:
        """The next pass."""
        buffer = np.zeros((ROWS, self._cache_len), np.int32)
        automaton = np.zeros((ROWS, self._cache_len + 1), np.int32)
        prompt_len, length, limit = np.zeros((3, ROWS), np.int32)
        policies = [self._neutral] * ROWS
        for row, reading in enumerate(self._rows):
            if reading is not None:
                buffer[row, : reading.tokens.size] = reading.tokens
                prompt_len[row], length[row] = reading.sequence.prompt_tokens.size, reading.tokens.size
                limit[row], policies[row] = reading.sequence.limit, reading.policy
                automaton[row, prompt_len[row] : length[row] + 1] = reading.sequence.automaton
        lanes = Lanes.over(self._unread(), *lane_shape(PASS_TOKENS))
        masks = self._masks(lanes) if self._capacity.token_masks else None
        return Pass(lanes, buffer, prompt_len, length, limit, stack(policies), automaton, masks)

    def _masks(self, lanes: Lanes) -> np.ndarray:
        masks, lane_len = no_masks(PASS_TOKENS, self._vocab), lane_shape(PASS_TOKENS)[1]
        for lane in np.flatnonzero(lanes.begin < lanes.end):
            reading = self._reading(lanes.row[lane])
            if reading.masks is not None:
                prompt_len, start, end = reading.sequence.prompt_tokens.size, lanes.start[lane], lanes.end[lane]
                first, place = max(lanes.begin[lane], prompt_len - 1), lane * lane_len - start
                told = reading.masks[first + 1 - prompt_len : end + 1 - prompt_len]
                masks[place + first : place + first + len(told)] = told
        return masks


def score_pass(
    model: Transformer,
    tokenizer_len: int,
    params: Any,
    cache: KVCache,
    vocabulary: Vocabulary,
    grammars: GrammarTables,
    work: Pass,
) -> tuple[KVCache, Scored]:
    """Reads the lanes and scores the tokens that follow theirs."""
    (num_lanes, lane_len), capacity = lane_shape(PASS_TOKENS), work.buffer.shape[1]
    hidden, cache = read_lanes(model, params, cache, work.buffer, work.lanes, lane_len)
    forward: Any = partial(model.apply, {"params": params})
    places, read = work.lanes.places(lane_len)
    hidden, row, length = hidden.reshape(PASS_TOKENS, -1), jnp.repeat(work.lanes.row, lane_len), places.reshape(-1) + 1
    due = read.reshape(-1) & (length >= work.prompt_len[row])

    def scored(at: jax.Array) -> Scored:
        """Of positions `at` int32 [block], counted through all lanes."""
        these = row[at]

        def of_due() -> Scored:
            before = StepState.prefixes(
                work.buffer[these],
                work.prompt_len[these],
                jnp.where(due[at], length[at], 0),
                work.limit[these],
                work.automaton[these, jnp.minimum(length[at], capacity - 1)],
                model.config.vocab_size,
            )
            tables = grammars if work.masks is None else grammars.replace(masks=work.masks[at])
            policy = jax.tree.map(lambda leaf: leaf[these], work.policy).bound(vocabulary, tables)
            following = work.buffer[these, jnp.minimum(length[at], capacity - 1)]
            choice = choose(policy, before, forward(hidden[at], method="logits"), following, tokenizer_len)
            after = policy.commit(before, following)
            if work.masks is not None:
                after = after.replace(automaton=work.automaton[these, jnp.minimum(length[at], capacity - 1) + 1])
            return Scored(choice.record, policy.stop_codes(before, after, following))

        empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(of_due))
        return jax.lax.cond(jnp.any(due[at]), of_due, lambda: empty)

    blocks = jnp.arange(PASS_TOKENS, dtype=jnp.int32).reshape(-1, BLOCK_TOKENS)
    by_block = jax.lax.map(scored, blocks)
    return cache, jax.tree.map(lambda leaf: leaf.reshape(num_lanes, lane_len, *leaf.shape[2:]), by_block)
