"""Metrics: what a training job wrote down after every step, read while it may still be writing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollout.json_values import shown
from sampling.errors import RecordError

METRICS_NAME = "metrics.jsonl"


@dataclass(frozen=True, eq=False)
class Metrics:
    """The steps of a training job, in order.

    Attributes:
        steps: int64 [steps], ascending.
        columns: by name float64 [steps]; NaN where a step has no such number. What no step has is absent.
        not_finite: by name in how many steps NaN or an infinity was recorded, which `columns` holds as NaN.
    """

    steps: np.ndarray
    columns: Mapping[str, np.ndarray]
    not_finite: Mapping[str, int]

    def measured(self, name: str) -> np.ndarray:
        """The measured numbers of a column, in the order of the steps; empty if there are none."""
        column = self.columns.get(name, np.zeros(0))
        return column[np.isfinite(column)]

    def evaluations(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """A figure of the held-out prompts: after how many steps, and what it was then."""
        found = [
            (step + ahead, value)
            for column, ahead in ((f"initial_{name}", 0), (name, 1))
            for step, value in zip(self.steps, self.columns.get(column, ()), strict=False)
            if np.isfinite(value)
        ]
        steps, values = zip(*found, strict=True) if found else ((), ())
        return np.array(steps, np.int64), np.array(values)


def read_metrics(path: Path) -> Metrics:
    """Reads a metrics file. A last line that is cut off is one that is being written, and is left out.

    Where a step stands there twice, because a job began again from an earlier checkpoint, the later one counts.

    Raises:
        RecordError: any other line is no JSON object with a step, or the file cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from error
    rows: dict[int, dict[str, float]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise RecordError(f"{path}, line {number}: expected a JSON object, got {shown(line[:80])}") from error
        if not isinstance(values, dict) or type(values.get("step")) is not int:
            raise RecordError(f"{path}, line {number}: expected an object with a whole number 'step', got {values!r}")
        rows[values["step"]] = {
            name: float(value) for name, value in values.items() if type(value) in (int, float) and name != "step"
        }
    steps = sorted(rows)
    columns: dict[str, np.ndarray] = {}
    not_finite: dict[str, int] = {}
    for name in dict.fromkeys(name for step in steps for name in rows[step]):
        column = np.array([rows[step].get(name, np.nan) for step in steps])
        finite = np.isfinite(column)
        if broken := sum(name in rows[step] for step in steps) - int(finite.sum()):
            not_finite[name] = broken
        if finite.any():
            columns[name] = np.where(finite, column, np.nan)
    return Metrics(np.array(steps, np.int64), columns, not_finite)
