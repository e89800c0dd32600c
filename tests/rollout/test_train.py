"""`rollout train` on real workers: a toy is learnt, equal runs are equal to the bit, and a killed one goes on."""

import json
import os
import shutil
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
from rollout.learning.run_metrics import TIMES

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TOY = yaml.safe_load(Path("configs/toy-grpo.yaml").read_text())
REQUIRED = {"step", "reward_mean", "loss", "policy_lag_max", "mismatch_p999"}


def train(config, out, *settings):
    overrides = [part for setting in settings for part in ("--set", setting)]
    done = CliRunner().invoke(main, ["train", f"configs/{config}.yaml", "--out", str(out), "--quiet", *overrides])
    assert done.exit_code == 0, done.output
    return metrics(out)


def metrics(out):
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def untimed(lines):
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


@pytest.mark.parametrize("config", ["toy-grpo", "toy-async", "toy-ppo"])
def test_a_toy_is_learnt(config, tmp_path):
    lines = train(config, tmp_path / "run")
    assert sum(line["step_s"] for line in lines) < 60
    assert [line["step"] for line in lines] == list(range(len(lines)))
    assert all(line.keys() >= REQUIRED for line in lines)
    assert lines[0]["reward_mean"] < 0.3
    assert sum(line["reward_mean"] for line in lines[-5:]) / 5 > 0.95
    lag = 2 if config == "toy-async" else 0
    assert max(line["policy_lag_max"] for line in lines) <= lag
    fresh = [line["mismatch_p999"] for line in lines if line["mismatch_p999"] is not None]
    assert fresh and max(fresh) < 1e-4
    rows = list(read_parquet(tmp_path / "run" / "trajectories" / "step-000003.parquet"))
    assert len(rows) == 256 and all(row.reward in (0.0, 1.0) for row in rows)


def test_equal_runs_are_equal_to_the_bit_and_a_killed_one_goes_on(tmp_path):
    settings = ["train.steps=9", "train.save_every=3", "evaluation.every=4"]
    whole = train("toy-grpo", tmp_path / "whole", *settings)
    again = train("toy-grpo", tmp_path / "again", *settings)
    assert untimed(whole) == untimed(again)
    assert [line["step"] for line in whole if "eval_accuracy" in line] == [3, 7, 8]
    assert [line["step"] for line in whole if "initial_eval_accuracy" in line] == [0]

    command = [sys.executable, "-m", "rollout.cli", "train", "configs/toy-grpo.yaml", "--out", str(tmp_path / "killed")]
    command += [part for setting in settings for part in ("--set", setting)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 120
    while not (tmp_path / "killed" / "checkpoints" / "6").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
    assert len(metrics(tmp_path / "killed")) < 9
    assert untimed(train("toy-grpo", tmp_path / "killed", *settings)) == untimed(whole)
    finished = metrics(tmp_path / "killed")
    assert train("toy-grpo", tmp_path / "killed", *settings) == finished  # nothing is left to do


def test_a_disturbed_training_learns_the_same(tmp_path):
    settings = ["train.steps=6", "train.save_every=2", "evaluation=null"]
    whole = train("toy-grpo", tmp_path / "whole", *settings)
    command = ["train", "configs/toy-grpo.yaml", "--out", str(tmp_path / "run")]
    command += [part for setting in settings for part in ("--set", setting)]
    faults = ["corrupt:worker=0,after=1", "kill:worker=0,after=20", "write:after=6"]
    ended = CliRunner().invoke(main, [*command, *(part for fault in faults for part in ("--chaos", fault))])
    assert ended.exit_code == 1, ended.output
    assert "step-000004.parquet: cannot be written: No space left on device (chaos)" in ended.stderr
    assert len(metrics(tmp_path / "run")) == 4
    assert untimed(train("toy-grpo", tmp_path / "run", *settings)) == untimed(whole)


def test_a_run_that_is_broken_off_in_an_evaluation_evaluates_again(tmp_path):
    """The checkpoint holds the line that waits for the evaluation; that line is lost, or half of it."""
    settings = ["train.steps=4", "train.save_every=2", "evaluation.every=2"]
    whole = train("toy-grpo", tmp_path / "run", *settings)
    path = tmp_path / "run" / "metrics.jsonl"
    kept = path.read_text().splitlines(keepends=True)
    for left in ("".join(kept[:3]), "".join(kept[:3]) + kept[3][:40]):
        path.write_text(left)
        assert untimed(train("toy-grpo", tmp_path / "run", *settings)) == untimed(whole)


def test_a_batch_with_nothing_to_learn_from_is_told_and_passed_over(tmp_path):
    settings = ["train.steps=2", "train.zero_variance=drop", "train.max_refills=0", "evaluation=null"]
    settings += ["sampling.n=2", "train.prompts_per_step=1", "seed=3", "sampling.temperature=0.0001"]
    lines = train("toy-grpo", tmp_path / "run", *settings)
    assert [line["skipped"] for line in lines] == ["no token to learn from"] * 2
    assert all(line["groups_dropped"] == 1 and line["reward_mean"] in (0.0, 1.0) for line in lines)
    assert len(list(read_parquet(tmp_path / "run" / "trajectories" / "step-000001.parquet"))) == 2


def test_prompts_that_cannot_be_trained_on_are_refused_before_workers_start(tmp_path):
    for rows, message in (
        ("{id: x, prompt: a, n: 3}", f"n: expected {TOY['sampling']['n']}, sampling.n of the run, got 3"),
        ("{id: x, prompt: a, sampling: {top_k: 2, record_support: 0}}", "expected sampling.record_support above 0"),
        ("{id: x, prompt: 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'}", "leave no room in a cache of 32"),
    ):
        command = ["train", "configs/toy-grpo.yaml", "--out", str(tmp_path / "run")]
        refused = CliRunner().invoke(main, [*command, "--set", f"prompts={{source: inline, rows: [{rows}]}}"])
        assert refused.exit_code == 2 and message in refused.output, refused.output
        shutil.rmtree(tmp_path / "run")


def test_another_config_is_refused_with_the_difference(tmp_path):
    train("toy-grpo", tmp_path / "run", "train.steps=1", "evaluation=null")
    command = ["train", "configs/toy-grpo.yaml", "--out", str(tmp_path / "run"), "--set", "learner.learning_rate=0.5"]
    refused = CliRunner().invoke(main, [*command, "--set", "evaluation=null"])
    assert refused.exit_code == 2
    assert f"learner.learning_rate: {TOY['learner']['learning_rate']} there, 0.5 here" in refused.output
    longer = train("toy-grpo", tmp_path / "run", "train.steps=2", "evaluation=null")
    assert [line["step"] for line in longer] == [0, 1]


def test_groups_without_variance_are_replaced_within_bounds(tmp_path):
    settings = ["train.steps=2", "train.zero_variance=drop", "train.max_refills=3", "evaluation=null", "sampling.n=2"]
    for line in train("toy-grpo", tmp_path / "run", *settings):
        assert line["groups_dropped"] <= 8 + 3
        assert line["groups"] == 8 - max(0, line["groups_dropped"] - 3)
