"""Requests of every kind, and what of a row must be equal wherever and whenever it is drawn.

    python -m tests.rollout.exact_work CHECKPOINT DTYPE

draws the requests in a process of its own and prints one digest of all their bits.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from rollout.trajectory import Trajectory
from sampling import Engine, Geometry, Request, SamplingParams, load_checkpoint
from sampling.capacity import Capacity
from sampling.types import Completion, Group

GEOMETRY = Geometry(slots=8, cache_len=64, prefill_rows=4, prefill_chunk=32)
CAPACITY = Capacity(support=64)
SEED = 7

TOKENS = {"max_new_tokens": 24, "ignore_eos": True}
POLICIES: dict[str, dict[str, Any]] = {
    "greedy": {**TOKENS, "temperature": 0.0},
    "plain": TOKENS,
    "filters": {**TOKENS, "temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "record_support": 40},
    "other filters": {**TOKENS, "temperature": 1.3, "typical_p": 0.8, "eta_cutoff": 0.002, "top_h": 0.9},
    "penalties": {**TOKENS, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "no_repeat_ngram_size": 2},
    "stops": {
        "max_new_tokens": 40,
        "min_new_tokens": 18,
        "stop": ["e"],
        "logit_bias": {"72": 5.0},
        "bad_words": ["th"],
    },
}
"""Each draws more tokens than one step of an engine decodes, so that a row can be seen in its slot. Id 72 is "e"."""


def tokens(seed: int, length: int) -> np.ndarray:
    """A prompt of random bytes, int32 [length]."""
    return np.random.default_rng(seed).integers(4, 260, length, dtype=np.int32)


PROMPTS = {name: tokens(place, (1, 3, 8, 9, 13, 17)[place]) for place, name in enumerate(POLICIES)}
"""Shorter than a prefill chunk, as long, one longer, and more."""


def requests(n: int = 1) -> list[Request]:
    """One request for each policy, with n samples."""
    return [
        Request(name, PROMPTS[name], SamplingParams(**policy, n=n), run_seed=SEED) for name, policy in POLICIES.items()
    ]


def strangers(count: int, seed: int, n: int = 1) -> list[Request]:
    """Requests that are there to disturb: lengths, policies and budgets of all sorts."""
    rng = np.random.default_rng(seed)
    kinds = list(POLICIES.values())
    return [
        Request(
            f"stranger {seed}-{place}",
            tokens(1000 * seed + place, int(rng.integers(1, 30))),
            SamplingParams(**{**kinds[rng.integers(len(kinds))], "max_new_tokens": int(rng.integers(20, 60)), "n": n}),
        )
        for place in range(count)
    ]


def bits(row: Completion | Trajectory) -> dict[str, str]:
    """Everything in a row that is promised to the bit, by name."""
    columns = ("prompt_tokens", "completion_tokens", "behaviour_logprobs", "model_logprobs", "log_kept_mass")
    columns += ("entropy", "policy_versions", "support_sizes", "support_ids", "key")
    return {**{name: getattr(row, name).tobytes().hex() for name in columns}, "stop_reason": str(row.stop_reason)}


def make_engine(checkpoint: str, dtype: str) -> Engine:
    """An engine with room for every request above, so that it compiles once."""
    return Engine(load_checkpoint(checkpoint), GEOMETRY, dtype, capacity=CAPACITY)


def rows(groups: Iterable[Group]) -> dict[tuple[str, int], dict[str, str]]:
    """The bits of every completion, by prompt id and sample index."""
    return {(row.prompt_id, row.sample_index): bits(row) for group in groups for row in group.completions}


def digest(found: dict[tuple[str, int], dict[str, str]]) -> str:
    """sha256 of the bits of many rows, whatever their order."""
    return hashlib.sha256(json.dumps(sorted(found.items())).encode()).hexdigest()


if __name__ == "__main__":
    print(digest(rows(make_engine(*sys.argv[1:]).generate(requests()))))
