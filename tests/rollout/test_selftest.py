"""The self-test passes on a sound service and fails when one tensor of a worker's weights is off by a thousandth."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import safetensors.numpy

from rollout.selftest import POLICIES, PROMPTS, selftest
from sampling.types import Geometry

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

GEOMETRY = Geometry(slots=8, cache_len=128, prefill_chunk=32)


def test_workers_and_a_learner_that_learns_nothing_agree(tiny_checkpoint):
    found = selftest(tiny_checkpoint, max_new_tokens=12, geometry=GEOMETRY)
    assert found.faults == () and found.lines()[-1] == "passed"
    assert found.samples == 4 * len(PROMPTS) * len(POLICIES) and found.tokens > 4 * found.samples
    assert found.ratio == pytest.approx(1, abs=1e-3)


def test_one_tensor_of_a_worker_off_by_a_thousandth_is_noticed(tiny_checkpoint, tmp_path):
    perturbed = shutil.copytree(tiny_checkpoint, tmp_path / "perturbed")
    file = perturbed / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"] += np.float32(1e-3)
    safetensors.numpy.save_file(tensors, file, {"format": "pt"})
    found = selftest(str(perturbed), learner=tiny_checkpoint, max_new_tokens=12, geometry=GEOMETRY)
    (fault,) = found.faults
    assert fault.startswith("the learner's log-probs: expected 99.9 % of the tokens within 0.0001 nats of their record")
    assert found.lines()[-1] == "failed: 1 faults"
