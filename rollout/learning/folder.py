"""A training run on disk.

    DIR/config.yaml                         the resolved config
    DIR/metrics.jsonl                       one object per step
    DIR/trajectories/step-000012.parquet    what was drawn for the step
    DIR/evaluations/step-000012.parquet     held-out prompts, by the weights after 12 steps
    DIR/checkpoints/                        the learner's state

What lies beyond the newest checkpoint is drawn and learnt again when a run continues, and replaced.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import yaml

from rollout.atomic import write_atomically
from rollout.codec import write_parquet
from rollout.config import differences
from rollout.learning.train_config import TrainConfig, load_train_config
from rollout.store import CONFIG_NAME, locked, opening
from rollout.trajectory import Trajectory
from sampling.errors import ConfigError

METRICS_NAME = "metrics.jsonl"
TRAJECTORIES_NAME, EVALUATIONS_NAME, CHECKPOINTS_NAME = "trajectories", "evaluations", "checkpoints"


class TrainFolder:
    """Writes a training run, or continues one. A context manager, which holds the folder's lock."""

    def __init__(self, path: Path, lock: Any) -> None:
        self.path, self._lock = path, lock

    @classmethod
    def open(cls, path: str | Path, config: TrainConfig) -> Self:
        """Makes the folder, or opens the same run again.

        Raises:
            ConfigError: it holds another run (the differing keys are listed) or foreign files.
            RunError: another process is writing to it.
        """
        path = Path(path)
        with opening(path):
            if path.is_dir() and not (path / CONFIG_NAME).exists() and any(path.iterdir()):
                names = ", ".join(sorted(entry.name for entry in path.iterdir())[:5])
                raise ConfigError(f"{path}: expected a new or empty folder, or a training run; it holds {names}")
            lock = locked(path, TRAJECTORIES_NAME, EVALUATIONS_NAME)
        try:
            if (path / CONFIG_NAME).exists():
                _require_same(path, config)
            text = yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)
            write_atomically(path / CONFIG_NAME, lambda file: file.write(text.encode()))
            return cls(path, lock)
        except BaseException:
            lock.close()
            raise

    @property
    def checkpoints(self) -> Path:
        """Where the learner's state is kept."""
        return self.path / CHECKPOINTS_NAME

    def rewind(self, step: int) -> int:
        """Removes what was written of this step and later ones; evaluations only of later ones.

        Returns:
            Steps that have a line of metrics.
        """
        metrics = self.path / METRICS_NAME
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < step]
        write_atomically(metrics, lambda file: file.write("".join(kept).encode()))
        for name, first in ((TRAJECTORIES_NAME, step), (EVALUATIONS_NAME, step + 1)):
            for file in (self.path / name).glob("step-*.parquet"):
                if int(file.stem.removeprefix("step-")) >= first:
                    file.unlink()
        return len(kept)

    def add_metrics(self, metrics: dict[str, Any]) -> None:
        """Appends one step's line."""
        with (self.path / METRICS_NAME).open("a") as file:
            file.write(json.dumps(metrics, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def add_step(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Writes what was drawn for a step."""
        self._write(TRAJECTORIES_NAME, step, trajectories)

    def add_evaluation(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Writes an evaluation of the weights after so many steps."""
        self._write(EVALUATIONS_NAME, step, trajectories)

    def _write(self, folder: str, step: int, trajectories: Sequence[Trajectory]) -> None:
        path = self.path / folder / f"step-{step:06d}.parquet"
        write_atomically(path, lambda file: write_parquet(file, trajectories))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()


def _require_same(path: Path, config: TrainConfig) -> None:
    changed = differences(load_train_config(path / CONFIG_NAME), config)
    if changed:
        lines = [f"  {key}: {theirs!r} there, {ours!r} here" for key, (theirs, ours) in changed.items()]
        advice = "Choose another --out, or give the same values to continue that run"
        raise ConfigError("\n".join([f"{path}: holds another training run; these keys differ:", *lines, advice]))
