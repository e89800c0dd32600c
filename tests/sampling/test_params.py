"""sampling/params.py and sampling/policy.py: what is refused, what is recorded, how it lowers."""

import math

import jax
import numpy as np
import pytest

from sampling import SamplingParams
from sampling.errors import ConfigError
from sampling.policy import EOS_CAPACITY, lower, resolved, stack
from sampling.state import NO_TOKEN
from sampling.transforms import Greedy, MinP, Temperature, TopK, TopP


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", None),
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
    ],
)
def test_a_bad_value_is_named(field, value):
    with pytest.raises(ConfigError) as error:
        SamplingParams(**{field: value})
    assert f"sampling.{field}: expected" in str(error.value)
    assert repr(value) in str(error.value)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"sampling\.topk: no such parameter; known are .*top_k"):
        SamplingParams().replace(topk=3)


@pytest.mark.parametrize("off", [None, 0, -1])
def test_top_k_has_three_ways_to_be_off_and_one_meaning(off):
    assert SamplingParams(top_k=off) == SamplingParams()


def test_recorded_parameters_read_back_equal():
    params = SamplingParams(temperature=0.3, top_k=5, top_p=0.9, eos_token_ids=(7, 2), n=3, seed=2**63)
    assert SamplingParams.from_dict(params.to_dict()) == params
    assert params.to_dict()["order_version"] == 1


def test_a_record_of_another_order_version_is_refused():
    with pytest.raises(ConfigError, match="version 99"):
        SamplingParams.from_dict({**SamplingParams().to_dict(), "order_version": 99})


def test_temperature_zero_lowers_to_greedy_alone():
    policy = lower(SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.1))
    values = {type(stage): jax.tree.leaves(stage)[0] for stage in policy.transforms}
    assert values == {Temperature: 1.0, TopK: 0, TopP: 1.0, MinP: 0.0, Greedy: True}


def test_end_of_sequence_ids_are_joined():
    params = SamplingParams(eos_token_ids=(9, 4))
    assert resolved(params, (2, 9)).eos_token_ids == (2, 4, 9)
    assert resolved(params.replace(ignore_eos=True), (2, 9)).eos_token_ids == ()
    assert lower(params, (2, 9)).stopping[0].eos.tolist() == [2, 4, 9] + [NO_TOKEN] * (EOS_CAPACITY - 3)
    with pytest.raises(ConfigError, match=f"at most {EOS_CAPACITY}"):
        lower(SamplingParams(eos_token_ids=tuple(range(EOS_CAPACITY + 1))))


def test_all_policies_of_an_order_stack():
    rows = stack([lower(SamplingParams(temperature=t)) for t in (0, 0.5, 1)])
    assert rows.transforms[0].value.tolist() == [1.0, 0.5, 1.0]
    assert rows.transforms[-1].enabled.tolist() == [True, False, False]
    assert all(np.shape(leaf)[0] == 3 for leaf in jax.tree.leaves(rows))
