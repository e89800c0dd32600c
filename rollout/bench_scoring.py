"""`rollout bench scoring`: what exactness costs. Replays and forward scores beside the generation they follow, and the
records beside a decode loop that keeps none."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sampling import (
    Capacity,
    Checkpoint,
    Completion,
    Engine,
    Geometry,
    Request,
    SamplingParams,
    Vocabulary,
    load_checkpoint,
)
from sampling.decode import EngineState, decode
from sampling.engine import DTYPES
from sampling.grammar.tables import GrammarTables
from sampling.models import Transformer
from sampling.policy import lower, stack
from sampling.programs import empty_state
from sampling.widths import compiler_options

PROMPT_LEN = 32


@dataclass(frozen=True)
class ScoringCost:
    """Seconds, and ratios of medians within this run.

    Attributes:
        rows, tokens: completions, and tokens of each.
        generation: drawing them all.
        replay: reading them all through the programs that draw.
        replay_few, forward_few: by number of completions, the seconds of either way to score them.
        recording: extra time of a decode step that keeps its records over one that does not, as a share.
        distance: largest |forward score - record| of a behaviour log-prob, nats; and at the 99.9th percentile.
    """

    rows: int
    tokens: int
    generation: float
    replay: float
    replay_few: dict[int, float]
    forward_few: dict[int, float]
    recording: float
    distance: tuple[float, float]

    def lines(self) -> list[str]:
        """For people."""
        return [
            f"{self.rows} completions of {self.tokens} tokens",
            f"generation           {self.generation:8.2f} s",
            f"replay               {self.replay:8.2f} s   {self.replay / self.generation:.2f} of the generation",
            *(
                f"forward scores of {rows:2d} {seconds:8.2f} s  "
                f" {self.replay_few[rows] / seconds:.1f} times faster than their replay ({self.replay_few[rows]:.2f} s)"
                for rows, seconds in self.forward_few.items()
            ),
            f"keeping the records  {self.recording:+8.2%} of a decode step",
            f"forward scores differ from the record by {self.distance[0]:.1e} nats at most,"
            f" {self.distance[1]:.1e} at the 99.9th percentile",
        ]


def scoring_cost(reference: str, rows: int = 32, tokens: int = 256, dtype: str = "float32") -> ScoringCost:
    """Measures one engine of `rows` slots.

    Args:
        reference: the checkpoint, as `inspect_checkpoint` takes it.
        tokens: of each completion.
        dtype: of the model's matrix products.
    """
    checkpoint, geometry = load_checkpoint(reference), Geometry(slots=rows, cache_len=PROMPT_LEN + tokens)
    recording = _recording_share(checkpoint, geometry, dtype)
    engine = Engine(checkpoint, geometry, dtype)
    rng = np.random.default_rng(0)
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    known = engine.info.tokenizer_len
    requests = [Request(f"p{i}", rng.integers(5, known, PROMPT_LEN), params) for i in range(rows)]
    warm = [_again(request, request.prompt_tokens[:2], forward) for request in requests for forward in (False, True)]
    list(engine.generate(warm))

    generation, drawn = _timed(engine, requests)
    recorded = {completion.prompt_id: completion for completion in drawn}
    replays = [_again(request, recorded[request.prompt_id].completion_tokens, False) for request in requests]
    forwards = [_again(request, recorded[request.prompt_id].completion_tokens, True) for request in requests]
    replay, _ = _timed(engine, replays)
    few = [count for count in (1, 8) if count < rows]
    replay_few = {count: _timed(engine, replays[:count])[0] for count in few} | {rows: replay}
    forward_few = {count: _timed(engine, forwards[:count])[0] for count in few}
    forward_few[rows], scored = _timed(engine, forwards)
    distances = np.concatenate(
        [np.abs(c.behaviour_logprobs - recorded[c.prompt_id].behaviour_logprobs) for c in scored]
    )
    return ScoringCost(
        rows=rows,
        tokens=tokens,
        generation=generation,
        replay=replay,
        replay_few=replay_few,
        forward_few=forward_few,
        recording=recording,
        distance=(float(distances.max()), float(np.quantile(distances, 0.999))),
    )


def _again(request: Request, given: np.ndarray, forward: bool) -> Request:
    params = request.params.replace(max_new_tokens=len(given))
    return Request(request.prompt_id, request.prompt_tokens, params, given=(given,), forward=forward)


def _timed(engine: Engine, requests: list[Request]) -> tuple[float, list[Completion]]:
    began = time.perf_counter()
    groups = list(engine.generate(requests))
    return time.perf_counter() - began, [completion for group in groups for completion in group.completions]


def _recording_share(
    checkpoint: Checkpoint, geometry: Geometry, dtype: str, steps: int = 16, repeats: int = 9
) -> float:
    """Times the decode loop against one whose records nobody asks for, so that the compiler drops them."""
    info = checkpoint.info
    model = Transformer(info.config, dtype=DTYPES[dtype])
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, DTYPES[dtype]), checkpoint.params)
    vocabulary, grammars = Vocabulary.from_pieces([b"?"]), GrammarTables.of([], info.config.vocab_size)
    state = empty_state(model, geometry, Capacity())
    running = jnp.full(geometry.slots, PROMPT_LEN)
    state = state.replace(
        rows=state.rows.replace(active=running > 0, prompt_len=running, length=running),
        policy=stack([lower(SamplingParams(max_new_tokens=geometry.cache_len))] * geometry.slots),
    )
    one, many = jnp.int32(1), jnp.int32(steps)

    def with_records(params: Any, state: EngineState) -> EngineState:
        return decode(model, info.tokenizer_len, params, state, vocabulary, grammars, one, many, one)[0]

    def without_records(params: Any, state: EngineState) -> EngineState:
        return with_records(params, state).replace(record=None, policy_versions=None)

    as_engines_are = dict(compiler_options())
    programs = {
        "with": jax.jit(with_records, compiler_options=as_engines_are),
        "without": jax.jit(without_records, compiler_options=as_engines_are),
    }
    times: dict[str, list[float]] = {name: [] for name in programs}
    with jax.default_matmul_precision(model.matmul_precision):
        for repeat in range(repeats + 1):
            for name, program in programs.items():
                began = time.perf_counter()
                jax.block_until_ready(program(params, state))
                if repeat:  # the first compiles
                    times[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return medians["with"] / medians["without"] - 1
