"""Log-probs of a batch's completions under their recorded policies, as functions of the weights.

Only hidden states at the places that predict a completion's tokens reach the head, and scores over the vocabulary
exist for a block of tokens at a time, in the gradient as well, which computes them once more.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from rollout.learning.batches import TrainBatch
from sampling.models import Transformer
from sampling.state import NO_TOKEN

REMOVED = -1e30
"""Score of a removed token: finite, so that no gradient is NaN; its weight is exactly 0."""


class TokenScores(struct.PyTreeNode):
    """What the weights say of the tokens of completions; float32 [rows, completion_len], nats, 0 where masked.

    Attributes:
        logprobs: under the recorded policy: scores over temperature, normalised over the recorded support, or over
            the tokenizer's ids where there is none.
        model_logprobs: of the model itself, at temperature 1; without a gradient.
        entropy: of the distribution of `logprobs`.
    """

    logprobs: jax.Array
    model_logprobs: jax.Array
    entropy: jax.Array


def as_computed(params: Any, dtype: DTypeLike) -> Any:
    """Float32 weights rounded to what a model of `dtype` computes with, gradients passing straight through."""
    if dtype == jnp.float32:
        return params

    def rounded(leaf: jax.Array) -> jax.Array:
        return leaf + jax.lax.stop_gradient(leaf.astype(dtype).astype(leaf.dtype) - leaf)

    return jax.tree.map(rounded, params)


def completion_hidden(model: Transformer, params: Any, batch: TrainBatch) -> jax.Array:
    """Hidden states that predict the tokens of the completions, [rows, completion_len, width] in the model's dtype."""
    length = batch.tokens.shape[1]
    places = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, :], batch.tokens.shape)
    positions = jnp.where(places < batch.length[:, None], places, -1)
    forward: Any = partial(model.apply, {"params": params})
    hidden, _ = forward(batch.tokens, positions)
    return jnp.take_along_axis(hidden, _predicting(batch)[:, :, None], axis=1)


def _predicting(batch: TrainBatch) -> jax.Array:
    """int32 [rows, completion_len]: place of the token before each token of a completion."""
    columns = jnp.arange(batch.completion_len, dtype=jnp.int32)
    return jnp.minimum(batch.prompt_len[:, None] - 1 + columns[None, :], batch.tokens.shape[1] - 1)


def token_scores(
    model: Transformer,
    params: Any,
    hidden: jax.Array,
    batch: TrainBatch,
    tokenizer_len: int,
    block_tokens: int = 256,
    entropy_gradient: bool = False,
) -> TokenScores:
    """Scores the tokens of completions.

    Args:
        hidden: of `completion_hidden`.
        tokenizer_len: ids from here on are never drawn.
        block_tokens: tokens whose scores over the vocabulary exist at the same time.
        entropy_gradient: whether gradients flow through the entropy; costs time where they do.
    """
    rows, completion_len, width = hidden.shape
    num_tokens = rows * completion_len
    block = min(block_tokens, num_tokens)
    last = batch.tokens.shape[1] - 1
    following = jnp.take_along_axis(batch.tokens, jnp.minimum(_predicting(batch) + 1, last), axis=1)
    by_token = (
        hidden.reshape(num_tokens, width),
        following.reshape(-1),
        jnp.repeat(batch.temperature, completion_len),
        batch.support.reshape(num_tokens, batch.support.shape[2]),
        batch.mask.reshape(-1),
    )
    forward: Any = partial(model.apply, {"params": params}, method="logits")

    @jax.checkpoint
    def scored(these: tuple[jax.Array, ...]) -> TokenScores:
        hidden, token, temperature, support, mask = these

        def of_some() -> TokenScores:
            # What lies under the mask may be anything, and the gradient of anything may be NaN.
            logits = forward(jnp.where(mask[:, None], hidden, 0))
            ids = jnp.broadcast_to(jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, :], logits.shape)
            whole = _logprobs(jax.lax.stop_gradient(logits), jnp.ones_like(logits, bool), token[:, None], ids)
            scores = logits / jnp.where(mask, temperature, 1.0)[:, None]
            law = _logprobs(scores, ids < tokenizer_len, token[:, None], ids)
            if support.shape[1]:
                kept = jnp.take_along_axis(scores, jnp.maximum(support, 0), axis=1)
                among = _logprobs(kept, support != NO_TOKEN, token[:, None], support)
                recorded = support[:, 0] != NO_TOKEN
                law = tuple(jnp.where(recorded, ours, theirs) for ours, theirs in zip(among, law, strict=True))
            entropy = law[1] if entropy_gradient else jax.lax.stop_gradient(law[1])
            values = TokenScores(law[0], whole[0], entropy)
            return jax.tree.map(lambda value: jnp.where(mask, value, 0.0), values)

        nothing = jnp.zeros(token.shape, jnp.float32)
        return jax.lax.cond(jnp.any(mask), of_some, lambda: TokenScores(nothing, nothing, nothing))

    def blocks(array: jax.Array) -> jax.Array:
        room = ((0, -num_tokens % block), *((0, 0),) * (array.ndim - 1))
        return jnp.pad(array, room).reshape(-(-num_tokens // block), block, *array.shape[1:])

    by_block = jax.lax.map(scored, jax.tree.map(blocks, by_token))
    return jax.tree.map(lambda leaf: leaf.reshape(-1)[:num_tokens].reshape(rows, completion_len), by_block)


def _logprobs(scores: jax.Array, possible: jax.Array, token: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-prob of a token per row, and the entropy, of softmax(scores) over the possible entries.

    Args:
        scores: float32 [rows, entries], possible bool of the same shape, ids int32 of the same shape.
        token: int32 [rows, 1].
    Returns:
        Two float32 [rows].
    """
    scores = jnp.where(possible, scores, REMOVED)
    best = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    below = scores - best
    weights = jnp.where(possible, jnp.exp(below), 0.0)
    total = jnp.sum(weights, axis=-1)
    # A row without any possible entry belongs to nobody; it stays finite.
    total = jnp.where(total > 0, total, 1.0)
    chosen = jnp.sum(jnp.where(possible & (ids == token), below, 0.0), axis=-1)
    entropy = jnp.log(total) - jnp.sum(weights * jnp.where(possible, below, 0.0), axis=-1) / total
    return chosen - jnp.log(total), entropy


def completion_logprobs(
    model: Transformer,
    params: Any,
    batch: TrainBatch,
    tokenizer_len: int,
    block_tokens: int = 256,
) -> TokenScores:
    """Scores of the tokens of completions, from the tokens: the forward pass and `token_scores`."""
    params = as_computed(params, model.dtype)
    hidden = completion_hidden(model, params, batch)
    return token_scores(model, params, hidden, batch, tokenizer_len, block_tokens)
