"""Vocabulary: the bytes of every token, since a stop string or a grammar speaks of text where a model speaks of ids.

    vocabulary = Vocabulary.from_tokenizer(tokenizer, vocab_size=model.vocab_size)
    vocabulary.text_bytes([17, 4])  # b"fooE"

Bytes and not characters: a token may hold a part of a code point, and UTF-8 matches byte by byte exactly where it
matches character by character.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import ArrayLike
from tokenizers import Tokenizer

from sampling.errors import ConfigError

NO_BYTE = -1
"""Stands where a token, or a row, has no byte. Compare with it; it is not a byte's value."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's space
_NEIGHBOUR = "abcdef"


class MatchingMode(enum.StrEnum):
    """How the names of a vocabulary's tokens spell bytes."""

    BYTE_LEVEL = "byte_level"
    """Every character stands for one byte (GPT-2)."""
    BYTE_FALLBACK = "byte_fallback"
    """Text with U+2581 for a space, and <0xNN> for one byte (SentencePiece)."""
    TEXT = "text"
    """Whole characters, as the tokenizer's decoder writes them (WordPiece, Unigram, word-level)."""


class Vocabulary(struct.PyTreeNode):
    """The bytes of all tokens, end to end. NumPy leaves; `jax.device_put` it once where it is used for long.

    Attributes:
        flat: uint8 [total_bytes].
        offsets: int32 [vocab + 1]; token i owns flat[offsets[i] : offsets[i + 1]].
        max_token_bytes: bytes of the longest token (static).
    """

    flat: ArrayLike
    offsets: ArrayLike
    max_token_bytes: int = struct.field(pytree_node=False)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, vocab_size: int | None = None) -> Vocabulary:
        """The vocabulary of a tokenizer; arguments and errors as in `vocabulary_pieces`."""
        return cls.from_pieces(vocabulary_pieces(tokenizer, vocab_size))

    @classmethod
    def from_pieces(cls, pieces: Sequence[bytes]) -> Vocabulary:
        """A vocabulary from the bytes of each id.

        Raises:
            ConfigError: no token has any bytes.
        """
        lengths = [len(piece) for piece in pieces]
        if not any(lengths):
            raise ConfigError(f"expected a vocabulary in which some token has text, got {len(pieces)} without any")
        return cls(
            flat=np.frombuffer(b"".join(pieces), np.uint8),
            offsets=np.cumsum([0, *lengths], dtype=np.int32),
            max_token_bytes=max(lengths),
        )

    @property
    def size(self) -> int:
        """Number of token ids, padded ones included."""
        return np.shape(self.offsets)[0] - 1

    def num_bytes(self, tokens: jax.Array) -> jax.Array:
        """int32, shaped as `tokens` (int32, not negative): bytes of each token; an id past the vocabulary has none."""
        first, end = self._span(tokens)
        return end - first

    def bytes_at(self, tokens: jax.Array, index: jax.Array) -> jax.Array:
        """int16, `tokens` and `index` broadcast: that byte of each token, NO_BYTE where it has no such byte."""
        first, end = self._span(tokens)
        place = first + index
        byte = jnp.asarray(self.flat)[jnp.clip(place, 0, np.shape(self.flat)[0] - 1)]
        return jnp.where((index >= 0) & (place < end), byte.astype(jnp.int16), NO_BYTE)

    def text_bytes(self, tokens: Iterable[int]) -> bytes:
        """The bytes of some ids, one after the other; on the host.

        Raises:
            ConfigError: an id is outside the vocabulary.
        """
        flat, offsets = np.asarray(self.flat), np.asarray(self.offsets)
        ids = np.asarray([*tokens], np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= self.size):
            raise ConfigError(f"expected token ids in 0 .. {self.size - 1}, got {ids.min()} .. {ids.max()}")
        return b"".join(flat[offsets[i] : offsets[i + 1]].tobytes() for i in ids)

    def digest(self) -> str:
        """SHA-256, in hex, of every token's bytes: equal for equal vocabularies, on every machine."""
        parts = (np.asarray(self.offsets).astype("<i4"), np.asarray(self.flat))
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()

    def _span(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        offsets, last = jnp.asarray(self.offsets), self.size
        return offsets[jnp.minimum(tokens, last)], offsets[jnp.minimum(tokens + 1, last)]


def byte_alphabet() -> dict[str, int]:
    """The byte behind each of the 256 characters in which byte-level vocabularies are written.

    Source: bytes_to_unicode of GPT-2. Printable Latin-1 stands for itself, other bytes for U+0100 onwards, in order.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in sorted(printable)} | {chr(256 + i): byte for i, byte in enumerate(others)}


def matching_mode(tokenizer: Any) -> MatchingMode:
    """How a tokenizer spells bytes.

    Args:
        tokenizer: a Transformers tokenizer, fast or slow, a processor that holds one, or a fast one's bare backend.
    Raises:
        ConfigError: it is neither.
    Source: StopStringCriteria of Transformers 5.24 for fast tokenizers, whose decoder says it. It reads slow ones as
        text; here their byte table, or a vocabulary with all 256 byte pieces, counts as well.
    """
    tokenizer = _held_tokenizer(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        if hasattr(tokenizer, "byte_decoder"):
            return MatchingMode.BYTE_LEVEL
        has_bytes = tokenizer.get_vocab().keys() >= {f"<0x{byte:02X}>" for byte in range(256)}
        return MatchingMode.BYTE_FALLBACK if has_bytes else MatchingMode.TEXT
    decoders = _decoder_types(json.loads(backend.decoder.__getstate__())) if backend.decoder is not None else set()
    if "ByteFallback" in decoders:
        return MatchingMode.BYTE_FALLBACK
    return MatchingMode.BYTE_LEVEL if "ByteLevel" in decoders else MatchingMode.TEXT


def vocabulary_pieces(tokenizer: Any, vocab_size: int | None = None) -> list[bytes]:
    """The bytes that each id adds to a text which goes on, index by id.

    Special and added tokens are spelled as the tokenizer decodes them, which is their literal text; ids that the
    tokenizer does not have, such as those that pad a head, have no bytes.

    Args:
        tokenizer: a Transformers tokenizer, fast or slow, a processor that holds one, or a fast one's bare backend.
        vocab_size: ids of the model's head; by default the tokenizer's.
    Raises:
        ConfigError: `vocab_size` is smaller than the tokenizer.
    Source: StopStringCriteria.clean_tokenizer_vocab of Transformers 5.24.
    """
    tokenizer = _held_tokenizer(tokenizer)
    vocab: dict[str, int] = tokenizer.get_vocab()
    needed = max(vocab.values(), default=-1) + 1
    vocab_size = needed if vocab_size is None else vocab_size
    if vocab_size < needed:
        raise ConfigError(f"vocab_size: expected at least {needed}, the tokenizer's, got {vocab_size}")
    spell = {
        MatchingMode.BYTE_LEVEL: _byte_level_spelling,
        MatchingMode.BYTE_FALLBACK: _byte_fallback_spelling,
        MatchingMode.TEXT: _decoded_spelling,
    }[matching_mode(tokenizer)](tokenizer)
    pieces = [b""] * vocab_size
    for token, index in vocab.items():
        pieces[index] = spell(token)
    return pieces


def control_tokens(tokenizer: Any) -> tuple[int, ...]:
    """The ids that stand for no text, such as the begin of a message: special tokens, whose literal text nobody reads.

    Args:
        tokenizer: as in `vocabulary_pieces`.
    """
    added = _held_tokenizer(tokenizer).added_tokens_decoder
    return tuple(sorted(index for index, token in added.items() if token.special))


class _Backend:
    """A bare tokenizer of the tokenizers library, with the questions that this module asks of a Transformers one."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend_tokenizer = backend

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        return self.backend_tokenizer.get_added_tokens_decoder()

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab()

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        decoder = self.backend_tokenizer.decoder
        return decoder.decode(tokens) if decoder is not None else " ".join(tokens)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.backend_tokenizer.id_to_token(index) or "" for index in ids]

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}


def _held_tokenizer(holder: Any) -> Any:
    if isinstance(holder, Tokenizer):
        return _Backend(holder)
    for tokenizer in (holder, getattr(holder, "tokenizer", None)):
        if hasattr(tokenizer, "convert_tokens_to_string"):
            return tokenizer
    raise ConfigError(
        f"expected a Transformers tokenizer, or a processor with one in .tokenizer, got {type(holder).__name__}"
    )


def _decoder_types(config: Any) -> set[str]:
    """All types in a decoder of the tokenizers library, which may be a sequence of decoders."""
    if isinstance(config, list):
        return set().union(*map(_decoder_types, config))
    if not isinstance(config, dict):
        return set()
    return {config.get("type", "")} | _decoder_types([*config.values()])


def _byte_level_spelling(_: Any) -> Callable[[str], bytes]:
    alphabet = byte_alphabet()

    def spelled(token: str) -> bytes:
        try:
            return bytes(alphabet[char] for char in token)
        except KeyError:  # not written in the alphabet: an added token with a space in it, say
            return token.encode()

    return spelled


def _byte_fallback_spelling(_: Any) -> Callable[[str], bytes]:
    def spelled(token: str) -> bytes:
        byte = _BYTE_PIECE.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE_MARK, " ").encode()

    return spelled


def _decoded_spelling(tokenizer: Any) -> Callable[[str], bytes]:
    # Decoders drop the space before a text's first token, so each token is decoded after a neighbour.
    decode = tokenizer.convert_tokens_to_string
    neighbour = tokenizer.convert_ids_to_tokens(tokenizer(_NEIGHBOUR, add_special_tokens=False)["input_ids"])

    def spelled(token: str) -> bytes:
        before = neighbour or [token]
        return decode([*before, token])[len(decode(before)) :].encode()

    return spelled
