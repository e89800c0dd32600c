"""What the rules of a grammar may hold that is followed on the host. llguidance passes over what it does not know in
`%json` and `%llguidance`, and some attributes of rules ask for more than a set of tokens; all that is refused here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from sampling.errors import ConfigError
from sampling.grammar.stepped_schema import require_known_keywords

_PIECES = re.compile(
    r"""
    (?: \#|//) [^\n]*                                   # a comment
    | "(?: \\. | [^"\\\n] )*"                           # a string
    | /(?: \\. | [^/\\] )+/                             # a regular expression
    | <[^<>\s]+>                                       # a special token
    | %(?P<keyword>json | llguidance | regex) \b \s*    # JSON follows
    | (?P<attribute>temperature | max_tokens | stop) \s* =
    | [\w-]+
    """,
    re.VERBOSE | re.DOTALL,
)
"""What has to be told apart to find keywords and attributes. In rules, `=` stands behind attributes alone."""

_OPTIONS = ("allow_initial_skip", "allow_invalid_utf8")
"""Of `%llguidance`; `no_forcing` is always on (sampling/grammar/stepped.py)."""

_LENIENT = ("lenient", "coerce_one_of")
"""Settings of `x-guidance` with which llguidance passes over keywords that it knows and cannot do."""


def require_known_rules(rules: str, where: str) -> None:
    """Refuses rules with something in them that would be passed over.

    Args:
        rules: in llguidance's variant of Lark's syntax. What it refuses itself may pass.
        where: begins the message of an error.
    Raises:
        ConfigError: there is such a thing; the message names it, its line, and its place in a schema.
    """
    for found, line, value in _pieces(rules, where):
        at = f"{where}: line {line}"
        if found["attribute"]:
            raise ConfigError(f"{at}: the attribute {found['attribute']!r} of a rule is not supported")
        if found["keyword"] == "json" and isinstance(value, dict):
            settings = value.pop("x-guidance", {})
            for name in _LENIENT:
                if isinstance(settings, dict) and settings.get(name):
                    raise ConfigError(f"{at}: {name!r} of x-guidance is not supported: keywords would be passed over")
            require_known_keywords(value, f"{at}: %json")
        if found["keyword"] == "llguidance" and isinstance(value, dict):
            for name in value:
                if name not in _OPTIONS:
                    known = ", ".join(_OPTIONS)
                    raise ConfigError(f"{at}: the option {name!r} of %llguidance is not supported; known are {known}")


def _pieces(rules: str, where: str) -> Iterator[tuple[re.Match[str], int, Any]]:
    """Each piece with its line, counted from 1, and the JSON behind it, if any is due."""
    place = 0
    while found := _PIECES.search(rules, place):
        line, value, place = rules.count("\n", 0, found.start()) + 1, None, found.end()
        if found["keyword"]:
            try:
                value, place = json.JSONDecoder().raw_decode(rules, place)
            except (ValueError, RecursionError) as error:
                expected = f"{where}: line {line}: expected JSON behind %{found['keyword']}"
                raise ConfigError(f"{expected}, got none that can be read: {error}") from error
        yield found, line, value
