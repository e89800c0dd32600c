"""Who gets the credit: a batch's rewards turned into masks, advantages, returns and weights, on the host."""

from __future__ import annotations

import numpy as np

from rollout.learning.advantages import STD_FLOOR, generalized_advantages, group_advantages, overlong_penalty
from rollout.learning.batches import TrainBatch
from rollout.learning.config import AlgorithmSection
from rollout.learning.losses import token_weights


def masked(batch: TrainBatch, algorithm: AlgorithmSection) -> TrainBatch:
    """Leaves out rows without a reward, and completions that were cut off where `overlong` asks for it."""
    kept = ~np.isnan(batch.rewards)
    if algorithm.overlong == "mask":
        kept &= ~batch.cut_off
    return batch.replace(mask=batch.mask & kept[:, None])


def credited(
    batch: TrainBatch, algorithm: AlgorithmSection, longest_completion: int, penalty: np.ndarray | None = None
) -> TrainBatch:
    """Assigns advantages, and with a value head returns.

    Args:
        batch: with `values` if the algorithm has a value head.
        longest_completion: tokens that a completion may have.
        penalty: float [rows, completion_len], taken from the reward token by token; None takes nothing.
    """
    rewards = batch.rewards.astype(np.float64)
    lengths = batch.length - batch.prompt_len
    if algorithm.overlong == "penalty":
        margin = min(algorithm.overlong_margin, longest_completion)
        rewards = rewards + overlong_penalty(lengths, longest_completion, margin)
    by_token = np.zeros(batch.mask.shape) if penalty is None else -np.where(batch.mask, penalty, 0.0)
    if algorithm.advantages == "group":
        return batch.replace(advantages=_of_groups(batch, algorithm, rewards + by_token.sum(axis=1)))
    assert batch.values is not None
    advantages, returns = np.zeros(batch.mask.shape), np.zeros(batch.mask.shape)
    for row in np.flatnonzero(batch.mask.any(axis=1)):
        # A completion that was cut off has its reward for what it is, so nothing follows its last token either.
        places = np.flatnonzero(batch.mask[row])
        due = by_token[row, places]
        due[-1] += rewards[row]
        estimates = generalized_advantages(due, batch.values[row, places], algorithm.discount, algorithm.trace)
        advantages[row, places], returns[row, places] = estimates
    if algorithm.scale == "std" and batch.mask.any():
        among = advantages[batch.mask]
        advantages = np.where(batch.mask, (advantages - among.mean()) / (among.std() + STD_FLOOR), 0.0)
    return batch.replace(advantages=advantages.astype(np.float32), returns=returns.astype(np.float32))


def _of_groups(batch: TrainBatch, algorithm: AlgorithmSection, rewards: np.ndarray) -> np.ndarray:
    advantages = np.zeros(batch.num_rows)
    for group in np.unique(batch.group):
        rows = batch.group == group
        advantages[rows] = group_advantages(rewards[rows], algorithm.baseline, algorithm.scale)
    return np.where(batch.mask, advantages[:, None], 0.0).astype(np.float32)


def weighted(batch: TrainBatch, algorithm: AlgorithmSection, longest_completion: int) -> TrainBatch:
    """Assigns the weights of one update's tokens, before it is cut into micro-batches."""
    weights = token_weights(batch.mask, algorithm.reduction, longest_completion)
    return batch.replace(weights=weights.astype(np.float32))
