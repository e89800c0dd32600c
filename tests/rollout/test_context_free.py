"""Grammars that are followed on the host, through the whole service: in workers, records, and every command."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil

import numpy as np
import pytest

from rollout.canary import CANARY_NAME
from rollout.codec import read_parquet, write_parquet
from rollout.driver import sample_run
from rollout.explain import RunExplainer
from rollout.manifest import read_manifest
from rollout.scoring.config import load_score_config
from rollout.scoring.folder import SCORED_NAME
from rollout.scoring.job import score_source
from rollout.scoring.scored import Outcome, read_scored
from rollout.shards import SHARDS_NAME, content_hash, read_trajectories
from rollout.verify import verify_run
from sampling.errors import ConfigError
from sampling.grammar import installed_library
from sampling.types import StopReason

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

PROMPTS = {
    "brackets": {"grammar_mode": "host", "lark": 'start: "(" start ")" | "x"'},
    "json": {"grammar_mode": "host", "json_schema": {"type": ["array", "null"]}, "temperature": 0.8},
    "table": {"choices": ["yes", "no"]},
    "free": {"top_p": 0.9},
}
STEPPED = ("brackets", "json")


@pytest.fixture
def config(tiny_config):
    rows = [{"id": name, "prompt": "abcabc", "n": 3, "sampling": policy} for name, policy in PROMPTS.items()]
    return tiny_config(
        prompts={"source": "inline", "rows": rows},
        sampling={"max_new_tokens": 20},
        workers={"count": 1, "cpus": 0, "threads": int(os.environ["NPROC"])},
        verify={"share": 1.0},
    )


@pytest.fixture
def run(finished, config):
    return finished(config)


def test_a_run_verifies_itself_and_is_verified_to_the_bit(run):
    records = list(read_trajectories(run))
    assert len(records) == 3 * len(PROMPTS) and not any(record.failed for record in records)
    canary = json.loads((run / CANARY_NAME).read_text())
    assert canary["faults"] == [] and canary["samples"] == len(records)
    for record in records:
        on_host = record.prompt_id in STEPPED
        assert record.policy["grammar_library"] == (installed_library() if on_host else "")
    ends = {record.stop_reason for record in records if record.prompt_id in STEPPED}
    assert ends <= {StopReason.GRAMMAR_DONE, StopReason.EOS, StopReason.LENGTH}
    found = verify_run(run)
    assert found.faults == [] and found.bit_exact and found.samples == len(records)


def test_two_workers_write_the_same_records(run, config, tmp_path):
    two = config.model_copy(update={"workers": config.workers.model_copy(update={"count": 2})})
    sample_run(two, tmp_path / "two")
    assert content_hash(read_trajectories(run)) == content_hash(read_trajectories(tmp_path / "two"))


def test_every_token_is_explained(run):
    explainer = RunExplainer(run)
    for name in PROMPTS:
        report = explainer.explain(name, 1, -1)
        assert not [fault for fault in report.faults], name
        rules = {rule.name for rule in report.explanation.rules}
        assert {"lark", "json_schema", "choices"} & set(PROMPTS[name]) <= rules


@pytest.mark.parametrize("path", ["replay", "forward"])
def test_a_run_is_scored_under_its_own_policies(run, tmp_path, path):
    score_source(run, load_score_config(run, None, [f"path={path}"]), tmp_path / "scored")
    files = sorted((tmp_path / "scored" / SCORED_NAME / "default").glob("*.parquet"))
    scored = [row for file in files for row in read_scored(file)]
    for record, row in zip(read_trajectories(run), scored, strict=True):
        assert row.outcome is Outcome.SCORED and row.left_grammar_at is None
        apart = np.abs(row.behaviour_logprobs - record.behaviour_logprobs)
        assert (apart == 0).all() if path == "replay" else np.median(apart) < 1e-4


def test_another_version_of_the_library_is_named(run, tmp_path):
    """Nothing is drawn again by another one, and what it did not follow is compared as ever."""
    other = shutil.copytree(run, tmp_path / "run")
    for shard in read_manifest(other).shards:
        file = other / SHARDS_NAME / shard.file
        records = [
            dataclasses.replace(record, policy={**record.policy, "grammar_library": "llguidance 0.7.0"})
            if record.prompt_id in STEPPED
            else record
            for record in read_parquet(file)
        ]
        write_parquet(file, records)
    found = verify_run(other)
    expected = f"expected to be followed by llguidance 0.7.0, here is {installed_library()}"
    assert sorted(fault.partition(":")[0] for fault in found.faults if expected in fault) == [
        "prompt 'brackets'",
        "prompt 'json'",
    ]
    assert found.samples == 6
    with pytest.raises(ConfigError, match=expected):
        RunExplainer(other).explain("brackets", 0, 0)
