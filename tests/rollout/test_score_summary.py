"""rollout/scoring/summary.py: every figure of a scorer against numbers worked out by hand."""

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from rollout.scoring.config import Law, RatiosConfig, ScorePath
from rollout.scoring.scored import Outcome, ScoredSequence
from rollout.scoring.summary import NO_LOGPROBS, ScoreSummary, Tally

LAW = Law("other", "checkpoint", None, ScorePath.FORWARD)
CONFIG = RatiosConfig(cap=2.0, clip_epsilon=0.2)
LOG2 = math.log(2)
NEWEST = 7


def row(log_ratios=(0.0,), versions=None, recorded=True, **changes):
    """A scored sequence with recorded log-probs of -1 and the given token log-ratios, which float32 holds exactly."""
    ratios = np.array(log_ratios, np.float64)
    behaviour = (ratios - 1.0).astype(np.float32)
    outside = np.abs(np.exp(ratios) - 1) > CONFIG.clip_epsilon
    fields = {
        "scorer": "other",
        "row": 0,
        "prompt_id": "p",
        "sample_index": 0,
        "prompt_tokens": np.int32([5]),
        "completion_tokens": np.full(ratios.size, 7, np.int32),
        "given_len": 0,
        "reward": None,
        "outcome": Outcome.SCORED,
        "model_logprobs": np.full(ratios.size, -2.0, np.float32),
        "behaviour_logprobs": behaviour,
        "log_kept_mass": np.zeros(ratios.size, np.float32),
        "entropy": np.full(ratios.size, 0.5, np.float32),
        "in_support": np.isfinite(ratios),
        "recorded_logprobs": np.full(ratios.size, -1.0, np.float32) if recorded else None,
        "log_ratio": float(ratios.sum()) if recorded else None,
        "ppo_clip_fraction": float(outside.mean()) if recorded and ratios.size else None,
        "policy_versions": None if versions is None else np.int32(versions),
        "staleness_max": None if versions is None else NEWEST - min(versions),
        "weights_digest": "w",
        "numerics_fingerprint": "n",
    }
    return ScoredSequence(**fields | changes)


def summary(*rows):
    tally = Tally(CONFIG, NEWEST)
    for each in rows:
        tally.add(each)
    return tally.summary(LAW)


def unscored(outcome, failure):
    nothing = np.zeros(0, np.float32)
    columns = ("model_logprobs", "behaviour_logprobs", "log_kept_mass", "entropy")
    changes = dict.fromkeys(columns, nothing) | dict.fromkeys(("recorded_logprobs", "log_ratio", "ppo_clip_fraction"))
    return row((), outcome=outcome, failure=failure, **changes)


def test_counts_add_up_and_failures_are_told():
    found = summary(row(), unscored(Outcome.SKIPPED, "empty"), unscored(Outcome.FAILED, "too long"), row())
    assert (found.trajectories, found.scored, found.skipped, found.failed) == (4, 2, 1, 1)
    assert found.failures == ("prompt 'p', sample 0: too long",)
    assert found.tokens == 2 and found.ratios.trajectories == 2


def test_means_are_over_tokens_and_not_over_sequences():
    first = row((0.0,), model_logprobs=np.float32([-1.0]), entropy=np.float32([1.0]))
    second = row((0.0, -1.0, -3.0), model_logprobs=np.float32([-2.0, -2.0, -3.0]), entropy=np.float32([0.0, 0.0, 1.0]))
    found = summary(first, second)
    assert found.mean_model_logprob == -2.0
    assert found.mean_behaviour_logprob == -2.0  # -1, -1, -2, -4
    assert found.mean_entropy == 0.5


def test_removed_tokens_are_counted_and_left_out_of_means():
    found = summary(row((0.0, -np.inf, -np.inf, -2.0)), row((-1.0, 1.0)))
    assert found.out_of_support_share == pytest.approx(2 / 6)
    assert found.zero_probability_share == 0.5
    assert found.mean_behaviour_logprob == -1.5  # -1, -3, -2, 0
    assert found.ratios.mean_abs_log_ratio == 1.0  # 0, 2, 1, 1
    assert found.ratios.abs_log_ratio_quantiles["max"] == 2.0
    assert found.ratios.kl.k1 == 0.5  # (0 + 2 + 1 - 1) / 4
    assert found.ratios.kl.k2 == 0.75  # (0 + 4 + 1 + 1) / 2 / 4
    e = math.e
    assert found.ratios.kl.k3 == pytest.approx((0 + (e**-2 - 1 + 2) + (1 / e - 1 + 1) + (e - 1 - 1)) / 4)
    assert found.ratios.ess == 1.0 and found.ratios.ess_share == 0.5  # weights 0 and 1


def test_forced_tokens_count_nowhere():
    found = summary(row((3.0, 1.0, -2.0), forced=np.int32([0]), log_ratio=-1.0))
    assert found.tokens == 2 and found.ratios.mean_abs_log_ratio == 1.5


def test_effective_sample_size_before_and_after_the_cap():
    """Weights 1, 4 and 1: 36 / 18. Cut at 2: 16 / 6."""
    found = summary(row((0.0,)), row((LOG2, LOG2)), row((1.0, -1.0))).ratios
    assert found.ess == pytest.approx(2.0) and found.ess_share == pytest.approx(2 / 3)
    assert found.ess_clipped == pytest.approx(16 / 6) and found.ess_clipped_share == pytest.approx(16 / 18)
    assert found.clipped_share == pytest.approx(1 / 3)
    assert found.ppo_clip_fraction == pytest.approx(4 / 5)  # all tokens but the first


def test_all_weights_zero():
    found = summary(row((-np.inf,)), row((-np.inf, 0.0)))
    assert found.zero_probability_share == 1.0
    assert found.ratios.ess == found.ratios.ess_clipped == found.ratios.clipped_share == 0.0


def test_nothing_in_support_at_all():
    found = summary(row((-np.inf,)))
    assert found.mean_behaviour_logprob is found.ratios.kl is found.ratios.mean_abs_log_ratio is None
    assert found.out_of_support_share == 1.0


def test_quantiles_of_the_tokens():
    found = summary(*(row((k / 64,)) for k in range(1, 101))).ratios.abs_log_ratio_quantiles
    assert found["p50"] == pytest.approx(50 / 64, rel=0.0101)
    assert found["p90"] == pytest.approx(90 / 64, rel=0.0101)
    assert found["p99"] == pytest.approx(99 / 64, rel=0.0101)
    assert found["max"] == 100 / 64


def test_a_single_sequence():
    found = summary(row((-3.0,)))
    assert found.ratios.ess == found.ratios.ess_share == 1.0


def test_no_sequences():
    found = summary()
    assert found.trajectories == found.tokens == 0 and found.ratios is None and found.staleness == ()
    assert found.mean_model_logprob is found.out_of_support_share is found.zero_probability_share is None


def test_without_recorded_log_probs_nothing_is_compared():
    found = summary(row(recorded=False), row(recorded=False, versions=[7]))
    assert found.ratios is None and found.tokens == 2
    assert [(age.age, age.trajectories, age.ess, age.mean_abs_log_ratio) for age in found.staleness] == [
        (0, 1, None, None)
    ]


def test_only_recorded_sequences_are_compared():
    found = summary(row(recorded=False), row((1.0, -1.0)))
    assert found.scored == 2 and found.ratios.trajectories == 1 and found.ratios.tokens == 2


def test_staleness_by_age():
    """Newest version 7. Sequences: all tokens at 7; at 5; and one whose tokens span 5 .. 7."""
    rows = [
        row((0.0, 0.0), versions=[7, 7]),
        row((1.0, -2.0), versions=[5, 5]),
        row((3.0, 0.0, 1.0), versions=[5, 6, 7]),
        row((LOG2,), versions=[7]),
    ]
    found = {age.age: age for age in summary(*rows).staleness}
    assert list(found) == [0, 1, 2]
    assert (found[0].trajectories, found[0].tokens) == (2, 4)
    assert found[0].ess == pytest.approx(9 / 5)  # weights 1 and 2
    assert found[0].mean_abs_log_ratio == pytest.approx((0 + 0 + 1 + LOG2) / 4)
    assert (found[1].trajectories, found[1].tokens, found[1].ess, found[1].mean_abs_log_ratio) == (0, 1, 0.0, 0.0)
    assert (found[2].trajectories, found[2].tokens) == (2, 3)
    weights = np.exp([-1.0, 4.0])
    assert found[2].ess == pytest.approx(weights.sum() ** 2 / (weights**2).sum())
    assert found[2].mean_abs_log_ratio == 2.0  # 1, 2, 3
    assert sum(age.trajectories for age in found.values()) == 4 and sum(age.tokens for age in found.values()) == 8


def test_tokens_that_a_branch_was_given_count_nowhere():
    branch = row((-np.inf, 5.0, 1.0, -1.0), versions=[1, 1, 6, 7], given_len=2, log_ratio=0.0, staleness_max=1)
    replayed = row((3.0,), versions=[0], given_len=1, log_ratio=None, staleness_max=None)
    found = summary(branch, replayed)
    assert found.scored == 2 and found.tokens == 2 and found.zero_probability_share == found.out_of_support_share == 0
    assert found.mean_behaviour_logprob == -1.0 and found.ratios.mean_abs_log_ratio == 1.0
    assert (found.ratios.trajectories, found.ratios.tokens, found.ratios.ess) == (1, 2, 1.0)
    assert [(age.age, age.trajectories, age.tokens) for age in found.staleness] == [(0, 0, 1), (1, 1, 1)]


def test_sequences_that_would_have_ended_early():
    assert summary(row(), row((0.0, 0.0), ended_at=0)).ended_early_share == 0.5


def rendered(*scorers):
    out = io.StringIO()
    whole = ScoreSummary("runs/a", CONFIG, NEWEST, scorers, (Path("out/summary.json"),))
    whole.render(Console(file=out, width=120))
    json.dumps(whole.to_dict(), allow_nan=False)
    return out.getvalue()


def test_the_table_says_it_in_words():
    text = rendered(summary(row((LOG2,), versions=[6]), row((-np.inf,), versions=[7])), summary(row(recorded=False)))
    lines = {line[:23].strip(): line[23:].split() for line in text.splitlines()}
    assert lines["trajectories"] == ["2", "1"]
    assert lines["out of support"] == lines["impossible"] == ["50.0%", "0.0%"]
    assert lines["effective sample size"] == ["1.0", "-"] and lines["share"] == ["50.0%", "-"]
    assert lines["KL k2"] == [f"{LOG2**2 / 2:.4f}", "-"]
    assert NO_LOGPROBS in text and "staleness, other" in text and "out/summary.json" in text


def test_a_scoring_of_nothing_can_be_shown():
    assert "trajectories" in rendered(summary())
