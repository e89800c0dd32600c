"""Stop strings: a row ends with the token that completes one of its strings.

Strings are data. A row's rule holds their UTF-8 bytes, not an automaton made from them, so rows of one batch stop at
different strings and a new string compiles nothing; the vocabulary tells which bytes the row's tokens are.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from sampling.errors import ConfigError
from sampling.state import StepState
from sampling.stopping import StoppingRule
from sampling.types import StopReason
from sampling.vocabulary import Vocabulary

_ENDS = 16
"""Bytes of the last token at which a match may end, looked at together: more than most tokens have."""


class StopStrings(StoppingRule):
    """Ends a row whose last token completes one of its strings.

    The bytes of prompt and drawn tokens are read as one text. A match ends within the last token; it may begin in any
    token before, and the last token may go on after it. So a match that an earlier token completed, in the prompt for
    instance, does not count again. A token without bytes is passed over, but no match reaches back over more tokens
    than its string has bytes.

    Attributes:
        patterns: uint8 [strings, pattern_len], or [rows, strings, pattern_len]; each string ends in the last column.
        lengths: int32 [strings] or [rows, strings]: bytes of each string, 0 where there is none.
        vocabulary: of the model. None adds no leaves, so a policy may stay small until it runs; calling needs one.
    Source: StopStringCriteria of Transformers 5.24. There an id that the tokenizer does not have ends the search, and
        every string reaches as far back as the longest one beside it.
    """

    patterns: ArrayLike
    lengths: ArrayLike
    vocabulary: Vocabulary | None = None
    reason = StopReason.STOP_STRING

    def __call__(self, state: StepState, tokens: jax.Array) -> jax.Array:
        """bool [rows]; rows that are not active, or have no strings, go on.

        Raises:
            ConfigError: no vocabulary is bound.
        """
        vocabulary = self.vocabulary
        if vocabulary is None:
            raise ConfigError("StopStrings: expected a vocabulary, got None; bind one with replace(vocabulary=...)")
        patterns, lengths = jnp.asarray(self.patterns), jnp.asarray(self.lengths)
        if patterns.ndim == 2:
            patterns, lengths = patterns[None], lengths[None]
        searched = jnp.any(lengths > 0, axis=-1) & state.active
        return jax.lax.cond(
            jnp.any(searched),
            lambda: searched & _completed(vocabulary, state, tokens, patterns.astype(jnp.int16), lengths),
            lambda: jnp.zeros_like(searched),
        )


def stop_strings(tokenizer: Any, strings: str | Sequence[str], vocab_size: int | None = None) -> StopStrings:
    """The rule for some strings, the same for all rows, with the vocabulary of a tokenizer bound.

    Args:
        tokenizer: a Transformers tokenizer, fast or slow, or a processor that holds one.
        strings: one or more, none empty.
        vocab_size: ids of the model's head; by default the tokenizer's.
    Raises:
        ConfigError: a string cannot be used, or `vocab_size` is smaller than the tokenizer.
    """
    sizes = [len(string) for string in stop_bytes(strings)]
    patterns, lengths = encode_stop_strings(strings, len(sizes), max(sizes, default=1))
    return StopStrings(patterns, lengths, Vocabulary.from_tokenizer(tokenizer, vocab_size))


def encode_stop_strings(strings: str | Sequence[str], capacity: int, pattern_len: int) -> tuple[np.ndarray, np.ndarray]:
    """The strings of one row at a fixed size, for `StopStrings`.

    Returns:
        uint8 [capacity, pattern_len], each string in the last columns of its row, and int32 [capacity], their lengths.
    Raises:
        ConfigError: a string cannot be used, or they need a larger capacity or pattern_len; the message says which.
    """
    encoded = stop_bytes(strings)
    longest = max(map(len, encoded), default=0)
    if len(encoded) > capacity or longest > pattern_len:
        raise ConfigError(
            f"stop: expected at most {capacity} strings of at most {pattern_len} bytes, got {len(encoded)} strings of"
            f" up to {longest} bytes; a capacity of {len(encoded)} and a pattern_len of {longest} would hold them"
        )
    patterns, lengths = np.zeros((capacity, pattern_len), np.uint8), np.zeros(capacity, np.int32)
    for i, string in enumerate(encoded):
        patterns[i, pattern_len - len(string) :] = np.frombuffer(string, np.uint8)
        lengths[i] = len(string)
    return patterns, lengths


def stop_bytes(strings: str | Sequence[str]) -> tuple[bytes, ...]:
    """The UTF-8 bytes of each stop string.

    Raises:
        ConfigError: one is empty, or no text that UTF-8 can write.
    """
    strings = (strings,) if isinstance(strings, str) else tuple(strings)
    for i, string in enumerate(strings):
        if not isinstance(string, str) or not string:
            raise ConfigError(f"stop[{i}]: expected a string of at least one character, got {string!r}")
        if any("\ud800" <= char <= "\udfff" for char in string):
            raise ConfigError(f"stop[{i}]: expected text, got {string!r} with half of a surrogate pair")
    return tuple(string.encode() for string in strings)


@dataclass(frozen=True)
class StopMatch:
    """Where in a completion its stop string stands, and the text that the stop leaves. Ids are not cut.

    Attributes:
        string: the stop string that matched.
        start: where it begins, in bytes of the completion; negative if it begins in the prompt.
        end: where it ends, in bytes of the completion.
        excluded: text of the completion before the stop string.
        included: text of the completion through the stop string.
    """

    string: str
    start: int
    end: int
    excluded: str
    included: str


def find_stop(
    vocabulary: Vocabulary,
    prompt_tokens: Sequence[int] | np.ndarray,
    completion_tokens: Sequence[int] | np.ndarray,
    strings: str | Sequence[str],
) -> StopMatch | None:
    """The match with which `StopStrings` ended a row, or None if its last token completes no string.

    Of several matches it is the one that is complete first, reading byte by byte, and of those the longest; so the text
    does not depend on how it is split into tokens. A code point on which the prompt breaks off belongs to the
    completion.

    Args:
        prompt_tokens: int [prompt_len]; completion_tokens: int [completion_len], up to the stop.
    Raises:
        ConfigError: a string cannot be used, or an id is outside the vocabulary.
    """
    strings = (strings,) if isinstance(strings, str) else tuple(strings)
    encoded = stop_bytes(strings)
    if not encoded or len(completion_tokens) == 0:
        return None
    # As far as a match can reach back, or a broken code point.
    lookback = max(map(len, encoded)) + 3
    before = vocabulary.text_bytes(prompt_tokens[-lookback:])
    data = before + vocabulary.text_bytes(completion_tokens)
    last_token = len(data) - len(vocabulary.text_bytes(completion_tokens[-1:]))
    tokens = [*prompt_tokens[-lookback:], *completion_tokens]

    found: list[tuple[int, int, str]] = []
    for string, pattern in zip(strings, encoded, strict=True):
        reach = len(vocabulary.text_bytes(tokens[-len(pattern) :]))
        start = data.find(pattern, max(last_token + 1 - len(pattern), len(data) - reach))
        if start >= 0:
            found.append((start + len(pattern), start, string))
    if not found:
        return None
    end, start, string = min(found)
    origin = len(before) - _broken_tail(before)
    return StopMatch(
        string=string,
        start=start - len(before),
        end=end - len(before),
        excluded=data[origin:start].decode(errors="replace"),
        included=data[origin:end].decode(errors="replace"),
    )


def _broken_tail(data: bytes) -> int:
    """Bytes at the end of a text that begin a code point without finishing it."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data)
    return len(decoder.getstate()[0])


def _completed(
    vocabulary: Vocabulary, state: StepState, tokens: jax.Array, patterns: jax.Array, lengths: jax.Array
) -> jax.Array:
    """bool [rows]: whether the last token completes a string; patterns int16 [rows or 1, strings, pattern_len]."""
    rows, pattern_len = tokens.shape[0], patterns.shape[-1]
    longest = jnp.max(jnp.where(state.active, vocabulary.num_bytes(tokens), 0))
    before, reach = _text_before(vocabulary, state, pattern_len - 1)
    index = jnp.arange(-(-vocabulary.max_token_bytes // _ENDS) * _ENDS, dtype=jnp.int32)
    text = jnp.concatenate([before, vocabulary.bytes_at(tokens[:, None], index[None, :])], axis=1)

    # A string takes from the tokens before the last only what as many tokens as it has bytes hold.
    num_before = jnp.broadcast_to(jnp.maximum(lengths - 1, 0), (rows, lengths.shape[-1]))
    least_taken = jnp.maximum(lengths - jnp.take_along_axis(reach, num_before, axis=1), 1)
    unused = jnp.arange(pattern_len, dtype=jnp.int32)[None, None, :] < pattern_len - lengths[:, :, None]
    ends = jnp.arange(_ENDS, dtype=jnp.int32)

    def block(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first, done = carry
        near = jax.lax.dynamic_slice_in_dim(text, first, pattern_len - 1 + _ENDS, axis=1)
        # int16 [rows, ends, pattern_len]: the bytes up to and with each end.
        windows = jnp.stack([near[:, end : end + pattern_len] for end in range(_ENDS)], axis=1)
        equal = jnp.all((windows[:, None] == patterns[:, :, None]) | unused[:, :, None], axis=-1)
        taken = (first + 1 + ends)[None, None, :]  # bytes of the last token up to and with each end
        matches = equal & (taken >= least_taken[:, :, None]) & (lengths > 0)[:, :, None]
        return first + _ENDS, done | jnp.any(matches, axis=(1, 2))

    start = (jnp.zeros((), jnp.int32), jnp.zeros(rows, bool))
    _, done = jax.lax.while_loop(lambda carry: carry[0] < longest, block, start)
    return done


def _text_before(vocabulary: Vocabulary, state: StepState, count: int) -> tuple[jax.Array, jax.Array]:
    """The bytes of each row before its last token, as far as its last `count` tokens before that one have them.

    Returns:
        int16 [rows, count], the nearest byte in the last column, NO_BYTE before the text begins; and int32
        [rows, count + 1], the number of bytes in the nearest 0 .. count of those tokens.
    """
    back = jnp.arange(count, dtype=jnp.int32)[None, :]
    place = state.length[:, None] - 2 - back
    tokens = jnp.take_along_axis(state.buffer, jnp.maximum(place, 0), axis=1)
    num_bytes = jnp.where(place >= 0, vocabulary.num_bytes(tokens), 0)
    reach = jnp.pad(jnp.cumsum(num_bytes, axis=1), ((0, 0), (1, 0)))
    # Counting bytes backwards from 0, byte `back` lies in the first token that reaches past it.
    holder = jnp.sum(reach[:, 1:, None] <= back[None, :], axis=1, dtype=jnp.int32)
    index = jnp.take_along_axis(reach, jnp.minimum(holder + 1, count), axis=1) - 1 - back
    token = jnp.take_along_axis(tokens, jnp.minimum(holder, max(count - 1, 0)), axis=1)
    # Where none does, `index` is negative.
    return vocabulary.bytes_at(token, index)[:, ::-1], reach
