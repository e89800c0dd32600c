"""Trajectories as arrays: what is learnt from and what is refused, shapes, credit."""

import dataclasses

import numpy as np
import pytest

from rollout.learning.batches import BatchShapes, TrainBatch, cut, joined, split
from rollout.learning.config import AlgorithmSection
from rollout.learning.credit import credited, masked, weighted
from rollout.rewards import Score
from sampling.errors import ConfigError
from sampling.params import SamplingParams
from sampling.state import NO_TOKEN
from sampling.types import StopReason
from tests.rollout.records import trajectory


def sample(size, reward=0.0, prompt_id="p", index=0, **changes):
    """A completion of `size` tokens 7, 8, ... with log-probs -0.1, -0.2, ..."""
    nats = -0.1 * np.arange(1, size + 1, dtype=np.float32)
    fields = dict(
        completion_tokens=np.arange(7, 7 + size, dtype=np.int32),
        behaviour_logprobs=nats,
        model_logprobs=nats,
        log_kept_mass=np.zeros(size, np.float32),
        params=SamplingParams(temperature=0.7),
        score=Score(reward),
    )
    return trajectory(prompt_id, index, **{**fields, **changes})


def test_arrays_by_hand():
    given = sample(3, None, index=1, given_len=1, policy_versions=np.array([0, 4, 5], np.int32))
    dead = sample(2, index=2, stop_reason=StopReason.UNDEFINED_DISTRIBUTION)
    batch = TrainBatch.of([sample(1, 2.0), given, dead, sample(2, prompt_id="q", stop_reason=StopReason.LENGTH)])
    assert batch.tokens.tolist() == [[1, 5, 6, 7, 0, 0], [1, 5, 6, 7, 8, 9], [1, 5, 6, 7, 8, 0], [1, 5, 6, 7, 8, 0]]
    assert batch.mask.tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 0]]
    np.testing.assert_allclose(batch.behaviour_logprobs[1], [0, -0.2, -0.3])
    assert batch.policy_versions[1].tolist() == [0, 4, 5]
    assert (batch.prompt_len.tolist(), batch.length.tolist()) == ([3, 3, 3, 3], [4, 6, 5, 5])
    assert batch.group.tolist() == [0, 0, 0, 1] and batch.cut_off.tolist() == [False, False, False, True]
    np.testing.assert_allclose(batch.temperature, [0.7, 0.7, 1, 0.7])
    assert batch.rewards[0] == 2 and np.isnan(batch.rewards[1])
    assert batch.support.shape == (4, 3, 0)


def test_supports_have_their_places():
    sizes, ids = np.array([2, 3], np.int32), np.array([7, 9, 4, 8, 12], np.int32)
    params = SamplingParams(top_k=3, record_support=4)
    batch = TrainBatch.of([sample(2, support_sizes=sizes, support_ids=ids, params=params), sample(1, index=1)])
    assert batch.support[0].tolist() == [[7, 9, NO_TOKEN], [4, 8, 12]]
    assert (batch.support[1] == NO_TOKEN).all()
    (part,) = cut(batch, BatchShapes(2, 64, 16, 8))
    assert part.batch.support.shape == (2, 8, 4) and part.batch.support[0, 1].tolist() == [4, 8, 12, NO_TOKEN]


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        ({"temperature": 0.0}, "sampling.temperature: expected more than 0, got 0"),
        ({"repetition_penalty": 1.2}, "sampling.repetition_penalty = 1.2: expected its default 1.0"),
        ({"logit_bias": {5: 1.0}}, "sampling.logit_bias = "),
        ({"no_repeat_ngram_size": 3}, "sampling.no_repeat_ngram_size = 3"),
        ({"plugins": {"cooler": {}}}, "sampling.plugins = "),
        ({"top_p": 0.9}, r"sampling.top_p = 0.9: expected sampling.record_support above 0, got 0"),
        ({"top_k": 9, "record_support": 9}, "sampling.top_k: expected the recorded support of every .* of token 0"),
    ],
)
def test_policies_that_cannot_be_learnt_from(parameter, words):
    with pytest.raises(ConfigError, match=f"prompt 'p', sample 0: .*{words}"):
        TrainBatch.of([sample(2, params=SamplingParams(**parameter))])


def test_forced_tokens_are_read_and_not_learnt_from():
    thinking = SamplingParams(temperature=0.7, thinking_budget=1, thinking_start=[5], thinking_end=[8, 9])
    row = sample(4, params=thinking, forced=np.array([1, 2], np.int32))
    branch = sample(4, index=1, given_len=1, params=thinking, forced=np.array([0, 2], np.int32))
    batch = TrainBatch.of([row, branch])
    assert batch.mask.tolist() == [[1, 0, 0, 1], [0, 1, 0, 1]]
    assert batch.tokens[0].tolist() == [1, 5, 6, 7, 8, 9, 10] and batch.length.tolist() == [7, 7]
    np.testing.assert_allclose(batch.behaviour_logprobs[0], [-0.1, 0, 0, -0.4])


def test_a_forced_token_needs_no_support():
    params = SamplingParams(top_k=3, record_support=4, forced_eos=8)
    sizes, ids = np.array([2, 0], np.int32), np.array([7, 9], np.int32)
    row = sample(2, params=params, support_sizes=sizes, support_ids=ids, forced=np.array([1], np.int32))
    assert TrainBatch.of([row]).mask.tolist() == [[True, False]]


def test_what_changes_no_probability_is_learnt_from():
    params = SamplingParams(
        temperature=1.3, max_new_tokens=9, stop=["x"], eos_token_ids=[2], seed=4, n=3, order="vllm", renormalize=True
    )
    assert TrainBatch.of([sample(2, params=params)]).mask.all()
    assert not TrainBatch.of([]).mask.any()


def test_rules_from_outside_change_no_probability():
    row = sample(2, params=SamplingParams(plugins={"same_token": {"times": 2, "version": "1"}, "late": {}}))
    assert TrainBatch.of([row], rules={"late", "same_token", "other"}).mask.all()
    with pytest.raises(ConfigError, match=r"sampling.plugins = .*same_token.*: expected its default"):
        TrainBatch.of([row], rules={"late"})


def test_micro_batches_have_few_shapes_and_hold_every_row_once():
    shapes = BatchShapes(rows=4, longest=100, longest_completion=90, bucket_len=8)
    rng = np.random.default_rng(0)
    batch = TrainBatch.of([sample(int(size), index=i) for i, size in enumerate(rng.integers(1, 91, 50))])
    micro = cut(batch, shapes)
    assert sorted(np.concatenate([part.rows for part in micro]).tolist()) == list(range(50))
    seen = {(part.batch.tokens.shape, part.batch.mask.shape) for part in micro}
    assert all(rows == 4 and length in (8, 16, 32, 64, 100) for (rows, length), _ in seen)
    assert all(rows == 4 and length in (8, 16, 32, 64, 90) for _, (rows, length) in seen)
    assert not micro[-1].batch.mask[2:].any() and not micro[-1].batch.length[2:].any()
    back = joined(batch, micro, [part.batch.behaviour_logprobs for part in micro])
    np.testing.assert_array_equal(back, batch.behaviour_logprobs)
    with pytest.raises(ConfigError, match="expected a completion of at most 80 tokens, got 8"):
        cut(batch, dataclasses.replace(shapes, longest_completion=80))


def test_rows_that_teach_nothing_are_in_no_micro_batch_and_no_part():
    batch = masked(
        TrainBatch.of([sample(2, None), *(sample(1, 1.0, index=i) for i in range(1, 6))]), AlgorithmSection()
    )
    assert [part.rows.tolist() for part in cut(batch, BatchShapes(3, 16, 8))] == [[1, 2, 3], [4, 5]]
    assert [part.num_rows for part in split(batch, 2)] == [3, 2]
    assert [part.num_rows for part in split(batch, 9)] == [1] * 5


def test_credit_of_groups_and_overlong_completions():
    batch = TrainBatch.of(
        [
            sample(1, 1.0),
            sample(4, 0.0, index=1, stop_reason=StopReason.LENGTH),
            sample(2, None, index=2),
            sample(3, 5.0, "q"),
        ]
    )
    plain = AlgorithmSection(scale="none")
    assert masked(batch, plain).mask.any(axis=1).tolist() == [True, True, False, True]
    got = credited(masked(batch, plain), plain, 4).advantages
    assert got.tolist() == [[0.5, 0, 0, 0], [-0.5] * 4, [0] * 4, [0] * 4]
    assert masked(batch, plain.model_copy(update={"overlong": "mask"})).mask.any(axis=1).tolist() == [1, 0, 0, 1]
    soft = plain.model_copy(update={"overlong": "penalty", "overlong_margin": 2})
    assert credited(batch, soft, 4).advantages[0, 0] == 1.0  # 1 against 0 - 1
    penalty = np.zeros((4, 4))
    penalty[1] = 0.25
    assert credited(batch, plain, 4, penalty).advantages[0, 0] == 1.0  # 1 against 0 - 4 * 0.25


def test_credit_of_tokens_by_generalized_advantages():
    """gamma 1, lambda 1: the advantage is the reward minus the value, and the return is the reward."""
    batch = TrainBatch.of([sample(2, 1.0), sample(3, 0.0, index=1, given_len=1)])
    values = np.array([[0.25, 0.5, 0], [0, 0.5, 0.75]], np.float32)
    algorithm = AlgorithmSection(advantages="gae", trace=1.0, scale="none")
    got = credited(batch.replace(values=values), algorithm, 4)
    assert got.advantages.tolist() == [[0.75, 0.5, 0], [0, -0.5, -0.75]]
    assert got.returns.tolist() == [[1, 1, 0], [0, 0, 0]]
    white = credited(batch.replace(values=values), algorithm.model_copy(update={"scale": "std"}), 4).advantages
    assert white[batch.mask].mean() == pytest.approx(0, abs=1e-6)
    assert white[batch.mask].std() == pytest.approx(1, abs=1e-4)


def test_weights_are_of_the_whole_batch():
    batch = TrainBatch.of([sample(1, 1.0), sample(3, 0.0, index=1)])
    each = {"token_mean": [1 / 4, 1 / 4], "sequence_mean": [1 / 2, 1 / 6], "constant": [1 / 8, 1 / 8]}
    for reduction, (short, long) in each.items():
        weights = weighted(batch, AlgorithmSection(reduction=reduction), 4).weights
        np.testing.assert_allclose(weights, [[short, 0, 0], [long] * 3])
