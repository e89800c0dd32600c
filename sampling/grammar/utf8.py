"""Ranges of code points as sequences of byte ranges, so that a set of characters can be read byte by byte."""

from __future__ import annotations

from collections.abc import Iterator

_LAST_OF_LENGTH = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)
"""The last code point that one, two, three and four bytes write."""


def utf8_sequences(low: int, high: int) -> Iterator[list[tuple[int, int]]]:
    """Sequences of inclusive byte ranges that together spell the characters low .. high, each of them once.

    Args:
        low, high: code points; no surrogate between them.
    Source: the utf8-ranges algorithm of RE2 and of Rust's regex-syntax.
    """
    for last in _LAST_OF_LENGTH:
        if low <= last < high:
            yield from utf8_sequences(low, last)
            yield from utf8_sequences(last + 1, high)
            return
    if high > _LAST_OF_LENGTH[0]:
        for bits in (6, 12, 18):
            mask = (1 << bits) - 1
            if low & ~mask == high & ~mask:
                continue
            if low & mask:
                yield from utf8_sequences(low, low | mask)
                yield from utf8_sequences((low | mask) + 1, high)
                return
            if high & mask != mask:
                yield from utf8_sequences(low, (high & ~mask) - 1)
                yield from utf8_sequences(high & ~mask, high)
                return
    yield list(zip(chr(low).encode(), chr(high).encode(), strict=True))
