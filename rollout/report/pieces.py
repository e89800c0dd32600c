"""The text of each token by itself, so that a page can colour it. For people: the ids stay the truth."""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Callable, Iterable, Sequence

_JOINERS = "\u200c\u200d"
"""Invisible, but parts of words and of pictures."""


def spell(tokens: Iterable[int], bytes_of: Callable[[int], bytes], before: Sequence[int] = ()) -> list[str]:
    """The text that each token adds, one string a token.

    A code point belongs to the token that completes it; those before have an empty text. Bytes that form no code
    point give U+FFFD, and what is left open at the end is given to the last token.

    Args:
        tokens: ids, one after the other.
        bytes_of: the bytes of an id.
        before: ids that come before them, whose last bytes the first of the tokens may complete.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in before:
        decoder.decode(bytes_of(token))
    pieces = [decoder.decode(bytes_of(token)) for token in tokens]
    if pieces:
        pieces[-1] += decoder.decode(b"", final=True)
    return [visible(piece) for piece in pieces]


def visible(text: str) -> str:
    """The text with characters that steer a display, rather than being seen, written out as <U+202E>."""
    return "".join(f"<U+{ord(char):04X}>" if _steers(char) else char for char in text)


def _steers(char: str) -> bool:
    return char not in "\n\t" and char not in _JOINERS and unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp", "Cs")
