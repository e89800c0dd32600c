"""Tests rollout/bench_workloads.py: equal seeds make equal requests, of the shape that the documentation promises."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.bench_workloads import POLICIES, Shape, workload
from sampling.errors import ConfigError

KNOWN = 49152


def prompts(work):
    return [request.prompt_tokens.tolist() for request in work.requests]


def budgets(work):
    return [request.params.max_new_tokens for request in work.requests]


@pytest.mark.parametrize("name", POLICIES)
def test_a_seed_names_one_workload(name):
    one, same, other = (workload(name, KNOWN, seed=seed) for seed in (3, 3, 4))
    assert prompts(one) == prompts(same) != prompts(other)
    assert budgets(one) == budgets(same)
    for a, b, c in zip(one.requests, same.requests, other.requests, strict=True):
        assert [key.tolist() for key in a.keys] == [key.tolist() for key in b.keys] != [key.tolist() for key in c.keys]


@pytest.mark.parametrize("name", POLICIES)
def test_only_the_budget_ends_a_row_and_the_cache_holds_the_longest(name):
    work = workload(name, KNOWN, slots=16)
    assert all(request.params.ignore_eos for request in work.requests)
    longest = max(request.prompt_tokens.size + request.params.max_new_tokens for request in work.requests)
    assert longest <= work.geometry.cache_len < longest + 64 and work.geometry.cache_len % 64 == 0
    assert work.geometry.slots == 16
    assert work.tokens == sum(request.params.n * request.params.max_new_tokens for request in work.requests)


@pytest.mark.parametrize("name", ["uniform", "filters"])
def test_uniform_rows_fill_the_slots_once(name):
    work = workload(name, KNOWN, slots=32)
    assert work.rows == 32 and budgets(work) == [64] * 32
    lens = [len(prompt) for prompt in prompts(work)]
    assert 24 <= min(lens) < 32 < max(lens) <= 40
    ids = np.concatenate(prompts(work))
    assert ids.min() >= 5 and ids.max() < KNOWN and np.median(ids) < KNOWN / 20  # small ids more often


def test_filters_differ_from_uniform_in_the_policy_alone():
    uniform, filters = workload("uniform", KNOWN), workload("filters", KNOWN)
    assert prompts(uniform) == prompts(filters)
    params = filters.requests[0].params
    assert (params.temperature, params.top_k, params.top_p) == (0.8, 50, 0.95)
    assert uniform.requests[0].params.temperature == 1


def test_groups_are_eight_samples_of_eight_long_prompts():
    work = workload("groups", KNOWN, slots=32)
    assert [len(prompt) for prompt in prompts(work)] == [256] * 8 and budgets(work) == [64] * 8
    assert work.rows == 64 and work.tokens == 64 * 64


def test_the_long_tail_has_its_median_its_longest_row_and_one_sum_for_all_seeds():
    found = [budgets(workload("longtail", KNOWN, slots=32, seed=seed)) for seed in range(3)]
    assert len(found[0]) == 128
    assert abs(np.median(found[0]) - 24) <= 1 and max(found[0]) == 256 and min(found[0]) >= 1
    assert np.mean(found[0]) > 1.4 * np.median(found[0])
    assert sorted(found[0]) == sorted(found[1]) == sorted(found[2])
    assert found[0] != found[1] != found[2]


def test_single_is_one_greedy_row():
    work = workload("single", KNOWN, slots=32)
    assert work.rows == 1 and work.tokens == 64 and work.params.temperature == 0


def test_a_shape_shrinks_a_workload():
    shape = Shape(prompt_len=8, new_tokens=3, group_prompts=2, group_prompt_len=10, group_size=5, rounds=2, longest=30)
    assert workload("uniform", 266, slots=4, shape=shape).tokens == 12
    assert workload("groups", 266, slots=4, shape=shape).tokens == 2 * 5 * 3
    assert len(workload("longtail", 266, slots=4, shape=shape).requests) == 8


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match="expected one of uniform, filters, groups, longtail, single, got 'unifrom'"):
        workload("unifrom", KNOWN)
