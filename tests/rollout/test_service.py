"""The Python surface: groups in prompt order, policies per prompt, failures raised or recorded."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from actors import Placement
from rollout import Branch, Geometry, Rollouts, SamplingParams
from rollout.groups import WINDOW_ROUNDS
from rollout.prompts import Prompt
from sampling import load_checkpoint
from sampling.checkpoints import weights_digest
from sampling.errors import CheckpointError, ConfigError, PromptError, RunError
from sampling.keys import row_key
from tests.tiny_models import tiny_llama

pytestmark = pytest.mark.ray

GEOMETRY = Geometry(slots=4, cache_len=64, prefill_chunk=16)


@pytest.fixture(scope="module")
def rollouts(local_ray, tiny_checkpoint):
    with Rollouts(
        tiny_checkpoint,
        workers=Placement(num_workers=2, cpus=0, threads=1),
        geometry=GEOMETRY,
        reward=lambda prompt, text: float(len(text)),
    ) as rollouts:
        yield rollouts


def test_ten_lines_sample_groups(rollouts):
    prompts = [
        {"messages": [{"role": "user", "content": "What is 3 + 4?"}]},
        {"prompt": "The capital of France is", "sampling": {"temperature": 0}},
        "plain text",
    ]
    params = SamplingParams(temperature=0.8, top_p=0.95, n=3, max_new_tokens=8)
    groups = list(rollouts.sample(prompts, params, seed=7))
    assert [[t.prompt_id for t in group] for group in groups] == [["0"] * 3, ["1"] * 3, ["2"] * 3]
    for group in groups:
        assert [t.sample_index for t in group] == [0, 1, 2]
        assert all(t.reward == len(t.text) for t in group)
    greedy = groups[1]
    assert all(np.array_equal(t.completion_tokens, greedy[0].completion_tokens) for t in greedy)
    assert all((t.behaviour_logprobs == 0).all() for t in greedy)
    assert len({t.completion_tokens.tobytes() for t in groups[0]}) == 3


def test_the_seed_decides_and_nothing_else(rollouts):
    def drawn(seed):
        groups = rollouts.sample(["abc", "abcd"], SamplingParams(n=2, max_new_tokens=8), seed=seed)
        return [t.completion_tokens.tobytes() for group in groups for t in group]

    assert drawn(1) == drawn(1) != drawn(2)


@pytest.fixture(scope="module")
def drawn(rollouts):
    """Two trajectories of one prompt, with a policy that looks back."""
    params = SamplingParams(n=2, max_new_tokens=12, frequency_penalty=0.5, top_p=0.9, ignore_eos=True)
    (group,) = rollouts.sample([{"prompt": "abc", "id": "p", "metadata": {"k": 1}}], params, seed=3)
    return group


def test_a_branch_with_nothing_changed_is_the_original(rollouts, drawn):
    branches = [Branch(trajectory, keep) for trajectory in drawn for keep in (0, 1, 7, 12)]
    groups = list(rollouts.branch(branches))
    for branch, (again,) in zip(branches, groups, strict=True):
        original = branch.trajectory
        assert (
            dataclasses.replace(
                again, wait_s=original.wait_s, decode_s=original.decode_s, worker=original.worker, given_len=0
            )
            == original
        )


def test_a_branch_goes_on_with_another_sample_or_policy(rollouts, drawn):
    original, sibling = drawn
    others, greedy, same = rollouts.branch(
        [
            Branch(original, 4, sample_indices=(5, 6), seed=3),
            Branch(original, 4, params=SamplingParams(temperature=0, max_new_tokens=9, ignore_eos=True)),
            Branch(original, 0, sample_indices=(1,), seed=3),
        ]
    )
    assert [t.sample_index for t in others] == [5, 6]
    for other in others:
        np.testing.assert_array_equal(other.completion_tokens[:4], original.completion_tokens[:4])
        np.testing.assert_array_equal(other.behaviour_logprobs[:4], original.behaviour_logprobs[:4])
        assert other.completion_tokens.tolist() != original.completion_tokens.tolist()
        assert other.reward == len(other.text) and other.metadata == {"k": 1}
    (greedy,) = greedy
    assert greedy.completion_len == 9 and (greedy.behaviour_logprobs[4:] == 0).all()
    assert np.isneginf(greedy.behaviour_logprobs[:4]).any() or (greedy.behaviour_logprobs[:4] == 0).all()
    np.testing.assert_array_equal(same[0].completion_tokens, sibling.completion_tokens)


def test_bad_branches_are_refused(rollouts, drawn):
    with pytest.raises(ConfigError, match=r"keep: expected 0 \.\. 12, the tokens of the completion, got 13"):
        Branch(drawn[0], 13)
    with pytest.raises(ConfigError, match="seed: the recorded key needs none"):
        Branch(drawn[0], 3, seed=1)
    with pytest.raises(ConfigError, match=r"branches: expected Branch\(trajectory, keep\), got"):
        next(rollouts.branch([drawn[0]]))
    with pytest.raises(ConfigError, match="got one of them"):
        next(rollouts.branch(Branch(drawn[0], 3)))


def test_a_loop_may_be_left_early(rollouts):
    params = SamplingParams(n=2, max_new_tokens=8)
    (reference,) = rollouts.sample(["abc"], params, seed=1)
    for group in rollouts.sample(("abc" for _ in range(10**9)), params, seed=1):
        assert [t.completion_tokens.tobytes() for t in group] == [t.completion_tokens.tobytes() for t in reference]
        break


def test_a_failure_is_raised_or_recorded(rollouts):
    prompts = ["abc", {"id": "long", "prompt_tokens": [5] * 64}, "abc"]
    params = SamplingParams(max_new_tokens=4)
    with pytest.raises(RunError, match=r"prompt 'long', sample 0: PromptError: .*64 tokens leave no room"):
        list(rollouts.sample(prompts, params))
    groups = list(rollouts.sample(prompts, params, on_failure="record"))
    assert [group[0].failed for group in groups] == [False, True, False]


def test_prompts_are_checked(rollouts):
    with pytest.raises(PromptError, match=r"prompts\[1\]: prompt 'a': its id is taken already"):
        list(rollouts.sample([{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}]))
    with pytest.raises(PromptError, match=r"prompts\[0\]: unknown field 'promt'"):
        list(rollouts.sample([{"promt": "x"}]))


def test_what_waits_for_its_turn_is_bounded(rollouts):
    pulled = itertools.count()
    slow = {"id": "slow", "prompt": "a", "sampling": {"max_new_tokens": 60}}
    quick = ({"id": f"q{next(pulled)}", "prompt": "a"} for _ in itertools.count())
    params = SamplingParams(max_new_tokens=1, ignore_eos=True)
    first = next(iter(rollouts.sample(itertools.chain([slow], quick), params)))
    assert first[0].prompt_id == "slow"
    assert next(pulled) <= WINDOW_ROUNDS * 2 * GEOMETRY.slots + 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"seed": -1}, ConfigError, r"seed: expected a whole number in 0 \.\. 2\^64 - 1, got -1"),
        ({"seed": 2**64}, ConfigError, "seed: expected .*, got 18446744073709551616"),
        ({"seed": "7"}, ConfigError, "seed: expected .*, got '7'"),
        ({"seed": True}, ConfigError, "seed: expected .*, got True"),
        ({"params": {"n": 2}}, ConfigError, r"params: expected SamplingParams\(...\), got {'n': 2}"),
        ({"on_failure": "ignore"}, ConfigError, "on_failure: expected 'raise' or 'record', got 'ignore'"),
        ({"prompts": "hello"}, PromptError, "prompts: expected a list, .*, got 'hello'"),
        ({"prompts": {"prompt": "hello"}}, PromptError, "prompts: expected a list, .*, got {'prompt': 'hello'}"),
        ({"prompts": None}, PromptError, "prompts: expected a list, .*, got None"),
        ({"prompts": [5]}, PromptError, r"prompts\[0\]: expected an object with id, .*, got 5"),
    ],
)
def test_an_argument_of_another_kind_is_refused_and_no_worker_is_lost(rollouts, call, error, message):
    with pytest.raises(error, match=message):
        list(rollouts.sample(**{"prompts": ["a"], **call}))
    assert len(list(rollouts.sample(["a"]))) == 1
    assert rollouts._workers.stats().restarts == 0


def test_the_tokens_of_a_record_can_be_sampled_on_from(rollouts):
    ((first,),) = rollouts.sample(["a"], SamplingParams(max_new_tokens=4))
    tokens = np.concatenate([first.prompt_tokens, first.completion_tokens])
    ((second,),) = rollouts.sample([{"prompt_tokens": tokens}], SamplingParams(max_new_tokens=4))
    assert np.array_equal(second.prompt_tokens, tokens)


def test_it_works_within_its_with_block_and_is_entered_once(rollouts, tiny_checkpoint):
    with pytest.raises(RunError, match="the workers are not running; use it as `with Rollouts"):
        next(Rollouts(tiny_checkpoint).sample(["a"]))
    with pytest.raises(RunError, match="the pool is open already"):
        rollouts.__enter__()
    assert len(list(rollouts.sample(["a"]))) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"workers": "2"}, ConfigError, "placement.num_workers: expected a whole number of at least 1, got '2'"),
        ({"workers": 1.5}, ConfigError, "placement.num_workers: expected a whole number of at least 1, got 1.5"),
        ({"geometry": {"slots": 2}}, ConfigError, r"geometry: expected Geometry\(...\), got {'slots': 2}"),
        ({"reward": "none"}, ConfigError, "reward: expected a function"),
        ({"checkpoint": None}, CheckpointError, "checkpoint: expected text or a path, got None"),
    ],
)
def test_a_service_that_cannot_be_built_says_why(tiny_checkpoint, arguments, error, message):
    with pytest.raises(error, match=message), Rollouts(**{"checkpoint": tiny_checkpoint, **arguments}):
        pass


def test_samples_of_other_indices_are_other_draws_of_the_same_prompt(rollouts):
    """A later epoch goes on where the last one ended; both may be under way at once."""
    params = SamplingParams(n=2, max_new_tokens=8)
    ((*whole,),) = rollouts.sample([Prompt("a", "abc", n=6)], params, seed=3)
    parts = [Prompt("a", "abc", first_sample=first) for first in (4, 0, 2)]
    found = list(rollouts.sample(parts, params, seed=3))
    assert [[t.sample_index for t in group] for group in found] == [[4, 5], [0, 1], [2, 3]]
    for group in found:
        for t in group:
            assert np.array_equal(t.key, whole[t.sample_index].key)
            assert np.array_equal(t.completion_tokens, whole[t.sample_index].completion_tokens)
    with pytest.raises(PromptError, match="its id is taken already"):
        list(rollouts.sample([parts[0], parts[1], parts[0]], params))


def test_failed_samples_have_the_indices_that_were_asked_for(rollouts):
    too_long, no_tokens = Prompt("a", "a" * 100, first_sample=7), Prompt("b", tokens=(10**6,), first_sample=8)
    (*good,), (*long,), (*unread,) = rollouts.sample(
        [Prompt("c", "abc", n=9), too_long, no_tokens], SamplingParams(n=2, max_new_tokens=2), on_failure="record"
    )
    assert [t.sample_index for t in good] == list(range(9)) and not any(t.failed for t in good)
    for group, indices in ((long, [7, 8]), (unread, [8, 9])):
        assert [t.sample_index for t in group] == indices and all(t.failed for t in group)
        assert [t.key.tolist() for t in group] == [row_key(0, group[0].prompt_id, i).tolist() for i in indices]


def test_records_name_the_weights_that_drew_them(local_ray, tiny_checkpoint, tmp_path):
    checkpoints = [load_checkpoint(path) for path in (tiny_checkpoint, tiny_llama(tmp_path / "other", seed=1))]
    digests = [weights_digest(checkpoint.params) for checkpoint in checkpoints]
    prompts = [Prompt(f"p{i}", "abc", n=4) for i in range(16)]
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    with Rollouts(tiny_checkpoint, workers=Placement(cpus=0, threads=1), geometry=GEOMETRY) as rollouts:
        groups = rollouts.sample([*prompts, Prompt("bad", tokens=(10**6,))], params, on_failure="record")
        found = list(next(groups))
        rollouts.publish(checkpoints[1].params, 1)
        found += [t for group in groups for t in group]
        (*afterwards,) = (t for group in rollouts.sample(prompts[:2], params) for t in group)
    assert all(t.policy_versions.min() == 1 for t in afterwards)
    *drawn, unread = [*afterwards, *found]
    assert {t.weights_digest for t in drawn} == set(digests)
    assert all(t.weights_digest == digests[t.policy_versions[-1]] for t in drawn)
    assert unread.failed and unread.weights_digest == digests[1]
