"""Tally: what the figures of a sampling run are drawn from, gathered in one pass over its records."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import numpy as np

from rollout.manifest import Manifest
from rollout.trajectory import Trajectory
from sampling.types import StopReason


class PlaceMeans:
    """Means over all samples of what stands at each place of a completion."""

    def __init__(self) -> None:
        self._sums = np.zeros(0)
        self._counts = np.zeros(0, np.int64)

    def add(self, values: np.ndarray, drawn: np.ndarray) -> None:
        """Takes the values of one completion, [completion_len]; finite ones of drawn tokens count."""
        if (more := values.size - self._sums.size) > 0:
            self._sums, self._counts = np.pad(self._sums, (0, more)), np.pad(self._counts, (0, more))
        counted = np.isfinite(values) & drawn
        self._sums[: values.size] += np.where(counted, values, 0)
        self._counts[: values.size] += counted

    def means(self, least: int) -> np.ndarray:
        """float64 [longest completion], NaN where fewer than `least` samples had a value."""
        return np.where(self._counts >= least, self._sums / np.maximum(self._counts, 1), np.nan)


class Tally:
    """Figures of a sampling run. Failed samples are counted and not measured.

    Attributes:
        samples: records seen.
        failed: those without a usable completion.
        tokens: completion tokens of all of them.
        rewards: of every sample that has one.
        lengths: completion lengths of usable samples, by the reason why they ended.
        logprobs: behaviour log-prob of drawn tokens by place, nats.
        entropy: of the distributions they were drawn from, nats.
        kept: probability mass of the untouched model that was left to draw from.
        wall_s: seconds between the start of the run and its end; None while it is unfinished.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.samples = self.failed = self.tokens = 0
        self.rewards: list[float] = []
        self.lengths: dict[StopReason, list[int]] = {}
        self.logprobs, self.entropy, self.kept = PlaceMeans(), PlaceMeans(), PlaceMeans()
        self.wall_s: float | None = None
        if manifest.finished_at is not None:
            began, ended = map(datetime.fromisoformat, (manifest.started_at, manifest.finished_at))
            self.wall_s = (ended - began).total_seconds()

    def add(self, group: Sequence[Trajectory]) -> None:
        """Takes the samples of a prompt."""
        for row in group:
            self.samples += 1
            self.tokens += row.completion_len
            if row.failed:
                self.failed += 1
                continue
            self.lengths.setdefault(row.stop_reason, []).append(row.completion_len)
            if row.reward is not None:
                self.rewards.append(row.reward)
            self.logprobs.add(row.behaviour_logprobs, row.drawn)
            self.entropy.add(row.entropy, row.drawn)
            self.kept.add(np.exp(row.log_kept_mass), row.drawn)
