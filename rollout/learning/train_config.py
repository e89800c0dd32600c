"""TrainConfig: everything that describes a training run, as one tree of frozen values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rollout.config import GeometryField, ModelConfig, PluginsField, RewardField, SamplingField, Section, WorkersConfig
from rollout.config_file import overridden_keys, read_values, validated
from rollout.learning.batches import require_learnable
from rollout.learning.config import AlgorithmSection, LearnerSection
from rollout.rewards import NO_REWARD, REWARD_TIMEOUT_S
from rollout.sources import Source
from sampling.errors import ConfigError
from sampling.params import SamplingParams
from sampling.plugins import PluginRefs
from sampling.types import Geometry

IDENTITY = tuple("model prompts geometry plugins sampling reward seed learner algorithm train evaluation".split())
"""Sections that determine what is learnt. They may change on the way where that is accepted, and is then recorded."""

FREE = (("train", "steps"), ("train", "save_every"), ("train", "keep_checkpoints"))
"""Keys in them that a continued run may change without a word."""

FIXED = ("model.checkpoint", "prompts", "seed", "sampling.n", "sampling.seed")
"""Keys that no continued run may change. They determine which samples of which prompts come next: with others, samples
that were drawn before would be drawn again, with the same keys."""


class TrainSection(Section):
    """The loop.

    Attributes:
        steps: batches to learn from.
        prompts_per_step: groups of a batch, each of `sampling.n` samples.
        max_policy_lag: steps that a batch may be drawn ahead of the weights it is learnt with: no token is older. With
            0 the workers wait while the learner learns.
        zero_variance: groups whose rewards are all equal: kept, with advantages of 0, or dropped and replaced.
        max_refills: prompts that may replace dropped groups in one step; a batch that lacks more stays smaller.
        save_every: steps between two checkpoints; the last step is always saved.
        keep_checkpoints: of the latest.
    """

    steps: int = Field(ge=1)
    prompts_per_step: int = Field(default=8, ge=1)
    max_policy_lag: int = Field(default=0, ge=0)
    zero_variance: Literal["keep", "drop"] = "keep"
    max_refills: int = Field(default=8, ge=0)
    save_every: int = Field(default=10, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)


class EvaluationSection(Section):
    """Held-out prompts, sampled before the first step, every few steps, and after the last.

    Attributes:
        prompts: where they come from.
        sampling: how they are sampled; by default greedily, with the budget of training.
        every: steps between two evaluations.
    """

    prompts: Source
    sampling: SamplingField | None = None
    every: int = Field(default=20, ge=1)


class TrainConfig(Section):
    """A training run.

    Attributes:
        model, prompts, geometry, sampling, workers, seed: as in RunConfig. The prompts are gone through as often as
            needed, with other samples each time.
        plugins: as in RunConfig. What is learnt from may name stopping rules alone, an evaluation transforms as well.
        reward: name of the scorer, or `package.module:name` of one's own.
        reward_timeout_s, reward_workers: as in RunConfig.
        learner, algorithm, train: how weights change, what is learnt, and in which order.
        evaluation: held-out prompts; None evaluates nothing.
    """

    model: ModelConfig
    prompts: Source
    geometry: GeometryField = Geometry()
    plugins: PluginsField = PluginRefs()
    sampling: SamplingField = SamplingParams()
    reward: RewardField
    reward_timeout_s: float = Field(default=REWARD_TIMEOUT_S, gt=0)
    reward_workers: int = Field(default=1, ge=1)
    workers: WorkersConfig = WorkersConfig()
    seed: int = Field(default=0, ge=0, lt=2**64)
    learner: LearnerSection = LearnerSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    train: TrainSection
    evaluation: EvaluationSection | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        require_learnable(self.sampling, rules=self.rules)
        if self.reward == NO_REWARD:
            raise ConfigError(f"reward: expected a scorer to learn from, got {NO_REWARD!r}")
        if self.algorithm.advantages == "group" and self.sampling.n < 2:
            raise ConfigError(
                f"sampling.n: expected at least 2 samples to compare with each other, got {self.sampling.n};"
                " or set algorithm.advantages to 'gae'"
            )
        if self.train.zero_variance == "drop" and self.sampling.n < 2:
            raise ConfigError("train.zero_variance: a group of one sample has no variance; set it to 'keep'")
        if self.model.dtype != "float32" and self.learner.dtype == "float32":
            raise ConfigError(
                "model.dtype: workers that draw in bfloat16 and a learner in float32 do not compute the same log-probs;"
                " set learner.dtype to 'bfloat16', or model.dtype to 'float32'"
            )
        return self

    @property
    def rules(self) -> frozenset[str]:
        """Names of the plugins that end rows."""
        return frozenset(ref.name for ref in self.plugins.stopping)

    @property
    def evaluation_sampling(self) -> SamplingParams:
        """How held-out prompts are sampled."""
        own = self.evaluation.sampling if self.evaluation else None
        return own or SamplingParams(temperature=0, max_new_tokens=self.sampling.max_new_tokens)

    def to_dict(self) -> dict[str, Any]:
        """The resolved tree as plain JSON values."""
        return self.model_dump(mode="json")

    def identity(self) -> dict[str, Any]:
        """The part that determines what is learnt."""
        resolved = self.to_dict()
        for section, key in FREE:
            del resolved[section][key]
        return {**{name: resolved[name] for name in IDENTITY}, "workers": {"threads": self.workers.threads}}


def load_train_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Reads and checks a training config; arguments and errors as `rollout.config_file.load_config`."""
    return validated(TrainConfig, read_values(path, overrides), str(path), overridden_keys(overrides))
