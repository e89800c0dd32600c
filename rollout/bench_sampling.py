"""`rollout bench sampling`: what the chain of transforms and a grammar cost, beside the matrix products of a step."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from rollout.step_parts import Part, choice, matrix_products, random_rows, seconds
from sampling import CheckpointInfo, SamplingParams, StepState, load_checkpoint
from sampling.checkpoints import load_backend
from sampling.draw import Distribution, draw
from sampling.grammar import GrammarCache, TokenAutomaton
from sampling.keys import uniforms
from sampling.plugins import PluginRefs
from sampling.vocabulary import Vocabulary, control_tokens

FILTERS = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.02)

EVERYTHING = FILTERS.replace(
    typical_p=0.95, epsilon_cutoff=1e-4, eta_cutoff=1e-4, top_h=0.9, repetition_penalty=1.1,
    prompt_repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1, no_repeat_ngram_size=4,
    prompt_no_repeat_ngram_size=4, logit_bias={5: 1.0, 8: -2.0}, sequence_bias=[([4, 5], 1.0)],
    bad_words=[[7, 8], [9]], suppress_tokens=[10, 11], begin_suppress_tokens=[12], allowed_token_ids=range(2, 40_000),
    min_new_tokens=200, min_length=200, exponential_decay_length_penalty=(5, 1.01), forced_eos=2, forced_bos=3,
    thinking_budget=1000, thinking_start=[6], thinking_end=[7],
    renormalize=True, remove_invalid_values=True,
)  # fmt: skip
"""Every stage of the chain on but two: a grammar, beside which nothing may be forced, and the greedy one, which
excludes drawing. Stopping rules are not part of the choice."""

PERSON = SamplingParams(
    json_schema={
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "born": {"type": "string", "format": "date"},
            "mail": {"type": "string", "pattern": "^[a-z0-9.]{1,20}@[a-z]{2,20}[.](com|org)$"},
            "hobbies": {"type": "array", "maxItems": 4, "items": {"enum": ["chess", "dance", "music", "other"]}},
            "home": {
                "type": "object",
                "properties": {"street": {"type": "string", "maxLength": 30}, "zip": {"type": "integer", "minimum": 0}},
                "required": ["street", "zip"],
            },
        },
        "required": ["name", "age", "home"],
    }
)
"""A grammar of some hundred states, and nothing else."""


THINKING = SamplingParams(thinking_budget=1000, thinking_start=[28, 11501, 46], thinking_end=[5837, 11501, 46])
"""Markers of three tokens, for which the whole history is searched; and nothing else."""


@dataclass(frozen=True)
class Cooler:
    """A transform as it may come from outside: divides a row's scores by a number that grows with it."""

    strength: Any = 0.1

    version = "1"

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        """float32 [rows, vocab] to the same."""
        return logits / (1 + self.strength * state.step.astype(jnp.float32))[:, None]


PLUGIN = SamplingParams(plugins={"cooler": {"strength": 0.5}})


@dataclass(frozen=True)
class GrammarTablesCost:
    """What it takes to compile PERSON for the tokenizer, measured once.

    Attributes:
        states, classes, mib: of its tables.
        cold_s, cached_s: seconds until they are there, with nothing kept and from a file.
    """

    states: int
    classes: int
    mib: float
    cold_s: float
    cached_s: float


@dataclass(frozen=True)
class SamplingCost:
    """Milliseconds per step for all rows together, medians of interleaved repeats.

    Attributes:
        matmuls: the matrix products of one decode step of the model.
        bare: a draw with its log-prob from the untouched distribution, no chain and no record.
        neutral, grammar, thinking, plugin, filters, everything: the whole choice with no stage on, with a grammar
            alone, a thinking budget alone, a plugin alone, four filters, all stages on but the grammar and a plugin.
        tables: of that grammar.
    """

    rows: int
    vocab: int
    matmuls: float
    bare: float
    neutral: float
    grammar: float
    thinking: float
    plugin: float
    filters: float
    everything: float
    tables: GrammarTablesCost

    def lines(self) -> list[str]:
        """For people."""
        names = "neutral grammar thinking plugin filters everything".split()
        surcharge = {name: getattr(self, name) - self.bare for name in names}
        return [
            f"{self.rows} rows, {self.vocab} token ids, float32; ms per step, medians",
            f"matrix products of the model   {self.matmuls:8.2f}",
            f"bare draw                      {self.bare:8.2f}",
            *(
                f"{name:12} over the bare draw {cost:8.2f}   {cost / self.matmuls:6.1%} of the matrix products"
                for name, cost in surcharge.items()
            ),
            f"tables of the grammar: {self.tables.states} states, {self.tables.classes} classes,"
            f" {self.tables.mib:.1f} MiB; {self.tables.cold_s:.2f} s cold, {self.tables.cached_s:.3f} s from a file",
        ]


def sampling_cost(reference: str, rows: int = 32, history: int = 128, repeats: int = 15) -> SamplingCost:
    """Measures with random scores and histories, of which nothing measured depends.

    Args:
        reference: the checkpoint, as `inspect_checkpoint` takes it.
        rows: rows that draw together.
        history: tokens of each row, half of them prompt.
        repeats: timed runs of each; they take turns, so that drift of the machine's speed hits all alike.
    """
    checkpoint = load_checkpoint(reference)
    info = checkpoint.info
    state, logits = random_rows(info.config.vocab_size, rows, history)
    automaton, tables = _compiled(info)

    @jax.jit
    def bare(state: StepState, logits: jax.Array) -> Any:
        model = Distribution.of(logits)
        drawn = draw(model, uniforms(state.keys, state.step))
        return drawn, model.logprobs(drawn)

    every: dict[str, Part] = {
        "matmuls": matrix_products(checkpoint, rows),
        "bare": lambda: bare(state, logits),
        "neutral": choice(info, SamplingParams(), state, logits),
        "grammar": choice(info, PERSON, state, logits, automaton),
        "thinking": choice(info, THINKING, state, logits),
        "plugin": choice(info, PLUGIN, state, logits, plugins=PluginRefs.of({"transforms": [Cooler]})),
        "filters": choice(info, FILTERS, state, logits),
        "everything": choice(info, EVERYTHING, state, logits),
    }
    return SamplingCost(rows=rows, vocab=info.config.vocab_size, tables=tables, **_medians(every, repeats))


def _compiled(info: CheckpointInfo) -> tuple[TokenAutomaton, GrammarTablesCost]:
    """PERSON over the checkpoint's tokens, and what that takes."""
    grammar, backend = PERSON.grammar, load_backend(info)
    assert grammar is not None
    vocabulary, control = Vocabulary.from_tokenizer(backend, info.config.vocab_size), control_tokens(backend)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        automaton = GrammarCache(vocabulary, control, Path(folder)).automaton(grammar)
        written = time.perf_counter()
        GrammarCache(vocabulary, control, Path(folder)).automaton(grammar)
        read = time.perf_counter()
    mib = automaton.num_bytes / 2**20
    return automaton, GrammarTablesCost(
        automaton.num_states, automaton.num_classes, mib, cold_s=written - began, cached_s=read - written
    )


def _medians(every: dict[str, Part], repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in every}
    for repeat in range(repeats + 1):
        for name, part in every.items():
            taken = seconds(part)
            if repeat:  # the first compiles
                times[name].append(1e3 * taken)
    return {name: statistics.median(values) for name, values in times.items()}
