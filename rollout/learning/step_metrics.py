"""StepMetrics: what one step of learning was like, computed on the host from what each token had in it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout.learning.batches import TrainBatch
from rollout.learning.config import AlgorithmSection
from rollout.learning.losses import effective_sample_size
from rollout.learning.objective import TokenTerms, total_loss

NOTHING_LEARNT = "no token to learn from"
"""Why a step is skipped whose rows all failed, have no reward, or are left out as overlong."""

NOT_FINITE = "the gradient is not finite"
"""Why an update is skipped whose gradient holds NaN or infinities."""


@dataclass(frozen=True)
class StepMetrics:
    """One step. None stands for what was not measured. Means and shares are over the tokens that were learnt from, and
    over all updates of the step; log-probs are in nats.

    Attributes:
        step: steps of the learner before this one.
        policy_version: of the weights after it.
        skipped: why nothing, or not all, was learnt; None if all was.
        updates: changes of the weights.
        rows, tokens: of the batch, that were learnt from.
        loss: mean over the updates, as are its parts, coefficients included.
        policy_loss, kl_loss, entropy_loss, value_loss: the parts.
        kl: mean of the estimate of the divergence from the reference.
        entropy: mean.
        grad_norm: largest global norm of an update's gradient, before clipping.
        learning_rate: of the last update.
        clip_fraction: share of tokens on which a clip took hold.
        ratio_p01, ratio_p50, ratio_p99, ratio_max: quantiles of the probability before an update over the recorded
            one.
        ess: effective share of samples of these ratios, in 0 .. 1.
        importance_mean: mean of the weights that correct for the policy that drew.
        mismatch_tokens: tokens drawn by the very weights that the step began with.
        mismatch_p50, mismatch_p999, mismatch_max: of them, quantiles of |recorded - own log-prob|.
        policy_lag_mean, policy_lag_max: policy versions between drawing and learning.
        advantage_mean, advantage_std: of the tokens.
        explained_variance: 1 - var(returns - values) / var(returns).
    """

    step: int
    policy_version: int
    skipped: str | None = None
    updates: int = 0
    rows: int = 0
    tokens: int = 0
    loss: float | None = None
    policy_loss: float | None = None
    kl_loss: float | None = None
    entropy_loss: float | None = None
    value_loss: float | None = None
    kl: float | None = None
    entropy: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    clip_fraction: float | None = None
    ratio_p01: float | None = None
    ratio_p50: float | None = None
    ratio_p99: float | None = None
    ratio_max: float | None = None
    ess: float | None = None
    importance_mean: float | None = None
    mismatch_tokens: int = 0
    mismatch_p50: float | None = None
    mismatch_p999: float | None = None
    mismatch_max: float | None = None
    policy_lag_mean: float | None = None
    policy_lag_max: int | None = None
    advantage_mean: float | None = None
    advantage_std: float | None = None
    explained_variance: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values by name; None for what is not finite."""
        return {name: value if _is_plain(value) else None for name, value in dataclasses.asdict(self).items()}


@dataclass(frozen=True)
class Update:
    """One update as it was observed.

    Attributes:
        batch: what it learnt from.
        terms: leaves NumPy [rows, completion_len].
        grad_norm: before clipping.
        learning_rate: of it.
        applied: whether the weights were changed.
    """

    batch: TrainBatch
    terms: TokenTerms
    grad_norm: float
    learning_rate: float
    applied: bool


@np.errstate(over="ignore", invalid="ignore")  # what is not finite is told as such
def of_step(
    step: int,
    batch: TrainBatch,
    version: int,
    before: np.ndarray,
    updates: Sequence[Update],
    algorithm: AlgorithmSection,
) -> StepMetrics:
    """The metrics of a step of at least one update.

    Args:
        batch: the whole of it, credited.
        version: policy version of the weights before the step.
        before: float [rows, completion_len], log-probs by those weights; NaN where they were not computed.
        updates: in order.
    """
    mask = batch.mask
    lags = version - batch.policy_versions[mask]
    gaps = np.abs(before[mask] - batch.behaviour_logprobs[mask])[lags == 0]
    gaps = gaps[~np.isnan(gaps)]
    losses = [total_loss(update.terms, update.batch.weights, algorithm) for update in updates]
    ratios = np.exp(
        np.concatenate(
            [(u.terms.logprobs - u.batch.behaviour_logprobs)[u.batch.mask].astype(np.float64) for u in updates]
        )
    )
    low, middle, high = np.quantile(ratios, (0.01, 0.5, 0.99)).tolist()
    applied = sum(update.applied for update in updates)
    return StepMetrics(
        step=step,
        policy_version=version + (applied > 0),
        skipped=None if applied == len(updates) else NOT_FINITE,
        updates=applied,
        rows=int(mask.any(axis=1).sum()),
        tokens=int(mask.sum()),
        **{name: _mean([loss[name] for loss in losses]) for name in losses[0]},
        kl=_token_mean(updates, "kl"),
        entropy=_token_mean(updates, "entropy"),
        grad_norm=max(update.grad_norm for update in updates),
        learning_rate=updates[-1].learning_rate,
        clip_fraction=_token_mean(updates, "clipped"),
        ratio_p01=low,
        ratio_p50=middle,
        ratio_p99=high,
        ratio_max=float(ratios.max()),
        ess=effective_sample_size(ratios),
        importance_mean=_token_mean(updates, "importance"),
        mismatch_tokens=gaps.size,
        mismatch_p50=_quantile(gaps, 0.5),
        mismatch_p999=_quantile(gaps, 0.999),
        mismatch_max=_quantile(gaps, 1.0),
        policy_lag_mean=float(lags.mean()),
        policy_lag_max=int(lags.max()),
        advantage_mean=float(batch.advantages[mask].mean(dtype=np.float64)),
        advantage_std=float(batch.advantages[mask].std(dtype=np.float64)),
        explained_variance=_explained_variance(batch),
    )


def _is_plain(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _token_mean(updates: Sequence[Update], name: str) -> float | None:
    if getattr(updates[0].terms, name) is None:
        return None
    tokens = np.concatenate([getattr(update.terms, name)[update.batch.mask] for update in updates])
    return float(tokens.mean(dtype=np.float64))


def _quantile(values: np.ndarray, share: float) -> float | None:
    return float(np.quantile(values, share)) if values.size else None


def _explained_variance(batch: TrainBatch) -> float | None:
    if batch.values is None:
        return None
    returns = batch.returns[batch.mask].astype(np.float64)
    rest = returns - batch.values[batch.mask]
    return float(1 - rest.var() / returns.var()) if returns.var() else None
