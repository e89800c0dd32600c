"""Checkpoints: a run that continues from one is the run that was never interrupted."""

import numpy as np
import pytest

from rollout.learning.batches import TrainBatch
from rollout.learning.checkpointing import Checkpoints
from rollout.learning.config import AlgorithmSection, LearnerSection
from rollout.learning.learner import Learner
from sampling import Engine, Geometry, SamplingParams, load_checkpoint
from sampling.checkpoints import weights_digest
from sampling.errors import CheckpointError, ConfigError
from tests.rollout.drawn import draw
from tests.tiny_models import tiny_llama

ALGORITHM = AlgorithmSection(advantages="gae", kl_coefficient=0.1)
NOTES = {"cursor": 12, "seed": 2**63, "config": "5f3a"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return load_checkpoint(tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def batch(checkpoint):
    engine = Engine(checkpoint, Geometry(slots=8, cache_len=64, prefill_chunk=16))
    return TrainBatch.of(draw(engine, SamplingParams(max_new_tokens=8, n=4), prompts=2))


def learner_of(checkpoint, algorithm=ALGORITHM):
    section = LearnerSection(learning_rate=1e-3, warmup_updates=4)
    return Learner(checkpoint, section, algorithm, longest=64, longest_completion=8)


def test_a_restored_learner_continues_to_the_same_bits(checkpoint, batch, tmp_path):
    learner = learner_of(checkpoint)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step in range(1, 5):
        learner.step(batch)
        checkpoints.save(step, learner.state, NOTES | {"cursor": step})
    assert checkpoints.steps == (3, 4)
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".pkl", ".pickle")]

    again = learner_of(checkpoint)
    found = Checkpoints(tmp_path / "checkpoints").restore(again.state, step=3)
    assert (found.step, found.notes) == (3, NOTES | {"cursor": 3})
    again.restore(found.state)
    assert (again.steps, again.version) == (3, 3)
    for _ in range(2):
        metrics = again.step(batch)
    for _ in range(1):
        expected = learner.step(batch)
    assert metrics == expected and metrics.step == 4
    assert weights_digest(again.params()) == weights_digest(learner.params())


def test_what_is_not_this_learners_is_refused(checkpoint, batch, tmp_path):
    learner = learner_of(checkpoint)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="expected a checkpoint of a learner, found none"):
        checkpoints.restore(learner.state)
    checkpoints.save(7, learner.state, NOTES)
    checkpoints.save(7, learner.state, {})  # over the older one
    assert checkpoints.restore(learner.state).notes == {}
    with pytest.raises(CheckpointError, match=r"expected a checkpoint of step 3, found those of \[7\]"):
        checkpoints.restore(learner.state, 3)
    wider = learner_of(load_checkpoint(tiny_llama(tmp_path / "wider", intermediate_size=48)))
    place = r"checkpoints/7: weights.policy.layers_0.feed_forward.down_kernel"
    with pytest.raises(CheckpointError, match=place + r": expected float32 \[32, 48\], found float32 \[32, 40\]"):
        checkpoints.restore(wider.state)
    headless = learner_of(checkpoint, AlgorithmSection())
    with pytest.raises(CheckpointError, match=r"value_head.bias: expected none, found float32 \[\]"):
        checkpoints.restore(headless.state)
    with pytest.raises(ConfigError, match=r"checkpoint notes\.seed"):
        checkpoints.save(8, learner.state, {"seed": np.int32(3)})
    assert checkpoints.steps == (7,)


def test_a_damaged_or_half_written_checkpoint_is_told(checkpoint, tmp_path):
    learner = learner_of(checkpoint)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (1, 2):
        checkpoints.save(step, learner.state, NOTES)
    for path in (tmp_path / "checkpoints" / "2" / "state").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(path.read_bytes()[:100])
    (tmp_path / "checkpoints" / "3.orbax-checkpoint-tmp").mkdir()
    again = Checkpoints(tmp_path / "checkpoints")
    assert again.steps == (1, 2)
    with pytest.raises(CheckpointError, match=r"checkpoints/2: cannot be read: .*; remove it to continue from an ear"):
        again.restore(learner.state)
    assert again.restore(learner.state, 1).notes == NOTES
