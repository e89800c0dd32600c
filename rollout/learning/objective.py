"""The loss of a micro-batch as a function of the weights, with what each token had in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rollout.learning.batches import TrainBatch
from rollout.learning.config import AlgorithmSection, LearnerSection
from rollout.learning.logprobs import TokenScores, as_computed, completion_hidden, token_scores
from rollout.learning.losses import cispo_loss, clipped_loss, importance_weights, kl_estimate, log_ratios, value_loss
from sampling.engine import DTYPES
from sampling.models import ModelConfig, Transformer


class Weights(struct.PyTreeNode):
    """Everything that is learnt; all float32.

    Attributes:
        policy: the parameters of the Transformer.
        value_head: `kernel` [width] and `bias` []; None without one.
    """

    policy: Any
    value_head: Any = None


class TokenTerms(struct.PyTreeNode):
    """What each token of an update had in the loss; float32 [rows, completion_len], 0 where masked.

    Attributes:
        logprobs: of the weights before the update, under the recorded policy.
        policy_loss: with the importance weight in it.
        clipped: 1 where a clip took hold.
        importance: the weight that corrects for the policy that drew.
        kl: estimate of the divergence from the reference; None without one.
        entropy: nats.
        value_loss: None without a value head.
    """

    logprobs: Any
    policy_loss: Any
    clipped: Any
    importance: Any
    entropy: Any
    kl: Any = None
    value_loss: Any = None


@dataclass(frozen=True)
class Objective:
    """A loss for a model. Everything in it is fixed when programs are compiled.

    Attributes:
        model: whose log-probs are learnt.
        tokenizer_len: ids from here on are never drawn.
        algorithm: which loss.
        logit_tokens: see LearnerSection.
    """

    model: Transformer
    tokenizer_len: int
    algorithm: AlgorithmSection
    logit_tokens: int

    @classmethod
    def of(
        cls, config: ModelConfig, tokenizer_len: int, learner: LearnerSection, algorithm: AlgorithmSection
    ) -> Objective:
        """The objective of a config."""
        model = Transformer(config, dtype=DTYPES[learner.dtype], remat=learner.remat)
        return cls(model, tokenizer_len, algorithm, learner.logit_tokens)

    def scores(self, weights: Weights, batch: TrainBatch) -> tuple[TokenScores, jax.Array | None]:
        """What the weights say of the completions, and the values of the value head [rows, completion_len]."""
        policy = as_computed(weights.policy, self.model.dtype)
        hidden = completion_hidden(self.model, policy, batch)
        entropy_gradient = self.algorithm.entropy_coefficient > 0
        sizes = self.tokenizer_len, self.logit_tokens, entropy_gradient
        return token_scores(self.model, policy, hidden, batch, *sizes), _values(weights, hidden, batch)

    def loss(self, weights: Weights, batch: TrainBatch) -> tuple[jax.Array, TokenTerms]:
        """Sum over the tokens of weight times loss, float32 []; its parts add up to the batch's, however it is cut."""
        algorithm, mask = self.algorithm, batch.mask
        scored, values = self.scores(weights, batch)
        logprobs = scored.logprobs
        if algorithm.correction == "none":
            old = batch.behaviour_logprobs
        elif batch.proximal_logprobs is None:  # the only update of a step begins at the policy before the step
            old = jax.lax.stop_gradient(logprobs)
        else:
            old = batch.proximal_logprobs
        level = "sequence" if algorithm.loss == "gspo" else "token"
        log_ratio = log_ratios(logprobs, old, mask, level)
        clips = algorithm.clip_low, algorithm.clip_high
        if algorithm.loss == "cispo":
            by_token, clipped = cispo_loss(logprobs, log_ratio, batch.advantages, *clips)
        else:
            by_token, clipped = clipped_loss(log_ratio, batch.advantages, *clips, algorithm.dual_clip)
        drift = old - batch.behaviour_logprobs
        bounds = algorithm.beyond, algorithm.cap, algorithm.floor
        importance = importance_weights(drift, mask, algorithm.correction, *bounds)
        terms = TokenTerms(logprobs, importance * by_token, clipped, importance, scored.entropy)
        loss = terms.policy_loss - algorithm.entropy_coefficient * terms.entropy
        if batch.reference_logprobs is not None:
            terms = terms.replace(kl=kl_estimate(logprobs, batch.reference_logprobs, mask, algorithm.kl))
            if algorithm.kl_in == "loss":
                loss = loss + algorithm.kl_coefficient * terms.kl
        if values is not None:
            terms = terms.replace(value_loss=value_loss(values, batch.values, batch.returns, algorithm.value_clip))
            loss = loss + algorithm.value_coefficient * terms.value_loss
        terms = jax.tree.map(lambda leaf: jnp.where(mask, leaf.astype(jnp.float32), 0.0), terms)
        return jnp.sum(jnp.where(mask, batch.weights * loss, 0.0)), terms


def _values(weights: Weights, hidden: jax.Array, batch: TrainBatch) -> jax.Array | None:
    if weights.value_head is None:
        return None
    kernel, bias = weights.value_head["kernel"], weights.value_head["bias"]
    with jax.default_matmul_precision("highest"):
        values = hidden.astype(jnp.float32) @ kernel + bias
    return jnp.where(batch.mask, values, 0.0)


def initial_weights(params: Any, width: int, value_head: bool) -> Weights:
    """Float32 copies of a model's parameters on the device, and a value head that says 0 of everything."""
    policy = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), params)
    head = {"kernel": jnp.zeros(width, jnp.float32), "bias": jnp.zeros((), jnp.float32)} if value_head else None
    return Weights(policy, head)


def total_loss(terms: TokenTerms, weights: np.ndarray, algorithm: AlgorithmSection) -> dict[str, float | None]:
    """The loss of an update and its parts, from the terms of all its tokens, summed in float64.

    Args:
        terms: leaves NumPy [rows, completion_len].
        weights: float [rows, completion_len].
    Returns:
        `loss`, which is the sum of `policy_loss`, `kl_loss`, `entropy_loss` and `value_loss`, coefficients
        included; None for a part that there is not.
    """

    def part(values: np.ndarray | None, coefficient: float) -> float | None:
        if values is None or not coefficient:
            return None
        return float(coefficient * np.sum(weights.astype(np.float64) * values))

    parts = {
        "policy_loss": part(terms.policy_loss, 1.0),
        "kl_loss": part(terms.kl, algorithm.kl_coefficient if algorithm.kl_in == "loss" else 0.0),
        "entropy_loss": part(terms.entropy, -algorithm.entropy_coefficient),
        "value_loss": part(terms.value_loss, algorithm.value_coefficient),
    }
    return {"loss": sum(value for value in parts.values() if value is not None), **parts}
