"""Plain records for tests, in which only the field at hand has to be spelled out."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollout.trajectory import Trajectory
from sampling.params import SamplingParams
from sampling.types import Completion, StopReason


def completion(prompt_id: str = "p", sample_index: int = 0, **changes: Any) -> Completion:
    """Two drawn tokens after a prompt of three; `changes` replace fields."""
    fields: dict[str, Any] = dict(
        prompt_id=prompt_id,
        sample_index=sample_index,
        prompt_tokens=np.array([1, 5, 6], np.int32),
        completion_tokens=np.array([7, 8], np.int32),
        behaviour_logprobs=np.array([-0.5, -0.7], np.float32),
        model_logprobs=np.array([-0.6, -0.9], np.float32),
        log_kept_mass=np.array([-0.1, -0.2], np.float32),
        key=np.array([3, 4], np.uint32),
        params=SamplingParams(top_p=0.95),
        given_len=0,
        ended_at=None,
        stop_reason=StopReason.EOS,
        wait_s=0.25,
        decode_s=0.5,
    )
    fields |= changes
    tokens = fields["completion_tokens"]
    per_token: dict[str, Any] = dict(
        entropy=np.full(len(tokens), 0.9, np.float32),
        policy_versions=np.zeros(len(tokens), np.int32),
        support_sizes=np.zeros(len(tokens), np.int32),
        support_ids=np.zeros(0, np.int32),
    )
    return Completion(**{**per_token, **fields})


def trajectory(prompt_id: str = "p", sample_index: int = 0, **changes: Any) -> Trajectory:
    """The record of `completion`; `changes` replace fields of either."""
    made_with: dict[str, Any] = {
        "run_id": "run",
        "weights_digest": "w0",
        "numerics_fingerprint": "n0",
        "text": "ab",
        "worker": "worker-0",
    }
    own = {name: changes.pop(name) for name in list(changes) if name in (*made_with, "score", "metadata", "group_id")}
    return Trajectory.from_completion(completion(prompt_id, sample_index, **changes), **{**made_with, **own})


def group(prompt_id: str, n: int = 2, **changes: Any) -> list[Trajectory]:
    """All samples of one prompt."""
    return [trajectory(prompt_id, index, **changes) for index in range(n)]
