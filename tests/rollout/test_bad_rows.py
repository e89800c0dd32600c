"""What is wrong with one prompt stays with it: the run goes on, records what happened, and says so at its end."""

from __future__ import annotations

import shutil
import sys

import numpy as np
import pytest
import ray
import safetensors.numpy
from click.testing import CliRunner

from rollout.cli import main
from rollout.config_file import dump_config
from rollout.driver import sample_run
from rollout.shards import content_hash, read_trajectories
from rollout.status import read_status
from sampling.types import StopReason
from tests.actors import faulty_worker

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

NAN_TOKEN = 200
GOOD = [{"id": f"p{index}", "prompt": "abc", "n": 1 + index % 3} for index in range(10)]
BAD = [
    {"id": "poison", "prompt": "abc"},
    {"id": "broken", "prompt": "abc", "n": 2},
    {"id": "nan", "prompt_tokens": [5, NAN_TOKEN, 6], "n": 2},
]


@pytest.fixture
def checkpoint(tiny_checkpoint, tmp_path):
    """The tiny model, undefined for whoever reads one token."""
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    file = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    tensors["model.embed_tokens.weight"][NAN_TOKEN] = np.nan
    safetensors.numpy.save_file(tensors, file, {"format": "pt"})
    return str(folder)


@pytest.fixture
def faulty_workers(monkeypatch):
    """Workers to which prompts do what their ids say, see tests/actors/faulty_worker.py."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[faulty_worker.__name__])
    monkeypatch.setattr("actors.supervision.SamplingWorker", faulty_worker.FaultyWorker)


def test_bad_prompts_are_recorded_with_their_cause_and_touch_no_other(
    tiny_config, tmp_path, checkpoint, faulty_workers
):
    def config(rows):
        return tiny_config(
            model={"checkpoint": checkpoint},
            prompts={"source": "inline", "rows": rows},
            workers={"count": 2, "cpus": 0, "threads": 1, "max_group_attempts": 2},
        )

    file, out = tmp_path / "config.yaml", tmp_path / "run"
    file.write_text(dump_config(config([*GOOD[:3], *BAD, *GOOD[3:]])))
    shown = CliRunner().invoke(main, ["sample", str(file), "--out", str(out)])
    assert shown.exit_code == 1, shown.output
    assert "5 sample(s) failed, as told under `failure` in their records" in shown.stderr

    rows = list(read_trajectories(out))
    failures = {row.prompt_id: row.failure for row in rows if row.failed}
    assert list(failures) == ["poison", "broken", "nan"]
    assert "ActorDiedError" in failures["poison"] and "'poison'" in failures["poison"]
    assert "FloatingPointError" in failures["broken"] and "the numbers went away" in failures["broken"]
    assert "(after 2 attempts)" in failures["poison"]
    assert failures["nan"] == "the row ended with undefined_distribution"
    assert [row.stop_reason for row in rows if row.prompt_id == "nan"] == [StopReason.UNDEFINED_DISTRIBUTION] * 2
    for prompt_id in failures:
        assert f"prompt '{prompt_id}', sample 0: " in shown.stderr

    sample_run(config(GOOD), tmp_path / "good")
    good = content_hash(row for row in rows if not row.failed)
    assert good == read_status(tmp_path / "good").content_hash
    assert sample_run(config([*GOOD[:3], *BAD, *GOOD[3:]]), out).already_finished
