"""The learner on a tiny model.

1.  Whatever the micro-batches, a step is the same within rounding; whatever else, the same inputs give the same bits.
2.  With a rate of 0 the weights keep every bit, and the recorded log-probs are its own.
3.  Nothing to learn from, and gradients that are not finite, change nothing and are told.
4.  Losses and their gradients are those of the formulas, with all parts together.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rollout.learning.batches import TrainBatch, cut
from rollout.learning.config import AlgorithmSection, LearnerSection
from rollout.learning.credit import weighted
from rollout.learning.learner import Learner
from rollout.learning.objective import Objective
from rollout.learning.step_metrics import NOT_FINITE, NOTHING_LEARNT
from sampling import Engine, Geometry, SamplingParams, load_checkpoint
from sampling.checkpoints import weights_digest
from sampling.errors import ConfigError, RecordError
from tests.rollout.drawn import draw
from tests.tiny_models import tiny_llama

PARAMS = SamplingParams(temperature=0.7, max_new_tokens=20, n=4)
GEOMETRY = Geometry(slots=8, cache_len=64, prefill_chunk=16)
EVERYTHING = AlgorithmSection(
    advantages="gae", clip_high=0.28, dual_clip=3.0, kl_coefficient=0.1, entropy_coefficient=0.01, correction="token"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """With a weight of -0.0, whose sign is a bit like any other."""
    loaded = load_checkpoint(tiny_llama(tmp_path_factory.mktemp("tiny")))
    loaded.params["embedding"] = loaded.params["embedding"].copy()
    loaded.params["embedding"][5, :4] = -0.0
    return loaded


@pytest.fixture(scope="module")
def engine(checkpoint):
    return Engine(checkpoint, GEOMETRY)


@pytest.fixture(scope="module")
def batch(engine):
    return TrainBatch.of(draw(engine, PARAMS))


def learner_of(checkpoint, algorithm=None, reference=None, **changes):
    section = LearnerSection(**{"learning_rate": 1e-3, "bucket_len": 64, "micro_batch_rows": 16, **changes})
    algorithm = algorithm or AlgorithmSection()
    return Learner(checkpoint, section, algorithm, longest=64, longest_completion=20, reference=reference)


def digest(learner):
    return weights_digest({"policy": learner.params(), "head": learner.state.weights.value_head or {}})


@pytest.mark.parametrize("rows", [3, 5])
def test_micro_batches_add_up_to_the_batch(checkpoint, batch, rows):
    """The optimizer's first moment after one step is the gradient, but for a factor."""
    whole, parts = (learner_of(checkpoint, EVERYTHING, micro_batch_rows=count) for count in (16, rows))
    one, other = whole.step(batch), parts.step(batch)
    for name in ("loss", "entropy_loss", "value_loss", "grad_norm"):
        assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-6)
    gradients = (jax.tree.leaves(optax.tree.get(learner.state.optimizer, "mu")) for learner in (whole, parts))
    for expected, got in zip(*gradients, strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def test_the_same_inputs_give_the_same_bits(checkpoint, batch):
    learners = [learner_of(checkpoint, EVERYTHING, micro_batch_rows=5) for _ in range(2)]
    metrics = [[learner.step(batch) for _ in range(2)] for learner in learners]
    assert metrics[0] == metrics[1]
    assert digest(learners[0]) == digest(learners[1]) != digest(learner_of(checkpoint, EVERYTHING))


def test_a_rate_of_zero_keeps_weights_and_logprobs_for_twenty_steps(checkpoint, engine):
    """At lag 0 the recorded log-probs are the learner's own, and stay so."""
    learner = learner_of(checkpoint, learning_rate=0.0, weight_decay=0.1)
    before = digest(learner)
    engine.policy_version = 0
    for step in range(20):
        metrics = learner.step(TrainBatch.of(draw(engine, PARAMS, prompts=2, seed=step)))
        engine.policy_version = learner.version
        assert (metrics.skipped, metrics.updates, metrics.policy_lag_max) == (None, 1, 0)
        assert metrics.mismatch_tokens == metrics.tokens > 0
        assert metrics.mismatch_p999 < 1e-4
        assert metrics.ratio_p01 == pytest.approx(1, abs=1e-4) and metrics.ess == pytest.approx(1, abs=1e-6)
    engine.policy_version = 0
    assert learner.version == learner.steps == 20
    assert digest(learner) == before == weights_digest({"policy": checkpoint.params, "head": {}})


def test_nothing_to_learn_from_is_told(checkpoint, engine):
    unscored = TrainBatch.of(draw(engine, PARAMS, prompts=1, reward=lambda completion: None))
    learner = learner_of(checkpoint)
    before = digest(learner)
    for nothing in (unscored, TrainBatch.of([])):
        metrics = learner.step(nothing)
        assert (metrics.skipped, metrics.updates, metrics.tokens) == (NOTHING_LEARNT, 0, 0)
        assert metrics.loss is None and metrics.policy_version == 0
    assert learner.steps == 2 and learner.version == 0 and digest(learner) == before


def test_a_gradient_that_is_not_finite_changes_nothing(checkpoint, batch):
    learner = learner_of(checkpoint)
    before = digest(learner)
    metrics = learner.step(batch.replace(behaviour_logprobs=batch.behaviour_logprobs - 1e4))  # ratios overflow
    assert (metrics.skipped, metrics.updates, learner.version) == (NOT_FINITE, 0, 0)
    assert digest(learner) == before
    assert learner.step(batch).skipped is None and digest(learner) != before


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        (AlgorithmSection(), {}),
        (AlgorithmSection(loss="gspo", clip_low=0.1, reduction="sequence_mean"), {}),
        (AlgorithmSection(loss="cispo", clip_low=1.0, clip_high=2.0, scale="none", reduction="constant"), {}),
        (EVERYTHING, {"epochs": 2, "updates_per_epoch": 2}),
    ],
    ids=["grpo", "gspo", "cispo", "ppo"],
)
def test_steps_raise_what_was_rewarded(checkpoint, batch, algorithm, changes):
    """After three steps on one batch, tokens of positive advantage are likelier and the others less likely."""
    learner = learner_of(checkpoint, algorithm, learning_rate=2e-4, **changes)
    objective = Objective.of(checkpoint.info.config, checkpoint.info.tokenizer_len, learner.learner, algorithm)
    (part,) = cut(batch, learner.shapes)
    scores = jax.jit(lambda weights: objective.scores(weights, part.batch)[0].logprobs)
    old = np.asarray(scores(learner.state.weights))
    metrics = [learner.step(batch) for _ in range(3)]
    moved = np.asarray(scores(learner.state.weights)) - old
    rewards = part.batch.rewards - part.batch.rewards.mean()
    assert np.corrcoef(rewards, np.where(part.batch.mask, moved, 0).sum(axis=1))[0, 1] > 0.5
    assert [m.updates for m in metrics] == [learner.learner.updates_per_step] * 3
    assert metrics[0].mismatch_p999 < 1e-4 and metrics[0].mismatch_tokens == metrics[0].tokens
    assert (metrics[2].policy_lag_max, metrics[2].mismatch_tokens) == (2, 0)
    assert metrics[2].grad_norm > 0 and metrics[2].ess < 1
    if algorithm.value_head:
        assert metrics[2].value_loss < metrics[0].value_loss
        assert metrics[2].kl > metrics[0].kl > 0
        assert metrics[2].explained_variance > metrics[0].explained_variance == pytest.approx(0, abs=1e-6)


def test_the_gradient_of_all_parts_together(checkpoint, batch):
    """Against finite differences along the gradient itself, the longest slope there is."""
    objective = Objective.of(checkpoint.info.config, checkpoint.info.tokenizer_len, LearnerSection(), EVERYTHING)
    weights = learner_of(checkpoint, EVERYTHING).state.weights
    rng = np.random.default_rng(0)

    def near(scale):
        return (batch.behaviour_logprobs + scale * rng.normal(size=batch.mask.shape)).astype(np.float32)

    full = batch.replace(
        behaviour_logprobs=near(0.1),
        proximal_logprobs=near(0.1),
        reference_logprobs=near(0.5),
        advantages=near(1.0),
        values=near(1.0),
        returns=near(1.0),
    )
    whole = weighted(full, EVERYTHING, 20)
    loss = jax.jit(lambda weights: objective.loss(weights, whole)[0])
    gradient = jax.jit(jax.grad(lambda weights: objective.loss(weights, whole)[0]))(weights)
    squared = sum(float(jnp.vdot(leaf, leaf)) for leaf in jax.tree.leaves(gradient))
    step = 1e-2 / squared
    ahead, back = (float(loss(jax.tree.map(lambda w, g, by=by: w + by * g, weights, gradient))) for by in (step, -step))
    assert (ahead - back) / (2 * step) == pytest.approx(squared, rel=1e-2)


def test_losses_are_those_of_the_formulas(checkpoint, batch):
    """Tokens drawn by a policy under which each was a quarter as likely: the weight 4 is cut at 2."""
    drifted = batch.replace(behaviour_logprobs=np.where(batch.mask, batch.behaviour_logprobs - np.log(4), 0))
    drifted = drifted.replace(behaviour_logprobs=drifted.behaviour_logprobs.astype(np.float32))
    algorithm = AlgorithmSection(correction="token", scale="none", entropy_coefficient=0.5)
    metrics = learner_of(checkpoint, algorithm, learning_rate=0.0).step(drifted)
    assert metrics.importance_mean == pytest.approx(2, rel=1e-5) and metrics.ratio_p50 == pytest.approx(4, rel=1e-4)
    tokens = batch.mask.sum(axis=1)
    advantages = batch.rewards - np.repeat(batch.rewards.reshape(4, 4).mean(axis=1), 4)
    assert metrics.policy_loss == pytest.approx(-2 * (advantages * tokens).sum() / tokens.sum(), rel=1e-4, abs=1e-4)
    assert metrics.entropy_loss == pytest.approx(-0.5 * metrics.entropy, rel=1e-5)
    assert metrics.loss == pytest.approx(metrics.policy_loss + metrics.entropy_loss, rel=1e-9)
    twice = learner_of(checkpoint, algorithm, learning_rate=0.0, epochs=2).step(drifted)
    assert twice.importance_mean == pytest.approx(2, rel=1e-5) and twice.updates == 2
    assert twice.policy_loss == pytest.approx(metrics.policy_loss, rel=1e-4) and twice.clip_fraction == 0
    plain = learner_of(checkpoint, AlgorithmSection(scale="none"), learning_rate=0.0).step(drifted)
    clipped = np.where(advantages > 0, 1.2, 4.0) * advantages
    assert plain.policy_loss == pytest.approx(-(clipped * tokens).sum() / tokens.sum(), rel=1e-4)
    positive = (tokens * (advantages > 0)).sum() / tokens.sum()
    assert plain.clip_fraction == pytest.approx(positive)


def test_a_reference_takes_from_the_reward(checkpoint, batch, tmp_path):
    """Where the reward is the same for all, only the divergence from another model is left to learn from."""
    other = load_checkpoint(tiny_llama(tmp_path / "other", seed=1))
    level = batch.replace(rewards=np.ones_like(batch.rewards))
    in_reward = AlgorithmSection(kl_coefficient=0.1, kl_in="reward", kl="k1")
    metrics = learner_of(checkpoint, in_reward, reference=other).step(level)
    assert metrics.kl > 0.1 and metrics.advantage_std > 0.5 and metrics.kl_loss is None
    own = learner_of(checkpoint, in_reward).step(level)
    assert abs(own.kl) < 1e-6 and own.policy_loss == pytest.approx(0, abs=1e-2)


def test_what_cannot_be_a_batch_is_refused(checkpoint, batch):
    learner = learner_of(checkpoint)
    with pytest.raises(RecordError, match="policy version 0 at most, the learner's, got version 3"):
        learner.step(batch.replace(policy_versions=batch.policy_versions + 3))
    section = learner.learner
    short = Learner(checkpoint, section, AlgorithmSection(), longest=64, longest_completion=19)
    with pytest.raises(ConfigError, match="expected a completion of at most 19 tokens, got 20"):
        short.step(batch)
    assert learner.steps == short.steps == 0


def test_few_programs_are_compiled(checkpoint, engine, batch, compilations):
    learner = learner_of(checkpoint, micro_batch_rows=4, bucket_len=32)
    learner.step(batch)
    compilations.clear()
    for seed in range(3):
        learner.step(TrainBatch.of(draw(engine, PARAMS.replace(max_new_tokens=20 - seed), seed=seed)))
    assert not compilations


def test_bfloat16_computes_as_a_bfloat16_engine_and_keeps_float32_weights(checkpoint):
    engine = Engine(checkpoint, GEOMETRY, dtype="bfloat16")
    learner = learner_of(checkpoint, AlgorithmSection(kl_coefficient=0.1), dtype="bfloat16")
    metrics = learner.step(TrainBatch.of(draw(engine, PARAMS)))
    assert metrics.skipped is None and abs(metrics.kl) < 1e-2
    assert metrics.mismatch_p50 < 0.02
    assert {leaf.dtype for leaf in jax.tree.leaves(learner.state.weights)} == {jnp.dtype(jnp.float32)}
    moved = [
        np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (learner.params(), checkpoint.params)), strict=True)
    ]
    assert min(moved) > 0 and learner.params(jnp.bfloat16)["embedding"].dtype == jnp.bfloat16


def test_published_parameters_outlive_the_step(checkpoint, batch):
    learner = learner_of(checkpoint)
    published = learner.params()
    kept = weights_digest(published)
    learner.step(batch)
    assert weights_digest(published) == kept != weights_digest(learner.params())


def test_rates_of_the_schedules():
    from rollout.learning.optimizer import learning_rates

    def rates(**changes):
        rate = learning_rates(LearnerSection(learning_rate=1.0, **changes))
        return [round(float(rate(update)), 6) for update in range(6)]

    assert rates() == [1] * 6
    assert rates(warmup_updates=3) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert rates(schedule="linear", decay_updates=4, final_share=0.2) == [1, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert rates(schedule="cosine", decay_updates=4) == [1, 0.853553, 0.5, 0.146447, 0, 0]
    assert rates(schedule="linear", decay_updates=5, warmup_updates=1) == [0.5, 1, 0.75, 0.5, 0.25, 0]


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        (LearnerSection, {"decay_updates": 5}, "no effect with learner.schedule = 'constant'"),
        (LearnerSection, {"schedule": "cosine"}, "expected a number of updates for schedule 'cosine'"),
        (LearnerSection, {"schedule": "linear", "decay_updates": 3, "warmup_updates": 3}, "more than learner.warmup"),
        (AlgorithmSection, {"floor": 0.5}, "0.5 has no effect with algorithm.beyond = 'truncate'"),
        (AlgorithmSection, {"floor": 2.0, "beyond": "mask"}, "expected less than algorithm.cap = 2, got 2"),
        (AlgorithmSection, {"loss": "cispo", "dual_clip": 3.0}, "no effect with algorithm.loss = 'cispo'"),
    ],
)
def test_settings_that_contradict(section, values, words):
    with pytest.raises(ValueError, match=words):
        section(**values)


def test_what_memory_cannot_hold_is_refused(checkpoint, monkeypatch):
    plan = learner_of(checkpoint, EVERYTHING).memory_plan
    parts = dataclasses.asdict(plan)
    assert plan.total == sum(parts.values()) and parts["moments"] == 2 * parts["weights"] == 2 * parts["reference"]
    monkeypatch.setattr("rollout.learning.learner.available_bytes", lambda: plan.total // 2)
    with pytest.raises(
        ConfigError, match=r"micro-batches of 16 sequences of 64 tokens need weights .*micro_batch_rows=\d"
    ):
        learner_of(checkpoint, EVERYTHING)
