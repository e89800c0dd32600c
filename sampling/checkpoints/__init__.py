"""Checkpoints on disk: what they are, their weights, their tokenizer."""

from sampling.checkpoints.digest import weights_digest
from sampling.checkpoints.inspection import CheckpointFormat, CheckpointInfo, inspect_checkpoint
from sampling.checkpoints.loading import Checkpoint, load_checkpoint
from sampling.checkpoints.tokenizer import load_backend, load_tokenizer

__all__ = [
    "Checkpoint",
    "CheckpointFormat",
    "CheckpointInfo",
    "inspect_checkpoint",
    "load_backend",
    "load_checkpoint",
    "load_tokenizer",
    "weights_digest",
]
