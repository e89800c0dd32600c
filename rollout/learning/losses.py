"""Losses of policy gradients with ratios, as pure functions of [rows, tokens] arrays.

Everything is per token until the very end, where one weighted sum makes the loss (`token_weights`). The weights are
computed of a whole batch before it is cut, so that micro-batches add up to it exactly. Masked entries may hold
anything, NaN included; they add nothing, to gradients neither.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from sampling.errors import ConfigError

Reduction = Literal["sequence_mean", "token_mean", "constant"]
"""How tokens weigh: every sequence alike (GRPO), every token of the batch alike (DAPO), or every token by one constant,
the longest completion there may be (Dr. GRPO)."""

RatioLevel = Literal["token", "sequence"]
"""Whose ratio is clipped: the token's, or the geometric mean over its sequence (GSPO)."""

KLEstimator = Literal["k1", "k2", "k3"]

Correction = Literal["none", "token", "sequence_mean", "sequence_product"]
"""Whose ratio corrects for the policy that drew: nobody's, the token's, or the sequence's, which is the geometric mean
of its tokens' ratios, or their product; the product is the unbiased one, and explodes with the length."""

Beyond = Literal["truncate", "mask"]
"""What happens to a ratio out of bounds: it is cut at the cap, or what it belongs to is left out."""


def token_weights(mask: np.ndarray, reduction: Reduction, longest: int) -> np.ndarray:
    """The weight of every token in the loss of a batch; a loss is the sum of weight * token's loss.

    Args:
        mask: bool [rows, tokens], tokens that count. A row without any adds nothing, and is no sequence.
        reduction: see Reduction.
        longest: completion tokens that a row may have at most, for "constant".
    Returns:
        float64 [rows, tokens]; all zero if no token counts.
    """
    mask = np.asarray(mask, bool)
    lengths = mask.sum(axis=1, keepdims=True)
    rows = np.count_nonzero(lengths)
    if reduction == "sequence_mean":
        each = 1.0 / (np.maximum(lengths, 1) * max(rows, 1))
    elif reduction == "token_mean":
        each = np.full(lengths.shape, 1.0 / max(lengths.sum(), 1))
    elif reduction == "constant":
        each = np.full(lengths.shape, 1.0 / (max(rows, 1) * longest))
    else:
        raise ConfigError(f"reduction: expected sequence_mean, token_mean or constant, got {reduction!r}")
    return np.where(mask, each, 0.0)


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of each row over its mask, [rows, 1]; 0 of an empty row."""
    total = jnp.sum(jnp.where(mask, values, 0.0), axis=-1, keepdims=True)
    return total / jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True, dtype=total.dtype), 1)


def log_ratios(logprobs: jax.Array, old_logprobs: jax.Array, mask: jax.Array, level: RatioLevel) -> jax.Array:
    """Log of new over old probability, [rows, tokens]; 0 where masked.

    At the sequence level every token has its sequence's mean, and the gradient of its own log-prob: the ratio is
    s * exp(logprob - stop_gradient(logprob)), with s the geometric mean of the sequence's ratios.

    Source: the sequence level is GSPO-token, Zheng et al. 2025, arXiv:2507.18071, which equals GSPO when a sequence
    has one advantage.
    """
    # Masked before it is used: NaN * 0 would be NaN, and so would be its gradient.
    logprobs = jnp.where(mask, logprobs, 0.0)
    by_token = logprobs - jnp.where(mask, old_logprobs, 0.0)
    if level == "token":
        return by_token
    mean = jax.lax.stop_gradient(masked_mean(by_token, mask))
    return jnp.where(mask, mean + logprobs - jax.lax.stop_gradient(logprobs), 0.0)


def clipped_loss(
    log_ratio: jax.Array,
    advantages: jax.Array,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """PPO's clipped surrogate, negated, per token.

    Args:
        log_ratio, advantages: [rows, tokens].
        clip_low, clip_high: the ratio counts within 1 - clip_low .. 1 + clip_high; clip-higher has the latter larger.
        dual_clip: with a negative advantage the loss is at most this times -advantage; above 1; None: no such bound.
    Returns:
        The loss, and where a clip took hold (bool), both [rows, tokens].

    Source: Schulman et al. 2017, arXiv:1707.06347; clip-higher, Yu et al. 2025, arXiv:2503.14476; dual clip, Ye et
    al. 2020, arXiv:1912.09729.
    """
    ratio = jnp.exp(log_ratio)
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss, held = jnp.maximum(plain, clipped), clipped > plain
    if dual_clip is not None:
        bound = -advantages * dual_clip
        beyond = (advantages < 0) & (loss > bound)
        loss, held = jnp.where(beyond, bound, loss), held | beyond
    return loss, held


def cispo_loss(
    logprobs: jax.Array, log_ratio: jax.Array, advantages: jax.Array, clip_low: float, clip_high: float
) -> tuple[jax.Array, jax.Array]:
    """REINFORCE weighted by the clipped ratio, through which no gradient flows: clipping silences no token.

    Returns:
        As `clipped_loss`.

    Source: CISPO, MiniMax 2025, arXiv:2506.13585.
    """
    ratio = jnp.exp(log_ratio)
    weight = jax.lax.stop_gradient(jnp.clip(ratio, 1 - clip_low, 1 + clip_high))
    return -weight * advantages * logprobs, jax.lax.stop_gradient(weight != ratio)


def kl_estimate(logprobs: jax.Array, reference: jax.Array, mask: jax.Array, estimator: KLEstimator) -> jax.Array:
    """Per token estimate of KL(policy || reference) from a token that the policy drew; [rows, tokens], 0 where masked.

    k1 = log p - log q is unbiased and may be negative; k2 = k1^2 / 2 is biased and has the right gradient; k3 =
    exp(-k1) - 1 + k1 is unbiased and never negative.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.
    """
    k1 = jnp.where(mask, logprobs, 0.0) - jnp.where(mask, reference, 0.0)
    if estimator == "k1":
        return k1
    if estimator == "k2":
        return 0.5 * jnp.square(k1)
    if estimator == "k3":
        return jnp.expm1(-k1) + k1
    raise ConfigError(f"kl estimator: expected k1, k2 or k3, got {estimator!r}")


def importance_weights(
    log_ratio: jax.Array,
    mask: jax.Array,
    correction: Correction,
    beyond: Beyond = "truncate",
    cap: float = 2.0,
    floor: float = 0.0,
) -> jax.Array:
    """Weights for tokens that another policy drew than the one the ratio is taken against; no gradient flows.

    Args:
        log_ratio: [rows, tokens], log of the proximal policy's probability over the drawing one's.
        mask: bool [rows, tokens].
        correction, beyond: see Correction and Beyond.
        cap, floor: bounds of the ratio; the floor matters to masks alone.
    Returns:
        [rows, tokens], 1 where nothing is to be corrected or where masked.

    Source: truncated importance sampling, Ionides 2008; for rollouts, Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training".
    """
    log_ratio = jax.lax.stop_gradient(jnp.where(mask, log_ratio, 0.0))
    if correction == "none":
        return jnp.ones_like(log_ratio)
    if correction == "sequence_mean":
        log_ratio = jnp.broadcast_to(masked_mean(log_ratio, mask), log_ratio.shape)
    elif correction == "sequence_product":
        log_ratio = jnp.broadcast_to(jnp.sum(log_ratio, axis=-1, keepdims=True), log_ratio.shape)
    elif correction != "token":
        raise ConfigError(f"correction: expected none, token, sequence_mean or sequence_product, got {correction!r}")
    ratio = jnp.exp(log_ratio)
    if beyond == "mask":
        weights = ((ratio >= floor) & (ratio <= cap)).astype(ratio.dtype)
    elif beyond == "truncate":
        weights = jnp.minimum(ratio, cap)
    else:
        raise ConfigError(f"beyond: expected truncate or mask, got {beyond!r}")
    return jnp.where(mask, weights, 1.0)


def effective_sample_size(weights: np.ndarray) -> float:
    """Kish's effective share of samples, (sum w)^2 / (n * sum w^2), in 0 .. 1; NaN without samples."""
    weights = np.asarray(weights, np.float64)
    squares = float(np.sum(np.square(weights)))
    return float(np.square(weights.sum()) / (weights.size * squares)) if squares else float("nan")


def value_loss(values: jax.Array, old_values: jax.Array, returns: jax.Array, clip: float | None = None) -> jax.Array:
    """Squared error of the value head, halved, per token; with a clip, the worse of it and of the value kept within
    `clip` of the old one.

    Source: the PPO implementation of OpenAI Baselines.
    """
    plain = 0.5 * jnp.square(values - returns)
    if clip is None:
        return plain
    near = old_values + jnp.clip(values - old_values, -clip, clip)
    return jnp.maximum(plain, 0.5 * jnp.square(near - returns))
