"""What a training run tells: a line for every step, figures of evaluations, and the whole in the end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from rich.console import Console
from rich.table import Table

from rollout.learning.advantages import has_signal
from rollout.learning.batch_line import Batch, rewards_of
from rollout.learning.batches import CUT_OFF
from rollout.learning.folder import METRICS_NAME
from rollout.learning.step_metrics import StepMetrics
from rollout.trajectory import Trajectory
from sampling.engine_stats import EngineStats

TIMES = ("tokens_per_s", "generate_s", "learn_s", "step_s", "occupancy")
"""Figures that are not the same in two runs of one config."""


class Clock:
    """Seconds and the workers' counts between the batches.

    Args:
        counts: gives those of all workers together.
        slots: of one worker.
    """

    def __init__(self, counts: Callable[[], EngineStats], slots: int) -> None:
        self._read, self._slots = counts, slots
        self._finished = self._whole = time.monotonic()
        self._generated: dict[int, float] = {}
        self._counts = self._now()

    def whole(self, step: int) -> None:
        """A batch is whole. Its drawing took the time since the one before was whole, or since that was learnt."""
        now = time.monotonic()
        self._generated[step], self._whole = now - max(self._whole, self._finished), now

    def finish(self, step: int) -> tuple[float, float, float | None]:
        """A step is learnt: seconds of drawing it, seconds since the last one, and slot occupancy since then."""
        now, counts = time.monotonic(), self._now()
        step_s, self._finished = now - self._finished, now
        busy, steps = counts[0] - self._counts[0], counts[1] - self._counts[1]
        self._counts = counts
        return self._generated.pop(step), step_s, busy / (steps * self._slots) if steps > 0 else None

    def _now(self) -> tuple[int, int]:
        engines = self._read()
        return engines.busy_row_steps, engines.steps


def step_line(batch: Batch, metrics: StepMetrics, clock: Clock, learn_s: float) -> dict[str, Any]:
    """One line of metrics.jsonl."""
    rows, groups = batch.drawn, len(batch.groups) + len(batch.dropped)
    silent = len(batch.dropped) + sum(not has_signal(rewards_of(group)) for group in batch.groups)
    tokens = sum(row.completion_len for row in rows)
    generate_s, step_s, occupancy = clock.finish(batch.step)
    return {
        "step": batch.step,
        **_reward_figures(rows),
        **{name: value for name, value in metrics.to_dict().items() if name not in ("step", "rows", "tokens")},
        "learnt_rows": metrics.rows,
        "learnt_tokens": metrics.tokens,
        "groups": len(batch.groups),
        "groups_dropped": len(batch.dropped),
        "zero_variance_share": silent / groups if groups else None,
        **_length_figures(rows),
        "tokens": tokens,
        "tokens_per_s": tokens / max(generate_s, 1e-9),
        "generate_s": generate_s,
        "learn_s": learn_s,
        "step_s": step_s,
        "occupancy": occupancy,
    }


def evaluation_figures(rows: Sequence[Trajectory]) -> dict[str, Any]:
    """Of held-out samples. A sample is right if its reward is 1; one that failed or has no reward is not."""
    right = sum(row.reward is not None and row.reward >= 1.0 for row in rows)
    return {
        "eval_accuracy": right / len(rows) if rows else None,
        "eval_reward_mean": _mean([row.reward for row in rows if row.reward is not None]),
        "eval_length_mean": _mean([row.completion_len for row in rows]),
    }


def _reward_figures(rows: Sequence[Trajectory]) -> dict[str, Any]:
    rewards = [row.reward for row in rows if row.reward is not None]
    return {
        "reward_mean": _mean(rewards),
        "reward_std": float(np.std(rewards)) if rewards else None,
        "rewards_missing": len(rows) - len(rewards),
        "failed": sum(row.failed for row in rows),
    }


def _length_figures(rows: Sequence[Trajectory]) -> dict[str, Any]:
    lengths = [row.completion_len for row in rows]
    return {
        "length_mean": _mean(lengths),
        "length_max": max(lengths, default=None),
        "truncated_share": _mean([row.stop_reason in CUT_OFF for row in rows]),
    }


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


@dataclass(frozen=True)
class TrainSummary:
    """A training run from its metrics: the first and the last line, and every evaluation in between."""

    path: Path
    lines: tuple[dict[str, Any], ...]

    @classmethod
    def from_folder(cls, path: Path) -> Self:
        """Reads metrics.jsonl."""
        metrics = path / METRICS_NAME
        text = metrics.read_text() if metrics.exists() else ""
        return cls(path, tuple(json.loads(line) for line in text.splitlines()))

    def render(self, console: Console) -> None:
        """Prints one line per figure."""
        table = Table.grid(padding=(0, 2))
        table.add_row("steps", str(len(self.lines)))
        for name in ("reward_mean", "loss", "length_mean", "mismatch_p999"):
            values = [line[name] for line in self.lines if line.get(name) is not None]
            if values:
                table.add_row(name, f"{values[0]:.4g} at first, {values[-1]:.4g} at last")
        names = "initial_eval_accuracy", "eval_accuracy"
        accuracies = [line[name] for line in self.lines for name in names if line.get(name) is not None]
        if accuracies:
            table.add_row("eval_accuracy", ", ".join(f"{accuracy:.3f}" for accuracy in accuracies))
        table.add_row("wall time", f"{sum(line['step_s'] for line in self.lines):.1f} s in the steps")
        console.print(table)
        console.print(f"  {self.path / METRICS_NAME}", markup=False, highlight=False, soft_wrap=True)
