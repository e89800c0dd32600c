"""LearnerMemoryPlan: what a step of learning will hold, known before anything is allocated."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp

from rollout.learning.batches import BatchShapes
from rollout.learning.config import AlgorithmSection, LearnerSection
from sampling.errors import ConfigError
from sampling.memory_plan import size_in_words, sum_in_words
from sampling.models import ModelConfig, Transformer

SCORE_ARRAYS = 6
"""Arrays [logit tokens, vocab] in float32 that a block's gradient holds at the same time, at most."""

ATTENTION_ARRAYS = 6
"""Arrays [rows, heads, len, len] in float32 that a layer's gradient holds at the same time, at most."""


@dataclass(frozen=True)
class LearnerMemoryPlan:
    """Bytes on the device, at the largest micro-batch.

    Attributes:
        weights: in float32.
        moments: of the optimizer, in float32.
        gradients: the sum over micro-batches and a new one beside it, in float32.
        reference: the frozen reference; 0 without one.
        activations: what a micro-batch keeps from its forward pass and needs amid its backward pass, an estimate
            from above.
    """

    weights: int
    moments: int
    gradients: int
    reference: int
    activations: int

    @classmethod
    def of(cls, config: ModelConfig, learner: LearnerSection, algorithm: AlgorithmSection, shapes: BatchShapes) -> Self:
        """The plan of a learner."""
        one = jnp.zeros((1, 1), jnp.int32)
        tree = jax.eval_shape(lambda: Transformer(config).init(jax.random.key(0), one, one))
        weights = 4 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
        narrow = learner.dtype == "bfloat16"
        tokens = shapes.rows * shapes.longest
        # A layer's residual stream, projections and gated feed-forward, the gradients of all beside them.
        inside = 2 * tokens * (6 * config.width + 2 * _qkv_width(config) + 5 * config.ffn) * 4
        inside += ATTENTION_ARRAYS * shapes.rows * config.heads * shapes.longest**2 * 4
        kept = config.layers * tokens * config.width * 4
        scores = SCORE_ARRAYS * min(learner.logit_tokens, tokens) * config.vocab_size * 4
        hidden = 4 * tokens * config.width * 4
        layers = kept + inside if learner.remat else config.layers * inside // 2 + inside
        return cls(
            weights=weights,
            moments=2 * weights,
            gradients=2 * weights,
            reference=(weights // 2 if narrow else weights) if algorithm.reference else 0,
            activations=layers + scores + hidden + (weights if narrow else 0),
        )

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.moments + self.gradients + self.reference + self.activations

    def __str__(self) -> str:
        return sum_in_words(dataclasses.asdict(self))


def require_memory(
    config: ModelConfig,
    learner: LearnerSection,
    algorithm: AlgorithmSection,
    shapes: BatchShapes,
    available: int | None,
) -> LearnerMemoryPlan:
    """The plan of a learner that fits.

    Args:
        available: bytes that may be used; None if nobody knows, and then everything fits.
    Raises:
        ConfigError: it does not fit; the message has the numbers, and what would help.
    """
    plan = LearnerMemoryPlan.of(config, learner, algorithm, shapes)
    if available is None or plan.total <= available:
        return plan
    fixed = plan.total - plan.activations
    per_row = plan.activations / shapes.rows
    rows = int((available - fixed) / per_row)
    remedy = f"learner.micro_batch_rows={rows} would fit" if 0 < rows < shapes.rows else "take a smaller model"
    if not learner.remat:
        remedy = "set learner.remat, or " + remedy
    raise ConfigError(
        f"learner: micro-batches of {shapes.rows} sequences of {shapes.longest} tokens need {plan}, and"
        f" {size_in_words(available)} are available; {remedy}"
    )


def _qkv_width(config: ModelConfig) -> int:
    return (config.heads + 2 * config.kv_heads) * config.head_dim
