"""What a pool of workers is made from: the work, the place, the deadlines, the retries. All frozen values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sampling.errors import ConfigError
from sampling.plugins import PluginRefs
from sampling.types import Geometry


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker needs to build its engine. Equal specs on equal hosts give engines with equal bits.

    Attributes:
        checkpoint: a reference that `sampling.load_checkpoint` reads; it must lead somewhere on every host.
        geometry: the engine's fixed shapes.
        dtype: "float32" or "bfloat16", of the model's matrix products.
        plugins: transforms and rules from outside. What is not installed on a worker's host is carried there.
    """

    checkpoint: str
    geometry: Geometry = field(default_factory=Geometry)
    dtype: str = "float32"
    plugins: PluginRefs = field(default_factory=PluginRefs)

    def __post_init__(self) -> None:
        _require(isinstance(self.checkpoint, str), "checkpoint", "text", self.checkpoint)
        _require(isinstance(self.geometry, Geometry), "geometry", "Geometry(...)", self.geometry)


@dataclass(frozen=True)
class TpuSlice:
    """A slice of several TPU hosts, named as Ray and Google Cloud name it.

    Attributes:
        topology: chips along each of its axes, such as "2x2x2".
        version: of the TPUs, such as "v4" or "v5litepod".
    """

    topology: str
    version: str

    def __post_init__(self) -> None:
        for name in ("topology", "version"):
            value = getattr(self, name)
            _require(isinstance(value, str) and bool(value), f"tpu_slice.{name}", "text", value)

    def __str__(self) -> str:
        return f"a slice {self.topology} of TPU {self.version}"


@dataclass(frozen=True)
class Placement:
    """Where workers run. A worker is one process with one JAX runtime and its own copy of the weights.

    Attributes:
        num_workers: how many.
        cpus: processors that Ray sets aside for each.
        gpus: GPUs for each; a worker without GPUs and TPUs never opens one. With less than 1 several processes share a
            GPU, and each takes that share of nine tenths of its memory, where XLA by itself would take three quarters.
        tpus: TPU chips for each: 1, 2, 4 or 8 of one host.
        tpu_slice: a slice of several hosts that the pool reserves: one worker for each, with all its chips.
        threads: threads of XLA's CPU kernels in each. The bits of a sum depend on it, so it belongs to the
            geometry: keep it the same whatever the number of workers.
    Raises:
        ConfigError: a value is out of range, or two of GPUs, TPUs and a slice are asked for together.
    """

    num_workers: int = 1
    cpus: float = 1
    gpus: float = 0
    tpus: int = 0
    threads: int = 2
    tpu_slice: TpuSlice | None = None

    def __post_init__(self) -> None:
        _whole(self.num_workers, "placement.num_workers", 1)
        _whole(self.threads, "placement.threads", 1)
        _whole(self.tpus, "placement.tpus", 0)
        for name in ("cpus", "gpus"):
            value = getattr(self, name)
            _require(_is_number(value) and value >= 0, f"placement.{name}", "a finite number >= 0", value)
        if self.gpus and self.tpus:
            raise ConfigError(f"placement: expected GPUs or TPUs, got {self.gpus} GPUs and {self.tpus} TPU chips")
        if self.tpu_slice is None:
            return
        _require(isinstance(self.tpu_slice, TpuSlice), "placement.tpu_slice", "TpuSlice(...)", self.tpu_slice)
        if self.gpus or self.tpus:
            raise ConfigError(
                f"placement: expected no GPUs and TPUs beside tpu_slice, whose workers have all chips of their hosts,"
                f" got {self.gpus} GPUs and {self.tpus} TPU chips"
            )


@dataclass(frozen=True)
class Deadlines:
    """How long to wait before a worker counts as lost. No wait of a pool is without one.

    Attributes:
        start_s: seconds for finding room, starting the process, loading and compiling.
        group_s: seconds between handing a group to a worker and its end, its turn in the worker's queue included.
        heartbeat_s: seconds without an answer from the process, whatever its engine does.
        publish_s: seconds for checking weights that are published, and again for taking them over.
    """

    start_s: float = 600.0
    group_s: float = 600.0
    heartbeat_s: float = 20.0
    publish_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("start_s", "group_s", "heartbeat_s", "publish_s"):
            value = getattr(self, name)
            _require(_is_number(value) and value > 0, f"deadlines.{name}", "seconds above 0", value)


@dataclass(frozen=True)
class RetryPolicy:
    """What to do about lost workers.

    Attributes:
        max_group_attempts: workers that may be lost with a group in their hands before the group itself is
            blamed. The last attempt is made alone on its worker, so that it convicts no innocent group.
        max_worker_restarts: restarts of one worker in a row, without a finished group in between.
        backoff_s: seconds before the second restart in a row; the first is immediate, each further wait is doubled.
    """

    max_group_attempts: int = 3
    max_worker_restarts: int = 3
    backoff_s: float = 1.0

    def __post_init__(self) -> None:
        _whole(self.max_group_attempts, "retry.max_group_attempts", 1)
        _whole(self.max_worker_restarts, "retry.max_worker_restarts", 0)
        valid = _is_number(self.backoff_s) and self.backoff_s >= 0
        _require(valid, "retry.backoff_s", "seconds of at least 0", self.backoff_s)

    def pause_s(self, restarts: int) -> float:
        """Seconds to wait before a restart, the first in a row being number 1."""
        return 0.0 if restarts <= 1 else self.backoff_s * 2.0 ** (restarts - 2)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: object, name: str, least: int) -> None:
    valid = isinstance(value, int) and not isinstance(value, bool) and value >= least
    _require(valid, name, f"a whole number of at least {least}", value)


def _require(valid: bool, name: str, expected: str, got: object) -> None:
    if not valid:
        raise ConfigError(f"{name}: expected {expected}, got {got!r}")
