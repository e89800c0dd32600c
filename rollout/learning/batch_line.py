"""BatchLine: which prompts are drawn for which step, and when a step's batch is whole.

It knows neither workers nor weights; the loop tells it what came back and how many steps are learnt.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from rollout.groups import TrajectoryGroup
from rollout.learning.advantages import has_signal
from rollout.learning.train_config import TrainSection
from rollout.prompts import Prompt
from rollout.trajectory import Trajectory


@dataclass
class Batch:
    """The groups of one step.

    Attributes:
        step: which.
        cursor: prompts taken from the source before its first one.
        groups: that it learns from.
        dropped: groups that it does not learn from, their rewards all equal.
        expected: groups that were asked for and have not come.
        refills: prompts that replaced dropped groups.
    """

    step: int
    cursor: int
    groups: list[TrajectoryGroup] = field(default_factory=list)
    dropped: list[TrajectoryGroup] = field(default_factory=list)
    expected: int = 0
    refills: int = 0

    @property
    def drawn(self) -> list[Trajectory]:
        """Every sample, learnt from or not."""
        return [row for group in [*self.groups, *self.dropped] for row in group]


def rewards_of(group: TrajectoryGroup) -> np.ndarray:
    """Rewards float64 [samples], NaN where there is none."""
    return np.array([np.nan if row.reward is None else row.reward for row in group])


def endless(read: Callable[[], Iterable[Prompt]], samples: int, skip: int = 0) -> Iterator[Prompt]:
    """A source gone through again and again, each time with samples of other indices; `skip` prompts are left out."""
    rounds = (
        dataclasses.replace(prompt, first_sample=round_ * samples) for round_ in itertools.count() for prompt in read()
    )
    return itertools.islice(rounds, skip, None)


class BatchLine:
    """Batches in the order of their steps.

    Args:
        settings: how large batches are, and what is dropped.
        prompts: endless.
        cursor: prompts that were taken from them before.
        first: the first step.
    """

    def __init__(self, settings: TrainSection, prompts: Iterator[Prompt], cursor: int = 0, first: int = 0) -> None:
        self._settings, self._prompts = settings, prompts
        self.cursor = cursor
        self._first, self._opened = first, first
        self._open: dict[int, Batch] = {}
        self._owner: dict[tuple[str, int], Batch] = {}
        self._wanted: deque[Batch] = deque()

    @property
    def outstanding(self) -> int:
        """Groups that were asked for and have not come."""
        return len(self._owner)

    @property
    def next_step(self) -> int:
        """The step whose batch would be begun next."""
        return self._opened

    def begin(self) -> None:
        """Opens the next step's batch; its prompts come out of `next_prompt`."""
        batch = Batch(self._opened, self.cursor)
        self._open[batch.step] = batch
        self._opened += 1
        batch.expected = self._settings.prompts_per_step
        self._wanted.extend([batch] * batch.expected)

    def next_prompt(self) -> Prompt | None:
        """A prompt to draw now; None while no open batch needs one."""
        if not self._wanted:
            return None
        batch, prompt = self._wanted.popleft(), next(self._prompts)
        self.cursor += 1
        self._owner[prompt.name] = batch
        return prompt

    def add(self, group: TrajectoryGroup) -> None:
        """Takes a group that came back."""
        batch = self._owner.pop((group[0].prompt_id, group[0].sample_index))
        batch.expected -= 1
        if self._settings.zero_variance == "keep" or has_signal(rewards_of(group)):
            batch.groups.append(group)
            return
        batch.dropped.append(group)
        if batch.refills < self._settings.max_refills:
            batch.refills += 1
            batch.expected += 1
            self._wanted.appendleft(batch)

    def take(self) -> Batch | None:
        """The oldest batch, once it is whole; None before."""
        batch = self._open.get(self._first)
        if batch is None or batch.expected:
            return None
        self._first += 1
        return self._open.pop(batch.step)

    def cursor_of(self, step: int) -> int:
        """Prompts taken before the first one of a step."""
        return self._open[step].cursor if step in self._open else self.cursor
