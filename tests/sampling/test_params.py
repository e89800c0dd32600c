"""sampling/params.py and sampling/policy.py: what is refused, what is recorded, how it lowers."""

import json
import math

import jax
import numpy as np
import pytest

from sampling import SamplingParams
from sampling.capacity import Capacity
from sampling.errors import ConfigError
from sampling.policy import STAGES, lower, resolved, stack
from sampling.state import NO_TOKEN


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", None),
        ("temperature", 1e-300),
        ("temperature", 1e300),
        ("eos_token_ids", {1: 2}),
        ("order", ["vllm"]),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("max_new_tokens", 0),
        ("n", 0),
        ("n", 2.0),
        ("seed", -1),
        ("seed", 2**64),
        ("ignore_eos", 1),
        ("eos_token_ids", (-1,)),
        ("eos_token_ids", (True,)),
        ("order", "alphabetical"),
        ("typical_p", 0),
        ("epsilon_cutoff", 1.0),
        ("eta_cutoff", -0.1),
        ("top_h", 0),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("frequency_penalty", math.inf),
        ("presence_penalty", "x"),
        ("no_repeat_ngram_size", -1),
        ("min_new_tokens", -1),
        ("max_length", 0),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", {-5: 1.0}),
        ("logit_bias", 7),
        ("sequence_bias", [([], 1.0)]),
        ("sequence_bias", [([1], 1.0), ([1], 2.0)]),
        ("bad_words", ["  "]),
        ("bad_words", "word"),
        ("bad_words", [[]]),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", 3),
        ("stop_token_ids", "12"),
        ("allowed_token_ids", (1.5,)),
        ("forced_bos", -1),
        ("exponential_decay_length_penalty", (1,)),
        ("exponential_decay_length_penalty", (1, -2.0)),
        ("remove_invalid_values", 1),
    ],
)
def test_a_bad_value_is_named(field, value):
    with pytest.raises(ConfigError) as error:
        SamplingParams(**{field: value})
    assert str(error.value).startswith(f"sampling.{field}")
    offender = value if not isinstance(value, (dict, list, tuple)) else ""
    assert repr(offender).strip("'") in str(error.value)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens = 5 contradicts sampling.max_new_tokens = 4"),
        ({"min_length": 5, "max_length": 4}, "min_length = 5 contradicts sampling.max_length = 4"),
        ({"stop_token_ids": [3], "suppress_tokens": [3]}, "token 3 is wanted and banned"),
        ({"stop_token_ids": [3], "bad_words": [[3]]}, "stop_token_ids = .* contradicts sampling.bad_words"),
        ({"stop_token_ids": [3], "logit_bias": {3: "-inf"}}, "stop_token_ids = .* contradicts sampling.logit_bias"),
        ({"stop_token_ids": [3], "allowed_token_ids": [4]}, "token 3 is wanted and not allowed"),
        ({"forced_eos": 3, "suppress_tokens": [3]}, "forced_eos = .* contradicts sampling.suppress_tokens"),
        ({"forced_bos": 3, "suppress_tokens": [3]}, "forced_bos = 3 contradicts"),
        ({"allowed_token_ids": [3], "suppress_tokens": [3, 4]}, "every allowed token is banned"),
    ],
)
def test_contradictions_are_refused_with_both_names(params, says):
    with pytest.raises(ConfigError, match=says):
        SamplingParams(**params)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"sampling\.topk: no such parameter; did you mean top_k.* known are .*top_p"):
        SamplingParams().replace(topk=3)


@pytest.mark.parametrize("off", [None, 0, -1])
def test_top_k_has_three_ways_to_be_off_and_one_meaning(off):
    assert SamplingParams(top_k=off) == SamplingParams()


def test_recorded_parameters_read_back_equal():
    params = SamplingParams(temperature=0.3, top_k=5, eos_token_ids=(7, 2), n=3, seed=2**63, stop="END", order="vllm",
        logit_bias={9: "-inf", 4: 1.5}, sequence_bias=[([1, 2], -2.0)], bad_words=["no", [3, 4]], max_length=9,
        exponential_decay_length_penalty=(3, 1.1), top_h=0.4)  # fmt: skip
    plain = params.to_dict()
    assert SamplingParams.from_dict(plain) == params
    assert SamplingParams.from_dict(json.loads(json.dumps(plain, allow_nan=False))) == params
    assert plain["order_version"] == 1
    assert plain["logit_bias"] == [[4, 1.5], [9, "-inf"]]


def test_a_record_of_another_order_version_is_refused():
    with pytest.raises(ConfigError, match="version 99"):
        SamplingParams.from_dict({**SamplingParams().to_dict(), "order_version": 99})


def test_every_order_names_every_stage_once():
    for stages in STAGES.values():
        assert sorted(stages) == sorted(lower(SamplingParams()).transforms)


def test_temperature_zero_lowers_to_greedy_alone():
    policy = lower(SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.1, top_h=0.3, epsilon_cutoff=0.1))
    active = {name for name, stage in policy.transforms.items() if not np.all(stage.is_neutral())}
    assert active == {"greedy"}
    kept = lower(SamplingParams(temperature=0, repetition_penalty=1.2, logit_bias={3: 1.0}))
    active = {name for name, stage in kept.transforms.items() if not np.all(stage.is_neutral())}
    assert active == {"greedy", "repetition_penalty", "logit_bias"}


def test_defaults_are_neutral_throughout():
    assert all(np.all(stage.is_neutral()) for stage in lower(SamplingParams()).transforms.values())


def test_end_of_sequence_ids_are_joined():
    params = SamplingParams(eos_token_ids=(9, 4))
    assert resolved(params, (2, 9)).eos_token_ids == (2, 4, 9)
    assert resolved(params.replace(ignore_eos=True), (2, 9)).eos_token_ids == ()
    rule = lower(resolved(params, (2, 9)), Capacity(end_ids=4)).stopping[0]
    assert rule.eos.tolist() == [2, 4, 9, NO_TOKEN]


def test_bad_words_as_text_cover_the_form_after_a_space():
    params = resolved(SamplingParams(bad_words=[" ab", [7]]), encode=lambda text: [ord(c) for c in text])
    assert params.bad_words == ((97, 98), (32, 97, 98), (7,))
    with pytest.raises(ConfigError, match="there is no tokenizer"):
        resolved(SamplingParams(bad_words=["ab"]))


def test_control_tokens_are_suppressed_unless_asked_for():
    control = (0, 1, 2, 3, 4, 5, 6)
    params = SamplingParams(suppress_control_tokens=True, suppress_tokens=[9], stop_token_ids=[3], forced_eos=4)
    known = resolved(params, (2,), control=control)
    assert known.suppress_tokens == (0, 1, 5, 6, 9) and resolved(known, (2,), control=control) == known
    assert resolved(params.replace(ignore_eos=True), (2,), control=control).suppress_tokens == (0, 1, 2, 5, 6, 9)
    thinking = params.replace(thinking_budget=3, thinking_start=[0, 20], thinking_end="</think>")
    marked = resolved(thinking, (2,), encode=lambda text: [5, 6], control=control)
    assert marked.suppress_tokens == (1, 9)
    assert resolved(SamplingParams(suppress_tokens=[9]), (2,), control=control).suppress_tokens == (9,)
    with pytest.raises(ConfigError, match="suppress_control_tokens: there is no tokenizer to tell them"):
        resolved(params, (2,))


def test_all_policies_of_a_capacity_stack():
    rows = stack([lower(SamplingParams(temperature=t)) for t in (0, 0.5, 1)])
    assert rows.transforms["temperature"].value.tolist() == [1.0, 0.5, 1.0]
    assert rows.transforms["greedy"].enabled.tolist() == [True, False, False]
    assert all(np.shape(leaf)[0] == 3 for leaf in jax.tree.leaves(rows))
    with pytest.raises(ConfigError, match="one capacity"):
        stack([lower(SamplingParams()), lower(SamplingParams(), Capacity(biases=64))])


def test_capacity_grows_to_the_next_power_of_two_and_never_truncates():
    many = SamplingParams(logit_bias={i: 1.0 for i in range(33)}, order="vllm")
    grown = Capacity().grown_for(Capacity.needed(many))
    assert (grown.biases, grown.orders, grown.allowed) == (64, ("transformers", "vllm"), Capacity().allowed)
    assert grown.grown_for(Capacity.needed(SamplingParams())) == grown
    with pytest.raises(ConfigError, match="expected a capacity of at least"):
        lower(many, Capacity())
