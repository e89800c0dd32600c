"""What a step needs, as the compiler counts it, against the plan; and whether layers are computed again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollout.learning.batches import BatchShapes, TrainBatch, cut
from rollout.learning.config import AlgorithmSection, LearnerSection
from rollout.learning.learner_memory import LearnerMemoryPlan
from rollout.learning.objective import Objective, initial_weights
from sampling import load_checkpoint
from sampling.params import SamplingParams
from tests.rollout.records import trajectory
from tests.tiny_models import tiny_llama

SHAPES = BatchShapes(rows=4, longest=96, longest_completion=64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return load_checkpoint(tiny_llama(tmp_path_factory.mktemp("tiny"), num_hidden_layers=8))


def workspace(checkpoint, learner):
    """Bytes besides arguments and results that the gradient of a micro-batch takes."""
    size = SHAPES.longest_completion
    nats = np.full(size, -1, np.float32)
    row = trajectory(
        prompt_tokens=np.ones(32, np.int32),
        completion_tokens=np.ones(size, np.int32),
        behaviour_logprobs=nats,
        model_logprobs=nats,
        log_kept_mass=nats,
        params=SamplingParams(),
    )
    (part,) = cut(TrainBatch.of([row] * SHAPES.rows), SHAPES)
    objective = Objective.of(checkpoint.info.config, checkpoint.info.tokenizer_len, learner, AlgorithmSection())
    weights = initial_weights(checkpoint.params, checkpoint.info.config.width, value_head=False)
    gradient = jax.jit(jax.grad(objective.loss, has_aux=True)).lower(weights, part.batch).compile()
    return gradient.memory_analysis().temp_size_in_bytes


def test_the_plan_is_kept_and_rematerialisation_saves(checkpoint):
    sizes = {}
    for remat in (True, False):
        learner = LearnerSection(remat=remat, logit_tokens=64)
        plan = LearnerMemoryPlan.of(checkpoint.info.config, learner, AlgorithmSection(), SHAPES)
        sizes[remat] = workspace(checkpoint, learner)
        assert plan.activations / 4 < sizes[remat] < plan.activations
    assert sizes[True] < sizes[False] / 3


def test_the_plan_counts_what_there_is(checkpoint):
    weights = sum(leaf.size for leaf in jax.tree.leaves(checkpoint.params)) * jnp.dtype(jnp.float32).itemsize
    plan = LearnerMemoryPlan.of(
        checkpoint.info.config, LearnerSection(dtype="bfloat16"), AlgorithmSection(kl_coefficient=0.1), SHAPES
    )
    assert (plan.weights, plan.moments, plan.gradients) == (weights, 2 * weights, 2 * weights)
    assert plan.reference == weights // 2
