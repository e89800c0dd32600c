"""What a learner does with trajectories: the algorithm's section of a training config, and the optimizer's."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rollout.config import Section
from rollout.learning.advantages import Baseline, Scale
from rollout.learning.losses import Beyond, Correction, KLEstimator, Reduction
from sampling.errors import ConfigError

Loss = Literal["clipped", "gspo", "cispo"]
"""PPO's clipped surrogate with the token's ratio, or with the sequence's; or REINFORCE with clipped weights."""


class AlgorithmSection(Section):
    """What is learnt from a batch. The defaults are GRPO with the recorded log-probs as the old ones.

    Advantages:
        advantages: `group` compares a sample's reward with its group's; `gae` learns a value head and estimates the
            advantage of every token (PPO).
        baseline, scale: of `group`; with `gae`, the scale `std` makes the advantages of a batch mean 0, deviation 1.
        discount, trace: gamma and lambda of `gae`.
        overlong: what happens to completions that a limit of length ended: nothing, or they are left out of the
            loss, or long ones lose reward on their last `overlong_margin` tokens before the limit.
        overlong_margin: tokens; for `penalty`.
    Loss:
        loss: see Loss.
        clip_low, clip_high: the ratio counts within 1 - clip_low .. 1 + clip_high.
        dual_clip: bound of the loss of a negative advantage, as a multiple of it, above 1; None: no bound.
        reduction: how tokens weigh.
        entropy_coefficient: of the entropy, which the loss then raises.
        value_coefficient, value_clip: of the value head's loss, and how far a value may move at once; None: any way.
    Reference:
        kl_coefficient: of the divergence from the frozen reference; 0 has no reference.
        kl: its estimator.
        kl_in: where it counts: in the loss, or in the reward.
    Off-policy tokens:
        correction: whose ratio between the policy before the step and the one that drew weighs a token. With `none`
            the loss takes its ratio against the policy that drew; otherwise against the policy before the step.
        beyond: what happens to a weight out of bounds.
        cap, floor: those bounds; the floor is one of `mask` alone.
    """

    advantages: Literal["group", "gae"] = "group"
    baseline: Baseline = "mean"
    scale: Scale = "std"
    discount: float = Field(default=1.0, gt=0, le=1)
    trace: float = Field(default=0.95, ge=0, le=1)
    overlong: Literal["none", "mask", "penalty"] = "none"
    overlong_margin: int = Field(default=16, ge=1)
    loss: Loss = "clipped"
    clip_low: float = Field(default=0.2, ge=0, le=1)
    clip_high: float = Field(default=0.2, ge=0)
    dual_clip: float | None = Field(default=None, gt=1)
    reduction: Reduction = "token_mean"
    entropy_coefficient: float = Field(default=0.0, ge=0)
    value_coefficient: float = Field(default=0.5, gt=0)
    value_clip: float | None = Field(default=None, gt=0)
    kl_coefficient: float = Field(default=0.0, ge=0)
    kl: KLEstimator = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    correction: Correction = "none"
    beyond: Beyond = "truncate"
    cap: float = Field(default=2.0, gt=0)
    floor: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.floor >= self.cap:
            raise ConfigError(f"algorithm.floor: expected less than algorithm.cap = {self.cap:g}, got {self.floor:g}")
        if self.floor and self.beyond != "mask":
            raise ConfigError(
                f"algorithm.floor: {self.floor:g} has no effect with algorithm.beyond = {self.beyond!r};"
                " set beyond to 'mask', or leave the floor out"
            )
        if self.dual_clip is not None and self.loss == "cispo":
            raise ConfigError(
                f"algorithm.dual_clip: {self.dual_clip:g} has no effect with algorithm.loss = 'cispo', whose weights"
                " are clipped from above already; leave it out"
            )
        return self

    @property
    def value_head(self) -> bool:
        """Whether a value head is learnt."""
        return self.advantages == "gae"

    @property
    def reference(self) -> bool:
        """Whether there is a frozen reference."""
        return self.kl_coefficient > 0


class LearnerSection(Section):
    """How the weights are changed.

    Attributes:
        learning_rate: the highest of the schedule.
        schedule: what the rate does after the warm-up: stays, or falls along a cosine or a line.
        warmup_updates: updates over which the rate rises in a line; the first of them is above 0 already.
        decay_updates: updates from the first one to the end of the fall; later ones stay there.
        final_share: of the learning rate that is left at the end of the fall.
        beta1, beta2, epsilon: of AdamW.
        weight_decay: of kernels and embeddings, decoupled; norms and biases have none.
        max_grad_norm: a longer gradient is shortened to this; None: none is.
        value_learning_rate_factor: the value head's rate as a multiple of the others'.
        dtype: of the model's matrix products; weights, gradients and moments are float32 in any case.
        epochs: times that a batch is gone through.
        updates_per_epoch: updates of one epoch, each of an equal part of the batch.
        micro_batch_rows: sequences whose activations exist at the same time. It changes no result beyond rounding.
        bucket_len: lengths are padded to this times a power of two, at most to the longest there may be.
        logit_tokens: tokens whose scores over the vocabulary exist at the same time.
        remat: layers are computed again in the backward pass instead of kept.
    """

    learning_rate: float = Field(default=1e-6, ge=0)
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_updates: int = Field(default=0, ge=0)
    decay_updates: int | None = Field(default=None, ge=1)
    final_share: float = Field(default=0.0, ge=0, le=1)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    value_learning_rate_factor: float = Field(default=1.0, gt=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    epochs: int = Field(default=1, ge=1)
    updates_per_epoch: int = Field(default=1, ge=1)
    micro_batch_rows: int = Field(default=8, ge=1)
    bucket_len: int = Field(default=64, ge=1)
    logit_tokens: int = Field(default=256, ge=1)
    remat: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.schedule == "constant":
            if self.decay_updates is not None:
                raise ConfigError(
                    f"learner.decay_updates: {self.decay_updates} has no effect with learner.schedule = 'constant';"
                    " choose 'cosine' or 'linear', or leave it out"
                )
        elif self.decay_updates is None:
            raise ConfigError(f"learner.decay_updates: expected a number of updates for schedule {self.schedule!r}")
        elif self.decay_updates <= self.warmup_updates:
            raise ConfigError(
                f"learner.decay_updates: expected more than learner.warmup_updates = {self.warmup_updates},"
                f" got {self.decay_updates}"
            )
        return self

    @property
    def updates_per_step(self) -> int:
        """Updates that one batch gives, at most."""
        return self.epochs * self.updates_per_epoch
