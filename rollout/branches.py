"""Branch: a recorded trajectory taken up again from one of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollout.json_values import shown
from rollout.prompts import Prompt
from rollout.trajectory import Trajectory
from sampling.errors import ConfigError
from sampling.params import SamplingParams
from sampling.types import Request


@dataclass(frozen=True)
class Branch:
    """The first `keep` tokens of a trajectory, and how to go on from there.

    With nothing else given the rest is drawn as it was, to the bit. The kept tokens are read by the programs that draw,
    so the record of a branch holds their log-probs too, under its own policy.

    Attributes:
        trajectory: where to begin; what it was drawn from must be what draws now.
        keep: completion tokens to keep, from 0 to all of them.
        params: another policy; None keeps the recorded one.
        sample_indices: samples to draw in place of the recorded one; None keeps it.
        seed: with the prompt id and `sample_indices` it gives their keys; the recorded key is used without them.
    Raises:
        ConfigError: `keep` is out of range, or a seed is given without sample indices.
    """

    trajectory: Trajectory
    keep: int
    params: SamplingParams | None = None
    sample_indices: tuple[int, ...] | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        most = self.trajectory.completion_len
        if isinstance(self.keep, bool) or not isinstance(self.keep, int) or not 0 <= self.keep <= most:
            raise ConfigError(f"keep: expected 0 .. {most}, the tokens of the completion, got {shown(self.keep)}")
        if self.seed is not None and self.sample_indices is None:
            raise ConfigError("seed: the recorded key needs none; give sample_indices with it")

    @property
    def prompt(self) -> Prompt:
        """The trajectory's prompt, with its metadata."""
        record = self.trajectory
        return Prompt(record.prompt_id, tokens=tuple(record.prompt_tokens.tolist()), metadata=record.metadata)

    def request(self) -> Request:
        """What to ask an engine for."""
        record = self.trajectory
        indices = (record.sample_index,) if self.sample_indices is None else tuple(self.sample_indices)
        return Request(
            record.prompt_id,
            record.prompt_tokens,
            SamplingParams.from_dict(record.policy) if self.params is None else self.params,
            run_seed=self.seed or 0,
            sample_indices=indices,
            given=(np.asarray(record.completion_tokens[: self.keep]),) * len(indices),
            keys=(record.key,) if self.sample_indices is None else (),
        )
