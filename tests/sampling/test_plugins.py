"""Rows keep all promises with plugins in their policies."""

import numpy as np
import pytest

from sampling import Engine, Geometry, Request, SamplingParams, StopReason, load_checkpoint
from sampling.capacity import Capacity
from sampling.errors import ConfigError
from sampling.explain import explain
from sampling.explanation import Verdict
from sampling.plugins import PluginRefs, load_plugins
from sampling.policy import STAGES, lower
from sampling.scoring import FORWARD_BOUND
from tests.example_plugin.example_plugin import Cooler, SameToken, no_echo
from tests.sampling.test_engine import assert_same_bits, prompt, rows
from tests.tiny_models import tiny_llama

GEOMETRY = Geometry(slots=12, cache_len=64, prefill_chunk=8)
PLUGINS = {
    "transforms": [Cooler, {"use": no_echo, "name": "echo", "before": "greedy"}],
    "stopping": [SameToken],
}
BASE = SamplingParams(max_new_tokens=16, ignore_eos=True)
EXAMPLES = [
    BASE,
    BASE.replace(plugins={"cooler": {"strength": 0.5}}),
    BASE.replace(plugins={"cooler": {"strength": 2}, "echo": {"penalty": 5.0}}, temperature=0.9, top_p=0.9),
    BASE.replace(plugins={"echo": {"penalty": 3.0}}, temperature=0),
    BASE.replace(plugins={"same_token": {"times": 1}}),
    BASE.replace(plugins={"same_token": {"times": 2}, "cooler": {"strength": 50.0}}, min_new_tokens=4),
    BASE.replace(plugins={"echo": {}}, order="vllm"),
    BASE.replace(plugins={"cooler": {"strength": 0.0}}),
]


def asked(params, i=0, **fields):
    return Request(f"t{i}", prompt(i, 6), params, run_seed=7, **fields)


def all_asked(**fields):
    return [asked(params, i, **fields) for i, params in enumerate(EXAMPLES)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return load_checkpoint(tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def engine(checkpoint):
    capacity = Capacity(orders=("transformers", "vllm"))
    return Engine(checkpoint, GEOMETRY, capacity=capacity, plugins=PLUGINS)


@pytest.fixture(scope="module")
def drawn(engine):
    """One row of each example, drawn beside four more, which is more than the narrow program has room for."""
    assert sorted(engine._programs.decode) == [8, 12]
    beside = [Request(f"beside{i}", prompt(i, 4), BASE.replace(max_new_tokens=24), run_seed=7) for i in range(4)]
    found = rows(engine.generate([*all_asked(), *beside]))
    return {(name, sample): row for (name, sample), row in found.items() if not name.startswith("beside")}


def test_rows_that_name_no_plugin_have_the_bits_of_an_engine_without(checkpoint, drawn):
    plain = Engine(checkpoint, GEOMETRY)
    (free,) = rows(plain.generate([asked(BASE)])).items()
    assert_same_bits(dict([free]), {("t0", 0): drawn["t0", 0]})
    (neutral,) = rows(plain.generate([asked(BASE, 7)])).items()
    assert_same_bits(dict([neutral]), {("t7", 0): drawn["t7", 0]})


def test_other_values_compile_nothing_and_each_row_has_the_bits_of_its_single_run(engine, drawn, compilations):
    compilations.clear()
    for i, params in enumerate(EXAMPLES):
        (alone,) = rows(engine.generate([asked(params, i)])).values()
        assert_same_bits({(f"t{i}", 0): alone}, {(f"t{i}", 0): drawn[f"t{i}", 0]})
    assert compilations == []


def test_the_log_probs_are_those_of_the_plugins_scores(engine, drawn):
    """The second example at each of its tokens, from the model's own scores and plain NumPy."""
    row = drawn["t1", 0]
    for place in (0, 1, 7):
        given = row.completion_tokens[:place]
        logits = np.asarray(engine.next_scores(asked(BASE, 1, given=(given,))), np.float64)
        scores = np.where(np.arange(logits.size) < engine.info.tokenizer_len, logits * (1 + 0.5 * place), -np.inf)
        expected = scores[row.completion_tokens[place]] - np.logaddexp.reduce(scores)
        assert row.behaviour_logprobs[place] == pytest.approx(expected, abs=1e-4)


def test_a_plugin_stands_before_the_stage_that_it_names():
    capacity = Capacity(plugins=load_plugins(PluginRefs.of(PLUGINS)))
    policy = lower(SamplingParams(), capacity)
    for order in STAGES:
        stages = policy.stages(order)
        assert stages[stages.index("temperature") - 1] == "cooler" and stages[-2:] == ["echo", "greedy"]
        assert [stage for stage in stages if stage not in ("cooler", "echo")] == STAGES[order]


def test_only_what_is_said_to_keep_the_best_token_is_left_out_of_greedy_rows(engine, drawn):
    greedy = drawn["t3", 0].completion_tokens
    assert (greedy[1:] != greedy[:-1]).any()
    capacity = Capacity(plugins=engine.plugins)
    both = BASE.replace(plugins={"cooler": {"strength": 1}, "echo": {}}, temperature=0)
    policy = lower(both, capacity)
    assert bool(policy.transforms["cooler"].is_neutral()) and not bool(policy.transforms["echo"].is_neutral())


def test_a_rule_ends_rows_and_minimum_lengths_hold_it_back(drawn):
    once, twice = drawn["t4", 0], drawn["t5", 0]
    assert (once.completion_tokens.size, once.stop_reason) == (1, StopReason.PLUGIN)
    if twice.stop_reason is StopReason.PLUGIN:
        assert twice.completion_tokens.size > 4 and twice.completion_tokens[-1] == twice.completion_tokens[-2]
    doubles = np.flatnonzero(twice.completion_tokens[4:] == twice.completion_tokens[3:-1])
    assert (doubles.size > 0) == (twice.stop_reason is StopReason.PLUGIN)


@pytest.mark.parametrize("kept", [0, 1, 7, 16])
def test_replays_have_the_same_bits(engine, drawn, kept):
    given = [asked(p, i, given=(drawn[f"t{i}", 0].completion_tokens[:kept],)) for i, p in enumerate(EXAMPLES)]
    assert_same_bits(rows(engine.generate(given)), drawn)


def test_forward_passes_agree_with_the_record(engine, drawn):
    known = [
        asked(params, i, given=(drawn[f"t{i}", 0].completion_tokens,), forward=True)
        for i, params in enumerate(EXAMPLES)
    ]
    for name, row in rows(engine.generate(known)).items():
        apart = np.abs(row.behaviour_logprobs - drawn[name].behaviour_logprobs)
        assert np.quantile(apart, 0.9) < FORWARD_BOUND["float32"][1]
        assert row.stop_reason == drawn[name].stop_reason


def test_the_record_holds_parameters_and_version_and_reads_back(engine, drawn):
    policy = drawn["t2", 0].params.to_dict()
    versions = {plugin.name: plugin.ref.version for plugin in engine.plugins}
    assert policy["plugins"] == {
        "cooler": {"strength": 2.0, "version": versions["cooler"]},
        "echo": {"penalty": 5.0, "version": versions["echo"]},
    }
    assert drawn["t6", 0].params.to_dict()["plugins"] == {"echo": {"penalty": 1.0, "version": versions["echo"]}}
    assert drawn["t0", 0].params.to_dict()["plugins"] == {}
    again = SamplingParams.from_dict(policy)
    assert again == drawn["t2", 0].params
    assert_same_bits({("t2", 0): drawn["t2", 0]}, rows(engine.generate([asked(again, 2)])))


def test_explain_shows_plugins_and_agrees(engine, drawn):
    row = drawn["t2", 0]
    for place in (0, 3):
        found = explain(engine, row.prompt_tokens, row.completion_tokens, place, row.params, row.key)
        names = [stage.name for stage in found.stages]
        assert found.agrees and names[-1] == "echo" and names.index("cooler") < names.index("temperature")
        assert found.behaviour_logprob == pytest.approx(row.behaviour_logprobs[place], abs=1e-5)
        (stage,) = (stage for stage in found.stages if stage.name == "cooler")
        assert stage.value == row.params.to_dict()["plugins"]["cooler"]
    row = drawn["t4", 0]
    found = explain(engine, row.prompt_tokens, row.completion_tokens, 0, row.params, row.key)
    (rule,) = (rule for rule in found.rules if rule.name == "same_token")
    assert (rule.verdict, found.stop_reason) == (Verdict.ENDS, StopReason.PLUGIN)
    greedy = drawn["t3", 0]
    params = greedy.params.replace(plugins={"cooler": {"strength": 3.0}})
    found = explain(engine, greedy.prompt_tokens, greedy.completion_tokens, 0, params, greedy.key)
    assert list(found.without_effect) == ["cooler"]


def test_what_a_row_may_not_ask_is_refused_when_it_comes(engine):
    for given, message in (
        ({"cooller": {}}, r"plugins\.cooller: no such plugin, did you mean cooler\?"),
        ({"cooler": {"strenght": 1}}, r"plugins\.cooler\.strenght: no such parameter; did you mean strength\?"),
        ({"cooler": {"strength": True}}, r"strength: expected a finite number, as the default 0\.0, got True"),
        ({"same_token": {"times": 2.5}}, r"times: expected a whole number, as the default 4, got 2\.5"),
        ({"cooler": {"strength": -1.0}}, r"plugins\.cooler: strength: expected at least 0, got -1\.0"),
        ({"cooler": {"version": "0.0.1"}}, r"cooler\.version: expected 0\.0\.1, here is .*; install the version"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine.submit(asked(BASE.replace(plugins=given)))
    assert engine.idle
    with pytest.raises(ConfigError, match=r"no such plugin, there are none; .* the section `plugins`"):
        lower(BASE.replace(plugins={"cooler": {}}))


@pytest.mark.parametrize(
    "value", ["cooler", {"cooler": 3}, {"cooler": {"strength": "1"}}, {"cooler": {"strength": float("nan")}}, {3: {}}]
)
def test_what_cannot_be_parameters_of_any_plugin_is_refused(value):
    with pytest.raises(ConfigError, match=r"^sampling\.plugins"):
        SamplingParams(plugins=value)
    assert SamplingParams(plugins={"cooler": None}).plugins == (("cooler", ()),)
