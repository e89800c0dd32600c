"""What a run means: prompts, rewards, trajectory records, files, the driver and the command line."""

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
