"""How far a scored law is from the law that the tokens were drawn under: importance ratios, KL, effective sample size.

Everything here is arithmetic on log-probs in float64. A log-ratio is scored minus recorded, in nats; -inf where the
scored policy has removed the token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SequenceRatios:
    """The ratios of one completion.

    Attributes:
        log_ratio: log of the importance ratio of the whole completion, nats: the sum over its tokens.
        mean_log_ratio: the same per token.
        clipped_ratio: the truncated importance weight min(ratio, cap).
        ppo_clip_fraction: share of the tokens whose own ratio is further than epsilon from 1.
    """

    log_ratio: float
    mean_log_ratio: float
    clipped_ratio: float
    ppo_clip_fraction: float


def token_log_ratios(scored: np.ndarray, recorded: np.ndarray) -> np.ndarray:
    """Log of each token's importance ratio.

    Args:
        scored: float [tokens], nats, -inf where the token is removed.
        recorded: float [tokens], nats, finite.
    Returns:
        float64 [tokens].
    """
    return scored.astype(np.float64) - recorded.astype(np.float64)


def sequence_ratios(log_ratios: np.ndarray, cap: float, epsilon: float) -> SequenceRatios:
    """The ratios of one completion of at least one token.

    Args:
        log_ratios: float64 [tokens], of `token_log_ratios`.
        cap: where the importance weight is cut off.
        epsilon: PPO's clip range.
    Source: truncated importance sampling, Ionides 2008; PPO, Schulman et al. 2017, arXiv:1707.06347.
    """
    total = float(log_ratios.sum())
    outside = np.abs(np.expm1(_bounded(log_ratios))) > epsilon
    return SequenceRatios(
        log_ratio=total,
        mean_log_ratio=total / log_ratios.size,
        clipped_ratio=min(math.exp(min(total, _LARGEST)), cap),
        ppo_clip_fraction=float(outside.mean()),
    )


def effective_sample_size(log_weights: np.ndarray) -> float:
    """(sum w)^2 / sum w^2: how many equally weighted samples the weighted ones are worth; 0 if every weight is 0.

    Args:
        log_weights: float64 [samples], nats; -inf is the weight 0. A common factor of all weights changes nothing.
    Source: Kish 1965.
    """
    if not log_weights.size or np.isneginf(log_weights).all():
        return 0.0
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / np.square(weights).sum())


@dataclass(frozen=True)
class KlEstimates:
    """Estimates of KL(recorded || scored) in nats per token, from tokens of the recorded law.

    Attributes:
        k1: mean of -log r: unbiased, of high variance, may be negative.
        k2: mean of (log r)^2 / 2: biased, of low variance.
        k3: mean of r - 1 - log r: unbiased, never negative.
    Source: Schulman 2020, "Approximating KL divergence".
    """

    k1: float
    k2: float
    k3: float


class KlSums:
    """KlEstimates of tokens that come in parts."""

    def __init__(self) -> None:
        self.tokens = 0
        self._sums = np.zeros(3)

    def add(self, log_ratios: np.ndarray) -> None:
        """Takes tokens in: float64 [tokens], finite."""
        terms = (-log_ratios, np.square(log_ratios) / 2, np.expm1(_bounded(log_ratios)) - log_ratios)
        self._sums += [term.sum() for term in terms]
        self.tokens += log_ratios.size

    def estimates(self) -> KlEstimates | None:
        """The means so far; None without tokens."""
        return KlEstimates(*(self._sums / self.tokens).tolist()) if self.tokens else None


class QuantileSketch:
    """Quantiles of any number of values >= 0, each within 1 % of the true one, in a few kilobytes.

    Values below 1e-9 count as 0. Mean and maximum are exact.

    Source: DDSketch, Masson, Rim and Lee 2019, arXiv:1908.10693.
    """

    ACCURACY = 0.01
    SMALLEST = 1e-9

    def __init__(self) -> None:
        self.count = 0
        self.max = 0.0
        self._sum = 0.0
        self._zeros = 0
        self._buckets: dict[int, int] = {}
        self._gamma = (1 + self.ACCURACY) / (1 - self.ACCURACY)

    def add(self, values: np.ndarray) -> None:
        """Takes values in: float64 [values], finite and >= 0."""
        if not values.size:
            return
        self.count += values.size
        self.max = max(self.max, float(values.max()))
        self._sum += float(values.sum())
        large = values[values >= self.SMALLEST]
        self._zeros += values.size - large.size
        indices = np.ceil(np.log(large) / math.log(self._gamma)).astype(np.int64)
        for index, count in zip(*np.unique(indices, return_counts=True), strict=True):
            self._buckets[int(index)] = self._buckets.get(int(index), 0) + int(count)

    @property
    def mean(self) -> float | None:
        """None without values."""
        return self._sum / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """The value at rank ceil(share * count) in ascending order, the first being 1; None without values."""
        if not self.count:
            return None
        rank, seen = max(math.ceil(share * self.count), 1), self._zeros
        if rank <= seen:
            return 0.0
        for index, count in sorted(self._buckets.items()):
            seen += count
            if seen >= rank:
                return min(2 * self._gamma**index / (self._gamma + 1), self.max)
        return self.max


_LARGEST = 700.0
"""About the largest number whose exponential is a finite float64."""


def _bounded(log_ratios: np.ndarray) -> np.ndarray:
    return np.minimum(log_ratios, _LARGEST)
