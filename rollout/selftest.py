"""`rollout bench selftest`: what a learner sees when it has changed nothing.

With a learning rate of zero, the log-probs that a learner computes are those that the rollouts were drawn with.
Whatever lies between them is the service's fault: other weights on a worker, another policy, a wrong position or mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from actors import Placement
from rollout.branches import Branch
from rollout.comparison import Distances, difference
from rollout.service import Rollouts
from rollout.trajectory import Trajectory
from sampling.checkpoints import load_checkpoint
from sampling.engine import Engine
from sampling.params import SamplingParams
from sampling.types import Geometry, Request

GEOMETRY = Geometry(slots=16, cache_len=256)

PROMPTS = (
    "The capital of France is",
    "Once upon a time, a fox",
    "def fibonacci(n):",
    "Q: What is 17 + 25? A:",
)

POLICIES = {
    "plain": SamplingParams(),
    "filtered": SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.01),
    "penalised": SamplingParams(repetition_penalty=1.1, frequency_penalty=0.2, no_repeat_ngram_size=4),
    "greedy": SamplingParams(temperature=0),
}
"""The policies under which every prompt is sampled."""


@dataclass(frozen=True)
class SelfTest:
    """What was found.

    Attributes:
        samples, tokens: drawn by the workers and scored by the learner.
        distances: quantiles of |learner - record| of the behaviour log-probs, in words.
        ratio: the importance ratio of a whole completion that lies farthest from 1.
        faults: what is wrong, one line each.
    """

    samples: int
    tokens: int
    distances: str
    ratio: float
    faults: tuple[str, ...]

    def lines(self) -> list[str]:
        """For people."""
        return [
            *self.faults,
            f"{self.samples} samples, {self.tokens} tokens: drawn twice by workers, and scored as a learner does",
            f"differences of log-probs: {self.distances}",
            f"importance ratio farthest from 1: {self.ratio:.6f}",
            "passed" if not self.faults else f"failed: {len(self.faults)} faults",
        ]


def selftest(
    checkpoint: str,
    *,
    learner: str | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    workers: int = 1,
    max_new_tokens: int = 64,
    geometry: Geometry = GEOMETRY,
) -> SelfTest:
    """Samples on workers, and scores what came with weights that this process loads for itself.

    Args:
        checkpoint: what the workers sample from.
        learner: what this process scores with; by default the same.
        dtype: of the model's matrix products, here and there.
        workers: how many.
        max_new_tokens: of every sample.
        geometry: of the engines.
    """
    faults: list[str] = []
    with Rollouts(checkpoint, workers=Placement(workers, cpus=0), geometry=geometry, dtype=dtype) as rollouts:
        drawn = [
            trajectory
            for name, params in POLICIES.items()
            for group in rollouts.sample(
                [{"id": f"{name} {i}", "prompt": prompt} for i, prompt in enumerate(PROMPTS)],
                params.replace(n=4, max_new_tokens=max_new_tokens),
            )
            for trajectory in group
        ]
        for record, (again,) in zip(drawn, rollouts.branch(Branch(record, 0) for record in drawn), strict=True):
            fault = difference(record, again, bound=None)
            faults += [f"drawn again: {fault}"] if fault else []

    engine = Engine(load_checkpoint(learner or checkpoint), geometry, dtype)
    distances, logs = Distances(), []
    requests = {index: _scoring(index, record) for index, record in enumerate(drawn)}
    for group in engine.generate(requests.values()):
        (completion,) = group.completions
        record = drawn[int(group.prompt_id)]
        distances.add(record, completion)
        logs.append(float(completion.behaviour_logprobs.sum(dtype=np.float64)) - record.behaviour_logprob)
    if far := distances.fault(dtype):
        faults.append(f"the learner's log-probs: {far}; workers and learner do not compute the same function")
    return SelfTest(
        samples=len(drawn),
        tokens=sum(record.completion_len for record in drawn),
        distances=str(distances),
        ratio=float(np.exp(max(logs, key=abs))),
        faults=tuple(faults),
    )


def _scoring(index: int, record: Trajectory) -> Request:
    return Request(
        str(index),
        record.prompt_tokens,
        SamplingParams.from_dict(record.policy),
        sample_indices=(record.sample_index,),
        given=(record.completion_tokens,),
        forward=True,
    )
