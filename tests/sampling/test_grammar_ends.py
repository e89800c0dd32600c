"""Where grammars end rows: as was asked for, in a dead end that has a name, or before anything runs, if parameters
contradict each other."""

import json

import pytest

from sampling import Engine, SamplingParams, StopReason, load_checkpoint
from sampling.errors import ConfigError
from tests.grammar_samples import SCHEMAS
from tests.sampling.test_engine import rows
from tests.sampling.test_grammars import EIGHT, GEOMETRY, asked, ids, text
from tests.tiny_models import tiny_llama


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return Engine(load_checkpoint(tiny_llama(tmp_path_factory.mktemp("tiny"))), GEOMETRY)


def ends(engine, n=30, **params):
    found = rows(engine.generate([asked(SamplingParams(**{"max_new_tokens": 8, "n": n} | params))])).values()
    return {(row.stop_reason, text(engine, row)) for row in found}


def test_each_way_to_end(engine):
    assert ends(engine, choices=["a", "b"]) <= {(StopReason.GRAMMAR_DONE, "a"), (StopReason.GRAMMAR_DONE, "b")}
    assert ends(engine, choices=["a"], grammar_end="eos") == {(StopReason.EOS, "a")}
    assert ends(engine, regex="a+", grammar_end="accepted") == {(StopReason.GRAMMAR_DONE, "a")}
    assert ends(engine, regex="a+", grammar_end="accepted", min_new_tokens=3) == {(StopReason.GRAMMAR_DONE, "aaa")}
    assert ends(engine, regex="a+", ignore_eos=True) == {(StopReason.LENGTH, "a" * 8)}
    open_end = ends(engine, regex="a+")
    assert {reason for reason, _ in open_end} <= {StopReason.EOS, StopReason.LENGTH} and len(open_end) > 2
    assert ends(engine, choices=["ab", "ac"], suppress_tokens=ids("bc").tolist()) == {
        (StopReason.CONSTRAINT_DEAD_END, "a")
    }


def test_stop_tokens_may_stand_where_they_fit_or_the_text_is_whole(engine):
    newline = ids("\n").tolist()
    params = {"regex": "a{1,3}", "stop_token_ids": newline, "ignore_eos": True}
    found = ends(engine, n=60, **params)
    assert (StopReason.STOP_TOKEN, "a\n") in found
    assert found <= {(StopReason.GRAMMAR_DONE, "aaa"), (StopReason.STOP_TOKEN, "a\n"), (StopReason.STOP_TOKEN, "aa\n")}


@pytest.mark.parametrize(
    ("params", "first", "second"),
    [
        ({"regex": "a", "choices": ["a"]}, "regex", "choices"),
        ({"regex": "a", "json_schema": {"type": "null"}}, "regex", "json_schema"),
        ({"regex": "a", "forced_eos": 2}, "forced_eos", "regex"),
        ({"choices": ["a"], "forced_bos": 2}, "forced_bos", "choices"),
        ({"regex": "a", "grammar_end": "eos", "ignore_eos": True}, "grammar_end", "ignore_eos"),
        ({"regex": "a{1,3}", "min_new_tokens": 4}, "min_new_tokens", "regex"),
        ({"regex": "a{1,3}", "min_length": 9}, "min_length", "regex"),
        ({"choices": ["abc"], "max_new_tokens": 2}, "max_new_tokens", "choices"),
        ({"choices": ["abc"], "max_new_tokens": 3, "grammar_end": "eos"}, "max_new_tokens", "choices"),
        ({"choices": ["abc"], "max_length": 7}, "max_length", "choices"),
        ({"regex": "[a-c]*", "stop": ["d"]}, "stop", "regex"),
        ({"json_schema": SCHEMAS["nested"], "stop": ['zip":']}, "stop", "json_schema"),
        ({"json_schema": SCHEMAS["nested"], "stop": ["}"]}, "stop", "json_schema"),
    ],
)
def test_contradictions_are_refused_by_both_names(engine, params, first, second):
    with pytest.raises(ConfigError, match=rf"\.{first} = .* contradicts .*\.{second} = "):
        list(engine.generate([asked(SamplingParams(**params))]))
    assert engine.idle


def test_what_is_no_contradiction_runs(engine):
    for params in (
        {"regex": "a{1,3}", "min_new_tokens": 3},
        {"choices": ["abc"], "max_new_tokens": 3},
        {"regex": "[a-c]{2,}", "stop": ["cc"]},
        {"regex": "[a-c]+", "stop": ["xa"]},  # the x may end the prompt
    ):
        assert ends(engine, n=2, **params)


def test_refused_grammars_name_the_prompt_and_leave_the_engine_usable(engine):
    with pytest.raises(ConfigError, match=r"prompt 'g0': sampling\.regex: a reference to a group"):
        engine.submit(asked(SamplingParams(regex=r"(a)\1")))
    with pytest.raises(ConfigError, match=r"prompt 'g0': sampling\.json_schema: at #: the keyword 'oneOf'"):
        engine.submit(asked(SamplingParams(json_schema={"oneOf": []})))
    assert ends(engine, n=1, choices=["a"])


def test_parameters_survive_the_record():
    for params in EIGHT:
        again = SamplingParams.from_dict(json.loads(json.dumps(params.to_dict())))
        assert again == params and again.grammar == params.grammar
    same = {SamplingParams(json_schema=schema).grammar for schema in ({"type": "null"}, '{"type":"null"}')}
    assert len(same) == 1 and SamplingParams().grammar is None


@pytest.mark.parametrize("value", [3, [], "[1]", "{", {"type": float("nan")}])
def test_what_is_no_schema_is_refused(value):
    with pytest.raises(ConfigError, match=r"sampling\.json_schema: expected a JSON schema"):
        SamplingParams(json_schema=value)


def test_too_many_grammars_at_once_are_refused_with_their_size(engine, monkeypatch):
    monkeypatch.setattr("sampling.grammar.shelf.MOST_BYTES", 2**20)
    with pytest.raises(
        ConfigError, match=r"sampling\.choices: \d+ grammars in use need tables of \d+ MiB, .* at most 1"
    ):
        for i in range(200):
            engine.submit(asked(SamplingParams(choices=[f"{i}", f"x{i}"], max_new_tokens=9), i))
    engine.abort()
    assert ends(engine, n=1, choices=["a"])
