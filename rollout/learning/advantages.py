"""Advantages: how much better a completion, or a token, was than expected. Plain NumPy in float64, on the host.

Rewards are few and losses are sensitive to them, so nothing here is worth a device or float32.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from sampling.errors import ConfigError

Baseline = Literal["mean", "leave_one_out"]
"""What a sample of a group is compared with: the mean of all, itself included, or of the others (RLOO)."""

Scale = Literal["std", "none"]
"""What the difference is divided by: the group's standard deviation (GRPO), or nothing (Dr. GRPO)."""

STD_FLOOR = 1e-6
"""Added to the standard deviation, so that rewards a rounding apart do not become advantages of +-1."""


def group_advantages(rewards: np.ndarray, baseline: Baseline = "mean", scale: Scale = "std") -> np.ndarray:
    """Advantages of one group's samples.

    A group whose rewards are all equal gives exactly 0 everywhere.

    Args:
        rewards: [samples]; NaN marks a sample without a reward, which is left out and gets the advantage 0.
        baseline: see Baseline. Of a single sample both are its own reward, so that its advantage is 0.
        scale: see Scale. The standard deviation is that of the samples as a population (divided by n - 1, as torch
            and the authors' code have it), and 0 of a single one.
    Returns:
        float64 [samples].

    Source: GRPO, Shao et al. 2024, arXiv:2402.03300; without the division, Liu et al. 2025, arXiv:2503.20783;
    leave-one-out, Ahmadian et al. 2024, arXiv:2402.14740.
    """
    rewards = np.asarray(rewards, np.float64)
    known = ~np.isnan(rewards)
    scored = rewards[known]
    advantages = np.zeros_like(rewards)
    if scored.size < 2 or np.all(scored == scored[0]):
        return advantages
    if baseline == "mean":
        differences = scored - scored.mean()
    elif baseline == "leave_one_out":
        differences = scored - (scored.sum() - scored) / (scored.size - 1)
    else:
        raise ConfigError(f"baseline: expected mean or leave_one_out, got {baseline!r}")
    if scale == "std":
        differences = differences / (scored.std(ddof=1) + STD_FLOOR)
    elif scale != "none":
        raise ConfigError(f"scale: expected std or none, got {scale!r}")
    advantages[known] = differences
    return advantages


def has_signal(rewards: np.ndarray) -> bool:
    """True if a group's samples differ in reward, so that there is something to learn from it.

    Groups are kept or dropped whole by this, never by sample: one sample of a mixed group may well equal the mean of
    the others and still belong to it.
    """
    scored = np.asarray(rewards, np.float64)
    scored = scored[~np.isnan(scored)]
    return bool(scored.size > 1 and np.any(scored != scored[0]))


def generalized_advantages(
    rewards: np.ndarray, values: np.ndarray, discount: float = 1.0, trace: float = 0.95, bootstrap: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """GAE over the tokens of one completion.

    Args:
        rewards: [tokens], given for each token; a reward for the completion stands at the last.
        values: [tokens], the value head's estimates before each token.
        discount, trace: gamma and lambda.
        bootstrap: value of what follows the last token: 0 after an end, an estimate after a truncation.
    Returns:
        advantages and returns (advantage + value), float64 [tokens].

    Source: Schulman et al. 2016, arXiv:1506.02438.
    """
    rewards, values = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    following = np.append(values[1:], bootstrap)
    surprises = rewards + discount * following - values
    advantages, running = np.zeros_like(surprises), 0.0
    for place in reversed(range(surprises.size)):
        running = surprises[place] + discount * trace * running
        advantages[place] = running
    return advantages, advantages + values


def overlong_penalty(lengths: np.ndarray, limit: int, margin: int) -> np.ndarray:
    """What is taken from the reward of long completions: 0 up to limit - margin, growing to -1 at the limit.

    Args:
        lengths: completion tokens, [samples].
        limit: longest completion there may be.
        margin: tokens before the limit over which the penalty grows.
    Returns:
        float64 [samples], in [-1, 0].

    Source: soft overlong punishment of DAPO, Yu et al. 2025, arXiv:2503.14476.
    """
    if not 0 < margin <= limit:
        raise ConfigError(f"overlong margin: expected 1 .. {limit}, the limit of a completion, got {margin}")
    return np.clip((limit - margin - np.asarray(lengths, np.float64)) / margin, -1.0, 0.0)
