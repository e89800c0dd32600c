"""sampling/grammar/json_schema.py: what is written validates with jsonschema, and what cannot be is refused by name."""

import json
import random

import jsonschema
import numpy as np
import pytest

from sampling.errors import ConfigError
from sampling.grammar import Grammar, GrammarKind, TokenAutomaton
from sampling.vocabulary import Vocabulary
from tests.grammar_samples import SCHEMAS, walk

BYTES = Vocabulary.from_pieces([bytes([byte]) for byte in range(256)])


def automaton(schema):
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)).byte_automaton()


def accepted(schema, *texts):
    found = automaton(schema)
    return [found.accepts(text.encode()) for text in texts]


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_texts_validate(name):
    schema, generator = SCHEMAS[name], np.random.default_rng(0)
    assert jsonschema.Draft202012Validator.check_schema(schema) is None
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    tokens = TokenAutomaton.of(automaton(schema), BYTES)
    found = [text for _ in range(150) if (text := walk(tokens, generator, most=400)) is not None]
    assert len(found) > 20
    for text in found:
        validator.validate(json.loads(bytes(text)))


def test_case_b049_optional_properties():
    schema = {"type": "object", "properties": {"p": {"enum": ["lo", "hi"]}, "q": {"const": 4}}, "required": ["q"]}
    documents = ['{"q":4}', '{"p":"lo","q":4}', '{"q":4,"p":"mid"}', '{"p":"mid","q":4}', "{}"]
    for others in ({}, {"additionalProperties": False}, {"additionalProperties": {"type": "string"}}):
        assert accepted(schema | others, *documents) == [True, True, False, False, False]


def test_any_subset_of_optional_properties_in_order():
    schema = SCHEMAS["optional keys"]
    texts = ["{}", '{"a": 1}', '{"b":2, "d":4}', '{"a":1,"b":2,"c":3,"d":4}', '{"b":2,"a":1}', '{,"a":1}', '{"a":1,}']
    assert accepted(schema, *texts) == [True, True, True, True, False, False, False]


def test_a_declared_name_is_never_an_additional_one():
    texts = ['{"kind":"map"}', '{"kind":"map","x":true,"":false}', '{"kind":"map","kind":true}', '{"kind":"map","x":1}']
    assert accepted(SCHEMAS["map"], *texts) == [True, True, False, False]


def test_strings_in_every_way_of_writing_a_character():
    schema = {"type": "string", "minLength": 1, "maxLength": 1}
    texts = ['"a"', '"é"', '"\U0001f355"', r'"\n"', r'"\u00e9"', r'"\ud83c\udf55"', '"\x7f"']
    assert accepted(schema, *texts) == [True] * len(texts)
    assert accepted(schema, '""', '"aa"', '"\n"', r'"\x"', r'"\ud83c"', r'"\udf55\ud83c"', '"""', r'"\"') == [False] * 8


@pytest.mark.parametrize("seed", range(30))
def test_integers_within_bounds(seed):
    rng = random.Random(seed)
    low, high = sorted(rng.randint(-130, 130) for _ in range(2))
    above, below = rng.random() < 0.5, rng.random() < 0.5
    schema = {"type": "integer", "exclusiveMinimum" if above else "minimum": low}
    schema |= {"exclusiveMaximum" if below else "maximum": high}
    expected = [n for n in range(-150, 151) if low + above <= n <= high - below]
    if not expected:
        with pytest.raises(ConfigError, match="some text"):
            automaton(schema)
        return
    found = automaton(schema)
    assert [n for n in range(-150, 151) if found.accepts(str(n).encode())] == expected
    assert not any(found.accepts(text) for text in (b"00", b"-0", b"01", b"1.0", b"", b"-"))


@pytest.mark.parametrize("bounds", [(-2, 1), (0, 1), (-3, -1), (0, 0), (2, 12), (-12, None), (None, 3), (None, 0)])
@pytest.mark.parametrize("excluded", [(False, False), (True, True), (True, False), (False, True)])
def test_numbers_within_bounds(bounds, excluded):
    (low, high), (above, below) = bounds, excluded
    schema = {"type": "number"}
    schema |= {} if low is None else {"exclusiveMinimum" if above else "minimum": low}
    schema |= {} if high is None else {"exclusiveMaximum" if below else "maximum": high}
    validator = jsonschema.Draft202012Validator(schema)
    texts = [f"{n / 4:.2f}" for n in range(-60, 60)] + [str(n) for n in range(-15, 15)] + ["0.000000", "0.999999"]
    valid = [text for text in texts if validator.is_valid(json.loads(text)) and not text.startswith("-0.00")]
    if not valid:
        with pytest.raises(ConfigError, match="some text"):
            automaton(schema)
        return
    found = automaton(schema)
    assert [text for text in texts if found.accepts(text.encode())] == valid


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "string", "contentEncoding": "base64"}, "'contentEncoding'"),
        (
            {"type": "object", "properties": {"a": {"type": "array", "contains": {}}}},
            "#/properties/a: the keyword 'contains'",
        ),
        ({"oneOf": [{"type": "null"}]}, "'oneOf' is not supported; use anyOf"),
        ({"not": {"type": "string"}}, "'not'"),
        ({"type": "object", "patternProperties": {}}, "'patternProperties'"),
        ({"type": "object", "properties": {"a": {"type": "null"}}, "minProperties": 1}, "'minProperties'"),
        ({"type": "array", "items": {"type": "null"}, "uniqueItems": True}, "'uniqueItems'"),
        ({"type": "number", "multipleOf": 2}, "'multipleOf'"),
        ({"type": "number", "minimum": 0.5}, "whole bounds of a number"),
        ({"type": "string", "format": "email"}, "format: expected one of date, "),
        ({"type": "string", "pattern": "(?=a)"}, "#/pattern: look-ahead"),
        ({"type": "object"}, "any depth"),
        ({}, "any depth"),
        (True, "any depth"),
        ({"type": "array"}, "any depth"),
        ({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["b"]}, "required: 'b'"),
        ({"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}, "refers to itself"),
        ({"$ref": "#/nowhere"}, "there is no"),
        ({"$ref": "http://example.com"}, "expected a place in this schema"),
        ({"allOf": [{"type": "string"}, {"maxLength": 3}]}, "'allOf' is supported with one"),
        ({"anyOf": [{"type": "null"}], "minLength": 3}, "'minLength' is not supported beside 'anyOf'"),
        (
            {"type": "array", "items": {"type": "null"}, "minItems": 3, "maxItems": 2},
            "minItems = 3 contradicts maxItems = 2",
        ),
        ({"type": "text"}, "type: expected one of"),
        ({"type": "string", "minLength": "3"}, "minLength: expected a whole number"),
        ({"type": "string", "pattern": "^a", "maxLength": 0}, "some text"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(schema, named):
    with pytest.raises(ConfigError, match=r"^sampling\.json_schema: ") as error:
        automaton(schema)
    assert named in str(error.value)


def test_annotations_change_nothing():
    plain = automaton({"type": "integer"})
    noted = automaton({"type": "integer", "title": "n", "description": "a number", "default": 3, "examples": [1]})
    assert np.array_equal(plain.next_state, noted.next_state)


def test_many_properties_stay_linear():
    schema = {"type": "object", "properties": {f"key{i}": {"type": "boolean"} for i in range(120)}}
    assert automaton(schema).num_states < 120 * 40
