"""Regular expressions as nodes: Python's own syntax, read by Python's own parser, and `re.fullmatch` as the meaning."""

from __future__ import annotations

import functools
import re
import sys

# Private, but it is what `re` itself runs on, and there is no public way to a parsed pattern.
from re import _constants as op  # pyright: ignore[reportAttributeAccessIssue]
from re import _parser as parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

from sampling.errors import ConfigError
from sampling.grammar.nodes import ANY, EMPTY, SURROGATES, Chars, Node, chars, either, repeated, sequence
from sampling.param_checks import short

_CATEGORIES = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}

_REFUSED = {
    "GROUPREF": "a reference to a group",
    "GROUPREF_EXISTS": "a conditional group",
    "ASSERT": "look-ahead or look-behind",
    "ASSERT_NOT": "negative look-ahead or look-behind",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repeat",
}


def regex_node(pattern: str, where: str, *, search: bool = False) -> Node:
    """The texts that a pattern matches from end to end; or, with `search`, that hold a match anywhere.

    Args:
        where: begins the message of an error.
    Raises:
        ConfigError: no valid pattern, or one with something that no automaton can do: references, look-around,
            word boundaries, anchors amid the pattern, other flags than s, x, a and u.
    """
    try:
        parsed = parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"{where}: no valid regular expression: {error}, in {short(pattern)}") from error
    return _Translation(where, pattern, repeated(ANY) if search else EMPTY).of(parsed, parsed.state.flags, True, True)


class _Translation:
    """One pattern's way to nodes. `beyond`: what may stand before the match and after it."""

    def __init__(self, where: str, pattern: str, beyond: Node) -> None:
        self._where, self._pattern, self._beyond = where, pattern, beyond

    def of(self, items: Any, flags: int, left: bool, right: bool) -> Node:
        """A sequence of parsed items. left, right: whether the sequence begins and ends the pattern."""
        if flags & (re.IGNORECASE | re.MULTILINE | re.LOCALE):
            raise self._refused("the flag i, m or L")
        items = list(items)
        parts: list[Node] = []
        if left and items and items[0] in ((op.AT, op.AT_BEGINNING), (op.AT, op.AT_BEGINNING_STRING)):
            items, left = items[1:], False
        ends = right and items and items[-1] in ((op.AT, op.AT_END), (op.AT, op.AT_END_STRING))
        if ends:
            items, right = items[:-1], False
        if left and not (items and _has_edges(items[0])):
            parts.append(self._beyond)
        for place, (code, value) in enumerate(items):
            first, last = left and place == 0, right and place == len(items) - 1
            parts.append(self._item(code, value, flags, first, last))
        if right and not (items and _has_edges(items[-1])):
            parts.append(self._beyond)
        return sequence(*parts)

    def _item(self, code: Any, value: Any, flags: int, left: bool, right: bool) -> Node:
        match str(code):
            case "LITERAL":
                return self._char(value)
            case "NOT_LITERAL":
                return chars(chr(value), excluded=True)
            case "ANY":
                return ANY if flags & re.DOTALL else chars("\n", excluded=True)
            case "IN":
                return self._set(value, flags)
            case "BRANCH":
                return either(*(self.of(option, flags, left, right) for option in value[1]))
            case "SUBPATTERN":
                _, added, removed, inner = value
                return self.of(inner, (flags | added) & ~removed, left, right)
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, inner = value
                return repeated(self.of(inner, flags, False, False), least, None if most is op.MAXREPEAT else most)
            case "AT":
                raise self._refused("a word boundary, or an anchor that is not at one end of the pattern")
            case name:
                raise self._refused(_REFUSED.get(name, name))

    def _char(self, value: int) -> Chars:
        if SURROGATES[0] <= value <= SURROGATES[1]:
            raise self._refused("half of a surrogate pair")
        return chars(chr(value))

    def _set(self, members: list[tuple[Any, Any]], flags: int) -> Node:
        ranges: list[tuple[int, int]] = []
        for code, value in members:
            match str(code):
                case "LITERAL":
                    ranges.append((value, value))
                case "RANGE":
                    ranges.append(value)
                case "CATEGORY":
                    name = str(value).removeprefix("CATEGORY_")
                    category = _CATEGORIES[name.removeprefix("NOT_")]
                    category = category.upper() if name.startswith("NOT_") else category
                    ranges += _category(category, flags & re.ASCII)
        return chars(ranges=ranges, excluded=members[0][0] is op.NEGATE)

    def _refused(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self._where}: {what} in {short(self._pattern)} is not supported, since no automaton can do it here;"
            " write the pattern without"
        )


def _has_edges(item: Any) -> bool:
    """Whether an item has sequences of its own, which see to what stands before and after the match."""
    return str(item[0]) in ("BRANCH", "SUBPATTERN")


@functools.lru_cache(maxsize=16)
def _category(category: str, flags: int) -> list[tuple[int, int]]:
    r"""Ranges of the characters that \d, \s, \w, \D, \S or \W matches."""
    return [(found.start(), found.end() - 1) for found in re.finditer(f"{category}+", _every_character(), flags)]


@functools.lru_cache(maxsize=1)
def _every_character() -> str:
    return "".join(map(chr, range(sys.maxunicode + 1)))
