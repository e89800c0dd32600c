"""Scoring by forward passes: the record of every token of a known sequence, many tokens at a time.

A sequence passes through the model in chunks of the geometry's prefill shape. Every position of a chunk becomes a row
of its own, in the state in which the row was when its next token was due, and goes through the same chain and the
same `choose` as in a decode step. What differs from a replay is the shape of the matrix products, and so their
rounding. Nothing of the size [tokens, vocab] outlives a block of BLOCK_TOKENS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from sampling.capacity import Capacity
from sampling.decode import TokenRecord, choose, read_chunk
from sampling.models import KVCache, Transformer
from sampling.params import SamplingParams
from sampling.policy import Policy, lower, stack
from sampling.state import StepState
from sampling.types import Geometry
from sampling.vocabulary import Vocabulary

BLOCK_TOKENS = 64
"""Positions whose scores over the vocabulary exist at the same time."""


class Chunk(struct.PyTreeNode):
    """A stretch of some known sequences, and all that their scores depend on.

    Attributes:
        start: int32 [], place of the stretch's first token in every sequence.
        buffer: int32 [rows, cache_len], prompts and completions.
        prompt_len, length, limit: int32 [rows]; length of both together; total length at which the budget ends.
        policy: leaves [rows, ...].
    """

    start: Any
    buffer: Any
    prompt_len: Any
    length: Any
    limit: Any
    policy: Policy


class Scored(struct.PyTreeNode):
    """What a chunk tells of the tokens that follow its positions. Entries that follow no prompt's end are unused.

    Attributes:
        record: leaves [rows, chunk, ...].
        stop: int32 [rows, chunk], StopReason.code with which the policy's rules end the row after the token, or 0.
    """

    record: TokenRecord
    stop: Any


@dataclass(frozen=True)
class KnownSequence:
    """A completion to be scored under a policy.

    Attributes:
        prompt_tokens, completion_tokens: int32 [prompt_len], [completion_len].
        params: the policy, as `resolved` leaves it.
        limit: total length at which its budget ends.
    """

    prompt_tokens: np.ndarray
    completion_tokens: np.ndarray
    params: SamplingParams
    limit: int


class Scorer:
    """Scores sequences with one set of weights. Compiles one program when it is made, and none afterwards.

    Args:
        model, tokenizer_len, params, vocabulary: those of the engine.
        geometry: `prefill_rows` sequences are scored together, `prefill_chunk` tokens of each at a time.
        capacity: sizes of the policies' tables.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer_len: int,
        geometry: Geometry,
        capacity: Capacity,
        params: Any,
        vocabulary: Vocabulary,
    ) -> None:
        self._geometry, self._capacity = geometry, capacity
        self._cache = KVCache.empty(model.config, geometry.prefill_rows, geometry.cache_len, model.dtype)
        program = partial(score_chunk, model, tokenizer_len, geometry.prefill_chunk)
        with jax.default_matmul_precision(model.matmul_precision):
            compiled = jax.jit(program, donate_argnums=1)
            self._program = compiled.lower(params, self._cache, vocabulary, self._chunk([])).compile()

    def score(self, params: Any, vocabulary: Vocabulary, sequences: Sequence[KnownSequence]) -> list[Scored]:
        """The record of every completion token; leaves NumPy [completion_len, ...], one entry per sequence.

        Args:
            params: the weights.
            sequences: at most `prefill_rows` of them.
        """
        whole = self._chunk(sequences)
        parts = []
        for start in range(0, int(whole.length.max()), self._geometry.prefill_chunk):
            chunk = whole.replace(start=np.int32(start))
            self._cache, scored = self._program(params, self._cache, vocabulary, chunk)
            parts.append(scored)
        joined = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *jax.device_get(parts))
        results = []
        for row, sequence in enumerate(sequences):
            # What a position tells is about the token after it.
            first = sequence.prompt_tokens.size - 1
            due = slice(first, first + sequence.completion_tokens.size)
            results.append(jax.tree.map(lambda leaf, row=row, due=due: leaf[row, due], joined))
        return results

    def _chunk(self, sequences: Sequence[KnownSequence]) -> Chunk:
        """The first chunk of some sequences; the places of those that are missing hold nothing."""
        rows, cache_len = self._geometry.prefill_rows, self._geometry.cache_len
        buffer = np.zeros((rows, cache_len), np.int32)
        prompt_len, length, limit = (np.zeros(rows, np.int32) for _ in range(3))
        policies = [lower(SamplingParams(), self._capacity)] * rows
        for row, sequence in enumerate(sequences):
            tokens = np.concatenate([sequence.prompt_tokens, sequence.completion_tokens])
            buffer[row, : tokens.size] = tokens
            prompt_len[row], length[row], limit[row] = sequence.prompt_tokens.size, tokens.size, sequence.limit
            policies[row] = lower(sequence.params, self._capacity)
        return Chunk(np.int32(0), buffer, prompt_len, length, limit, stack(policies))


def score_chunk(
    model: Transformer,
    tokenizer_len: int,
    chunk_len: int,
    params: Any,
    cache: KVCache,
    vocabulary: Vocabulary,
    chunk: Chunk,
) -> tuple[KVCache, Scored]:
    """Reads `chunk_len` tokens of each sequence and scores the tokens that follow them."""
    rows, capacity = chunk.buffer.shape
    places = chunk.start + jnp.arange(chunk_len, dtype=jnp.int32)
    inside = places[None, :] < chunk.length[:, None]
    tokens = jnp.where(inside, chunk.buffer[:, jnp.minimum(places, capacity - 1)], 0)
    positions = jnp.where(inside, places[None, :], -1)
    hidden, cache = read_chunk(model, params, cache, tokens, positions, jnp.full(rows, chunk.start == 0))
    hidden = hidden.reshape(rows * chunk_len, -1)
    forward: Any = partial(model.apply, {"params": params}, method="logits")

    def scored(index: jax.Array) -> Scored:
        """Of positions `index` int32 [block], counted through all rows of the chunk."""
        row = jnp.minimum(index // chunk_len, rows - 1)
        length = chunk.start + index % chunk_len + 1
        due = (index < rows * chunk_len) & (length >= chunk.prompt_len[row]) & (length < chunk.length[row])

        def of_due() -> Scored:
            policy = jax.tree.map(lambda leaf: leaf[row], chunk.policy)
            before = StepState.prefixes(
                chunk.buffer[row],
                chunk.prompt_len[row],
                jnp.where(due, length, 0),
                chunk.limit[row],
                model.config.vocab_size,
            )
            following = chunk.buffer[row, jnp.minimum(length, capacity - 1)]
            logits = forward(hidden[jnp.minimum(index, hidden.shape[0] - 1)])
            choice = choose(policy, before, logits, following, tokenizer_len)
            stop = policy.bound(vocabulary).stop_codes(before, before.commit(following), following)
            return Scored(choice.record, stop)

        empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(of_due))
        return jax.lax.cond(jnp.any(due), of_due, lambda: empty)

    block = min(BLOCK_TOKENS, rows * chunk_len)
    blocks = -(-rows * chunk_len // block)
    index = jnp.arange(blocks * block, dtype=jnp.int32).reshape(blocks, block)
    by_block = jax.lax.map(scored, index)

    def by_row(leaf: jax.Array) -> jax.Array:
        flat = leaf.reshape(blocks * block, *leaf.shape[2:])[: rows * chunk_len]
        return flat.reshape(rows, chunk_len, *leaf.shape[2:])

    return cache, jax.tree.map(by_row, by_block)
