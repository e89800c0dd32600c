"""What a JSON schema may hold that is followed on the host. llguidance refuses what it knows and cannot do; names that
it does not know, misspelt ones for instance, it passes over, so those are refused here."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from sampling.errors import ConfigError

_SAYS_NOTHING = frozenset(
    "title description default examples deprecated readOnly writeOnly $schema $id $comment".split()
)
_ONE = ("items", "additionalProperties")
"""Keywords with one schema below them."""

_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAP = ("properties", "patternProperties", "$defs", "definitions")

_PLAIN = (
    "$ref const enum type required minItems maxItems minProperties maxProperties minLength maxLength pattern format"
    " minimum maximum exclusiveMinimum exclusiveMaximum multipleOf"
).split()

_KNOWN = _SAYS_NOTHING.union(_ONE, _LIST, _MAP, _PLAIN)


def require_known_keywords(schema: Any, where: str) -> None:
    """Refuses a schema with a keyword that would be passed over.

    Args:
        schema: plain values, as `json.loads` gives them.
        where: begins the message of an error.
    Raises:
        ConfigError: there is one; the message says where in the schema.
    """
    for path, inner in _schemas(schema, "#"):
        for keyword in inner:
            if keyword not in _KNOWN:
                near = difflib.get_close_matches(keyword, _KNOWN, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(_KNOWN))}"
                raise ConfigError(f"{where}: at {path}: the keyword {keyword!r} is not supported; {hint}")


def _schemas(schema: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A schema and all below it, each with its place."""
    if not isinstance(schema, Mapping):
        return
    yield path, schema
    for keyword, value in schema.items():
        at = f"{path}/{keyword}"
        if keyword in _ONE:
            yield from _schemas(value, at)
        elif keyword in _LIST and isinstance(value, list):
            for index, inner in enumerate(value):
                yield from _schemas(inner, f"{at}/{index}")
        elif keyword in _MAP and isinstance(value, Mapping):
            for name, inner in value.items():
                yield from _schemas(inner, f"{at}/{name}")
