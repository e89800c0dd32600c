"""The optimizer of a config: clipping, AdamW and a schedule, from optax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from rollout.learning.config import LearnerSection
from rollout.learning.objective import Weights


def learning_rates(section: LearnerSection) -> optax.Schedule:
    """The rate of each update, by its number from 0."""
    peak, warmup = section.learning_rate, section.warmup_updates
    after: optax.Schedule
    if section.decay_updates is None:
        after = optax.schedules.constant_schedule(peak)
    elif section.schedule == "cosine":
        after = optax.schedules.cosine_decay_schedule(peak, section.decay_updates - warmup, section.final_share)
    else:
        last = peak * section.final_share
        after = optax.schedules.linear_schedule(peak, last, section.decay_updates - warmup)
    if not warmup:
        return after
    # The first update already has a rate: a step that changes nothing would be a step lost.
    rising = optax.schedules.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.schedules.join_schedules([rising, after], [warmup])


def optimizer(section: LearnerSection) -> optax.GradientTransformation:
    """Gradients of Weights to what is added to them."""
    factors = Weights(1.0, section.value_learning_rate_factor)
    clip = [] if section.max_grad_norm is None else [optax.clip_by_global_norm(section.max_grad_norm)]
    return optax.chain(
        *clip,
        optax.scale_by_adam(section.beta1, section.beta2, section.epsilon),
        optax.add_decayed_weights(section.weight_decay, mask=_decayed),
        optax.stateless(lambda updates, _: jax.tree.map(_scaled, factors, updates)),
        optax.scale_by_learning_rate(learning_rates(section)),
    )


def _scaled(factor: float, updates: Any) -> Any:
    return updates if factor == 1 else jax.tree.map(lambda leaf: factor * leaf, updates)


def _decayed(weights: Weights) -> Weights:
    """Which leaves decay: matrices of the model, and not norms, biases or the value head."""

    def decays(path: tuple[Any, ...], leaf: jax.Array) -> bool:
        name = str(getattr(path[-1], "key", ""))
        return name.endswith("_kernel") or name in ("embedding", "head")

    return jax.tree_util.tree_map_with_path(decays, weights)


def added(weights: Weights, updates: Weights) -> Weights:
    """Weights plus updates, where an update of 0 leaves every bit: -0.0 + 0.0 would be 0.0."""
    return jax.tree.map(lambda leaf, by: jnp.where(by == 0, leaf, leaf + by), weights, updates)
