"""StepState: all that a transform or a stopping rule may see of the rows."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from sampling.errors import ConfigError

NO_TOKEN = -1
"""Fills the places of a history that hold no token. Compare with it; never index with it."""


class StepState(struct.PyTreeNode):
    """The rows of a batch between two draws: no parameters, no cache, no padding.

    Attributes:
        buffer: int32 [rows, capacity], each row's tokens from index 0 on, the prompt first and then what was drawn.
            What lies past `length` means nothing; read it through the methods below.
        prompt_len: int32 [rows].
        length: int32 [rows], prompt and drawn tokens together.
        active: bool [rows], rows that still run.
        keys: uint32 [rows, 2], one key per row (sampling.keys).
        limit: int32 [rows], the total length at which the row's own budget ends.
        in_prompt: bool [rows, vocab], ids that the row's prompt holds.
        counts: int32 [rows, vocab], how often the row has drawn each id. Both are carried from step to step.
        automaton: int32 [rows], the state of the row's grammar (sampling.grammar.tables); 0 without one. A policy
            advances it (`Policy.commit`), since a state does not know the grammar.
    """

    buffer: jax.Array
    prompt_len: jax.Array
    length: jax.Array
    active: jax.Array
    keys: jax.Array
    limit: jax.Array
    in_prompt: jax.Array
    counts: jax.Array
    automaton: jax.Array

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.counts.shape[1]

    @property
    def capacity(self) -> int:
        """Tokens that a row can hold."""
        return self.buffer.shape[1]

    @property
    def step(self) -> jax.Array:
        """int32 [rows]: tokens drawn so far, which is also the index of the next draw."""
        return self.length - self.prompt_len

    def total(self) -> jax.Array:
        """int32 [rows]: prompt and drawn tokens together."""
        return self.length

    def history(self) -> jax.Array:
        """int32 [rows, capacity]: prompt and drawn tokens, NO_TOKEN after them."""
        return jnp.where(self._index() < self.length[:, None], self.buffer, NO_TOKEN)

    def prompt_history(self) -> jax.Array:
        """int32 [rows, capacity]: the prompt's tokens, NO_TOKEN after them."""
        return jnp.where(self._index() < self.prompt_len[:, None], self.buffer, NO_TOKEN)

    def generated(self) -> jax.Array:
        """int32 [rows, capacity]: drawn tokens at the places where they stand in the history, NO_TOKEN elsewhere."""
        index = self._index()
        drawn = (index >= self.prompt_len[:, None]) & (index < self.length[:, None])
        return jnp.where(drawn, self.buffer, NO_TOKEN)

    def commit(self, tokens: jax.Array) -> StepState:
        """Appends one token to every active row; tokens int32 [rows]. A full row stays as it is."""
        room = self.active & (self.length < self.capacity)
        rows = jnp.arange(self.buffer.shape[0])
        index = jnp.where(room, self.length, self.capacity)
        return self.replace(
            buffer=self.buffer.at[rows, index].set(tokens, mode="drop"),
            length=self.length + room.astype(jnp.int32),
            counts=self.counts.at[rows, tokens].add(room.astype(jnp.int32)),
        )

    def ended_with(self, depth: int) -> jax.Array:
        """int32 [rows, depth]: the last tokens of each history, the very last first, NO_TOKEN before the beginning."""
        index = self.length[:, None] - 1 - jnp.arange(depth, dtype=jnp.int32)[None, :]
        tokens = jnp.take_along_axis(self.buffer, jnp.maximum(index, 0), axis=-1)
        return jnp.where(index >= 0, tokens, NO_TOKEN)

    def _index(self) -> jax.Array:
        return jnp.arange(self.capacity, dtype=jnp.int32)[None, :]

    @classmethod
    def empty(cls, rows: int, capacity: int, vocab_size: int) -> StepState:
        """Rows that hold nothing and do not run."""
        return cls(
            buffer=jnp.zeros((rows, capacity), jnp.int32),
            prompt_len=jnp.zeros(rows, jnp.int32),
            length=jnp.zeros(rows, jnp.int32),
            active=jnp.zeros(rows, bool),
            keys=jnp.zeros((rows, 2), jnp.uint32),
            limit=jnp.zeros(rows, jnp.int32),
            in_prompt=jnp.zeros((rows, vocab_size), bool),
            counts=jnp.zeros((rows, vocab_size), jnp.int32),
            automaton=jnp.zeros(rows, jnp.int32),
        )

    @classmethod
    def prefixes(
        cls,
        buffer: jax.Array,
        prompt_len: jax.Array,
        length: jax.Array,
        limit: jax.Array,
        automaton: jax.Array,
        vocab_size: int,
    ) -> StepState:
        """Rows that are known beforehand, each as it was when it held `length` tokens.

        Args:
            buffer: int32 [rows, capacity], the whole sequences, known tokens beyond `length` included.
            prompt_len, length, limit, automaton: int32 [rows]; a row of length 0 does not run.
        """
        rows, capacity = buffer.shape
        index, row = jnp.arange(capacity, dtype=jnp.int32)[None, :], jnp.arange(rows)[:, None]
        in_prompt = index < prompt_len[:, None]
        drawn = ~in_prompt & (index < length[:, None])
        return cls(
            buffer=buffer,
            prompt_len=prompt_len,
            length=length,
            active=length > 0,
            keys=jnp.zeros((rows, 2), jnp.uint32),
            limit=limit,
            in_prompt=jnp.zeros((rows, vocab_size), bool)
            .at[row, jnp.where(in_prompt, buffer, vocab_size)]
            .set(True, mode="drop"),
            counts=jnp.zeros((rows, vocab_size), jnp.int32)
            .at[row, jnp.where(drawn, buffer, vocab_size)]
            .add(1, mode="drop"),
            automaton=automaton,
        )

    @classmethod
    def from_histories(
        cls,
        prompts: Sequence[Sequence[int]],
        drawn: Sequence[Sequence[int]],
        capacity: int | None = None,
        *,
        vocab_size: int,
        limit: int | None = None,
    ) -> StepState:
        """Builds a state from plain lists of token ids, one prompt and one list of drawn tokens per row.

        Args:
            capacity: tokens that a row can hold; by default one more than the longest history.
            limit: total length at which the rows' budget ends; by default the capacity.
        Raises:
            ConfigError: the two differ in length, a row exceeds `capacity`, or an id is outside the vocabulary.
        """
        if len(prompts) != len(drawn):
            raise ConfigError(f"expected one list of drawn tokens per prompt, got {len(prompts)} and {len(drawn)}")
        rows = [[*prompt, *tokens] for prompt, tokens in zip(prompts, drawn, strict=True)]
        longest = max((len(row) for row in rows), default=0)
        capacity = longest + 1 if capacity is None else capacity
        if longest > capacity:
            raise ConfigError(f"capacity: expected at least {longest}, the longest history, got {capacity}")
        outside = [token for row in rows for token in row if not 0 <= token < vocab_size]
        if outside:
            raise ConfigError(f"expected token ids in 0 .. {vocab_size - 1}, got {outside[0]}")
        buffer = np.zeros((len(rows), capacity), np.int32)
        in_prompt = np.zeros((len(rows), vocab_size), bool)
        counts = np.zeros((len(rows), vocab_size), np.int32)
        for i, (prompt, tokens) in enumerate(zip(prompts, drawn, strict=True)):
            buffer[i, : len(rows[i])] = rows[i]
            in_prompt[i, list(prompt)] = True
            np.add.at(counts[i], list(tokens), 1)
        return cls(
            buffer=jnp.asarray(buffer),
            prompt_len=jnp.asarray([len(prompt) for prompt in prompts], jnp.int32),
            length=jnp.asarray([len(row) for row in rows], jnp.int32),
            active=jnp.ones(len(rows), bool),
            keys=jnp.zeros((len(rows), 2), jnp.uint32),
            limit=jnp.full(len(rows), capacity if limit is None else limit, jnp.int32),
            in_prompt=jnp.asarray(in_prompt),
            counts=jnp.asarray(counts),
            automaton=jnp.zeros(len(rows), jnp.int32),
        )
