"""Tests rollout/trajectory.py."""

import dataclasses

import numpy as np
import pytest

from rollout.rewards import Score
from rollout.trajectory import FAILED_REASONS, MAX_ROUNDING_NATS, Status, Trajectory
from sampling.errors import RecordError
from sampling.keys import row_key
from sampling.params import SamplingParams
from sampling.types import StopReason
from tests.rollout.records import completion, trajectory


def test_a_completion_becomes_a_record_with_every_field():
    record = Trajectory.from_completion(
        completion("p-1", 3),
        run_id="r",
        weights_digest="w",
        numerics_fingerprint="n",
        text="ab",
        worker="w-0",
        score=Score(0.5),
        metadata={"level": 2},
    )
    assert (record.prompt_id, record.group_id, record.sample_index) == ("p-1", "p-1", 3)
    assert record.completion_tokens.tolist() == [7, 8]
    assert record.behaviour_logprobs.tolist() == np.array([-0.5, -0.7], np.float32).tolist()
    assert record.policy == SamplingParams(top_p=0.95).to_dict()
    assert (record.stop_reason, record.status, record.failure) == (StopReason.EOS, Status.COMPLETED, None)
    assert (record.reward, record.reward_error, record.metadata) == (0.5, None, {"level": 2})
    assert record.completion_len == 2
    assert record.behaviour_logprob == pytest.approx(-1.2, abs=1e-6)


@pytest.mark.parametrize("reason", StopReason)
def test_reasons_without_a_usable_completion_give_failed_records(reason):
    record = trajectory(stop_reason=reason)
    assert record.failed == (reason in FAILED_REASONS)
    assert (record.failure is not None) == record.failed
    assert record.completion_tokens.tolist() == [7, 8], "tokens drawn before the failure stay in the record"


def test_a_sample_that_was_never_drawn_is_a_named_failure_with_its_own_key():
    record = Trajectory.from_failure(
        "worker-1 died 3 times",
        "p",
        2,
        np.array([1], np.int32),
        row_key(7, "p", 2),
        params=SamplingParams(),
        run_id="r",
        weights_digest="w",
        numerics_fingerprint="n",
    )
    assert (record.status, record.failure) == (Status.FAILED, "worker-1 died 3 times")
    assert record.stop_reason is StopReason.ABORTED
    assert record.completion_len == 0 and record.behaviour_logprob == 0.0
    assert record.key.tolist() == row_key(7, "p", 2).tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"behaviour_logprobs": np.zeros(1, np.float32)}, r"behaviour_logprobs: expected float32 \[2\], got .* \[1\]"),
        ({"model_logprobs": np.zeros(2, np.float64)}, r"model_logprobs: expected float32 \[2\], got float64 \[2\]"),
        ({"completion_tokens": np.zeros(2, np.int64)}, r"completion_tokens: expected int32 .*, got int64 \[2\]"),
        ({"policy_versions": np.zeros((2, 1), np.int32)}, r"policy_versions: expected int32 \[2\], got int32 \[2, 1\]"),
        ({"completion_tokens": [7, 8]}, r"completion_tokens: expected int32 .*, got \[7, 8\]"),
        ({"key": np.zeros(3, np.uint32)}, r"key: expected uint32 \[2\], got uint32 \[3\]"),
        ({"behaviour_logprobs": np.array([-1, np.nan], np.float32)}, r"behaviour_logprobs\[1\]: .* got .*nan"),
        ({"behaviour_logprobs": np.array([-np.inf, -1], np.float32)}, r"behaviour_logprobs\[0\]: expected a log-prob"),
        ({"behaviour_logprobs": np.array([-1, 0.5], np.float32)}, r"behaviour_logprobs\[1\]: .* <= 0"),
        ({"log_kept_mass": np.array([0.5, -1], np.float32)}, r"log_kept_mass\[0\]: expected a log-probability"),
        ({"entropy": np.array([0.5, -1], np.float32)}, r"entropy\[1\]: expected NaN or nats, finite and >= 0, got"),
        ({"entropy": np.array([np.inf, 1], np.float32)}, r"entropy\[0\]: expected NaN or nats"),
        ({"support_sizes": np.array([1, 0], np.int32)}, r"support_ids: expected int32 \[1\], the sum of support_sizes"),
        ({"support_sizes": np.array([1, -1], np.int32)}, "support_sizes: expected numbers >= 0"),
        ({"support_sizes": np.array([0, 2], np.int32), "support_ids": np.array([3, 4], np.int32)},
         r"support of token 1: expected ascending ids, the token's own among them, got .*\[3, 4\]"),
        ({"given_len": 3}, r"given_len: expected a whole number in 0 \.\. 2, got 3"),
        ({"given_len": 1, "behaviour_logprobs": np.array([-1, -np.inf], np.float32)}, r"behaviour_logprobs\[1\]: "),
        ({"forced": np.array([2], np.int32)}, r"forced: expected ascending places in 0 \.\. 1, got .*2"),
        ({"forced": np.array([1, 0], np.int32)}, "forced: expected ascending places"),
        ({"forced": np.array([True])}, r"forced: expected int32 \[any length\], got bool"),
        ({"sample_index": -1}, "sample_index: expected a whole number >= 0, got -1"),
        ({"wait_s": float("nan")}, "wait_s: expected seconds >= 0 as a float, got nan"),
        ({"metadata": {"a": (1, 2)}}, r"metadata.a: expected a plain JSON value .* got tuple"),
        ({"metadata": {"a": [float("inf")]}}, r"metadata.a\[0\]: expected a finite number, got inf"),
        ({"metadata": {1: "a"}}, "metadata: expected text as keys, got 1"),
        ({"text": "\ud800"}, "text: expected text"),
        ({"reward": float("nan")}, "reward: expected a finite float or None, got nan"),
        ({"reward": 1.0, "reward_error": "why"}, "reward_error: expected None beside a reward"),
        ({"status": Status.FAILED}, "status: expected one that fits stop reason eos, got failed"),
        ({"failure": "why"}, "failure: expected text for a failed row and None for a completed one"),
        ({"stop_reason": "tired"}, "'tired' is not a valid StopReason"),
    ],
)  # fmt: skip
def test_a_record_that_breaks_its_invariants_is_refused_by_name(changes, message):
    with pytest.raises(RecordError, match=message) as caught:
        dataclasses.replace(trajectory("p-9"), **changes)
    assert "prompt 'p-9'" in str(caught.value)


def test_a_given_token_may_be_one_that_the_policy_removes():
    values = np.array([-np.inf, -1.0], np.float32)
    assert trajectory(given_len=1, behaviour_logprobs=values).behaviour_logprobs.tobytes() == values.tobytes()


def test_supports_are_read_token_by_token():
    sizes, ids = np.array([3, 0], np.int32), np.array([2, 7, 9], np.int32)
    record = trajectory(support_sizes=sizes, support_ids=ids)
    assert record.support(0).tolist() == [2, 7, 9] and record.support(1).tolist() == []


def test_rounding_just_above_zero_is_no_fault_and_is_kept_as_it_is():
    values = np.array([MAX_ROUNDING_NATS / 2, 0.0], np.float32)
    assert trajectory(behaviour_logprobs=values).behaviour_logprobs.tobytes() == values.tobytes()


def test_equality_is_equality_of_bits():
    nan_a, nan_b = np.array([0x7FC00001, 0], np.uint32), np.array([0x7FC00002, 0], np.uint32)
    a = trajectory(model_logprobs=nan_a.view(np.float32))
    assert a == trajectory(model_logprobs=nan_a.view(np.float32))
    assert a != trajectory(model_logprobs=nan_b.view(np.float32))
    assert trajectory(sample_index=1) != trajectory(sample_index=2)
    assert trajectory(behaviour_logprobs=np.array([0.0, -1], np.float32)) != trajectory(
        behaviour_logprobs=np.array([-0.0, -1], np.float32)
    )


def test_a_record_cannot_be_changed_in_place():
    record = trajectory()
    with pytest.raises(ValueError, match="read-only"):
        record.completion_tokens[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.reward = 1.0
