"""`rollout bench sampling`: what the chain of transforms costs, beside the matrix products of its decode step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sampling import SamplingParams, StepState, inspect_checkpoint, load_checkpoint
from sampling.decode import choose
from sampling.draw import Distribution, draw
from sampling.keys import row_key, uniforms
from sampling.policy import Policy, lower, resolved, stack
from sampling.state import NO_TOKEN

FILTERS = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.02)

EVERYTHING = FILTERS.replace(
    typical_p=0.95, epsilon_cutoff=1e-4, eta_cutoff=1e-4, top_h=0.9, repetition_penalty=1.1,
    prompt_repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1, no_repeat_ngram_size=4,
    prompt_no_repeat_ngram_size=4, logit_bias={5: 1.0, 8: -2.0}, sequence_bias=[([4, 5], 1.0)],
    bad_words=[[7, 8], [9]], suppress_tokens=[10, 11], begin_suppress_tokens=[12], allowed_token_ids=range(2, 40_000),
    min_new_tokens=200, min_length=200, exponential_decay_length_penalty=(5, 1.01), forced_eos=2, forced_bos=3,
    renormalize=True, remove_invalid_values=True,
)  # fmt: skip
"""Every stage of the chain on but the greedy one, which excludes drawing. Stopping rules are not part of the choice."""


@dataclass(frozen=True)
class SamplingCost:
    """Milliseconds per step for all rows together, medians of interleaved repeats.

    Attributes:
        matmuls: the matrix products of one decode step of the model.
        bare: a draw with its log-prob from the untouched distribution, no chain and no record.
        neutral, filters, everything: the whole choice with no stage on, with four filters, with all stages on.
    """

    rows: int
    vocab: int
    matmuls: float
    bare: float
    neutral: float
    filters: float
    everything: float

    def lines(self) -> list[str]:
        """For people."""
        surcharge = {name: getattr(self, name) - self.bare for name in ("neutral", "filters", "everything")}
        return [
            f"{self.rows} rows, {self.vocab} token ids, float32; ms per step, medians",
            f"matrix products of the model   {self.matmuls:8.2f}",
            f"bare draw                      {self.bare:8.2f}",
            *(
                f"{name:12} over the bare draw {cost:8.2f}   {cost / self.matmuls:6.1%} of the matrix products"
                for name, cost in surcharge.items()
            ),
        ]


def sampling_cost(reference: str, rows: int = 32, history: int = 128, repeats: int = 15) -> SamplingCost:
    """Measures with random scores and histories, of which nothing measured depends.

    Args:
        reference: the checkpoint, as `inspect_checkpoint` takes it.
        rows: rows that draw together.
        history: tokens of each row, half of them prompt.
        repeats: timed runs of each; they take turns, so that drift of the machine's speed hits all alike.
    """
    info = inspect_checkpoint(reference)
    vocab = info.config.vocab_size
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(rows, vocab)).astype(np.float32) * 3)
    tokens = rng.integers(0, vocab, (rows, history)).tolist()
    state = StepState.from_histories(
        [row[: history // 2] for row in tokens],
        [row[history // 2 :] for row in tokens],
        capacity=2 * history,
        vocab_size=vocab,
    ).replace(keys=jnp.asarray(np.stack([row_key(0, "bench", i) for i in range(rows)])))
    given = jnp.full(rows, NO_TOKEN, jnp.int32)

    @jax.jit
    def bare(state: StepState, logits: jax.Array) -> Any:
        model = Distribution.of(logits)
        drawn = draw(model, uniforms(state.keys, state.step))
        return drawn, model.logprobs(drawn)

    chosen = jax.jit(partial(choose, tokenizer_len=info.tokenizer_len))
    every: dict[str, Callable[[], Any]] = {
        "matmuls": _matmuls(load_checkpoint(reference).params, rows),
        "bare": lambda: bare(state, logits),
    }
    for name, params in (("neutral", SamplingParams()), ("filters", FILTERS), ("everything", EVERYTHING)):
        policy = _stacked(params, rows, info.eos_token_ids)
        every[name] = partial(chosen, policy, state, logits, given)
    return SamplingCost(rows=rows, vocab=vocab, **_medians(every, repeats))


def _stacked(params: SamplingParams, rows: int, eos: tuple[int, ...]) -> Policy:
    return jax.device_put(stack([lower(resolved(params, eos))] * rows))


def _matmuls(params: Any, rows: int) -> Callable[[], Any]:
    """Only the matrix products of a decode step: every kernel of two axes or more, and the tied or untied head once."""
    kernels = [
        np.asarray(leaf).reshape(leaf.shape[0], -1)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if leaf.ndim >= 2 and "embedding" not in jax.tree_util.keystr(path)
    ]
    head = params.get("head", params["embedding"]) if "head" not in params else None
    weights = jax.device_put(kernels + ([np.asarray(head).T.copy()] if head is not None else []))
    inputs = [jnp.ones((rows, kernel.shape[0]), jnp.float32) for kernel in weights]

    @jax.jit
    def products(weights: list[jax.Array], inputs: list[jax.Array]) -> list[jax.Array]:
        return [x @ kernel for x, kernel in zip(inputs, weights, strict=True)]

    return lambda: products(weights, inputs)


def _medians(every: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in every}
    for repeat in range(repeats + 1):
        for name, run in every.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            if repeat:  # the first compiles
                times[name].append((time.perf_counter() - began) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}
