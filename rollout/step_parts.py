"""Parts of a decode step by themselves: programs that the benchmarks time beside the whole."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sampling import Checkpoint, CheckpointInfo, SamplingParams, StepState
from sampling.capacity import Capacity
from sampling.decode import choose
from sampling.engine import DTYPES
from sampling.grammar import TokenAutomaton
from sampling.grammar.tables import FREE, GrammarTables
from sampling.keys import row_key
from sampling.models import Transformer
from sampling.plugins import PluginRefs, load_plugins
from sampling.policy import lower, resolved, stack
from sampling.state import NO_TOKEN
from sampling.vocabulary import Vocabulary
from sampling.widths import compiler_options

Part = Callable[[], Any]
"""Runs once and returns arrays that may not be there yet."""


@functools.cache
def _choice_program() -> Callable[..., Any]:
    return jax.jit(choose, static_argnames="tokenizer_len", compiler_options=dict(compiler_options()))


def matrix_products(checkpoint: Checkpoint, rows: int, dtype: str = "float32") -> Part:
    """Only the matrix products of a decode step: every kernel once, and the tied or untied head.

    Args:
        checkpoint: whose weights are copied.
        rows: rows that decode together.
        dtype: "float32" or "bfloat16", of the products; the head's scores are float32 in any case.
    """
    params, kind = checkpoint.params, DTYPES[dtype]
    kernels = [
        np.asarray(leaf).reshape(-1, leaf.shape[-1])
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if "kernel" in jax.tree_util.keystr(path)
    ]
    head = np.asarray(params.get("head", params["embedding"]))
    weights = jax.device_put([kernel.astype(kind, copy=False) for kernel in [*kernels, head]])
    inputs = [jnp.ones((kernel.shape[1], rows), kind) for kernel in weights]

    def products(weights: list[jax.Array], inputs: list[jax.Array]) -> list[jax.Array]:
        *layers, scores = zip(weights, inputs, strict=True)
        return [*(kernel @ x for kernel, x in layers), jnp.matmul(*scores, preferred_element_type=jnp.float32)]

    with jax.default_matmul_precision(Transformer(checkpoint.info.config, kind).matmul_precision):
        compiled = jax.jit(products).lower(weights, inputs).compile(dict(compiler_options()))
    return lambda: compiled(weights, inputs)


def random_rows(vocab: int, rows: int, history: int) -> tuple[StepState, jax.Array]:
    """Rows with random histories, half of each its prompt, and random scores float32 [rows, vocab] for them.

    No time that is measured with them depends on what they hold.
    """
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(rows, vocab)).astype(np.float32) * 3)
    tokens = rng.integers(0, vocab, (rows, history)).tolist()
    state = StepState.from_histories(
        [row[: history // 2] for row in tokens],
        [row[history // 2 :] for row in tokens],
        capacity=2 * history,
        vocab_size=vocab,
    )
    return state.replace(keys=jnp.asarray(np.stack([row_key(0, "bench", i) for i in range(rows)]))), logits


def choice(
    info: CheckpointInfo,
    params: SamplingParams,
    state: StepState,
    logits: jax.Array,
    automaton: TokenAutomaton | None = None,
    plugins: PluginRefs | None = None,
) -> Part:
    """The whole choice of a step's tokens: the chain of transforms, the draw, and the log-probs for the record.

    Args:
        info: of the checkpoint whose tokens are drawn.
        params: the same for every row.
        state, logits: as `random_rows` gives them.
        automaton: of the parameters' grammar; each row is in another state of it.
        plugins: those that the parameters may name.
    """
    rows, vocab = logits.shape
    params = resolved(params, info.eos_token_ids)
    capacity = Capacity(plugins=load_plugins(plugins or PluginRefs())).grown_for(Capacity.needed(params))
    lowered = lower(params, capacity, grammar_start=1 if automaton else FREE)
    policy = stack([lowered] * rows)
    if automaton:
        policy = policy.bound(Vocabulary.from_pieces([b"?"]), GrammarTables.of([automaton], vocab))
        state = state.replace(automaton=1 + jnp.arange(rows, dtype=jnp.int32) % automaton.num_states)
    policy, given = jax.device_put(policy), jnp.full(rows, NO_TOKEN, jnp.int32)
    program = _choice_program()
    return lambda: program(policy, state, logits, given, tokenizer_len=info.tokenizer_len)


def seconds(part: Part) -> float:
    """How long one run takes."""
    began = time.perf_counter()
    jax.block_until_ready(part())
    return time.perf_counter() - began
