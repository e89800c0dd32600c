"""Filters that follow the entropy of the distribution: typical, epsilon, eta, top-h.

Numerical reference: Transformers' logits_process.py.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import ArrayLike

from sampling.extremes import row_max
from sampling.pytrees import Node
from sampling.state import StepState
from sampling.transforms.base import FILTER, RowwiseTransform, per_row
from sampling.transforms.cuts import Cut, CutFilter, cut_among_ties, cut_below
from sampling.transforms.sanitising import LogTotal
from sampling.transforms.thresholds import from_ordered_bits, largest, largest_values, ordered_bits


class TypicalSet(Node):
    """What `Typical` keeps: tokens whose surprise is within `distance` of the entropy. float32 [rows] each, nats."""

    total: LogTotal
    entropy: Any
    distance: Any


class Typical(RowwiseTransform):
    """Keeps the tokens whose surprise is nearest to the entropy, until they hold probability `mass`; 1 is off.

    Source: Meister et al. 2022, arXiv:2202.00666; Transformers' TypicalLogitsWarper.
    """

    mass: ArrayLike
    NEUTRAL = (1.0,)
    argmax_invariant = False

    def is_neutral(self) -> jax.Array:
        return jnp.asarray(self.mass) >= 1.0

    def summary(self, state: StepState, logits: jax.Array) -> TypicalSet:
        total = LogTotal.of(logits)
        log_probs = total.normalize(logits)
        probs = jnp.exp(log_probs)
        typical = entropy(log_probs, probs)
        order = ordered_bits(jnp.abs(-log_probs - typical[:, None]))
        wanted = jnp.asarray(self.mass, jnp.float32)

        def too_little(threshold: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(order < threshold[:, None], probs, 0.0), axis=-1) < wanted

        # The smallest distance within which the mass is reached; all tokens if rounding keeps it from being reached.
        return TypicalSet(total, typical, from_ordered_bits(largest(too_little, logits.shape[0])))

    def idle(self) -> TypicalSet:
        return TypicalSet(LogTotal.zero(), np.float32(0), np.float32(np.inf))

    def finish(self, logits: jax.Array, summary: TypicalSet) -> jax.Array:
        distance = jnp.abs(-summary.total.normalize(logits) - summary.entropy[:, None])
        return jnp.where(distance > summary.distance[:, None], FILTER, logits)


class EpsilonCutoff(CutFilter):
    """Removes tokens of probability below `epsilon`, but never the best; 0 is off.

    Source: Hewitt et al. 2022, arXiv:2210.15191; Transformers' EpsilonLogitsWarper.
    """

    epsilon: ArrayLike
    NEUTRAL = (0.0,)

    def is_neutral(self) -> jax.Array:
        return jnp.asarray(self.epsilon) <= 0.0

    def summary(self, state: StepState, logits: jax.Array) -> Cut:
        return _cut_improbable(logits, jax.nn.softmax(logits, axis=-1), per_row(self.epsilon))


class EtaCutoff(CutFilter):
    """Removes tokens of probability below min(epsilon, sqrt(epsilon) * exp(-entropy)), but never the best; 0 is off.

    Source: Hewitt et al. 2022, arXiv:2210.15191; Transformers' EtaLogitsWarper.
    """

    epsilon: ArrayLike
    NEUTRAL = (0.0,)

    def is_neutral(self) -> jax.Array:
        return jnp.asarray(self.epsilon) <= 0.0

    def summary(self, state: StepState, logits: jax.Array) -> Cut:
        probs = jax.nn.softmax(logits, axis=-1)
        epsilon = per_row(self.epsilon)
        eta = jnp.minimum(epsilon, jnp.sqrt(epsilon) * jnp.exp(-_categorical_entropy(logits, probs)))
        return _cut_improbable(logits, probs, eta)


class TopH(CutFilter):
    """Keeps the best tokens while their cumulative entropy stays within `fraction` of the head's total; 0 is off.

    The head is the `candidates` best tokens, renormalised. The best token always stays. A removed token inside the head
    ends the selection, as its NaN entropy does in the reference.

    Source: Transformers' TopHLogitsWarper.
    """

    fraction: ArrayLike
    candidates: int = struct.field(pytree_node=False, default=100)
    NEUTRAL = (0.0,)

    def is_neutral(self) -> jax.Array:
        return jnp.asarray(self.fraction) <= 0.0

    def summary(self, state: StepState, logits: jax.Array) -> Cut:
        head = largest_values(logits, min(self.candidates, logits.shape[-1]))
        log_probs = jax.nn.log_softmax(head, axis=-1)
        probs = jnp.exp(log_probs)
        present = probs > 0
        terms = jnp.where(present, -probs * jnp.where(present, log_probs, 0.0), 0.0)
        cumulative = jnp.cumsum(terms, axis=-1)
        limit = per_row(self.fraction) * _categorical_entropy(head, probs)
        first = jnp.arange(head.shape[1], dtype=jnp.int32)[None, :] == 0
        selected = first | ((cumulative <= limit) & present)

        score = jnp.min(jnp.where(selected, head, jnp.inf), axis=-1)
        kept_ties = jnp.sum(selected & (head == score[:, None]), axis=-1, keepdims=True)
        # A NaN with its sign bit set sorts last and would leave the head unseen: the row passes through undefined.
        score = jnp.where(jnp.isfinite(row_max(logits)), score, FILTER)
        return cut_among_ties(logits, score, lambda rank, _: rank <= kept_ties)


def entropy(log_probs: jax.Array, probs: jax.Array) -> jax.Array:
    """Entropy of distributions [rows, vocab] in nats, float32 [rows]; a removed token adds nothing, nor a gradient."""
    finite = jnp.where(probs > 0, log_probs, 0.0)
    return -jnp.sum(probs * finite, axis=-1)


def _categorical_entropy(logits: jax.Array, probs: jax.Array) -> jax.Array:
    """Entropy as torch's Categorical has it, float32 [rows, 1].

    It subtracts the log of the sum from the scores themselves, which rounds in proportion to their size; thresholds of
    the reference are made of it.
    """
    return entropy(logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True), probs)[:, None]


def _cut_improbable(logits: jax.Array, probs: jax.Array, threshold: jax.Array) -> Cut:
    best = row_max(logits)[:, None]
    return cut_below(logits, ~((probs < threshold) & (logits < best)))
