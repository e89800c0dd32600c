"""What a grammar is made of: a language of texts as a tree, or rather a graph, of frozen nodes.

    sequence(literal('"'), repeated(chars("ab"), 1, 3), literal('"'))     "a", "b", "aa", ... "bbb" in quotes

Regular expressions and JSON schemas are translated to nodes; `sampling.grammar.byte_automaton` compiles nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

SURROGATES = (0xD800, 0xDFFF)
"""Code points that UTF-8 cannot write."""

LAST_CODE_POINT = 0x10FFFF


@dataclass(frozen=True)
class Chars:
    """One character out of `ranges`: inclusive code points, ascending, apart from each other, without surrogates."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Sequence:
    """The parts one after the other; without parts, the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Either:
    """One of the options; without options, no text at all."""

    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeated:
    """`node` at least `least` and at most `most` times; None is without end."""

    node: Node
    least: int
    most: int | None


@dataclass(frozen=True)
class Both:
    """Texts of `first` that are texts of `second` as well; or, where `excluded`, that are none of `second`."""

    first: Node
    second: Node
    excluded: bool = False


Node = Chars | Sequence | Either | Repeated | Both

EMPTY = Sequence(())


def chars(text: str = "", *, ranges: Iterable[tuple[int, int]] = (), excluded: bool = False) -> Chars:
    """The characters of a text and of some inclusive ranges of code points; or all others, where `excluded`."""
    merged: list[list[int]] = []
    for low, high in sorted([*((ord(char), ord(char)) for char in text), *ranges]):
        if merged and low <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    if excluded:
        edges = [-1, *(edge for pair in merged for edge in pair), LAST_CODE_POINT + 1]
        merged = [[low + 1, high - 1] for low, high in zip(edges[::2], edges[1::2], strict=True) if high - low > 1]
    below, above = SURROGATES
    parts = [part for low, high in merged for part in ((low, min(high, below - 1)), (max(low, above + 1), high))]
    return Chars(tuple((low, high) for low, high in parts if low <= high))


ANY = chars(excluded=True)
"""Any character."""

DIGIT = chars("0123456789")


def literal(text: str) -> Node:
    """This text alone."""
    return Sequence(tuple(chars(char) for char in text))


def sequence(*parts: Node) -> Node:
    """The parts one after the other."""
    return parts[0] if len(parts) == 1 else Sequence(parts)


def either(*options: Node) -> Node:
    """One of the options."""
    return options[0] if len(options) == 1 else Either(options)


def repeated(node: Node, least: int = 0, most: int | None = None) -> Node:
    """A node several times; by default any number of times."""
    return Repeated(node, least, most)


def optional(node: Node) -> Node:
    """A node, or nothing."""
    return Repeated(node, 0, 1)
