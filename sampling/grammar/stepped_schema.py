"""What a JSON schema may hold that is followed on the host. llguidance refuses what it knows and cannot do; names that
it does not know, misspelt ones for instance, it passes over, so those are refused here."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from sampling.errors import ConfigError

_SAYS_NOTHING = frozenset(
    "title description default examples deprecated readOnly writeOnly $schema $id $comment".split()
)
_ONE = ("items", "additionalProperties")
"""Keywords with one schema below them."""

_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
"""Keywords with a list of them; `items` may have either."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions")

_PLAIN = (
    "$ref const enum type required minItems maxItems minProperties maxProperties minLength maxLength pattern format"
    " minimum maximum exclusiveMinimum exclusiveMaximum multipleOf"
).split()

_KNOWN = _SAYS_NOTHING.union(_ONE, _LISTS, _MAPS, _PLAIN)


def require_known_keywords(schema: Any, where: str) -> None:
    """Refuses a schema with a keyword that would be passed over.

    Args:
        schema: plain values, as `json.loads` gives them.
        where: begins the message of an error.
    Raises:
        ConfigError: there is one, or a reference to what is no schema and so was not looked at; the message says where
            in the schema.
    """
    schemas = dict(_schemas(schema, "#"))
    for path, inner in schemas.items():
        for keyword in inner:
            if keyword not in _KNOWN:
                near = difflib.get_close_matches(keyword, _KNOWN, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(_KNOWN))}"
                raise ConfigError(f"{where}: at {path}: the keyword {keyword!r} is not supported; {hint}")
        ref = inner.get("$ref")
        if isinstance(ref, str) and ref.startswith("#") and _plain_path(ref) not in schemas:
            raise ConfigError(f"{where}: at {path}: $ref: there is no schema at {ref!r}; name one under #/$defs")


def _schemas(schema: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A schema and all below it, each with its place; one that is true or false has no keywords."""
    if not isinstance(schema, Mapping):
        yield path, {}
        return
    yield path, schema
    for keyword, value in schema.items():
        at = f"{path}/{keyword}"
        if keyword in _LISTS and isinstance(value, list):
            for index, inner in enumerate(value):
                yield from _schemas(inner, f"{at}/{index}")
        elif keyword in _ONE:
            yield from _schemas(value, at)
        elif keyword in _MAPS and isinstance(value, Mapping):
            for name, inner in value.items():
                yield from _schemas(inner, f"{at}/{name}")


def _plain_path(ref: str) -> str:
    """A reference as `_schemas` writes places."""
    return unquote(ref).replace("~1", "/").replace("~0", "~").rstrip("/")
