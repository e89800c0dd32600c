"""Small requests, and what of their results must be equal."""

from __future__ import annotations

import numpy as np

from actors import GroupResult, Placement
from sampling.params import SamplingParams
from sampling.types import Geometry, Group, Request

GEOMETRY = Geometry(slots=4, cache_len=64, prefill_rows=1, prefill_chunk=16)
ONE_WORKER = Placement(num_workers=1, cpus=0, threads=1)
TWO_WORKERS = Placement(num_workers=2, cpus=0, threads=1)


def requests(count: int = 24) -> list[Request]:
    """Requests of unequal length, size and policy."""
    return [request(f"p{index}", index) for index in range(count)]


def request(prompt_id: str, index: int = 0) -> Request:
    tokens = np.arange(4, 5 + index % 7, dtype=np.int32) + index
    params = SamplingParams(
        temperature=(1.0, 0.7, 0.0)[index % 3], top_p=0.9, n=1 + index % 4, max_new_tokens=5 + index % 20
    )
    return Request(prompt_id, tokens, params, run_seed=11)


def groups(outcomes) -> dict[str, Group]:
    """Groups by prompt id; every outcome must be a result, and each prompt's only one."""
    found: dict[str, Group] = {}
    for outcome in outcomes:
        assert isinstance(outcome, GroupResult), outcome.message
        assert outcome.group.prompt_id not in found
        found[outcome.group.prompt_id] = outcome.group
    return found


def drawn(group: Group) -> list[tuple]:
    """Everything in a group that must not depend on who drew it, to the bit."""
    return [
        (
            completion.prompt_id,
            completion.sample_index,
            completion.completion_tokens.tobytes(),
            completion.behaviour_logprobs.tobytes(),
            completion.model_logprobs.tobytes(),
            completion.log_kept_mass.tobytes(),
            completion.entropy.tobytes(),
            completion.key.tobytes(),
            completion.stop_reason,
        )
        for completion in group.completions
    ]


def all_drawn(found: dict[str, Group]) -> dict[str, list[tuple]]:
    """`drawn` of every group, by prompt id."""
    return {prompt_id: drawn(group) for prompt_id, group in sorted(found.items())}
