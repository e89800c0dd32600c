"""Workloads of `rollout bench`: seeded requests whose lengths are exact, since nothing but the budget ends a row."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import numpy as np

from sampling import Geometry, Request, SamplingParams
from sampling.errors import ConfigError
from sampling.types import LANE_TOKENS

POLICIES = {
    "uniform": SamplingParams(),
    "filters": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
    "groups": SamplingParams(),
    "longtail": SamplingParams(),
    "single": SamplingParams(temperature=0),
}
"""Every workload, and how its rows are drawn."""

_SPECIAL_IDS = 5
"""Ids below stand for beginnings, ends and padding in most vocabularies."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the workloads; the defaults are those of the published figures.

    Attributes:
        prompt_len: tokens of a prompt, give or take a quarter.
        new_tokens: tokens that a row draws.
        group_prompts, group_prompt_len, group_size: prompts of `groups`, the tokens of each, and its samples.
        rounds: requests of `longtail` per slot.
        median, longest: tokens that a row of `longtail` draws.
    """

    prompt_len: int = 32
    new_tokens: int = 64
    group_prompts: int = 8
    group_prompt_len: int = 256
    group_size: int = 8
    rounds: int = 4
    median: int = 24
    longest: int = 256


@dataclass(frozen=True)
class Workload:
    """What is to be drawn.

    Attributes:
        name: one of POLICIES.
        slots: rows that may be resident at the same time.
        params: how every row is drawn, except for its budget.
        requests: in the order in which they are submitted.
    """

    name: str
    slots: int
    params: SamplingParams
    requests: tuple[Request, ...]

    @property
    def rows(self) -> int:
        """Completions in all."""
        return sum(request.params.n for request in self.requests)

    @property
    def tokens(self) -> int:
        """Tokens to draw in all."""
        return sum(request.params.n * request.params.max_new_tokens for request in self.requests)

    @property
    def geometry(self) -> Geometry:
        """An engine's shapes with just the cache that the longest row needs, in steps of 64.

        Fewer rows or prompts than the default reads together need no more than their own tokens.
        """
        longest = max(request.prompt_tokens.size + request.params.max_new_tokens for request in self.requests)
        prompts = min(Geometry.prefill_rows, self.slots, len(self.requests))
        tokens = prompts * max(request.prompt_tokens.size for request in self.requests)
        chunk = min(Geometry.prefill_chunk, -(-tokens // LANE_TOKENS) * LANE_TOKENS)
        return Geometry(self.slots, -(-longest // 64) * 64, prompts, chunk)


def workload(name: str, tokenizer_len: int, slots: int = 32, seed: int = 0, shape: Shape | None = None) -> Workload:
    """Makes a workload; equal arguments make equal requests.

    Args:
        name: one of POLICIES.
        tokenizer_len: prompts hold ids below; small ones more often, as in texts.
        slots: rows that may be resident at the same time.
        seed: of lengths and ids, and of the draws.
        shape: its sizes.
    Raises:
        ConfigError: no workload has this name.
    """
    if name not in POLICIES:
        raise ConfigError(f"workload: expected one of {', '.join(POLICIES)}, got {name!r}")
    shape, rng = shape or Shape(), np.random.default_rng(seed)
    params = POLICIES[name].replace(ignore_eos=True)
    if name == "groups":
        params = params.replace(n=shape.group_size)
        prompt_lens, budgets = [shape.group_prompt_len] * shape.group_prompts, [shape.new_tokens] * shape.group_prompts
    else:
        count = {"single": 1, "longtail": shape.rounds * slots}.get(name, slots)
        quarter = shape.prompt_len // 4
        prompt_lens = rng.integers(shape.prompt_len - quarter, shape.prompt_len + quarter + 1, count).tolist()
        budgets = [shape.new_tokens] * count
        if name == "longtail":
            budgets = rng.permutation(_long_tail(count, shape.median, shape.longest)).tolist()
    requests = tuple(
        Request(f"{name}-{i}", _ids(rng, prompt_len, tokenizer_len), params.replace(max_new_tokens=budget), seed)
        for i, (prompt_len, budget) in enumerate(zip(prompt_lens, budgets, strict=True))
    )
    return Workload(name, slots, params, requests)


def _long_tail(count: int, median: int, longest: int) -> list[int]:
    """Evenly spaced quantiles of a log-normal distribution (sigma 1), cut at `longest`.

    Quantiles rather than draws: every seed then has the same median, the same longest row and the same sum.
    """
    normal = statistics.NormalDist()
    quantiles = (normal.inv_cdf((i + 0.5) / count) for i in range(count))
    return [min(max(round(median * math.exp(z)), 1), longest) for z in quantiles]


def _ids(rng: np.random.Generator, count: int, tokenizer_len: int) -> np.ndarray:
    """Token ids at rates that fall with the id, since vocabularies list frequent tokens first."""
    return np.exp(rng.uniform(math.log(_SPECIAL_IDS), math.log(tokenizer_len), count)).astype(np.int32)
