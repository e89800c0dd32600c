"""Learner: weights, optimizer and the step that changes them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.typing import DTypeLike

from rollout.learning.batches import BatchShapes, TrainBatch, cut, joined, split
from rollout.learning.config import AlgorithmSection, LearnerSection
from rollout.learning.credit import credited, masked, weighted
from rollout.learning.learner_memory import LearnerMemoryPlan, require_memory
from rollout.learning.losses import kl_estimate
from rollout.learning.objective import Objective, TokenTerms, Weights, initial_weights
from rollout.learning.optimizer import added, learning_rates, optimizer
from rollout.learning.step_metrics import NOTHING_LEARNT, StepMetrics, Update, of_step
from sampling.checkpoints import Checkpoint
from sampling.engine import DTYPES
from sampling.errors import RecordError
from sampling.memory_plan import available_bytes

log = logging.getLogger(__name__)


class LearnerState(struct.PyTreeNode):
    """All that a learner carries from step to step, and all that a checkpoint has to keep of it.

    Attributes:
        weights: what is learnt.
        optimizer: state of the optimizer.
        steps: int32 [], steps taken, skipped ones among them.
        version: int32 [], policy version of the weights: steps that changed them.
    """

    weights: Weights
    optimizer: Any
    steps: Any
    version: Any


class Learner:
    """Learns from batches of trajectories with one set of weights.

    Steps are functions of state and batch: the same ones give the same bits on the same machine.

    Args:
        checkpoint: the weights to begin with.
        learner, algorithm: the config's sections.
        longest, longest_completion: tokens that a sequence and a completion may have.
        reference: the frozen reference, if the algorithm has one; by default the weights to begin with.
    Raises:
        ConfigError: a step needs more memory than there is.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        learner: LearnerSection,
        algorithm: AlgorithmSection,
        *,
        longest: int,
        longest_completion: int,
        reference: Checkpoint | None = None,
    ) -> None:
        info = checkpoint.info
        self.info, self.learner, self.algorithm = info, learner, algorithm
        self.shapes = BatchShapes(learner.micro_batch_rows, longest, longest_completion, learner.bucket_len)
        self.memory_plan: LearnerMemoryPlan = require_memory(
            info.config, learner, algorithm, self.shapes, available_bytes()
        )
        log.info("memory of a step: %s", self.memory_plan)
        objective = Objective.of(info.config, info.tokenizer_len, learner, algorithm)
        self._precision = objective.model.matmul_precision
        self._rates: Any = learning_rates(learner)
        self._optimizer: Any = optimizer(learner)
        weights = initial_weights(checkpoint.params, info.config.width, algorithm.value_head)
        zero = np.zeros((), np.int32)
        self._state = LearnerState(weights, self._optimizer.init(weights), zero, zero)
        self._reference: Weights | None = None
        if algorithm.reference:
            frozen = (reference or checkpoint).params
            self._reference = Weights(jax.tree.map(lambda leaf: jnp.array(leaf, DTYPES[learner.dtype]), frozen))

        def accumulate(gradient: Weights, weights: Weights, batch: TrainBatch) -> tuple[Weights, TokenTerms]:
            new, terms = jax.grad(objective.loss, has_aux=True)(weights, batch)
            return jax.tree.map(jnp.add, gradient, new), terms

        def apply(weights: Weights, state: Any, gradient: Weights) -> tuple[Weights, Any]:
            with jax.numpy_dtype_promotion("standard"):  # optax mixes counts with floats
                updates, state = self._optimizer.update(gradient, state, weights)
            return added(weights, updates), state

        self._scores = jax.jit(objective.scores)
        self._zeros = jax.jit(partial(jax.tree.map, jnp.zeros_like))
        self._accumulate = jax.jit(accumulate, donate_argnums=0)
        self._norm = jax.jit(optax.tree.norm)
        self._apply = jax.jit(apply, donate_argnums=(0, 1))

    @property
    def version(self) -> int:
        """Policy version of the weights: steps that changed them."""
        return int(self._state.version)

    @property
    def steps(self) -> int:
        """Steps taken, skipped ones among them."""
        return int(self._state.steps)

    def params(self, dtype: DTypeLike = np.float32) -> dict[str, Any]:
        """The policy's parameters for publication: a nested dict of NumPy arrays of their own."""
        return jax.tree.map(lambda leaf: np.array(leaf, dtype), self._state.weights.policy)

    @property
    def state(self) -> LearnerState:
        """What a checkpoint has to keep. The next step takes its arrays back: copy or save them before."""
        return self._state

    def restore(self, state: LearnerState) -> None:
        """Continues from a state, with leaves like those of `state`."""
        self._state = jax.tree.map(lambda new, old: jnp.array(new, old.dtype), state, self._state)

    def step(self, batch: TrainBatch) -> StepMetrics:
        """Learns from a batch: advantages, then all updates, micro-batch by micro-batch.

        A batch without a token to learn from changes nothing but the count of steps. So does an update whose gradient
        is not finite. Both are told by `skipped`.

        Raises:
            ConfigError: a sequence is longer than the learner was made for.
            RecordError: a token was drawn by a later policy than the learner's.
        """
        algorithm, longest = self.algorithm, self.shapes.longest_completion
        step, version = self.steps, self.version
        batch = masked(batch, algorithm)
        if not batch.mask.any():
            self._count(step, version)
            return StepMetrics(step, version, skipped=NOTHING_LEARNT)
        if (newest := int(batch.policy_versions[batch.mask].max())) > version:
            raise RecordError(
                f"batch: expected tokens of policy version {version} at most, the learner's, got version {newest};"
                " were they drawn by another run?"
            )
        batch, before = self._prepared(batch)
        batch = credited(batch, algorithm, longest, self._penalty(batch, before))
        updates: list[Update] = []
        for _ in range(self.learner.epochs):
            parts = [weighted(part, algorithm, longest) for part in split(batch, self.learner.updates_per_epoch)]
            updates += [self._update(part) for part in parts]
        if before is None:  # a single update has computed them
            before = np.full(batch.mask.shape, np.nan, np.float32)
            before[batch.mask.any(axis=1)] = updates[0].terms.logprobs
        metrics = of_step(step, batch, version, before, updates, algorithm)
        self._count(step, metrics.policy_version)
        return metrics

    def _prepared(self, batch: TrainBatch) -> tuple[TrainBatch, np.ndarray | None]:
        """The batch with what the loss needs of other weights, and log-probs by the present ones where it does."""
        algorithm, before = self.algorithm, None
        several = self.learner.updates_per_step > 1
        in_reward = algorithm.reference and algorithm.kl_in == "reward"
        if several or algorithm.value_head or in_reward:
            scores, values = self._scored(self._state.weights, batch)
            before = scores.logprobs
            proximal = before if several and algorithm.correction != "none" else None
            batch = batch.replace(values=values, proximal_logprobs=proximal)
        if self._reference is not None:
            batch = batch.replace(reference_logprobs=self._scored(self._reference, batch)[0].logprobs)
        return batch, before

    def _penalty(self, batch: TrainBatch, before: np.ndarray | None) -> np.ndarray | None:
        """What the divergence from the reference takes from the reward of each token."""
        algorithm = self.algorithm
        if not algorithm.reference or algorithm.kl_in != "reward":
            return None
        assert before is not None
        estimate = kl_estimate(jnp.asarray(before), batch.reference_logprobs, batch.mask, algorithm.kl)
        return algorithm.kl_coefficient * np.asarray(estimate, np.float64)

    def _scored(self, weights: Weights, batch: TrainBatch) -> Any:
        """`Objective.scores` of the whole batch, on the host."""
        return self._over_micro_batches(partial(self._scores, weights), batch)

    def _update(self, batch: TrainBatch) -> Update:
        gradient = self._zeros(self._state.weights)

        def add(micro: TrainBatch) -> TokenTerms:
            nonlocal gradient
            gradient, terms = self._accumulate(gradient, self._state.weights, micro)
            return terms

        terms = self._over_micro_batches(add, batch)
        norm = float(self._norm(gradient))
        rate = float(self._rates(_updates_made(self._state.optimizer)))
        applied = bool(np.isfinite(norm))
        if applied:
            weights, state = self._apply(self._state.weights, self._state.optimizer, gradient)
            self._state = self._state.replace(weights=weights, optimizer=state)
        return Update(batch, terms, norm, rate, applied)

    def _over_micro_batches(self, function: Callable[[TrainBatch], Any], batch: TrainBatch) -> Any:
        micro = cut(batch, self.shapes)
        with jax.default_matmul_precision(self._precision):
            parts: Sequence[Any] = [jax.device_get(function(part.batch)) for part in micro]
        return joined(batch, micro, parts)

    def _count(self, step: int, version: int) -> None:
        self._state = self._state.replace(steps=np.int32(step + 1), version=np.int32(version))


def _updates_made(state: Any) -> int:
    """Updates that the optimizer has made: its own count, which the schedule reads."""
    return int(optax.tree.get(state, "count", filtering=lambda path, _: "ScaleByScheduleState" in str(path)))
