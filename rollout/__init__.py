"""What a run means: prompts, rewards, trajectory records, files, the driver and the command line.

Names are imported when they are first used: the command line shows its help without waiting for JAX and Ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout.branches import Branch
    from rollout.config import RunConfig
    from rollout.config_file import load_config
    from rollout.driver import sample_run
    from rollout.groups import TrajectoryGroup
    from rollout.prompts import Prompt
    from rollout.rewards import Reward
    from rollout.service import Rollouts
    from rollout.shards import read_trajectories
    from rollout.status import read_status
    from rollout.summary import RunSummary
    from rollout.trajectory import Status, Trajectory
    from sampling.params import SamplingParams
    from sampling.types import Geometry, StopReason

__all__ = [
    "Branch",
    "Geometry",
    "Prompt",
    "Reward",
    "Rollouts",
    "RunConfig",
    "RunSummary",
    "SamplingParams",
    "Status",
    "StopReason",
    "Trajectory",
    "TrajectoryGroup",
    "load_config",
    "read_status",
    "read_trajectories",
    "sample_run",
]

_MODULES = {
    "rollout.branches": ("Branch",),
    "rollout.config": ("RunConfig",),
    "rollout.config_file": ("load_config",),
    "rollout.driver": ("sample_run",),
    "rollout.groups": ("TrajectoryGroup",),
    "rollout.prompts": ("Prompt",),
    "rollout.rewards": ("Reward",),
    "rollout.service": ("Rollouts",),
    "rollout.shards": ("read_trajectories",),
    "rollout.status": ("read_status",),
    "rollout.summary": ("RunSummary",),
    "rollout.trajectory": ("Status", "Trajectory"),
    "sampling.params": ("SamplingParams",),
    "sampling.types": ("Geometry", "StopReason"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
