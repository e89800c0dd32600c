"""What the main job promises.

1. Every (prompt id, sample index) ends once, in prompt order; the content does not depend on the workers.
2. A run that was stopped or killed continues to the same content; a finished one is left alone.
3. A prompt that cannot be sampled is recorded as failed, and the exit status says so; malformed input is refused
   before any worker is started.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from rollout.cli import main
from rollout.config_file import dump_config
from rollout.driver import sample_run
from rollout.manifest import MANIFEST_NAME, read_manifest
from rollout.progress import ProgressReporter
from rollout.shards import content_hash, read_trajectories
from rollout.status import read_status
from sampling.errors import CheckpointError, ConfigError, PromptError
from sampling.types import StopReason

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

EXPECTED_ROWS = [(f"p{index}", sample) for index in range(12) for sample in range(1 + index % 3)]


class StopsAt(ProgressReporter):
    """Interrupts the run as Ctrl-C does, when so many rows are done."""

    def __init__(self, rows: int) -> None:
        super().__init__(quiet=True)
        self._rows = rows

    def update(self, progress) -> None:
        if progress.rows_done >= self._rows:
            raise KeyboardInterrupt


def committed(folder: Path) -> int:
    return read_manifest(folder).rows if (folder / MANIFEST_NAME).exists() else 0


def rows(folder: Path) -> list[tuple[str, int]]:
    return [(row.prompt_id, row.sample_index) for row in read_trajectories(folder)]


def test_every_sample_ends_once_in_prompt_order(tiny_config, finished):
    folder = finished(tiny_config())
    assert rows(folder) == EXPECTED_ROWS
    for row in read_trajectories(folder):
        assert row.metadata == {"index": int(row.prompt_id[1:])}
        assert row.completion_len <= 4 + row.metadata["index"]
        assert row.worker == "worker-0" and row.weights_digest and not row.failed
        assert row.policy["temperature"] == (1.0, 0.0, 0.5)[row.metadata["index"] % 3]
    status = read_status(folder)
    assert (status.state, status.done, status.failed, status.total) == ("finished", 24, 0, 24)


def test_two_workers_write_the_same_content(tiny_config, finished, tmp_path):
    two = tiny_config(workers={"count": 2, "cpus": 0, "threads": 1})
    summary = sample_run(two, tmp_path / "two")
    assert (summary.prompts, summary.trajectories, summary.programs_compiled) == (12, 24, 6)
    assert summary.tokens == sum(row.completion_len for row in read_trajectories(tmp_path / "two"))
    assert read_status(tmp_path / "two").content_hash == read_status(finished(tiny_config())).content_hash


def test_an_interrupted_run_continues_to_the_same_content(tiny_config, finished, tmp_path):
    folder = tmp_path / "run"
    for done in (3, 9):
        with pytest.raises(KeyboardInterrupt):
            sample_run(tiny_config(), folder, progress=StopsAt(done))
        assert read_status(folder).state == "unfinished"
        assert done <= len(rows(folder)) < len(EXPECTED_ROWS)
        assert rows(folder) == EXPECTED_ROWS[: len(rows(folder))]
    sample_run(tiny_config(), folder)
    assert rows(folder) == EXPECTED_ROWS
    assert read_status(folder).content_hash == read_status(finished(tiny_config())).content_hash


def test_a_finished_run_is_left_alone(tiny_config, finished):
    folder = finished(tiny_config())
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*.*") if file.name != ".lock"}
    summary = sample_run(tiny_config(), folder)
    assert summary.already_finished and summary.trajectories == 24
    assert {file: file.stat().st_mtime_ns for file in before} == before


def prompt_file(path, *texts):
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return {"source": "jsonl", "path": str(path)}


def test_a_finished_run_refuses_other_prompts_under_the_same_name(tiny_config, tmp_path):
    config = tiny_config(prompts=prompt_file(tmp_path / "p.jsonl", "a", "b"))
    sample_run(config, tmp_path / "run")
    assert sample_run(config, tmp_path / "run").already_finished
    prompt_file(tmp_path / "p.jsonl", "a", "c")
    with pytest.raises(ConfigError, match=r"prompts_digest .*the file behind the same name has changed"):
        sample_run(config, tmp_path / "run")
    assert len(rows(tmp_path / "run")) == 2


def test_prompts_that_are_edited_while_they_are_sampled_do_not_pass_for_the_old_ones(tiny_config, tmp_path):
    file = tmp_path / "p.jsonl"
    config = tiny_config(prompts=prompt_file(file, *"abcdef"))

    class Editor(ProgressReporter):
        def update(self, progress):
            prompt_file(file, *"abcdeg")

    with pytest.raises(ConfigError, match="the file behind the same name has changed"):
        sample_run(config, tmp_path / "run", progress=Editor(quiet=True))
    assert read_status(tmp_path / "run").state == "unfinished"


@pytest.mark.slow
def test_a_killed_driver_loses_nothing(tiny_config, tmp_path):
    long = [{"id": str(i), "prompt": "abc", "n": 4} for i in range(300)]
    config = tiny_config(
        prompts={"source": "inline", "rows": long},
        sampling={"max_new_tokens": 40, "ignore_eos": True},
        output={"rows_per_shard": 40},
    )
    file, folder = tmp_path / "config.yaml", tmp_path / "run"
    file.write_text(dump_config(config))
    command = [sys.executable, "-m", "rollout.cli", "sample", str(file), "--out", str(folder), "--quiet"]
    driver = subprocess.Popen(command, cwd=Path(__file__).parents[2], start_new_session=True)
    limit = time.monotonic() + 90
    while not committed(folder) and time.monotonic() < limit and driver.poll() is None:
        time.sleep(0.01)
    driver.send_signal(signal.SIGKILL)
    assert driver.wait(timeout=10) == -signal.SIGKILL
    assert 0 < read_status(folder).done < 1200
    sample_run(config, folder)
    assert rows(folder) == [(str(i), sample) for i in range(300) for sample in range(4)]
    sample_run(config, tmp_path / "undisturbed")
    assert content_hash(read_trajectories(folder)) == content_hash(read_trajectories(tmp_path / "undisturbed"))


def test_prompts_that_cannot_be_sampled_are_recorded_and_the_rest_goes_on(tiny_config, tmp_path):
    good = {"id": "good", "prompt": "abc"}
    bad = [
        {"id": "too long", "prompt_tokens": [5] * 64, "n": 2},
        {"id": "no token", "prompt_tokens": [5, 9999]},
    ]
    config = tmp_path / "config.yaml"
    config.write_text(dump_config(tiny_config(prompts={"source": "inline", "rows": [bad[0], good, bad[1]]})))
    result = CliRunner().invoke(main, ["sample", str(config), "--out", str(tmp_path / "run")])
    assert result.exit_code == 1, result.output
    assert "(3 failed)" in result.output
    assert "  prompt 'too long', sample 0: PromptError: prompt 'too long': 64 tokens leave no room" in result.stderr
    assert "  prompt 'no token', sample 0: PromptError: " in result.stderr
    found = list(read_trajectories(tmp_path / "run"))
    assert [(row.prompt_id, row.failed) for row in found] == [
        ("too long", True),
        ("too long", True),
        ("good", False),
        ("no token", True),
    ]
    assert found[0].stop_reason is StopReason.ABORTED
    assert "PromptError" in found[0].failure and "64 tokens leave no room in a cache of 64" in found[0].failure
    assert "expected a token id in" in found[3].failure


def test_a_run_of_nothing_but_bad_prompts_ends(tiny_config, tmp_path):
    bad = [{"id": str(i), "prompt_tokens": [9999], "n": 4} for i in range(40)]
    summary = sample_run(tiny_config(prompts={"source": "inline", "rows": bad}), tmp_path / "run")
    assert (summary.prompts, summary.failed, summary.tokens) == (40, 160, 0)


def test_malformed_input_is_refused_before_any_worker_starts(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr("rollout.driver.WorkerPool", None)
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": "a", "prompt": "abc"})] * 2
    file.write_text("\n".join(lines))
    with pytest.raises(PromptError, match="line 2: prompt id 'a' is taken"):
        sample_run(tiny_config(prompts={"source": "jsonl", "path": str(file)}), tmp_path / "run")
    with pytest.raises(CheckpointError, match="no such file"):
        sample_run(tiny_config(model={"checkpoint": str(tmp_path / "none")}), tmp_path / "run")
    config = tmp_path / "config.yaml"
    config.write_text(dump_config(tiny_config(prompts={"source": "jsonl", "path": str(file)})))
    result = CliRunner().invoke(main, ["sample", str(config), "--out", str(tmp_path / "run")])
    assert result.exit_code == 2 and "line 2" in result.output
