"""Real runs whose scorers fail: what fails is recorded, the rest is as if it had not happened, and the run goes on.

1. `rollout sample` says in its exit status that samples were not scored; its records do not depend on the processes.
2. `rollout train` leaves samples without a reward out of the learning, and passes over a batch without any.
3. Prompts and names that cannot give a reward are refused before workers start.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from rollout.cli import main
from rollout.codec import read_parquet
from rollout.config_file import dump_config
from rollout.driver import sample_run
from rollout.progress import ProgressReporter
from rollout.shards import read_trajectories
from rollout.status import read_status
from sampling.errors import ConfigError, PromptError
from tests.processes import alive, await_end

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

SCORERS = "tests.rollout.scorers"


def invoke(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_samples_that_are_not_scored_are_recorded_and_others_are_not_touched(tiny_config, tmp_path):
    config = tiny_config(reward=f"{SCORERS}:by_prompt", reward_timeout_s=0.5)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    done = invoke("sample", tmp_path / "config.yaml", "--out", tmp_path / "one")
    assert done.exit_code == 1, done.output
    rows = list(read_trajectories(tmp_path / "one"))
    plain = tiny_config(reward=f"{SCORERS}:length", reward_workers=2)
    assert sample_run(plain, tmp_path / "plain").reward_errors == 0
    errors = {
        "p1": "timed out after 0.5 s",
        "p2": "the scorer's process ended with exit status 3",
        "p3": "ZeroDivisionError: no samples",
        "p4": "expected a finite reward, got nan",
    }
    missing = 0
    for row, other in zip(rows, read_trajectories(tmp_path / "plain"), strict=True):
        assert (row.prompt_id, row.sample_index, row.text) == (other.prompt_id, other.sample_index, other.text)
        assert row.completion_tokens.tobytes() == other.completion_tokens.tobytes()
        assert other.reward == len(row.text)
        assert row.reward_error == errors.get(row.prompt_id)
        assert row.reward == (None if row.prompt_id in errors else other.reward)
        missing += row.reward is None
    assert f"{missing} sample(s) not scored, as told under `reward_error`:" in done.output
    assert "  prompt 'p1', sample 0: timed out after 0.5 s" in done.output
    again = sample_run(config.model_copy(update={"reward_workers": 2}), tmp_path / "two")
    assert again.reward_errors == missing
    assert read_status(tmp_path / "two").content_hash == read_status(tmp_path / "one").content_hash


@pytest.mark.parametrize(
    ("reward", "error", "message"),
    [
        ("exact_match", PromptError, r"prompt 'p0': metadata.answer: expected text, got None"),
        ("reasoning_gym", PromptError, r"prompt 'p0': metadata.reasoning_gym: expected a task with dataset"),
        (f"{SCORERS}:one_argument", ConfigError, r"got one of \(text\)"),
        ("nowhere:f", ConfigError, "module nowhere cannot be imported"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_workers_start(tiny_config, tmp_path, reward, error, message):
    started = []

    class Told(ProgressReporter):
        def message(self, text):
            started.append(text)

    with pytest.raises(error, match=message):
        sample_run(tiny_config(reward=reward), tmp_path / "run", progress=Told(quiet=True))
    assert not started


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_run_that_is_ended_leaves_no_scorer_behind(tiny_config, tmp_path, signum, code):
    file, pid_file = tmp_path / "config.yaml", tmp_path / "pid"
    file.write_text(dump_config(tiny_config(reward=f"{SCORERS}:hangs_and_tells", reward_timeout_s=1000)))
    driver = subprocess.Popen(
        [sys.executable, "-m", "rollout.cli", "sample", str(file), "--out", str(tmp_path / "run"), "--quiet"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "SCORER_PID_FILE": str(pid_file)},
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    limit = time.monotonic() + 90
    while not (pid_file.exists() and pid_file.read_text().endswith("\n")) and driver.poll() is None:
        assert time.monotonic() < limit
        time.sleep(0.05)
    scorer = int(pid_file.read_text())
    assert alive(scorer)
    driver.send_signal(signum)
    assert driver.wait(timeout=30) == code
    await_end(scorer, within_s=2)


def train(out, *settings, flags=(), expected=0):
    overrides = [part for setting in (*SMALL, *settings) for part in ("--set", setting)]
    done = invoke("train", "configs/toy-grpo.yaml", "--out", out, *flags, *overrides)
    assert done.exit_code == expected, done.output
    return done.output


SMALL = ("sampling.n=8", "train.prompts_per_step=4", "evaluation=null", "train.steps=2", "workers.cpus=0")


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_training_goes_on_without_what_was_not_scored(tmp_path):
    out = tmp_path / "run"
    even = ["sampling.n=4", "sampling.temperature=5", "sampling.allowed_token_ids=[68, 69, 70, 71, 72, 73]"]  # a to f
    told = train(out, f"reward={SCORERS}:faulty", "reward_timeout_s=0.5", *even)
    errors = {
        "a": "ValueError: no a, please",
        "b": "expected a finite reward, got nan",
        "c": "timed out after 0.5 s",
        "d": "the scorer's process ended with exit status 3",
    }
    seen = set()
    for line in metrics(out):
        rows = list(read_parquet(out / "trajectories" / f"step-{line['step']:06d}.parquet"))
        assert len(rows) == 16
        for row in rows:
            assert row.reward_error == errors.get(row.text)
            assert row.reward == (None if row.text in errors else ord(row.text) - ord("e"))
        rewards = [row.reward for row in rows if row.reward is not None]
        assert line["rewards_missing"] == 16 - len(rewards) > 0
        assert line["learnt_rows"] == len(rewards) > 0
        assert line["reward_mean"] == pytest.approx(sum(rewards) / len(rewards))
        assert line["groups"] == 4 and math.isfinite(line["loss"])
        assert f"step {line['step']}: {16 - len(rewards)} of 16 samples not scored, the first: " in told
        seen |= {row.text for row in rows}
    assert seen >= errors.keys()


@pytest.mark.slow
def test_a_batch_without_any_reward_is_passed_over(tmp_path):
    train(tmp_path / "run", f"reward={SCORERS}:raises")
    for line in metrics(tmp_path / "run"):
        assert line["skipped"] == "no token to learn from"
        assert line["rewards_missing"] == 32 and line["reward_mean"] is None
        assert line["policy_lag_max"] in (None, 0)


@pytest.mark.slow
def test_a_changed_config_is_continued_where_that_is_asked_for(tmp_path):
    out = tmp_path / "run"
    train(out, "evaluation={every: 2, prompts: {source: jsonl, path: configs/toy/prompts.jsonl}}", "train.save_every=2")
    config = (out / "config.yaml").read_text()
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[:1]))  # as if it was broken off in the evaluation

    changed = ["train.steps=3", "learner.learning_rate=0.5", f"reward={SCORERS}:length"]
    refused = train(out, *changed, expected=2)
    assert "learner.learning_rate: 0.001 there, 0.5 here" in refused and "--accept-changes continues it" in refused
    for fixed in ("seed=5", "sampling.n=4", "prompts.path=configs/toy/prompts.jsonl.gz"):
        refused = train(out, *changed, fixed, flags=["--accept-changes"], expected=2)
        assert f"these keys of a training run can never change:\n  {fixed.partition('=')[0]}: " in refused
        assert "learning_rate" not in refused
    refused = train(out, *changed, "learner.max_grad_norm=null", flags=["--accept-changes"], expected=2)
    assert "it is of another model, optimizer or algorithm" in refused
    assert (out / "config.yaml").read_text() == config and not (out / "changes.jsonl").exists()

    told = train(out, *changed, flags=["--accept-changes"])
    assert "from step 2 on: " in told and "learner.learning_rate 0.001 -> 0.5" in told
    (change,) = [json.loads(line) for line in (out / "changes.jsonl").read_text().splitlines()]
    assert change["step"] == 2
    assert change["changes"] == {
        "evaluation.every": [2, None],
        "evaluation.prompts.path": ["configs/toy/prompts.jsonl", None],
        "evaluation.prompts.source": ["jsonl", None],
        "learner.learning_rate": [0.001, 0.5],
        "reward": ["exact_match", f"{SCORERS}:length"],
    }
    assert yaml.safe_load((out / "config.yaml").read_text())["learner"]["learning_rate"] == 0.5
    found = metrics(out)
    assert [line["step"] for line in found] == [0, 1, 2]
    assert found[2]["reward_mean"] == 1.0  # every text is one letter
    assert train(out, *changed) and metrics(out) == found  # it is that config's run now
