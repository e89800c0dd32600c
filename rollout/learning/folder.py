"""A training run on disk.

    DIR/config.yaml                         the resolved config
    DIR/metrics.jsonl                       one object per step
    DIR/trajectories/step-000012.parquet    what was drawn for the step
    DIR/evaluations/step-000012.parquet     held-out prompts, by the weights after 12 steps
    DIR/checkpoints/                        the learner's state
    DIR/changes.jsonl                       where the config was changed on the way: from which step on, and what

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
from rollout.learning.train_config import FIXED, TrainConfig, load_train_config
from rollout.store import CONFIG_NAME, locked, opening
from rollout.trajectory import Trajectory
from sampling.errors import ConfigError

METRICS_NAME = "metrics.jsonl"
CHANGES_NAME = "changes.jsonl"
TRAJECTORIES_NAME, EVALUATIONS_NAME, CHECKPOINTS_NAME = "trajectories", "evaluations", "checkpoints"

Changes = dict[str, tuple[Any, Any]]
"""Keys of the config, each with its value so far and its value from now on."""


class TrainFolder:
    """Writes a training run, or continues one. A context manager, which holds the folder's lock."""

    def __init__(self, path: Path, lock: Any, config: TrainConfig, changes: Changes) -> None:
        self.path, self._lock, self._config, self._changes = path, lock, config, changes

    @classmethod
    def open(cls, path: str | Path, config: TrainConfig, *, accept_changes: bool = False) -> Self:
        """Makes the folder, or opens the same run again.

        Args:
            accept_changes: opens a run of another config, too, as long as it can go on with the new values; `adopt`
                then records them.
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
            changes: Changes = {}
            if (path / CONFIG_NAME).exists():
                changes = differences(load_train_config(path / CONFIG_NAME), config)
                _require_acceptable(path, changes, accept_changes)
            folder = cls(path, lock, config, changes)
            if not changes:
                folder._write_config()
            return folder
        except BaseException:
            lock.close()
            raise

    def adopt(self, step: int) -> Changes:
        """Goes on with the new config. What has changed is recorded, and returned.

        Args:
            step: the first one with the new values.
        """
        if self._changes:  # recorded first: a change that is made but not told would be worse than one told twice
            _append(self.path / CHANGES_NAME, {"step": step, "changes": self._changes})
            self._write_config()
        return self._changes

    def _write_config(self) -> None:
        text = yaml.safe_dump(self._config.to_dict(), sort_keys=False, allow_unicode=True)
        write_atomically(self.path / CONFIG_NAME, lambda file: file.write(text.encode()))

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
        _append(self.path / METRICS_NAME, metrics)

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


def in_words(changes: Changes) -> str:
    """Changes on one line."""
    return ", ".join(f"{key} {before!r} -> {after!r}" for key, (before, after) in changes.items())


def _append(path: Path, line: dict[str, Any]) -> None:
    """Adds a line of JSON to a file, and sees it to the disk."""
    with path.open("a") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _require_acceptable(path: Path, changes: Changes, accepted: bool) -> None:
    """Raises ConfigError for changes that were not accepted, and for those that cannot be."""
    fixed = [key for key in changes if key in FIXED or key.startswith(tuple(f"{name}." for name in FIXED))]
    if not changes or (accepted and not fixed):
        return
    told = fixed if accepted else list(changes)
    lines = [f"  {key}: {changes[key][0]!r} there, {changes[key][1]!r} here" for key in told]
    if accepted:
        head = f"{path}: these keys of a training run can never change:"
        advice = "They say which samples are drawn next; choose another --out to begin a run of its own"
    else:
        head = f"{path}: holds another training run; these keys differ:"
        advice = "Choose another --out, or give the same values to continue that run"
        advice += "" if fixed else "; --accept-changes continues it with the new ones"
    raise ConfigError("\n".join([head, *lines, advice]))
