"""Context-free grammars through the engine: a matcher on the host follows each row.

1.  Every completion is whole and belongs to its grammar, or ends by its budget.
2.  Rows of both modes and free rows share a program; a row's bits are those it has alone, and those of its replay.
3.  Tokens outside the grammar are found; explanations show where the matcher stands.
4.  What cannot be is refused by name.
5.  Contradictions that only tables foresee end a row with a reason that has a name.
6.  Records hold the version of what followed the grammar; another one is refused.
"""

import dataclasses
import json
import logging
import re

import numpy as np
import pytest

from sampling import Engine, Geometry, SamplingParams, StopReason, load_checkpoint
from sampling.errors import ConfigError
from sampling.explain import explain
from sampling.explanation import Verdict
from sampling.grammar import installed_library
from sampling.keys import row_key
from sampling.scoring import FORWARD_BOUND
from tests.sampling.test_engine import assert_same_bits, prompt, rows
from tests.sampling.test_grammars import asked, ids, text, uniform
from tests.tiny_models import EOS_ID, tiny_llama

GEOMETRY = Geometry(slots=16, cache_len=160, prefill_chunk=8)

ARITHMETIC = r"""
start: sum
sum: product (("+" | "-") product)*
product: atom (("*" | "/") atom)*
atom: NUMBER | "(" sum ")"
NUMBER: /[0-9]{1,3}/
"""

TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"enum": [1, "é", None]},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 3},
            },
            "required": ["v", "kids"],
            "additionalProperties": False,
        }
    },
}

STEPPED = [
    SamplingParams(lark=ARITHMETIC, grammar_mode="host"),
    SamplingParams(json_schema={}, grammar_mode="host", temperature=0.7),
    SamplingParams(json_schema=TREE, grammar_mode="host", top_p=0.9),
    SamplingParams(lark='start: "(" start ")" | "é"', grammar_mode="host"),
    SamplingParams(lark='start: "a"+', grammar_mode="host", grammar_end="accepted", min_new_tokens=3),
    SamplingParams(lark='start: "[" start "]" | "x"', grammar_mode="host", grammar_end="eos"),
]
OTHERS = [
    SamplingParams(regex="(19|20)[0-9]{2}-[0-9]{2}"),
    SamplingParams(choices=["yes", "yes please", "no"], min_new_tokens=2),
    SamplingParams(),
    SamplingParams(top_k=5, temperature=0.8),
    SamplingParams(temperature=0),
]
ALL = [params.replace(max_new_tokens=30) for params in STEPPED + OTHERS]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return load_checkpoint(tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def engine(checkpoint):
    return Engine(checkpoint, GEOMETRY)


def parsed(written):
    """The length of the longest sum that a text begins with: a parser by recursive descent."""

    def atom(at):
        if written[at : at + 1] == "(":
            at = sum_(at + 1)
            assert written[at] == ")"
            return at + 1
        found = re.compile("[0-9]{1,3}").match(written, at)
        assert found
        return found.end()

    def chain(at, part, signs):
        at = part(at)
        while written[at : at + 1] and written[at] in signs:
            at = part(at + 1)
        return at

    def sum_(at):
        return chain(at, lambda at: chain(at, atom, "*/"), "+-")

    return sum_(0)


def whole(engine, params, count=60):
    """Texts of the completions that are not cut off by their budget."""
    found = rows(engine.generate([asked(params.replace(n=count))])).values()
    assert all(np.isfinite(row.behaviour_logprobs).all() for row in found)
    ends = (StopReason.EOS, StopReason.GRAMMAR_DONE)
    assert all(row.stop_reason in (*ends, StopReason.LENGTH) for row in found)
    return [text(engine, row) for row in found if row.stop_reason in ends]


@pytest.fixture(scope="module")
def uniform_engine(checkpoint):
    return Engine(uniform(checkpoint), GEOMETRY)


def test_json_of_any_depth_parses(uniform_engine):
    params = SamplingParams(json_schema={"type": ["object", "array"]}, grammar_mode="host", max_new_tokens=120)
    texts = whole(uniform_engine, params, 100)
    assert len(texts) > 10 and all(isinstance(json.loads(one), (dict, list)) for one in texts)
    assert any(isinstance(inner, (dict, list)) for one in texts for inner in _inner(json.loads(one)))


def _inner(value):
    return value.values() if isinstance(value, dict) else value


def test_a_schema_that_refers_to_itself(uniform_engine):
    texts = whole(uniform_engine, SamplingParams(json_schema=TREE, grammar_mode="host", max_new_tokens=150))

    def check(node):
        assert set(node) == {"v", "kids"} and node["v"] in (1, "é", None) and len(node["kids"]) <= 3
        return 1 + max(map(check, node["kids"]), default=0)

    assert len(texts) > 5 and max(check(json.loads(one)) for one in texts) >= 2


def test_arithmetic_with_nested_brackets(uniform_engine):
    texts = whole(uniform_engine, SamplingParams(lark=ARITHMETIC, grammar_mode="host", max_new_tokens=100))
    assert len(texts) > 20 and all(parsed(one) == len(one) for one in texts)
    assert any("(" in one for one in texts)


def test_brackets_close_at_any_depth(uniform_engine):
    texts = whole(uniform_engine, STEPPED[3].replace(max_new_tokens=100))
    depths = [len(one) // 2 for one in texts]
    assert texts == ["(" * depth + "é" + ")" * depth for depth in depths] and max(depths) > 3


def test_rows_of_both_modes_and_free_rows_in_one_program(engine, checkpoint, compilations, caplog):
    fresh = Engine(checkpoint, GEOMETRY)
    requests = [asked(params, i) for i, params in enumerate(ALL)]
    plain = requests[len(STEPPED) :]
    expected = rows(fresh.generate(plain))
    with caplog.at_level(logging.WARNING, "sampling"):
        together = rows(fresh.generate(requests))
    assert caplog.text.count("compiling once more") == 1
    assert_same_bits({name: together[name] for name in expected}, expected)
    programs = fresh.stats().programs_compiled
    compilations.clear()
    assert_same_bits(rows(fresh.generate(requests[::-1])), together)
    for request in requests:
        assert_same_bits(rows(fresh.generate([request])), {(request.prompt_id, 0): together[request.prompt_id, 0]})
    for share in (1.0, 0.5):
        given = []
        for request in requests:
            tokens = together[request.prompt_id, 0].completion_tokens
            given.append(dataclasses.replace(request, given=(tokens[: int(np.ceil(tokens.size * share))],)))
        again = rows(fresh.generate(given))
        assert_same_bits(again, together)
        assert all(row.left_grammar_at is None and row.ended_at is None for row in again.values())
    assert compilations == [] and fresh.stats().programs_compiled == programs


THREE = ["yes", "yes please", "no"]
AS_RULES = 'start: "yes" | "yes please" | "no"'


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"grammar_end": "accepted"},
        {"grammar_end": "eos"},
        {"grammar_end": "accepted", "min_new_tokens": 5, "max_new_tokens": 10},
        {"ignore_eos": True, "stop_token_ids": ids(" s").tolist()},
        {"suppress_tokens": ids("o").tolist()},
        {"max_new_tokens": 3},
        {"stop": ["s pl"]},
        {"temperature": 0.0, "repetition_penalty": 1.3},
    ],
    ids=lambda fields: "-".join(fields) or "plain",
)
def test_one_language_in_both_modes_gives_the_same_bits(engine, fields):
    modes = {"choices": THREE}, {"lark": AS_RULES, "grammar_mode": "host"}
    table, host = (SamplingParams(**({"n": 12, "max_new_tokens": 20} | fields | mode)) for mode in modes)
    expected = rows(engine.generate([asked(table)]))
    assert_same_bits(rows(engine.generate([asked(host)])), expected)
    for written in ("yes", "yes please", "yesterday", "maybe", "no", "nope", "yes pleas!", "y"):
        for tokens in (ids(written), np.append(ids(written), [EOS_ID] * 2)):
            both = [
                rows(engine.generate([asked(params.replace(n=1), given=(tokens,))]))["g0", 0]
                for params in (table, host)
            ]
            assert_same_bits(*({"it": row} for row in both))
            assert both[0].left_grammar_at == both[1].left_grammar_at and both[0].ended_at == both[1].ended_at
            scored = [
                rows(engine.generate([asked(params.replace(n=1), given=(tokens,), forward=True)]))["g0", 0]
                for params in (table, host)
            ]
            assert_same_bits(*({"it": row} for row in scored))
            assert scored[0].left_grammar_at == scored[1].left_grammar_at
            assert scored[0].ended_at == scored[1].ended_at


def test_explanations_show_where_the_matcher_stands(engine):
    params = SamplingParams(lark='start: "(" start ")" | "x"', grammar_mode="host", max_new_tokens=30)
    for written, place, before, after, verdict in (
        ("(x)", 0, "inside", "inside", Verdict.GOES_ON),
        ("(x)", 2, "inside", "complete", Verdict.ENDS),
        ("(y", 1, "inside", "outside", Verdict.GOES_ON),
    ):
        found = explain(engine, prompt(0, 5), ids(written), place, params, row_key(3, "g0", 0))
        (rule,) = (rule for rule in found.rules if rule.name == "lark")
        assert (rule.before, rule.after, rule.verdict) == (before, after, verdict)
        assert (found.stop_reason == StopReason.GRAMMAR_DONE) == (verdict == Verdict.ENDS)
    (row,) = rows(engine.generate([asked(STEPPED[0].replace(max_new_tokens=12))])).values()
    for place in range(row.completion_tokens.size):
        found = explain(engine, row.prompt_tokens, row.completion_tokens, place, row.params, row.key)
        assert found.agrees and found.stages[-1].name == "grammar"
        assert found.behaviour_logprob == pytest.approx(row.behaviour_logprobs[place], abs=1e-5)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"lark": 'start: "a"'}, r"lark = .* contradicts .*grammar_mode = 'table'.*'host'"),
        ({"regex": "a", "grammar_mode": "host"}, "grammar_mode = 'host' contradicts sampling.regex"),
        ({"choices": ["a"], "grammar_mode": "host"}, "grammar_mode = 'host' contradicts sampling.choices"),
        ({"lark": 'start: "a"', "regex": "a", "grammar_mode": "host"}, "regex = .* contradicts sampling.lark"),
        ({"lark": 'start: "a"', "grammar_mode": "gpu"}, "grammar_mode: expected one of table, host"),
        ({"lark": " ", "grammar_mode": "host"}, "lark: expected the rules of a grammar"),
        (
            {"lark": 'start: "a"', "grammar_mode": "host", "thinking_budget": 3, "thinking_start": [5]}
            | {"thinking_end": [6]},
            "thinking_budget = 3 contradicts sampling.lark",
        ),
        ({"json_schema": {"type": "object"}}, "at #: a value of any depth .* grammar_mode to 'host'"),
        ({"json_schema": TREE}, "refers to itself, .* grammar_mode to 'host'"),
        ({"lark": "start: x\nx: foo", "grammar_mode": "host"}, r'lark: at 2\(4\): unknown name: "foo"'),
        ({"lark": 'x: "a"', "grammar_mode": "host"}, "lark: no start rule found"),
        ({"lark": 'start: x "b"\nx[temperature=0.5]: /a/', "grammar_mode": "host"}, "'temperature' of a rule"),
        ({"lark": 'start: x\nx: x "a"', "grammar_mode": "host"}, "expected a grammar that allows some text"),
        (
            {"json_schema": {"properties": {"a": {"typ": "null"}}}, "grammar_mode": "host"},
            "at #/properties/a: the keyword 'typ' is not supported; did you mean 'type'",
        ),
        ({"json_schema": {"uniqueItems": True}, "grammar_mode": "host"}, "the keyword 'uniqueItems' is not supported"),
        ({"lark": 'start: %json {"typ": 1}', "grammar_mode": "host"}, "lark: line 1: %json: at #: the keyword 'typ'"),
        (
            {"regex": "a", "grammar_library": "llguidance 1.9.1"},
            "grammar_library = .* no grammar is followed on the host",
        ),
        ({"lark": 'start: "a"', "grammar_mode": "host", "grammar_library": 1}, "grammar_library: expected a name and"),
    ],
)
def test_what_cannot_be_is_refused_by_name(engine, params, message):
    with pytest.raises(ConfigError, match=message):
        list(engine.generate([asked(SamplingParams(**params))]))
    assert engine.idle


@pytest.mark.parametrize(
    ("fields", "reason", "written"),
    [
        ({"max_new_tokens": 2}, StopReason.LENGTH, "ab"),
        ({"max_length": 7}, StopReason.LENGTH, "ab"),
        ({"max_new_tokens": 3, "grammar_end": "eos"}, StopReason.LENGTH, "abc"),
        ({"min_new_tokens": 5}, StopReason.GRAMMAR_DONE, "abc"),
        ({"min_length": 12}, StopReason.GRAMMAR_DONE, "abc"),
        ({"min_new_tokens": 5, "grammar_end": "accepted"}, StopReason.GRAMMAR_DONE, "abc"),
        ({"min_new_tokens": 5, "grammar_end": "eos"}, StopReason.CONSTRAINT_DEAD_END, "abc"),
        ({"stop": ["b"]}, StopReason.STOP_STRING, "ab"),
        ({"stop": ["d"]}, StopReason.GRAMMAR_DONE, "abc"),
        ({"suppress_tokens": ids("b").tolist()}, StopReason.CONSTRAINT_DEAD_END, "a"),
        ({"grammar_end": "eos", "suppress_tokens": [EOS_ID]}, StopReason.CONSTRAINT_DEAD_END, "abc"),
    ],
    ids=lambda one: "-".join(one) if isinstance(one, dict) else None,
)
def test_contradictions_that_nobody_foresees_end_a_row_by_name(engine, fields, reason, written):
    params = SamplingParams(**{"max_new_tokens": 9} | fields)
    host = params.replace(lark='start: "abc"', grammar_mode="host", n=3)
    for row in rows(engine.generate([asked(host)])).values():
        assert row.stop_reason == reason
        assert engine.vocabulary.text_bytes(row.completion_tokens).decode() == written


def test_a_matcher_that_gives_up_ends_its_row_by_name_and_no_other(engine, caplog):
    many = range(1200)  # ways to go on after "c", more than llguidance follows at a time
    rules = ['start: "c" one', f"one: {' | '.join(f'r{i}' for i in many)}", *(f'r{i}: "a" r{i} | "{i}"' for i in many)]
    requests = [asked(SamplingParams(lark="\n".join(rules), grammar_mode="host", max_new_tokens=9)), asked(ALL[-3], 1)]
    with caplog.at_level(logging.WARNING, "sampling"):
        found = rows(engine.generate(requests))
    assert found["g0", 0].stop_reason == StopReason.CONSTRAINT_DEAD_END
    assert engine.vocabulary.text_bytes(found["g0", 0].completion_tokens) == b"c"
    assert "prompt 'g0': the grammar's matcher gives up: " in caplog.text and "items" in caplog.text
    assert_same_bits(rows(engine.generate(requests[1:])), {("g1", 0): found["g1", 0]})


def test_records_hold_the_version_of_what_followed_the_grammar(engine):
    (row,) = rows(engine.generate([asked(STEPPED[3])])).values()
    assert row.params.grammar_library == installed_library() and re.fullmatch(
        r"llguidance \d+\.\d+\.\d+", installed_library()
    )
    other = row.params.replace(grammar_library="llguidance 0.7.0")
    expected = rf"sampling\.lark: expected to be followed by llguidance 0\.7\.0, here is {installed_library()}; install"
    for again in (asked(other), asked(other, given=(row.completion_tokens,), forward=True)):
        with pytest.raises(ConfigError, match=expected):
            engine.submit(again)
    with pytest.raises(ConfigError, match=expected):
        explain(engine, row.prompt_tokens, row.completion_tokens, 0, other, row.key)
    assert engine.idle
    assert_same_bits(rows(engine.generate([asked(row.params)])), {("g0", 0): row})
    assert all(one.params.grammar_library == "" for one in rows(engine.generate([asked(OTHERS[0])])).values())


def test_forward_passes_agree_with_the_record(engine):
    requests = [asked(params, i) for i, params in enumerate(ALL)]
    drawn = rows(engine.generate(requests))
    known = [dataclasses.replace(r, given=(drawn[r.prompt_id, 0].completion_tokens,), forward=True) for r in requests]
    for name, row in rows(engine.generate(known)).items():
        apart = np.abs(row.behaviour_logprobs - drawn[name].behaviour_logprobs)
        assert np.quantile(apart, 0.9) < FORWARD_BOUND["float32"][1]
        assert row.stop_reason == drawn[name].stop_reason and row.left_grammar_at is None


def test_an_engine_that_is_aborted_forgets_its_matchers(engine):
    request = asked(STEPPED[0].replace(max_new_tokens=20))
    expected = rows(engine.generate([request]))
    engine.submit(request)
    engine.step()
    engine.abort()
    assert_same_bits(rows(engine.generate([request])), expected)
