"""Sampling: one policy table, one batch of rows, tokens in and tokens out. Pure JAX; no Ray, no files of a run."""

from sampling.checkpoints import Checkpoint, CheckpointInfo, inspect_checkpoint, load_checkpoint
from sampling.engine import Engine, EngineStats
from sampling.params import SamplingParams
from sampling.policy import Policy
from sampling.state import StepState
from sampling.stopping import EndOfSequence, MaxNewTokens, Stopping
from sampling.transforms import FILTER, Greedy, LogitsTransform, MinP, Temperature, TopK, TopP
from sampling.types import Completion, Geometry, Group, Request, StopReason

__all__ = [
    "FILTER",
    "Checkpoint",
    "CheckpointInfo",
    "Completion",
    "EndOfSequence",
    "Engine",
    "EngineStats",
    "Geometry",
    "Greedy",
    "Group",
    "LogitsTransform",
    "MaxNewTokens",
    "MinP",
    "Policy",
    "Request",
    "SamplingParams",
    "StepState",
    "StopReason",
    "Stopping",
    "Temperature",
    "TopK",
    "TopP",
    "inspect_checkpoint",
    "load_checkpoint",
]
