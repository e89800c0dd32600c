"""ScoreConfig: which laws to score recorded sequences under, and where.

`load_score_config` reads it. For a run's folder, model, geometry and workers default to those of the run, so that a
config need only say what is different; without any config the run's own checkpoint scores its own policies.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PlainSerializer, ValidatorFunctionWrapHandler, WrapValidator

from rollout.config import (
    GeometryField,
    ModelConfig,
    OutputConfig,
    PluginsField,
    SamplingField,
    Section,
    WorkersConfig,
)
from rollout.config_file import load_config, overridden_keys, read_values, validated
from rollout.json_values import shown
from rollout.manifest import read_manifest
from rollout.store import CONFIG_NAME
from sampling.errors import ConfigError
from sampling.params import SamplingParams
from sampling.plugins import PluginRefs
from sampling.types import Geometry

RECORDED: Any = "recorded"
"""Stands for each record's own policy."""

NO_BUDGET = 1 << 20
"""`max_new_tokens` of a policy to score under that names none: the sequences are as long as they are."""

IDENTITY = ("model", "geometry", "plugins", "sampling", "path", "scorers", "ratios")
"""Sections that determine what is written."""

FROM_RUN = ("model", "geometry", "plugins", "workers", "output")
"""Sections whose defaults are the run's, where the source is a run."""


class ScorePath(enum.StrEnum):
    """How the log-probs of a sequence are computed."""

    FORWARD = "forward"
    """Forward passes over whole sequences: the fast way; equal to the draw up to float32 rounding."""
    REPLAY = "replay"
    """The programs that draw, step by step: the same bits as the draw, where weights and numerics are the same."""


def _or_recorded(values: Any, read: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(values, str):
        if values != RECORDED:
            raise ConfigError(f"sampling: expected {RECORDED!r} or sampling parameters, got {values!r}")
        return values
    return read({"max_new_tokens": NO_BUDGET, **values} if isinstance(values, Mapping) else values)


def _plain_policy(policy: Any) -> Any:
    return policy.to_dict() if isinstance(policy, SamplingParams) else policy


PolicyField = Annotated[SamplingField, WrapValidator(_or_recorded), PlainSerializer(_plain_policy)]


def _file_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ConfigError(f"name: expected up to 64 letters, digits, dots, dashes or underscores, got {shown(name)}")
    return name


class ScorerConfig(Section):
    """One law to score under. What it leaves out is that of the whole config.

    Attributes:
        name: names it in files and tables.
        checkpoint: of its weights.
        sampling: its policy; see ScoreConfig.
        path: how its log-probs are computed.
    """

    name: Annotated[str, AfterValidator(_file_name)]
    checkpoint: str | None = Field(default=None, min_length=1)
    sampling: PolicyField | None = None
    path: Annotated[ScorePath, Field(strict=False)] | None = None


class RatiosConfig(Section):
    """How importance ratios are cut.

    Attributes:
        cap: largest importance weight of a whole sequence (truncated importance sampling).
        clip_epsilon: PPO's clip range: a token's ratio is clipped outside 1 - epsilon .. 1 + epsilon.
    """

    cap: float = Field(default=2.0, gt=0)
    clip_epsilon: float = Field(default=0.2, gt=0, lt=1)


@dataclass(frozen=True)
class Law:
    """A scorer with nothing left out.

    Attributes:
        name: of the scorer.
        checkpoint: of its weights.
        params: its policy; None for that of each record.
        path: how its log-probs are computed.
    """

    name: str
    checkpoint: str
    params: SamplingParams | None
    path: ScorePath


def _distinct(scorers: tuple[ScorerConfig, ...]) -> tuple[ScorerConfig, ...]:
    if not scorers:
        raise ConfigError("scorers: expected at least one item in the list, got none")
    names = [scorer.name.lower() for scorer in scorers]  # they become folders, and some disks ignore case
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"scorers: expected distinct names, got {twice[0]!r} twice")
    return scorers


class ScoreConfig(Section):
    """What `rollout score` does.

    Attributes:
        model: which weights, unless a scorer names others.
        geometry: the fixed shapes of each worker's engine.
        plugins: transforms and stopping rules from outside, which policies name.
        workers: where it runs.
        sampling: the policy to score under: "recorded" for that of each record, or sampling parameters. Those left out
            have their neutral defaults, not the record's values; without `max_new_tokens` there is no budget.
        path: "forward" or "replay".
        scorers: the laws to score under.
        ratios: how importance ratios are cut.
        output: how the files are cut.
    """

    model: ModelConfig
    geometry: GeometryField = Geometry()
    plugins: PluginsField = PluginRefs()
    workers: WorkersConfig = WorkersConfig()
    sampling: PolicyField = RECORDED
    path: Annotated[ScorePath, Field(strict=False)] = ScorePath.FORWARD
    scorers: Annotated[tuple[ScorerConfig, ...], Field(strict=False), AfterValidator(_distinct)] = (
        ScorerConfig(name="default"),
    )
    ratios: RatiosConfig = RatiosConfig()
    output: OutputConfig = OutputConfig()

    @property
    def laws(self) -> tuple[Law, ...]:
        """The scorers, in order, with what they leave out filled in."""
        return tuple(self._law(scorer) for scorer in self.scorers)

    def _law(self, scorer: ScorerConfig) -> Law:
        policy = self.sampling if scorer.sampling is None else scorer.sampling
        return Law(
            name=scorer.name,
            checkpoint=scorer.checkpoint or self.model.checkpoint,
            params=None if policy == RECORDED else policy,
            path=scorer.path or self.path,
        )

    def to_dict(self) -> dict[str, Any]:
        """The resolved tree as plain JSON values, every default written out."""
        return self.model_dump(mode="json")

    def identity(self) -> dict[str, Any]:
        """The part that determines what is written: not where and how fast, nor how the files are cut."""
        resolved = self.to_dict()
        return {**{name: resolved[name] for name in IDENTITY}, "workers": {"threads": self.workers.threads}}


def load_score_config(source: Path, path: Path | None = None, overrides: Sequence[str] = ()) -> ScoreConfig:
    """Reads and checks a config for a source.

    Args:
        source: what will be scored; a run's folder gives defaults.
        path: a .yaml, .yml or .toml file; None takes the defaults.
        overrides: as in `config_file.load_config`.
    Raises:
        ConfigError: file, values or run cannot be used. Every problem with a value is listed.
    """
    if not source.exists():
        raise ConfigError(f"{source}: no such file or folder; expected that of a run, or a .parquet or .jsonl file")
    values = {"model": {}, **read_values(path, overrides)}  # so that a missing checkpoint is named in full
    if source.is_dir():
        run = _run_sections(source)
        for section in FROM_RUN:
            given = values.get(section, {})
            values[section] = {**run[section], **given} if isinstance(given, Mapping) else given
    return validated(ScoreConfig, values, str(path or "no --config"), overridden_keys(overrides))


def _run_sections(folder: Path) -> dict[str, Any]:
    read_manifest(folder)
    return load_config(folder / CONFIG_NAME).to_dict()
