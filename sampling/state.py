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
        vocab_size: number of token ids (static).
    """

    buffer: jax.Array
    prompt_len: jax.Array
    length: jax.Array
    active: jax.Array
    keys: jax.Array
    vocab_size: int = struct.field(pytree_node=False)

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
        buffer = self.buffer.at[rows, index].set(tokens, mode="drop")
        return self.replace(buffer=buffer, length=self.length + room.astype(jnp.int32))

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
            vocab_size=vocab_size,
        )

    @classmethod
    def from_histories(
        cls,
        prompts: Sequence[Sequence[int]],
        drawn: Sequence[Sequence[int]],
        capacity: int | None = None,
        *,
        vocab_size: int,
    ) -> StepState:
        """Builds a state from plain lists of token ids, one prompt and one list of drawn tokens per row.

        Raises:
            ConfigError: the two differ in length, a row exceeds `capacity`, or an id is outside the vocabulary.
        """
        if len(prompts) != len(drawn):
            raise ConfigError(f"expected one list of drawn tokens per prompt, got {len(prompts)} and {len(drawn)}")
        rows = [[*prompt, *tokens] for prompt, tokens in zip(prompts, drawn, strict=True)]
        longest = max((len(row) for row in rows), default=0)
        capacity = max(longest + 1, 1) if capacity is None else capacity
        if longest > capacity:
            raise ConfigError(f"capacity: expected at least {longest}, the longest history, got {capacity}")
        if any(not 0 <= token < vocab_size for row in rows for token in row):
            raise ConfigError(f"expected token ids in 0 .. {vocab_size - 1}, got {max(map(max, filter(None, rows)))}")
        buffer = np.zeros((len(rows), capacity), np.int32)
        for i, row in enumerate(rows):
            buffer[i, : len(row)] = row
        return cls(
            buffer=jnp.asarray(buffer),
            prompt_len=jnp.asarray([len(p) for p in prompts], jnp.int32),
            length=jnp.asarray([len(r) for r in rows], jnp.int32),
            active=jnp.ones(len(rows), bool),
            keys=jnp.zeros((len(rows), 2), jnp.uint32),
            vocab_size=vocab_size,
        )
