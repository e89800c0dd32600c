"""rollout/scoring/scored.py: one sequence under one scorer, worked out by hand, and exact to the bit through a file."""

import dataclasses
import json
import math

import numpy as np
import pyarrow.parquet
import pytest

from rollout.codec import write_parquet
from rollout.scoring.config import RatiosConfig
from rollout.scoring.foreign import RecordedSequence
from rollout.scoring.scored import MEANINGS, Outcome, ScoredSequence, count_scored, read_scored, write_scored
from sampling.errors import RecordError
from tests.rollout.records import completion, trajectory

LOG2 = math.log(2)
ORIGIN = {"scorer": "s", "weights_digest": "w", "numerics_fingerprint": "n"}


def sequence(**changes):
    fields = {
        "row": 4,
        "where": "file, row 4",
        "prompt_id": "p",
        "sample_index": 1,
        "prompt_tokens": np.int32([5, 6]),
        "completion_tokens": np.int32([7, 8, 9]),
        "behaviour_logprobs": np.float32([-1.0, -2.0, -0.5]),
        "policy_versions": np.int32([3, 3, 4]),
        "reward": 0.5,
    }
    return RecordedSequence(**fields | changes)


def answer(behaviour):
    """What a worker says of the three tokens; one more was drawn after them."""
    columns = {
        "behaviour_logprobs": behaviour,
        "model_logprobs": [-3.0, -2.0, -1.0, -9.0],
        "log_kept_mass": [-0.1, 0.0, 0.0, -9.0],
        "entropy": [0.5, 1.5, 0.25, 9.0],
    }
    tokens = np.int32([7, 8, 9, 10])
    return completion(completion_tokens=tokens, **{name: np.float32(values) for name, values in columns.items()})


def scored(recorded=None, behaviour=(-1.0 + LOG2, -2.0, -0.5 - 2 * LOG2, -9.0), newest_version=5, ratios=None):
    return ScoredSequence.of(
        recorded or sequence(),
        answer(behaviour),
        ratios=ratios or RatiosConfig(),
        newest_version=newest_version,
        policy="{}",
        **ORIGIN,
    )


def test_ratios_and_ages_by_hand():
    """Token ratios 2, 1 and 1/4; versions 3, 3, 4 of a source that knows 5."""
    row = scored()
    assert row.log_ratio == pytest.approx(-LOG2, abs=1e-6)  # the inputs are float32
    assert row.mean_log_ratio == pytest.approx(-LOG2 / 3, abs=1e-6)
    assert row.clipped_ratio == pytest.approx(0.5, abs=1e-6)
    assert row.ppo_clip_fraction == pytest.approx(2 / 3)
    assert row.recorded_logprob == -3.5
    assert row.staleness_mean == pytest.approx(5 / 3) and row.staleness_max == 2
    assert row.in_support.tolist() == [True, True, True]
    assert row.outcome is Outcome.SCORED and row.failure is None and row.reward == 0.5


def test_forced_tokens_have_no_ratio():
    row = scored(sequence(forced=np.int32([2]), given_len=0))
    assert row.log_ratio == pytest.approx(LOG2, abs=1e-6) and row.recorded_logprob == -3.0
    assert row.staleness_mean == 2.0 and row.forced.tolist() == [2]


def test_what_was_drawn_beyond_the_sequence_is_left_out():
    row = scored()
    for name in ("model_logprobs", "behaviour_logprobs", "log_kept_mass", "entropy", "in_support"):
        assert getattr(row, name).shape == (3,), name
    assert row.model_logprobs.tolist() == [-3.0, -2.0, -1.0]


def test_a_removed_token_is_out_of_support():
    row = scored(behaviour=(-1.0, -np.inf, -0.5, -9.0))
    assert row.in_support.tolist() == [True, False, True]
    assert row.log_ratio == row.mean_log_ratio == -np.inf and row.clipped_ratio == 0.0
    assert row.ppo_clip_fraction == pytest.approx(1 / 3)


def test_the_cap_is_the_configs():
    assert scored(behaviour=(0.0, 0.0, 0.0, 0.0), ratios=RatiosConfig(cap=3.5)).clipped_ratio == 3.5


def test_ratios_and_ages_are_about_drawn_tokens():
    """A branch: the first token was given, and the law that drew the others would never have drawn it."""
    row = scored(sequence(given_len=1, behaviour_logprobs=np.float32([-np.inf, -2.0, -0.5])))
    assert row.log_ratio == pytest.approx(-2 * LOG2, abs=1e-6) and row.recorded_logprob == -2.5
    assert row.mean_log_ratio == pytest.approx(-LOG2, abs=1e-6) and row.ppo_clip_fraction == 0.5
    assert row.staleness_mean == 1.5 and row.recorded_logprobs[0] == -np.inf and row.behaviour_logprobs.size == 3
    row = scored(sequence(given_len=3, behaviour_logprobs=np.float32([-np.inf] * 3)))
    assert row.log_ratio is row.clipped_ratio is row.recorded_logprob is row.staleness_max is None


def test_without_recorded_log_probs_there_are_no_ratios():
    row = scored(sequence(behaviour_logprobs=None, policy_versions=None), newest_version=None)
    for name in ("recorded_logprobs", "recorded_logprob", "log_ratio", "mean_log_ratio", "clipped_ratio"):
        assert getattr(row, name) is None, name
    assert row.ppo_clip_fraction is row.staleness_mean is row.staleness_max is row.policy_versions is None
    assert row.behaviour_logprobs.size == 3


def rows():
    return [
        scored(),
        ScoredSequence.unscored(sequence(row=5), Outcome.FAILED, "too long", **ORIGIN),
        scored(sequence(behaviour_logprobs=None, policy_versions=None, reward=None)),
        dataclasses.replace(scored(behaviour=(-1.0, -np.inf, -0.5, -9.0)), ended_at=1),
    ]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "part.parquet"
    with path.open("wb") as stream:
        write_scored(stream, rows())
    return path


def test_a_file_gives_the_same_rows_back(file):
    found = list(read_scored(file))
    assert count_scored(file) == len(found) == 4
    for ours, theirs in zip(rows(), found, strict=True):
        for field in dataclasses.fields(ScoredSequence):
            mine, read = getattr(ours, field.name), getattr(theirs, field.name)
            if isinstance(mine, np.ndarray):
                assert (mine.dtype, mine.tobytes()) == (read.dtype, read.tobytes()), field.name
            else:
                assert (type(mine), mine) == (type(read), read), field.name


def test_the_file_says_what_its_columns_mean(file):
    schema = pyarrow.parquet.read_schema(file)
    assert json.loads(schema.metadata[b"rollout.scored_columns"]) == MEANINGS
    assert schema.names == list(MEANINGS) == [field.name for field in dataclasses.fields(ScoredSequence)]
    assert schema.metadata[b"rollout.scored_schema_version"] == b"2"


def test_other_files_are_refused(file, tmp_path):
    other = tmp_path / "other.parquet"
    table = pyarrow.parquet.read_table(file)
    pyarrow.parquet.write_table(table.replace_schema_metadata({b"rollout.scored_schema_version": b"9"}), other)
    with pytest.raises(RecordError, match=r"other.parquet: expected version 2 of scored sequences, got 9"):
        list(read_scored(other))
    pyarrow.parquet.write_table(table.drop_columns(["entropy"]), other)
    with pytest.raises(RecordError, match=r"other.parquet: expected columns scorer, row, "):
        count_scored(other)
    with other.open("wb") as stream:
        write_parquet(stream, [trajectory()])
    with pytest.raises(RecordError, match="got none"):
        count_scored(other)
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(RecordError, match="it may be truncated"):
        list(read_scored(file))
