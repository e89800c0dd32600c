"""JSON schemas as nodes: texts that a schema's validator accepts, in one way of writing them.

What is written is always valid; not everything valid is written. Properties come in the order of the schema, with at
most one space after a comma or a colon; names and values that the schema spells out are written as `json.dumps` does.
A keyword that would be needed for that and is not known here is refused by its name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sampling.errors import ConfigError
from sampling.grammar.json_numbers import LARGEST_BOUNDED, LARGEST_INTEGER, Bounds, integer, number
from sampling.grammar.json_text import COLON, COMMA, FORMATS, PLAIN, any_of, json_literal, json_string, named_format
from sampling.grammar.nodes import Both, Node, either, literal, optional, repeated, sequence
from sampling.grammar.regex import regex_node
from sampling.param_checks import short

_SAYS_NOTHING = frozenset(
    "title description default examples deprecated readOnly writeOnly $schema $id $comment $defs definitions".split()
)
"""Keywords that no value has to meet."""

_OF_TYPE = {
    "object": "properties required additionalProperties".split(),
    "array": "items prefixItems minItems maxItems uniqueItems".split(),
    "string": "minLength maxLength pattern format".split(),
    "integer": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split(),
    "number": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split(),
    "boolean": [],
    "null": [],
}
"""The types, and the keywords that values of each have to meet."""

_ALONE = ("$ref", "const", "enum", "anyOf", "allOf")
"""Keywords that stand for the whole schema: beside them only a type may stand."""

_KNOWN = _SAYS_NOTHING.union(["type"], _ALONE, *_OF_TYPE.values())

_DEEP = "a value of any depth is beyond a token automaton"

_SLOWER = "or set grammar_mode to 'host', which follows any depth, more slowly"


def json_schema_node(schema: Any, where: str) -> Node:
    """The texts that a schema allows.

    Args:
        schema: plain values, as `json.loads` gives them.
        where: begins the message of an error.
    Raises:
        ConfigError: a keyword or a value of one is not supported, or the schema allows nothing; the message says where
            in the schema.
    """
    return _Schema(schema, where).node(schema, "#", ())


class _Schema:
    """One schema's way to nodes. `path` is where in it, `refs` are the references that led there."""

    def __init__(self, root: Any, where: str) -> None:
        self._root, self._where = root, where

    def node(self, schema: Any, path: str, refs: tuple[str, ...]) -> Node:
        if schema is False:
            return either()
        if not isinstance(schema, Mapping):
            raise self._error(path, f"{_DEEP}, so a schema has to name its type, got {short(schema)}; {_SLOWER}")
        for keyword in schema:
            if keyword not in _KNOWN:
                raise self._error(path, f"the keyword {keyword!r} is not supported; {self._hint(keyword)}")
        alone = [keyword for keyword in _ALONE if keyword in schema]
        beside = [keyword for keyword in schema if keyword not in _SAYS_NOTHING.union(alone[:1], ["type"])]
        if alone and beside:
            raise self._error(path, f"the keyword {beside[0]!r} is not supported beside {alone[0]!r}; write one schema")
        if not alone:
            return either(*(self._typed(name, schema, path, refs) for name in self._types(schema, path)))
        keyword, value = alone[0], schema[alone[0]]
        if keyword in ("const", "enum"):
            values = [value] if keyword == "const" else self._list(value, f"{path}/enum", "values")
            return any_of([v for v in values if "type" not in schema or self._is_of(v, self._types(schema, path))])
        if "type" in schema:
            raise self._error(path, f"the keyword 'type' is not supported beside {keyword!r}; write it there")
        if keyword == "$ref":
            return self._referred(value, path, refs)
        options = self._list(value, f"{path}/{keyword}", "schemas")
        if keyword == "allOf" and len(options) > 1:
            raise self._error(path, "the keyword 'allOf' is supported with one schema alone; write all into one")
        return either(*(self.node(option, f"{path}/{keyword}/{i}", refs) for i, option in enumerate(options)))

    def _types(self, schema: Mapping[str, Any], path: str) -> list[str]:
        found = schema.get("type")
        if found is None:
            found = [name for name, keywords in _OF_TYPE.items() if any(keyword in schema for keyword in keywords)]
            found = ["number"] if found == ["integer", "number"] else found
            if len(found) != 1:
                raise self._error(
                    path, f"{_DEEP}, so a schema has to name its type, got {short(dict(schema))}; {_SLOWER}"
                )
        types = [found] if isinstance(found, str) else self._list(found, f"{path}/type", "types")
        for name in types:
            if name not in _OF_TYPE:
                raise self._error(path, f"type: expected one of {', '.join(_OF_TYPE)}, got {short(name)}")
        return types

    def _typed(self, name: str, schema: Mapping[str, Any], path: str, refs: tuple[str, ...]) -> Node:
        match name:
            case "object":
                return self._object(schema, path, refs)
            case "array":
                return self._array(schema, path, refs)
            case "string":
                return self._string(schema, path)
            case "boolean":
                return any_of([True, False])
            case "null":
                return json_literal(None)
            case _:
                return self._number(name, schema, path)

    def _object(self, schema: Mapping[str, Any], path: str, refs: tuple[str, ...]) -> Node:
        properties = schema.get("properties", {})
        if not isinstance(properties, Mapping):
            raise self._error(path, f"properties: expected a mapping, got {short(properties)}")
        required = self._list(schema.get("required", []), f"{path}/required", "names")
        missing = [name for name in required if name not in properties]
        if missing:
            raise self._error(path, f"required: {missing[0]!r} is none of the properties; describe it there")
        others = schema.get("additionalProperties", True)
        if not isinstance(others, bool | Mapping):
            raise self._error(path, f"additionalProperties: expected a schema, got {short(others)}")
        if others is True and not properties:
            needs = "an object needs properties, or additionalProperties with a schema"
            raise self._error(path, f"{_DEEP}, so {needs}; {_SLOWER}")

        close = literal("}")
        # What may follow once nothing has been written, or something. Built from the last property to the first.
        opened = begun = close
        if isinstance(others, Mapping):
            names: Node = json_string(0, None, [repeated(PLAIN)])
            if properties:
                names = Both(names, any_of([*properties]), excluded=True)
            value = self.node(others, f"{path}/additionalProperties", refs)
            other = sequence(names, COLON, value)
            begun = sequence(repeated(sequence(COMMA, other)), close)
            opened = either(close, sequence(other, begun))
        for key, inner in reversed([*properties.items()]):
            value = self.node(inner, f"{path}/properties/{key}", refs)
            entry = sequence(json_literal(key), COLON, value)
            first, later = sequence(entry, begun), sequence(COMMA, entry, begun)
            opened, begun = (first, later) if key in required else (either(first, opened), either(later, begun))
        return sequence(literal("{"), opened)

    def _array(self, schema: Mapping[str, Any], path: str, refs: tuple[str, ...]) -> Node:
        if schema.get("uniqueItems"):
            raise self._error(path, "the keyword 'uniqueItems' is not supported; let a reward see to it")
        least, most = self._sizes(schema, "minItems", "maxItems", path)
        prefix = self._list(schema.get("prefixItems", []), f"{path}/prefixItems", "schemas")
        first = [self.node(item, f"{path}/prefixItems/{i}", refs) for i, item in enumerate(prefix)][:most]
        items = schema.get("items", not prefix)
        bounded = most is not None and most <= len(first)
        if items is False or bounded:
            if least > len(first):
                raise self._error(path, f"minItems: expected at most {len(first)}, the items described, got {least}")
            rest = None
        else:
            rest = self.node(items, f"{path}/items", refs)
        least = max(least - len(first), 0)
        most = None if most is None else most - len(first)
        body = [part for item in first for part in (COMMA, item)][1:]
        if rest is not None and first:
            body.append(repeated(sequence(COMMA, rest), least, most))
        elif rest is not None:
            more = repeated(sequence(COMMA, rest), max(least - 1, 0), None if most is None else most - 1)
            body.append(sequence(rest, more) if least else optional(sequence(rest, more)))
        return sequence(literal("["), *body, literal("]"))

    def _string(self, schema: Mapping[str, Any], path: str) -> Node:
        least, most = self._sizes(schema, "minLength", "maxLength", path)
        contents = []
        if "pattern" in schema:
            pattern = schema["pattern"]
            if not isinstance(pattern, str):
                raise self._error(path, f"pattern: expected a regular expression, got {short(pattern)}")
            contents.append(regex_node(pattern, f"{self._where}: at {path}/pattern", search=True))
        if "format" in schema:
            if schema["format"] not in FORMATS:
                known = ", ".join(FORMATS)
                raise self._error(
                    path, f"format: expected one of {known}, got {short(schema['format'])}; use a pattern"
                )
            contents.append(named_format(schema["format"], f"{self._where}: at {path}/format"))
        return json_string(least, most, contents)

    def _number(self, name: str, schema: Mapping[str, Any], path: str) -> Node:
        if schema.get("multipleOf", 1) != 1 or ("multipleOf" in schema and name == "number"):
            raise self._error(path, "the keyword 'multipleOf' is not supported; let a reward see to it")
        least, above = self._bound(schema, "minimum", "exclusiveMinimum", max, path)
        most, below = self._bound(schema, "maximum", "exclusiveMaximum", min, path)
        if name == "integer":  # 0.5 < n means 1 <= n
            least, above = (least, above) if least is None or least % 1 == 0 else (math.ceil(least), False)
            most, below = (most, below) if most is None or most % 1 == 0 else (math.floor(most), False)
        for bound in (least, most):
            largest = LARGEST_INTEGER if name == "integer" else LARGEST_BOUNDED
            if bound is not None and (bound % 1 or abs(bound) > largest):
                raise self._error(path, f"expected whole bounds of a {name} within {largest:,}, got {bound}")
        bounds = Bounds(None if least is None else int(least), None if most is None else int(most), above, below)
        return integer(bounds) if name == "integer" else number(bounds)

    def _bound(self, schema: Mapping[str, Any], with_: str, without: str, tighter: Any, path: str) -> Any:
        """The tighter one of two bounds, and whether it is excluded."""
        found = []
        for keyword in (with_, without):
            value = schema.get(keyword)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                    raise self._error(path, f"{keyword}: expected a number, got {short(value)}")
                found.append(value)
        if not found:
            return None, False
        bound = tighter(found)
        return bound, schema.get(without) == bound

    def _sizes(self, schema: Mapping[str, Any], least: str, most: str, path: str) -> tuple[int, int | None]:
        low, high = schema.get(least, 0), schema.get(most)
        for keyword, value in ((least, low), (most, high)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise self._error(path, f"{keyword}: expected a whole number of at least 0, got {short(value)}")
        if high is not None and low > high:
            raise self._error(path, f"{least} = {low} contradicts {most} = {high}: no value has both")
        return low, high

    def _referred(self, ref: Any, path: str, refs: tuple[str, ...]) -> Node:
        if not isinstance(ref, str) or not ref.startswith("#"):
            raise self._error(path, f"$ref: expected a place in this schema such as '#/$defs/name', got {short(ref)}")
        if ref in refs:
            raise self._error(
                path, f"$ref: {ref!r} refers to itself, and {_DEEP}; unfold it as deep as you need, {_SLOWER}"
            )
        found = self._root
        for name in ref.split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or name not in found:
                raise self._error(path, f"$ref: there is no {ref!r} in the schema")
            found = found[name]
        return self.node(found, ref, (*refs, ref))

    def _list(self, value: Any, path: str, what: str) -> list[Any]:
        if isinstance(value, str | Mapping) or not hasattr(value, "__iter__"):
            raise self._error(path, f"expected a list of {what}, got {short(value)}")
        return list(value)

    def _is_of(self, value: Any, types: list[str]) -> bool:
        """Whether a plain value is of one of the types."""
        if isinstance(value, bool):
            return "boolean" in types
        if isinstance(value, int | float):
            return "number" in types or ("integer" in types and value % 1 == 0)
        kinds = {str: "string", list: "array", tuple: "array", dict: "object", type(None): "null"}
        return kinds[type(value)] in types

    def _hint(self, keyword: str) -> str:
        if keyword == "oneOf":
            return "use anyOf"
        return f"supported are {', '.join(sorted(_KNOWN - _SAYS_NOTHING))}"

    def _error(self, path: str, what: str) -> ConfigError:
        return ConfigError(f"{self._where}: at {path}: {what}")
