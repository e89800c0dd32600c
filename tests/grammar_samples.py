"""Grammars that several tests share, and texts drawn from their automata without a model."""

from __future__ import annotations

import numpy as np

from sampling.grammar import TokenAutomaton

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "born": {"type": "string", "format": "date"},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 8},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["zip"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "address"],
    "additionalProperties": False,
}

SCHEMAS = {
    "nested": PERSON,
    "deep": {
        "type": "object",
        "properties": {
            "a": {"type": "object", "properties": {"b": {"type": "object", "properties": {"c": {"type": "null"}}}}}
        },
        "required": ["a"],
    },
    "bounded array": {
        "type": "array",
        "items": {"type": "integer", "minimum": -9, "maximum": 120},
        "minItems": 2,
        "maxItems": 5,
    },
    "array of arrays": {
        "type": "array",
        "maxItems": 3,
        "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "tuple": {"type": "array", "prefixItems": [{"type": "integer", "minimum": 0}, {"const": "x"}], "items": False},
    "tuple and rest": {
        "type": "array",
        "prefixItems": [{"type": "null"}],
        "items": {"enum": [1, 2]},
        "minItems": 2,
        "maxItems": 4,
    },
    "enum": {"enum": ["a", "ab", "é", 'with "quotes"', 1, 1.5, None, [1, {"k": "v"}]]},
    "typed enum": {"type": "string", "enum": ["lo", "hi", "the lot"]},
    "integer": {"type": "integer", "exclusiveMinimum": -3, "maximum": 1005},
    "number": {"type": "number"},
    "bounded number": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "negative number": {"type": "number", "minimum": -20, "maximum": -3},
    "string": {"type": "string", "maxLength": 6},
    "long string": {"type": "string", "minLength": 10, "maxLength": 20},
    "pattern": {"type": "string", "pattern": "[a-c]+-(\\d\\d|é)", "maxLength": 12},
    "formats": {
        "type": "array",
        "prefixItems": [{"type": "string", "format": name} for name in ("date-time", "uuid", "ipv4")],
    },
    "optional keys": {
        "type": "object",
        "properties": {name: {"type": "integer", "minimum": 0, "maximum": 9} for name in "abcd"},
        "additionalProperties": False,
    },
    "map": {
        "type": "object",
        "properties": {"kind": {"const": "map"}},
        "required": ["kind"],
        "additionalProperties": {"type": "boolean"},
    },
    "alternatives": {
        "anyOf": [
            {"type": ["integer", "null"]},
            {"type": "object", "properties": {"é": {"type": "boolean"}}, "required": ["é"]},
        ]
    },
    "references": {
        "$defs": {
            "point": {"type": "array", "prefixItems": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/c"}]},
            "c": {"type": "integer", "minimum": -5, "maximum": 5},
        },
        "type": "object",
        "title": "A line",
        "properties": {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
        "required": ["from", "to"],
        "additionalProperties": False,
    },
}
"""Twenty schemas: nested objects, arrays with bounds, enums, numbers, strings with escapes, optional keys and more."""

REGEXES = {
    "date": r"(19|20)\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])",
    "phone": r"\+?[0-9]{1,3}([ -][0-9]{2,4}){2,3}",
    "arrows": "[←-↓]+",
    "multi-byte alternatives": "日本(語)?|é|ü+|\U0001f355{1,2}",
    "prefixes": "yes|yes please|no",
}


def walk(automaton: TokenAutomaton, generator: np.random.Generator, most: int) -> list[int] | None:
    """Tokens drawn evenly from what may follow, up to acceptance; None if that takes more than `most`."""
    state, tokens = 0, []
    while len(tokens) <= most:
        allowed = automaton.allowed(state)
        if automaton.accepting[state] and (not allowed.size or generator.random() < 0.3):
            return tokens
        tokens.append(int(generator.choice(allowed)))
        state = automaton.step(state, tokens[-1])
    return None
