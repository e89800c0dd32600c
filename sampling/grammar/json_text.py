"""Parts of JSON texts as nodes: strings, their formats, and the signs between values."""

from __future__ import annotations

import json
from typing import Any

from sampling.grammar.nodes import Both, Chars, Node, chars, either, literal, optional, repeated, sequence
from sampling.grammar.regex import regex_node

QUOTE = literal('"')
PLAIN: Chars = chars('"\\', ranges=[(0, 0x1F)], excluded=True)
"""Characters that a JSON string holds as they are."""

_HEX = chars("0123456789abcdefABCDEF")
_UNIT = either(  # four hexadecimal digits that are no half of a surrogate pair
    sequence(chars("0123456789abcefABCEF"), repeated(_HEX, 3, 3)),
    sequence(chars("dD"), chars("01234567"), repeated(_HEX, 2, 2)),
)
_PAIR = sequence(
    chars("dD"), chars("89abAB"), repeated(_HEX, 2, 2), literal("\\u"), chars("dD"), chars("cdefCDEF"),
    repeated(_HEX, 2, 2),
)  # fmt: skip
CHARACTER = either(
    PLAIN, sequence(literal("\\"), either(chars('"\\/bfnrt'), sequence(literal("u"), either(_UNIT, _PAIR))))
)
"""One character of a JSON string, in any of the ways in which it may be written."""

COMMA = sequence(literal(","), optional(literal(" ")))
COLON = sequence(literal(":"), optional(literal(" ")))

_DATE = r"\d{4}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
FORMATS = {
    "date": rf"(?a){_DATE}",
    "time": rf"(?a){_TIME}",
    "date-time": rf"(?a){_DATE}T{_TIME}",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"(?a)({_BYTE}\.){{3}}{_BYTE}",
}
"""What a string of each format looks like. Of the leap days none is written, so that no year has to be known."""


def json_literal(value: Any) -> Node:
    """The value as `json.dumps` writes it, with characters beyond ASCII as they are."""
    return literal(json.dumps(value, ensure_ascii=False))


def json_string(least: int, most: int | None, contents: list[Node]) -> Node:
    """Strings of some length whose contents, written without escapes, belong to all of these languages."""
    if not contents:
        return sequence(QUOTE, repeated(CHARACTER, least, most), QUOTE)
    inside: Node = repeated(PLAIN, least, most)
    for content in contents:
        inside = Both(inside, content)
    return sequence(QUOTE, inside, QUOTE)


def any_of(values: list[Any]) -> Node:
    """One of some values."""
    return either(*map(json_literal, values))


def named_format(name: str, where: str) -> Node:
    """The contents of strings of a format."""
    return regex_node(FORMATS[name], where)
