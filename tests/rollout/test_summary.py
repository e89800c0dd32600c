"""Tests rollout/summary.py: figures worked out by hand, and what is printed."""

import io

import numpy as np
import pytest
from rich.console import Console

from rollout.rewards import Score
from rollout.store import RunFolder
from rollout.summary import RunSummary
from sampling.types import StopReason
from tests.rollout.records import trajectory
from tests.rollout.test_store import MADE_FROM, config


@pytest.fixture
def run(tmp_path):
    """Three rows: rewards 1, 0 and a scorer's error; 5 tokens."""
    task = {"reasoning_gym": {"question": "What is [bold]3 + 4[/bold]?"}}
    one_token = {
        "completion_tokens": np.array([7], np.int32),
        "behaviour_logprobs": np.array([-1.6], np.float32),
        "model_logprobs": np.array([-2.0], np.float32),
        "log_kept_mass": np.array([-0.1], np.float32),
        "policy_versions": np.array([0], np.int32),
    }
    with RunFolder.open(tmp_path / "run", config()) as folder:
        folder.begin(**MADE_FROM)
        folder.add_group(
            [
                trajectory("a", 0, text="It is [7].", score=Score(1.0), metadata=task),
                trajectory("a", 1, text="no", score=Score(0.0), metadata=task),
            ]
        )
        folder.add_group([trajectory("b", 0, score=Score(error="why"), stop_reason=StopReason.LENGTH, **one_token)])
        folder.finish()
    return tmp_path / "run"


def printed(summary, width=100):
    console = Console(file=io.StringIO(), width=width)
    summary.render(console)
    return console.file.getvalue()


def test_figures_are_those_of_the_folder(run):
    summary = RunSummary.from_folder(run, wall_s=2.0, tokens_per_s=2.5, programs_compiled=2)
    assert (summary.prompts, summary.trajectories, summary.failed, summary.tokens) == (2, 3, 0, 5)
    assert (summary.mean_reward, summary.reward_errors) == (0.5, 1)
    assert summary.mean_behaviour_logprob == pytest.approx((2 * -1.2 - 1.6) / 5, abs=1e-6)
    assert summary.mean_model_logprob == pytest.approx((2 * -1.5 - 2.0) / 5, abs=1e-6)
    assert summary.stop_reasons == {StopReason.EOS: 2, StopReason.LENGTH: 1}
    assert [(e.prompt_id, e.text, e.reward) for e in summary.examples] == [("a", "It is [7].", 1.0), ("b", "ab", None)]
    assert [path.name for path in summary.files] == ["part-00000.parquet", "manifest.json", "config.yaml"]


def test_what_is_printed_holds_every_figure_and_no_markup_of_the_model(run):
    text = printed(RunSummary.from_folder(run, wall_s=2.0, tokens_per_s=2.5, programs_compiled=2))
    for part in (
        "a  reward 1.00",
        "> What is [bold]3 + 4[/bold]?",
        "It is [7].",
        "b  no reward",
        "3 (0 failed)",
        "eos 2, length 1",
        "0.500 (1 not scored, see reward_error)",
        "-0.8000 nats/token",
        "-1.0000 nats/token",
        "2.5",
        "2.0 s",
        "manifest.json",
    ):
        assert part in text


def test_paths_are_never_broken_by_a_narrow_terminal(run):
    text = printed(RunSummary.from_folder(run), width=20)
    assert str(run / "trajectories" / "part-00000.parquet") in text


def test_a_second_start_says_that_nothing_was_left_to_do(run):
    text = printed(RunSummary.from_folder(run, already_finished=True))
    assert "finished before; nothing was left to do" in text
    assert "tokens/s" not in text


def test_a_run_without_tokens_has_no_means(tmp_path):
    with RunFolder.open(tmp_path / "run", config()) as folder:
        folder.finish()
    summary = RunSummary.from_folder(tmp_path / "run")
    assert (summary.mean_reward, summary.mean_behaviour_logprob, summary.examples) == (None, None, ())
    assert "trajectories" in printed(summary)
