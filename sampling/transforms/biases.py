"""Biases on tokens and on sequences of tokens.

Tables have a fixed number of places, so that their content is data. A place that is not used holds length 0 or
NO_TOKEN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from sampling.errors import ConfigError
from sampling.state import NO_TOKEN, StepState
from sampling.transforms.base import FILTER, Transform
from sampling.transforms.masks import is_empty


class SequenceBias(Transform):
    """Adds a bias to the last token of a sequence whenever the history ends with the tokens before it.

    A sequence of one token is biased at every step. A prefix longer than the history is skipped. -inf bans.

    Attributes:
        sequences: int32 [sequences, sequence_len] or [rows, sequences, sequence_len].
        lengths: int32 [sequences] or [rows, sequences]; 0 marks an unused place.
        bias: float32, like `lengths`.

    Source: Transformers' SequenceBiasLogitsProcessor.
    """

    sequences: ArrayLike
    lengths: ArrayLike
    bias: ArrayLike
    NEUTRAL = (((NO_TOKEN,),), (0,), (0.0,))
    argmax_invariant = False

    def is_neutral(self) -> jax.Array:
        return jnp.all(jnp.asarray(self.lengths) <= 0, axis=-1)

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        rows = logits.shape[0]
        sequences, lengths = jnp.asarray(self.sequences, jnp.int32), jnp.asarray(self.lengths, jnp.int32)
        sequences = sequences if sequences.ndim == 3 else sequences[None]
        count, longest = sequences.shape[1:]
        sequences = jnp.broadcast_to(sequences, (rows, count, longest))
        lengths = jnp.broadcast_to(lengths, (rows, count))
        bias = jnp.broadcast_to(jnp.asarray(self.bias, jnp.float32), (rows, count))

        matches = lengths > 0
        suffix = state.ended_with(max(longest - 1, 1))
        for back in range(1, longest):
            # Token `back` places before the last one of the sequence, against the history from its end.
            index = jnp.maximum(lengths - 1 - back, 0)
            token = jnp.take_along_axis(sequences, index[:, :, None], axis=-1)[:, :, 0]
            matches &= (token == suffix[:, back - 1 : back]) | (back > lengths - 1)
        last = jnp.take_along_axis(sequences, jnp.maximum(lengths - 1, 0)[:, :, None], axis=-1)[:, :, 0]
        return _add(logits, jnp.where(matches, last, NO_TOKEN), bias)


class LogitBias(Transform):
    """Adds a bias to the scores of some tokens; -inf bans.

    Made from a mapping, `LogitBias({id: bias})`, or from arrays, `LogitBias(ids, bias)`.

    Attributes:
        tokens: int32 [tokens] or [rows, tokens]; NO_TOKEN marks an unused place.
        bias: float32, like `tokens`.
    """

    tokens: Any
    bias: Any = None
    NEUTRAL = ({},)
    argmax_invariant = False

    def __post_init__(self) -> None:
        if isinstance(self.tokens, Mapping):
            entries = dict(self.tokens)
            object.__setattr__(self, "tokens", np.array(list(entries), np.int32))
            object.__setattr__(self, "bias", np.array(list(entries.values()), np.float32))

    def is_neutral(self) -> jax.Array:
        return is_empty(self.tokens)

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        tokens, bias = jnp.asarray(self.tokens, jnp.int32), jnp.asarray(self.bias, jnp.float32)
        shape = (logits.shape[0], tokens.shape[-1])
        return _add(logits, jnp.broadcast_to(tokens, shape), jnp.broadcast_to(bias, shape))


def _add(logits: jax.Array, tokens: jax.Array, bias: jax.Array) -> jax.Array:
    """Adds up each row's biases, in order, and adds the sums to the scores; a removed token stays removed."""
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    index = jnp.where(tokens < 0, logits.shape[1], tokens)
    total = jnp.zeros_like(logits).at[row, index].add(bias, mode="drop")
    return jnp.where(jnp.isneginf(logits), FILTER, logits + total)


def sequence_bias(entries: Mapping[Sequence[int], float] | Sequence[tuple[Sequence[int], float]]) -> SequenceBias:
    """A SequenceBias from {token ids: bias} or a list of pairs (token ids, bias).

    Raises:
        ConfigError: there is no entry, a sequence is empty or repeated, an id is negative, or a bias is NaN or +inf.
    """
    return _table("sequence_bias", entries.items() if isinstance(entries, Mapping) else entries)


def bad_words(ids: Sequence[Sequence[int]], eos_id: int | Sequence[int] | None = None) -> SequenceBias:
    """A SequenceBias that bans sequences of tokens. Bans of a single end-of-sequence token are left out.

    Source: Transformers' NoBadWordsLogitsProcessor.
    Raises:
        ConfigError: there is no word, a word is empty, or an id is negative.
    """
    eos = [] if eos_id is None else np.atleast_1d(eos_id).tolist()
    words = dict.fromkeys(tuple(word) for word in ids)
    kept = [word for word in words if not (len(word) == 1 and word[0] in eos)]
    if words and not kept:
        return SequenceBias(*SequenceBias.NEUTRAL)
    return _table("bad_words", [(word, FILTER) for word in kept])


def _table(where: str, entries: Iterable[tuple[Sequence[int], float]]) -> SequenceBias:
    biases: dict[tuple[int, ...], float] = {}
    for ids, bias in entries:
        sequence = tuple(int(token) for token in ids)
        if not sequence or min(sequence) < 0:
            raise ConfigError(f"{where}: expected a sequence of token ids >= 0, got {list(sequence)}")
        if sequence in biases:
            raise ConfigError(f"{where}: the sequence {list(sequence)} is given more than once")
        if np.isnan(bias) or bias == np.inf:
            raise ConfigError(f"{where}: expected a number or -inf for {list(sequence)}, got {bias}")
        biases[sequence] = bias
    if not biases:
        raise ConfigError(f"{where}: expected at least one sequence of token ids, got none")
    table = np.full((len(biases), max(map(len, biases))), NO_TOKEN, np.int32)
    for place, sequence in enumerate(biases):
        table[place, : len(sequence)] = sequence
    lengths = np.array([len(sequence) for sequence in biases], np.int32)
    return SequenceBias(table, lengths, np.array(list(biases.values()), np.float32))
