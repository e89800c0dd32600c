"""Thinking budgets through the engine: what is forced, what is recorded of it, and that all else stays as it is."""

import dataclasses

import numpy as np
import pytest

from sampling import Engine, Geometry, Request, SamplingParams, StopReason, load_checkpoint
from sampling.errors import ConfigError
from sampling.explain import explain
from sampling.policy import resolved
from sampling.scoring import FORWARD_BOUND
from tests.sampling.test_engine import assert_same_bits, prompt, rows
from tests.sampling.test_grammars import ids
from tests.tiny_models import EOS_ID, tiny_llama

MARKERS = SamplingParams(thinking_start="<t>", thinking_end="</t>", max_new_tokens=24, ignore_eos=True)
START, END = ids("<t>").tolist(), ids("</t>").tolist()
THINKING = np.concatenate([prompt(0, 5), START]).astype(np.int32)
EXAMPLES = [
    MARKERS.replace(thinking_budget=0),
    MARKERS.replace(thinking_budget=5, temperature=0.7),
    MARKERS.replace(thinking_budget=9, top_p=0.8, suppress_tokens=END),
    MARKERS.replace(thinking_budget=5, temperature=0, repetition_penalty=1.3),
    MARKERS.replace(thinking_budget=100),
    MARKERS,
    SamplingParams(max_new_tokens=24, ignore_eos=True),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return Engine(
        load_checkpoint(tiny_llama(tmp_path_factory.mktemp("tiny"))), Geometry(slots=8, cache_len=64, prefill_chunk=8)
    )


def asked(params, i=0, begin=THINKING, **fields):
    return Request(f"t{i}", begin, params, run_seed=7, **fields)


@pytest.fixture(scope="module")
def drawn(engine):
    return rows(engine.generate([asked(params, i) for i, params in enumerate(EXAMPLES)]))


def test_the_end_marker_is_forced_where_the_budget_ends(drawn):
    for i, params in enumerate(EXAMPLES):
        row, budget = drawn[f"t{i}", 0], params.thinking_budget
        if budget is None or budget > 24:
            assert row.forced.size == 0
            continue
        places = list(range(budget, budget + len(END)))
        assert row.forced.tolist() == places and row.forced.dtype == np.int32
        assert row.completion_tokens[places].tolist() == END
        assert row.behaviour_logprobs[places].tolist() == [0.0] * len(END) == row.entropy[places].tolist()
        np.testing.assert_allclose(row.log_kept_mass[places], row.model_logprobs[places], atol=1e-5)
        assert row.completion_tokens.size == 24 and row.stop_reason == StopReason.LENGTH


def test_what_is_drawn_before_is_as_without_a_budget(engine, drawn):
    for i, params in enumerate(EXAMPLES):
        (free,) = rows(engine.generate([asked(params.replace(thinking_budget=None), i)])).values()
        row = drawn[f"t{i}", 0]
        before = row.forced[0] if row.forced.size else 24
        for name in ("completion_tokens", "behaviour_logprobs", "model_logprobs", "entropy"):
            np.testing.assert_array_equal(getattr(row, name)[:before], getattr(free, name)[:before])


def test_each_row_has_its_own_budget_and_the_bits_of_its_single_run(engine, drawn, compilations):
    compilations.clear()
    for i, params in enumerate(EXAMPLES):
        name = (f"t{i}", 0)
        (alone,) = rows(engine.generate([asked(params, i)])).values()
        assert_same_bits({name: alone}, {name: drawn[name]})
        assert alone.forced.tolist() == drawn[name].forced.tolist()
    assert compilations == []


@pytest.mark.parametrize("kept", [0, 3, 6, 7, 24])
def test_replays_and_branches_force_the_same(engine, drawn, kept):
    given = [asked(p, i, given=(drawn[f"t{i}", 0].completion_tokens[:kept],)) for i, p in enumerate(EXAMPLES)]
    again = rows(engine.generate(given))
    assert_same_bits(again, drawn)
    assert all(again[name].forced.tolist() == drawn[name].forced.tolist() for name in drawn)


def test_a_branch_that_opens_a_second_thought_is_ended_again(engine):
    given = np.int32([*END, 8, 8, *START, 4])
    (row,) = rows(engine.generate([asked(MARKERS.replace(thinking_budget=4), given=(given,))])).values()
    assert row.forced.tolist() == [given.size + 3 + i for i in range(len(END))]


def test_given_tokens_in_the_place_of_forced_ones_cannot_be(engine):
    given = np.int32([9, 9, 9, 9])
    for forward in (False, True):
        request = asked(MARKERS.replace(thinking_budget=2), given=(given,), forward=forward)
        (row,) = rows(engine.generate([request])).values()
        assert np.isneginf(row.behaviour_logprobs[:4]).tolist() == [False, False, True, True]
        assert row.forced[:2].tolist() == [2, 3]


def test_forward_passes_agree_with_the_record(engine, drawn):
    known = [
        asked(params, i, given=(drawn[f"t{i}", 0].completion_tokens,), forward=True)
        for i, params in enumerate(EXAMPLES)
    ]
    for name, row in rows(engine.generate(known)).items():
        apart = np.abs(row.behaviour_logprobs - drawn[name].behaviour_logprobs)
        assert np.quantile(apart, 0.9) < FORWARD_BOUND["float32"][1]
        assert row.forced.tolist() == drawn[name].forced.tolist()


def test_explain_shows_what_was_forced(engine, drawn):
    row = drawn["t1", 0]
    for place in (4, 5, 8, 9):
        found = explain(engine, row.prompt_tokens, row.completion_tokens, place, row.params, row.key)
        (stage,) = (stage for stage in found.stages if stage.name == "thinking_budget")
        assert found.agrees and (found.support == 1) == (stage.left == 1) == (place in row.forced)
        assert stage.value == 5


def test_a_first_and_a_last_token_are_forced_too(engine):
    params = SamplingParams(forced_bos=9, forced_eos=EOS_ID, max_new_tokens=6, ignore_eos=True)
    (row,) = rows(engine.generate([asked(params, begin=np.int32([5]))])).values()
    assert row.completion_tokens[[0, -1]].tolist() == [9, EOS_ID]
    assert row.forced.tolist() == [0, 5]


def test_markers_of_other_sizes_compile_once_and_the_record_holds_ids(engine, drawn):
    assert drawn["t1", 0].params.thinking_end == tuple(END)
    again = SamplingParams.from_dict(drawn["t1", 0].params.to_dict())
    assert again == drawn["t1", 0].params
    one = Engine(load_checkpoint(engine.info.path), Geometry(slots=1, cache_len=64, prefill_chunk=8))
    before = one.stats().programs_compiled
    long = MARKERS.replace(thinking_budget=2, thinking_end="</long thought>")
    (row,) = rows(one.generate([asked(long)])).values()
    assert row.completion_tokens[row.forced].tolist() == ids("</long thought>").tolist()
    assert one.stats().programs_compiled > before


@pytest.mark.parametrize(
    ("params", "first", "second"),
    [
        ({"thinking_budget": 3, "thinking_end": [4]}, "thinking_budget", "thinking_start"),
        ({"thinking_budget": 3, "thinking_start": "<t>"}, "thinking_budget", "thinking_end"),
        (
            {"thinking_budget": 3, "thinking_start": [4, 5, 6], "thinking_end": [5, 6]},
            "thinking_start",
            "thinking_end",
        ),
        (
            {"thinking_budget": 3, "thinking_start": [4], "thinking_end": [5, 6], "stop_token_ids": [6]},
            "thinking_end",
            "stop_token_ids",
        ),
        (
            {"thinking_budget": 3, "thinking_start": [4], "thinking_end": [5], "regex": "a+"},
            "thinking_budget",
            "regex",
        ),
    ],
)
def test_contradictions_are_refused_by_both_names(params, first, second):
    with pytest.raises(ConfigError, match=rf"sampling\.{first} = .* contradicts sampling\.{second} = "):
        SamplingParams(**params)


def test_what_texts_contradict_is_found_when_they_are_ids(engine):
    for changes, message in (
        ({"thinking_end": "t"}, "thinking_start = .* contradicts sampling.thinking_end"),
        ({"thinking_end": "a", "stop_token_ids": ids("a").tolist()}, "thinking_end = .* contradicts"),
        ({"thinking_end": [99999]}, r"thinking_end: expected token ids in 0 \.\. "),
    ):
        with pytest.raises(ConfigError, match=message):
            engine.submit(asked(MARKERS.replace(thinking_budget=2, **changes)))
    with pytest.raises(ConfigError, match=r"sampling\.thinking_start: '<t>' is a text and there is no tokenizer"):
        resolved(MARKERS)
    for value in ("", 3, [[4]], [-1]):
        with pytest.raises(ConfigError, match=r"sampling\.thinking_end"):
            SamplingParams(thinking_end=value)
    assert dataclasses.replace(MARKERS, thinking_start=[]).thinking_start == ()
