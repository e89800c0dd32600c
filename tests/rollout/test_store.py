"""Tests rollout/store.py, shards.py, manifest.py and atomic.py. What they promise:

1. What is committed is whole; what is not committed does not exist, whenever the process dies.
2. A folder continues its own run only, and says what differs otherwise.
3. Every sample is in the folder once; groups are whole, in the order of the prompts.
4. The content hash names what was sampled and nothing else.
"""

import dataclasses
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from rollout.atomic import before_writes
from rollout.cli import main
from rollout.config_file import dump_config, load_config, parse_config
from rollout.manifest import read_manifest
from rollout.shards import content_hash, read_trajectories
from rollout.status import read_status
from rollout.store import RunFolder
from rollout.trajectory import SCHEMA_VERSION
from sampling.errors import ConfigError, RecordError, RunError
from sampling.types import StopReason
from tests.rollout.records import group, trajectory

ROOT = Path(__file__).parents[2]
MADE_FROM = {"weights_digest": "w0", "numerics": {"n0": {"jax": "1"}}, "prompts_digest": ""}


def config(seed=0, rows_per_shard=4):
    return parse_config(
        {
            "model": {"checkpoint": "m"},
            "prompts": {"source": "inline", "rows": [{"prompt": "hi"}]},
            "seed": seed,
            "output": {"rows_per_shard": rows_per_shard},
        }
    )


def write_run(path, prompt_ids="abc", **settings):
    with RunFolder.open(path, config(**settings)) as folder:
        folder.begin(**MADE_FROM)
        for prompt_id in prompt_ids:
            folder.add_group(group(prompt_id))
        folder.finish()
    return folder.manifest


def test_a_finished_run_reads_back_in_prompt_order(tmp_path):
    manifest = write_run(tmp_path / "run", "cab")
    rows = list(read_trajectories(tmp_path / "run"))
    assert rows == [*group("c"), *group("a"), *group("b")]
    assert [(s.file, s.rows, s.groups, s.tokens, s.first_prompt, s.last_prompt) for s in manifest.shards] == [
        ("part-00000.parquet", 4, 2, 8, "c", "a"),
        ("part-00001.parquet", 2, 1, 4, "b", "b"),
    ]
    assert (manifest.rows_total, manifest.prompts_total, manifest.failed) == (6, 3, 0)
    assert manifest.numerics == {"n0": {"jax": "1"}} and manifest.weights_digest == "w0"
    assert "behaviour_logprobs" in manifest.logprob_definition


def test_the_folder_holds_exactly_its_files(tmp_path):
    write_run(tmp_path / "run")
    names = sorted(str(p.relative_to(tmp_path / "run")) for p in (tmp_path / "run").rglob("*") if p.is_file())
    assert names == [
        ".lock",
        "config.yaml",
        "manifest.json",
        "trajectories/part-00000.parquet",
        "trajectories/part-00001.parquet",
    ]
    assert load_config(tmp_path / "run" / "config.yaml") == config()


def test_a_finished_folder_says_so_and_keeps_its_run(tmp_path):
    before = write_run(tmp_path / "run")
    with RunFolder.open(tmp_path / "run", config()) as folder:
        assert folder.finished
        assert folder.done_prompt_ids == {"a", "b", "c"}
        assert folder.manifest == before


def test_an_unfinished_run_continues_to_the_same_content(tmp_path):
    write_run(tmp_path / "whole", "abcde")
    with RunFolder.open(tmp_path / "cut", config()) as folder:
        folder.begin(**MADE_FROM)
        for prompt_id in "abc":
            folder.add_group(group(prompt_id))
    with RunFolder.open(tmp_path / "cut", config(rows_per_shard=1)) as folder:
        assert not folder.finished and folder.done_prompt_ids == {"a", "b", "c"}
        folder.begin(**MADE_FROM)
        for prompt_id in "de":
            folder.add_group(group(prompt_id))
        folder.finish()
    whole, cut = (content_hash(read_trajectories(tmp_path / name)) for name in ("whole", "cut"))
    assert whole == cut


def test_sigkill_between_commits_loses_only_what_was_not_committed(tmp_path):
    program = """
        import os, signal, sys
        from rollout import store
        from tests.rollout.records import group
        from tests.rollout.test_store import MADE_FROM, config
        folder = store.RunFolder.open(sys.argv[1], config(rows_per_shard=2))
        folder.begin(**MADE_FROM)
        folder.add_group(group("a"))
        store.RunFolder._commit = lambda self, **_: os.kill(os.getpid(), signal.SIGKILL)
        folder.add_group(group("b"))
    """
    run = tmp_path / "run"
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(run)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert killed.returncode == -signal.SIGKILL
    (run / "trajectories" / "part-00007.parquet.tmp").write_bytes(b"half")
    (run / "manifest.json.tmp").write_bytes(b"{")
    assert (run / "trajectories" / "part-00001.parquet").exists(), "written, but never named by the manifest"
    assert list(read_trajectories(run)) == group("a")
    with RunFolder.open(run, config(rows_per_shard=2)) as folder:
        assert folder.done_prompt_ids == {"a"}
        assert [p.name for p in (run / "trajectories").iterdir()] == ["part-00000.parquet"]
        assert not (run / "manifest.json.tmp").exists()
        folder.begin(**MADE_FROM)
        folder.add_group(group("b"))
        folder.finish()
    write_run(tmp_path / "whole", "ab")
    assert content_hash(read_trajectories(run)) == content_hash(read_trajectories(tmp_path / "whole"))


def test_the_folder_of_another_run_is_refused_with_the_keys_that_differ(tmp_path):
    write_run(tmp_path / "run", seed=3)
    before = sorted((p, p.read_bytes()) for p in (tmp_path / "run").rglob("*") if p.is_file())
    with pytest.raises(ConfigError) as caught:
        RunFolder.open(tmp_path / "run", config(seed=4))
    assert "holds another run" in str(caught.value)
    assert "  seed: 3 there, 4 here" in str(caught.value).splitlines()
    assert before == sorted((p, p.read_bytes()) for p in (tmp_path / "run").rglob("*") if p.is_file())


def test_an_edited_config_cannot_pass_for_the_run(tmp_path):
    write_run(tmp_path / "run", seed=3)
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("seed: 3", "seed: 4"))
    with pytest.raises(ConfigError, match=r"its config\.yaml was edited"):
        RunFolder.open(tmp_path / "run", config(seed=4))


def test_a_run_without_rows_can_be_begun_anew_with_another_config(tmp_path):
    with RunFolder.open(tmp_path / "run", config(seed=3)) as folder:
        folder.begin(**MADE_FROM)
    with RunFolder.open(tmp_path / "run", config(seed=4)) as folder:
        folder.begin(**{**MADE_FROM, "weights_digest": "w1"})
        folder.add_group(group("a"))
    assert load_config(tmp_path / "run" / "config.yaml") == config(seed=4)
    with pytest.raises(ConfigError, match="holds another run"):
        RunFolder.open(tmp_path / "run", config(seed=3))


@pytest.mark.parametrize("changed", ["weights_digest", "prompts_digest"])
def test_other_weights_or_prompts_behind_the_same_name_are_refused(tmp_path, changed):
    with RunFolder.open(tmp_path / "run", config()) as folder:
        folder.begin(**MADE_FROM)
        folder.add_group(group("a"))
    with (
        RunFolder.open(tmp_path / "run", config()) as folder,
        pytest.raises(ConfigError, match=f"{changed} .*the file behind the same name has changed"),
    ):
        folder.begin(**{**MADE_FROM, changed: "other"})


def test_a_folder_with_foreign_files_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match=r"expected a new or empty folder, or a run; it holds thesis\.tex"):
        RunFolder.open(tmp_path, config())
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(ConfigError, match=r"thesis.tex: cannot be made or written: .*; choose another --out"):
        RunFolder.open(tmp_path / "thesis.tex", config())
    with pytest.raises(ConfigError, match="cannot be made or written: File name too long"):
        RunFolder.open(tmp_path / ("x" * 300), config())


def test_a_folder_that_may_not_be_written_is_refused(tmp_path, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(ConfigError, match="run: cannot be made or written: Permission denied"):
        RunFolder.open(tmp_path / "run", config())
    monkeypatch.setattr(Path, "is_file", denied)
    with pytest.raises(ConfigError, match=r"manifest.json: cannot be read: Permission denied"):
        read_manifest(tmp_path / "run")


def test_two_writers_cannot_share_a_folder(tmp_path):
    with (
        RunFolder.open(tmp_path / "run", config()),
        pytest.raises(RunError, match="another process is writing this run"),
    ):
        RunFolder.open(tmp_path / "run", config())
    RunFolder.open(tmp_path / "run", config()).close()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"expected all samples of one prompt, got prompts \[\]"),
        ([trajectory("b", 0), trajectory("c", 1)], r"got prompts \['b', 'c'\]"),
        ([trajectory("b", 0), trajectory("b", 0)], r"prompt 'b': sample indices repeat or fall: \[0, 0\]"),
        (group("a"), "prompt 'a' was added before"),
    ],
)
def test_a_group_that_would_lose_or_repeat_a_sample_is_refused(tmp_path, rows, message):
    with RunFolder.open(tmp_path / "run", config()) as folder:
        folder.begin(**MADE_FROM)
        folder.add_group(group("a"))
        with pytest.raises(RecordError, match=message):
            folder.add_group(rows)
    assert list(read_trajectories(tmp_path / "run")) == group("a")


@pytest.mark.parametrize("damage", [lambda b: b[:-30], lambda b: b[:80] + b"\0" + b[81:], None])
def test_a_damaged_file_is_named_and_stops_the_reading(tmp_path, damage):
    write_run(tmp_path / "run")
    file = tmp_path / "run" / "trajectories" / "part-00001.parquet"
    if damage:
        file.write_bytes(damage(file.read_bytes()))
    else:
        file.unlink()
    rows = read_trajectories(tmp_path / "run")
    assert [next(rows).prompt_id for _ in range(4)] == ["a", "a", "b", "b"]
    with pytest.raises(RecordError, match=r"part-00001\.parquet"):
        next(rows)
    with pytest.raises(RecordError, match=r"part-00001\.parquet"):
        RunFolder.open(tmp_path / "run", config())


def test_a_damaged_manifest_is_named(tmp_path):
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "manifest.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "schema_version": 9}))
    with pytest.raises(
        RecordError, match=rf"manifest\.json: expected trajectory schema version {SCHEMA_VERSION}, got 9"
    ):
        read_manifest(tmp_path / "run")
    path.write_text(json.dumps({**fields, "extra": 1}))
    with pytest.raises(RecordError, match=r"manifest\.json: extra"):
        read_manifest(tmp_path / "run")
    path.write_text(path.read_text()[:-9])
    with pytest.raises(RecordError, match=r"manifest\.json"):
        read_manifest(tmp_path / "run")


def test_a_disk_that_cannot_be_written_leaves_the_committed_rows(tmp_path, monkeypatch):
    folder = RunFolder.open(tmp_path / "run", config(rows_per_shard=2))
    folder.begin(**MADE_FROM)
    folder.add_group(group("a"))

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match=r"part-00001\.parquet: cannot be written: No space left on device"):
            folder.add_group(group("b"))
    assert list(read_trajectories(tmp_path / "run")) == group("a")
    folder.close()
    assert list(read_trajectories(tmp_path / "run")) == [*group("a"), *group("b")]


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (
            lambda run: _set(run, schema_version=9),
            1,
            f"manifest.json: expected trajectory schema version {SCHEMA_VERSION}, got 9",
        ),
        (lambda run: _set(run, lineage="v9"), 1, "manifest.json: lineage: .*written by another release"),
        (lambda run: (run / "manifest.json").write_text("{"), 1, "manifest.json: "),
        (lambda run: _cut(run / "trajectories" / "part-00001.parquet"), 1, "part-00001.parquet: .*damaged since"),
        (lambda run: (run / "trajectories" / "part-00000.parquet").unlink(), 1, "part-00000.parquet: .*cannot be read"),
        (lambda run: (shutil.rmtree(run), run.write_text("")), 2, "Directory .*run' is a file"),
    ],
)
def test_a_damaged_folder_ends_the_command_with_a_name_and_is_left_as_it_is(tmp_path, damage, code, words):
    run, file = tmp_path / "run", tmp_path / "config.yaml"
    write_run(run)
    file.write_text(dump_config(config()))
    damage(run)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    shown = CliRunner().invoke(main, ["sample", str(file), "--out", str(run)])
    assert shown.exit_code == code, shown.output
    assert re.search(words, shown.stderr) and "Traceback" not in shown.output
    assert {path: path.read_bytes() for path in before} == before


def _set(run, **fields):
    path = run / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def _cut(file):
    file.write_bytes(file.read_bytes()[:-30])


def test_what_a_manifest_could_not_say_is_not_committed_twice(tmp_path, monkeypatch):
    folder = RunFolder.open(tmp_path / "run", config(rows_per_shard=2))
    folder.begin(**MADE_FROM)
    written = []

    def full_once(path):
        written.append(path.name)
        if written.count("manifest.json") == 1 and path.name == "manifest.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with before_writes(full_once):
        with pytest.raises(RunError, match=r"manifest\.json: cannot be written: No space left on device"):
            folder.add_group(group("a"))
        folder.add_group(group("b"))
        folder.close()
    assert list(read_trajectories(tmp_path / "run")) == [*group("a"), *group("b")]
    assert folder.manifest.rows == 4 and read_status(tmp_path / "run").prompts == 2


def test_status_counts_rows_and_names_the_content(tmp_path):
    with RunFolder.open(tmp_path / "run", config()) as folder:
        folder.begin(**MADE_FROM, rows_total=8)
        folder.add_group([trajectory("a", 0), trajectory("a", 1, stop_reason=StopReason.ABORTED)])
        assert read_status(tmp_path / "run").state == "running"
    status = read_status(tmp_path / "run")
    assert (status.state, status.done, status.failed, status.total, status.prompts) == ("unfinished", 1, 1, 8, 1)
    assert status.content_hash == content_hash(read_trajectories(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"found no manifest\.json"):
        read_status(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_id": "q"},
        {"sample_index": 1},
        {"completion_tokens": np.array([7, 9], np.int32)},
        {"behaviour_logprobs": np.array([-0.5, np.nextafter(np.float32(-0.7), np.float32(0))], np.float32)},
        {"model_logprobs": np.array([-0.6, np.nan], np.float32)},
        {"log_kept_mass": np.array([-0.1, -0.0], np.float32)},
        {"stop_reason": StopReason.LENGTH},
        {"key": np.array([3, 5], np.uint32)},
        {"policy_versions": np.array([0, 1], np.int32)},
    ],
)
def test_the_content_hash_sees_what_was_sampled(change):
    assert content_hash([trajectory()]) != content_hash([trajectory(**change)])


def test_the_content_hash_sees_order_and_nothing_of_how_it_was_made():
    a, b = trajectory("a"), trajectory("b")
    assert content_hash([a, b]) != content_hash([b, a])
    elsewhere = trajectory("a", run_id="r2", worker="w9", wait_s=9.0, decode_s=8.0, numerics_fingerprint="x")
    assert content_hash([a]) == content_hash([elsewhere])


def test_the_content_hash_is_a_fixed_number():
    """Golden: changes only together with the schema version, and with a line in the changelog."""
    row = dataclasses.replace(trajectory(), policy={"temperature": 1.0}, reward=0.5)
    assert content_hash([row]) == "2ce553e78d04610b6db7ce9185371646c907699f80cf2173e0ae098fa18bef65"
