"""Tests rollout/cli.py: exit codes, messages, and that a command is no more than its library call."""

import dataclasses
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from click.testing import CliRunner

from rollout.cli import main
from rollout.config_file import load_config
from rollout.shards import content_hash, read_trajectories
from rollout.summary import RunSummary
from sampling.errors import CheckpointError, ConfigError, PromptError, RecordError, RunError, WorkerError
from tests.rollout.test_store import write_run

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


@pytest.fixture
def driver(monkeypatch):
    """Stands in for rollout.driver; `calls` holds what it was asked, `outcome` is raised or returned."""
    module = types.ModuleType("rollout.driver")
    module.calls, module.outcome = [], None

    def sample_run(config, out_dir, *, address, progress, chaos):
        module.calls.append((config, out_dir, address, chaos))
        if isinstance(module.outcome, BaseException):
            raise module.outcome
        write_run(out_dir)
        return RunSummary.from_folder(out_dir, wall_s=1.0, tokens_per_s=12.0)

    module.sample_run = sample_run
    monkeypatch.setitem(sys.modules, "rollout.driver", module)
    return module


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_sample_is_one_library_call_and_prints_its_summary(driver, tmp_path):
    out = tmp_path / "run"
    result = run(
        "sample",
        QUICKSTART,
        "--out",
        out,
        "--set",
        "seed=5",
        "--set",
        "sampling.n=2",
        "--address",
        "auto",
        "--chaos",
        "kill",
    )
    assert (result.exit_code, result.stderr) == (0, "")
    assert driver.calls == [(load_config(QUICKSTART, ["seed=5", "sampling.n=2"]), out, "auto", ("kill",))]
    assert "trajectories" in result.stdout and "12.0" in result.stdout


def test_quiet_prints_nothing(driver, tmp_path):
    result = run("sample", QUICKSTART, "--out", tmp_path / "run", "--quiet")
    assert (result.exit_code, result.output) == (0, "")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("seed: bad"), 2),
        (PromptError("f, line 3: bad"), 2),
        (CheckpointError("no such file"), 2),
        (RecordError("part: damaged"), 1),
        (WorkerError("worker-1 died"), 1),
        (RunError("disk full"), 1),
    ],
)
def test_an_error_is_one_message_with_the_code_of_its_class(driver, tmp_path, error, code):
    driver.outcome = error
    result = run("sample", QUICKSTART, "--out", tmp_path / "run")
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr == f"rollout: error: {error}\n"


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), OSError("disk gone"), RecursionError("too deep")])
def test_an_error_that_nobody_foresaw_is_one_line_too(driver, tmp_path, error):
    driver.outcome = error
    result = run("sample", QUICKSTART, "--out", tmp_path / "run")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"rollout: unexpected {type(error).__name__}: {error}. This is a fault of rollout")
    assert result.stderr.count("\n") == 1
    assert "Traceback" in run("sample", QUICKSTART, "--out", tmp_path / "run", "--debug").stderr


def test_trouble_with_a_file_is_not_called_a_fault_of_ours(driver, tmp_path):
    driver.outcome = PermissionError(13, "Permission denied", "/some/file")
    result = run("sample", QUICKSTART, "--out", tmp_path / "run")
    assert (result.exit_code, result.stderr) == (1, "rollout: error: /some/file: Permission denied\n")


def test_failed_samples_exit_1_with_their_reasons(driver, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    write_run(folder)
    summary = dataclasses.replace(
        RunSummary.from_folder(folder), failed=3, failures=("prompt 'a', sample 0: too long",)
    )
    monkeypatch.setattr(driver, "sample_run", lambda *_, **__: summary)
    result = run("sample", QUICKSTART, "--out", folder)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-2:] == [
        "rollout: 3 sample(s) failed, as told under `failure` in their records:",
        "  prompt 'a', sample 0: too long",
    ]


def test_debug_adds_the_traceback_and_keeps_the_code(driver, tmp_path):
    driver.outcome = WorkerError("worker-1 died")
    result = run("sample", QUICKSTART, "--out", tmp_path / "run", "--debug")
    assert result.exit_code == 1
    assert result.stderr.startswith("Traceback") and result.stderr.endswith("rollout: error: worker-1 died\n")


def test_an_interrupt_exits_130_and_says_how_to_go_on(driver, tmp_path):
    driver.outcome = KeyboardInterrupt()
    result = run("sample", QUICKSTART, "--out", tmp_path / "run")
    assert result.exit_code == 130
    assert result.stderr == "rollout: interrupted; start the same command again to continue\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sample", QUICKSTART], "Missing option '--out'"),
        (["sample", QUICKSTART, "--out", "x", "--sets", "a"], "No such option"),
        (["sampel"], "No such command"),
        (["sample", "nowhere.yaml", "--out", "x"], "nowhere.yaml: cannot read the config"),
        (["sample", QUICKSTART, "--out", "x", "--set", "sampling.top_q=1"], "did you mean 'top_p'"),
        (["sample", QUICKSTART, "--out", "x", "--set", "sampling.n=0"], "sampling.n: expected a whole number"),
        (["status", "nowhere"], "found no manifest.json"),
    ],
)
def test_usage_and_configuration_errors_exit_2_before_anything_starts(driver, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr and "Traceback" not in result.output
    assert driver.calls == []


def test_status_counts_and_hashes(tmp_path):
    write_run(tmp_path / "run", "ab")
    expected = content_hash(read_trajectories(tmp_path / "run"))
    facts = json.loads(run("status", tmp_path / "run", "--json").stdout)
    assert (facts["done"], facts["failed"], facts["total"], facts["content_hash"]) == (4, 0, 4, expected)
    assert facts["state"] == "finished"
    lines = dict(line.split() for line in run("status", tmp_path / "run").stdout.splitlines())
    assert (lines["done"], lines["total"], lines["content_hash"]) == ("4", "4", expected)


def test_a_real_process_returns_the_codes_and_writes_to_the_right_streams(tmp_path):
    write_run(tmp_path / "run")

    def rollout(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "rollout.cli", *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )

    good = rollout("status", "run", "--json")
    assert (good.returncode, json.loads(good.stdout)["done"], good.stderr) == (0, 6, "")
    bad = rollout("sample", QUICKSTART, "--out", tmp_path / "x", "--set", "sampling.top_p=1.5")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == "rollout: error: sampling.top_p: expected a number in (0, 1]; 1 is off, got 1.5  (--set)\n"
    shard = tmp_path / "run" / "trajectories" / "part-00000.parquet"
    shard.write_bytes(shard.read_bytes()[:-1])
    damaged = rollout("status", "run")
    assert (damaged.returncode, damaged.stdout) == (1, "")
    assert "part-00000.parquet" in damaged.stderr and "Traceback" not in damaged.stderr


def test_help_waits_for_no_library():
    code = "import sys, rollout.cli; print(*{'jax', 'ray', 'pyarrow', 'pydantic', 'transformers'} & {*sys.modules})"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == []
