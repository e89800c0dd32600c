"""The learner's log-probs against the engine's records, finite differences, and padding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollout.learning.batches import BatchShapes, TrainBatch, cut, joined
from rollout.learning.logprobs import as_computed, completion_logprobs
from sampling import Engine, Geometry, SamplingParams, load_checkpoint
from sampling.models import Transformer
from tests.rollout.drawn import draw
from tests.tiny_models import TOKENIZER_LEN, tiny_llama, tiny_mistral

SHAPES = BatchShapes(rows=4, longest=64, longest_completion=24, bucket_len=16)
POLICIES = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.7),
    "top_k": SamplingParams(temperature=1.3, top_k=5, record_support=8),
    "top_p": SamplingParams(top_p=0.8, record_support=300),
    "masks": SamplingParams(
        temperature=0.8, min_p=0.02, min_new_tokens=3, allowed_token_ids=tuple(range(40)), record_support=40
    ),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return load_checkpoint(tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def trajectories(checkpoint):
    policies = [policy.replace(n=3, max_new_tokens=20) for policy in POLICIES.values()]
    return draw(Engine(checkpoint, Geometry(slots=8, cache_len=64, prefill_chunk=16)), *policies, prompts=5)


@pytest.fixture(scope="module")
def program(checkpoint):
    model = Transformer(checkpoint.info.config)
    return jax.jit(lambda params, batch: completion_logprobs(model, params, batch, TOKENIZER_LEN, 16))


def scored(program, params, batch, shapes=SHAPES):
    micro = cut(batch, shapes)
    return joined(batch, micro, [jax.device_get(program(params, part.batch)) for part in micro])


def test_the_recorded_logprobs_are_found_again(checkpoint, trajectories, program):
    """Each policy, in batches that mix them; entropies and the model's own log-probs as well."""
    batch = TrainBatch.of(trajectories)
    scores = scored(program, checkpoint.params, batch)
    for row, trajectory in enumerate(trajectories):
        drawn = slice(0, trajectory.completion_len)
        for name, recorded in (
            ("logprobs", trajectory.behaviour_logprobs),
            ("model_logprobs", trajectory.model_logprobs),
            ("entropy", trajectory.entropy),
        ):
            np.testing.assert_allclose(
                getattr(scores, name)[row, drawn], recorded, atol=1e-4, err_msg=f"{name} {trajectory.prompt_id}"
            )
    assert batch.support.shape[2] > 8  # those of top_p


def test_padding_buckets_and_rows_change_nothing(checkpoint, trajectories, program):
    batch = TrainBatch.of(trajectories)
    expected = scored(program, checkpoint.params, batch)
    wider = BatchShapes(rows=7, longest=64, longest_completion=64, bucket_len=64)
    got = scored(program, checkpoint.params, batch, wider)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), expected, got)


def test_a_block_of_any_size_gives_the_same(checkpoint, trajectories):
    model, (part, *_) = Transformer(checkpoint.info.config), cut(TrainBatch.of(trajectories), SHAPES)
    whole, parts = (completion_logprobs(model, checkpoint.params, part.batch, TOKENIZER_LEN, b) for b in (999, 7))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), whole, parts)


def total(model, params, batch):
    scores = completion_logprobs(model, params, batch, TOKENIZER_LEN, 13)  # of which no batch is a multiple
    return jnp.sum(jnp.where(batch.mask, batch.advantages * scores.logprobs, 0.0))


def test_the_gradient_is_that_of_finite_differences(checkpoint, trajectories):
    """Along a random direction; the central difference errs by its step squared, float32 by 1e-7 over the step."""
    model = Transformer(checkpoint.info.config)
    (part, *_) = cut(TrainBatch.of(trajectories), SHAPES)
    rng = np.random.default_rng(0)
    advantages = rng.normal(size=part.batch.mask.shape).astype(np.float32)
    batch = part.batch.replace(advantages=advantages)
    params = jax.tree.map(jnp.asarray, checkpoint.params)
    value = jax.jit(lambda params: total(model, params, batch))
    gradient = jax.jit(jax.grad(lambda params: total(model, params, batch)))(params)
    direction = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), params)
    expected = sum(float(jnp.vdot(g, d)) for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True))
    step = 1e-3
    moved = [
        float(value(jax.tree.map(lambda p, d, sign=sign: p + sign * step * d, params, direction))) for sign in (1, -1)
    ]
    assert (moved[0] - moved[1]) / (2 * step) == pytest.approx(expected, rel=5e-3)
    assert abs(expected) > 1


def test_remat_changes_neither_values_nor_gradients(tmp_path, trajectories):
    """With a sliding window, which a layer finds by its number."""
    checkpoint = load_checkpoint(tiny_mistral(tmp_path / "tiny"))
    (part, *_) = cut(TrainBatch.of(trajectories), SHAPES)
    batch = part.batch.replace(advantages=np.ones_like(part.batch.advantages))
    plain, again = (Transformer(checkpoint.info.config, remat=remat) for remat in (False, True))
    one = jnp.zeros((1, 1), jnp.int32)
    trees = [jax.eval_shape(lambda m=m: m.init(jax.random.key(0), one, one)) for m in (plain, again)]
    assert trees[0] == trees[1]
    results = [
        jax.jit(jax.value_and_grad(lambda params, m=model: total(m, params, batch)))(checkpoint.params)
        for model in (plain, again)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4), *results)


def test_rubbish_under_the_mask_reaches_nothing(checkpoint, trajectories, program):
    """NaN and impossible ids in padded rows and behind the ends, and a row of padding in the gradient."""
    model = Transformer(checkpoint.info.config)
    shapes = dataclasses.replace(SHAPES, rows=len(trajectories) + 1)
    (part,) = cut(TrainBatch.of(trajectories), shapes)
    batch = part.batch.replace(advantages=np.ones_like(part.batch.advantages))
    behind = ~batch.mask
    rubbish = batch.replace(
        advantages=np.where(behind, np.nan, batch.advantages),
        support=np.where(behind[:, :, None], 2**31 - 1, batch.support),
    )
    gradient = jax.jit(jax.grad(lambda params, batch: total(model, params, batch)))
    expected, got = (gradient(checkpoint.params, b) for b in (batch, rubbish))
    jax.tree.map(np.testing.assert_array_equal, expected, got)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))
    scores = program(checkpoint.params, rubbish)
    assert not np.asarray(scores.logprobs)[behind].any()


def test_bfloat16_rounds_as_an_engine_does_and_lets_gradients_through():
    leaf = jnp.asarray([1.0, 1.001, -3.14159, 1e-30, 0.0], jnp.float32)
    rounded = as_computed({"a": leaf}, jnp.bfloat16)["a"]
    np.testing.assert_array_equal(rounded, leaf.astype(jnp.bfloat16).astype(jnp.float32))
    gradient = jax.grad(lambda x: jnp.sum(3.0 * as_computed(x, jnp.bfloat16)))(leaf)
    np.testing.assert_array_equal(gradient, np.full(5, 3.0))
