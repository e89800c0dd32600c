"""Tests rollout/json_values.py."""

import json

import pytest
from hypothesis import given

from rollout.json_values import canonical_json, require_json, shown
from sampling.errors import PromptError
from tests import strategies


@given(strategies.json_values)
def test_what_is_accepted_comes_back_equal(value):
    require_json(value, "x", PromptError)
    assert json.loads(canonical_json(value)) == value


def test_equal_values_have_one_text():
    assert canonical_json({"b": [1, None], "a": "é"}) == '{"a":"\\u00e9","b":[1,null]}'
    assert canonical_json({"a": "é", "b": [1, None]}) == canonical_json({"b": [1, None], "a": "é"})


def nested(depth):
    value = 0
    for _ in range(depth):
        value = [value]
    return value


def test_the_limits_themselves_come_back_equal():
    value = {"depth": nested(99), "digits": 10**4000 - 1}
    require_json(value, "x", PromptError)
    assert json.loads(canonical_json(value)) == value


def test_a_long_value_is_shown_without_its_middle():
    assert shown("ab") == "'ab'"
    assert shown("a" * 1000 + "b", 20) == "'aaaaaaaaa ... aaaaaaaab' (1003 characters)"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [0, (1,)]}, r"x\.a\[1\]: expected a plain JSON value .*, got tuple; convert it first"),
        ({"a": {2: "b"}}, r"x\.a: expected text as keys, got 2"),
        ([float("nan")], r"x\[0\]: expected a finite number, got nan; store it as text or leave it out"),
        ({"a": "\udc00"}, r"x\.a: expected text that UTF-8 can hold"),
        ({"\udc00": 1}, "x, a key: expected text that UTF-8 can hold"),
        (b"bytes", "x: expected a plain JSON value .*, got bytes"),
        pytest.param(10**5000, "x: expected at most 4000 digits, got a larger number; store it as text", id="digits"),
        (nested(101), r"x(\[0\]){101}: expected at most 100 levels of lists and objects, got more; flatten it"),
        (nested(100_000), r"x(\[0\]){101}: expected at most 100 levels"),
    ],
)
def test_what_json_would_change_is_refused_with_its_place(value, message):
    with pytest.raises(PromptError, match=message):
        require_json(value, "x", PromptError)
