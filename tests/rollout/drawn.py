"""Trajectories that an engine has drawn from a tiny model, for tests of what is learnt from them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rollout.rewards import Score
from rollout.trajectory import Trajectory
from sampling import Engine, Request, SamplingParams
from sampling.types import Completion


def first_id(completion: Completion) -> float:
    """A reward that most groups differ in."""
    return float(completion.completion_tokens[0] % 7)


def draw(
    engine: Engine,
    *policies: SamplingParams,
    prompts: int = 4,
    seed: int = 0,
    reward: Callable[[Completion], float | None] = first_id,
) -> list[Trajectory]:
    """The samples of some prompts, which have the policies in turn, in the order of the prompts."""
    rng = np.random.default_rng(1)
    requests = [
        Request(f"p{index}", rng.integers(4, 200, 3 + 5 * index), policies[index % len(policies)], run_seed=seed)
        for index in range(prompts)
    ]
    groups = sorted(engine.generate(requests), key=lambda group: group.prompt_id)
    return [
        Trajectory.from_completion(
            completion,
            run_id="run",
            weights_digest="w0",
            numerics_fingerprint="n0",
            score=Score(reward(completion)),
        )
        for group in groups
        for completion in group.completions
    ]
