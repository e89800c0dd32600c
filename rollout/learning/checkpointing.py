"""Checkpoints of a learner: its state by orbax, and a few plain values beside it. Nothing in them is pickled."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import LatestN

from rollout.json_values import require_json, shown
from rollout.learning.learner import LearnerState
from sampling.errors import CheckpointError, ConfigError, RunError

STATE, NOTES = "state", "notes"
"""Items of a checkpoint."""


@dataclass(frozen=True)
class RestoredCheckpoint:
    """What a checkpoint holds.

    Attributes:
        step: under which it was saved.
        state: of the learner, leaves NumPy.
        notes: the plain values that were saved beside it.
    """

    step: int
    state: LearnerState
    notes: dict[str, Any]


class Checkpoints:
    """The checkpoints of a training run, one directory for each, named by its step.

    A checkpoint is whole or absent: it is written under a temporary name and renamed.

    Args:
        directory: made if missing.
        keep: how many of the latest stay; older ones are removed after a newer one is whole.
    """

    def __init__(self, directory: str | Path, keep: int = 2) -> None:
        if keep < 1:
            raise ConfigError(f"checkpoints: keep: expected at least 1, got {keep}")
        self.directory = Path(directory).absolute()
        logging.getLogger("absl").setLevel(logging.WARNING)  # orbax tells every step of its work
        options = ocp.CheckpointManagerOptions(
            preservation_policy=LatestN(keep),
            enable_async_checkpointing=False,
            cleanup_tmp_directories=True,
        )
        handlers = {STATE: ocp.StandardCheckpointHandler(), NOTES: ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.directory, options=options, item_handlers=handlers)

    def save(self, step: int, state: LearnerState, notes: dict[str, Any]) -> None:
        """Commits a checkpoint, over an older one of the same step if there is one.

        Args:
            notes: plain JSON values: data cursor, seed, identity of the config.
        Raises:
            RunError: it cannot be written; earlier ones are untouched.
        """
        require_json(notes, "checkpoint notes", ConfigError)
        items = ocp.args.Composite(
            **{STATE: ocp.args.StandardSave(jax.device_get(_named(state))), NOTES: ocp.args.JsonSave(notes)},
        )
        try:
            if step in self.steps:
                self._manager.delete(step)
            self._manager.save(step, args=items, force=True)
            self._manager.wait_until_finished()
        except OSError as error:
            raise RunError(
                f"{self.directory}: checkpoint {step} cannot be written: {error.strerror or error}; earlier ones are"
                " safe, start the same command again to continue from there"
            ) from error

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of which there is a whole checkpoint, ascending."""
        return tuple(sorted(self._manager.all_steps()))

    def restore(self, like: LearnerState, step: int | None = None) -> RestoredCheckpoint:
        """Reads a checkpoint.

        Args:
            like: the state of the learner that is to continue; its values do not matter.
            step: which one; None: the latest.
        Raises:
            CheckpointError: there is none, it is damaged, or it is of another model or optimizer; the message names
                the first leaf that differs.
        """
        if not self.steps:
            raise CheckpointError(f"{self.directory}: expected a checkpoint of a learner, found none")
        step = self.steps[-1] if step is None else step
        if step not in self.steps:
            raise CheckpointError(
                f"{self.directory}: expected a checkpoint of step {step}, found those of {list(self.steps)}"
            )
        place = f"{self.directory / str(step)}"
        # Asked for as NumPy arrays, so that nothing is tied to the devices of the run that saved it.
        wanted = {name: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape) for name, leaf in _named(like).items()}
        try:
            stored = self._manager.item_metadata(step)[STATE]
            _require_same(place, dict(stored.tree if hasattr(stored, "tree") else stored), wanted)
            items = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    **{STATE: ocp.args.StandardRestore(wanted), NOTES: ocp.args.JsonRestore()},
                ),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{place}: cannot be read: {shown(str(error))}; remove it to continue from an earlier one"
            ) from error
        leaves = [np.asarray(items[STATE][name]) for name in wanted]
        state = jax.tree.unflatten(jax.tree.structure(like), leaves)
        return RestoredCheckpoint(step, state, items[NOTES])


def _named(state: LearnerState) -> dict[str, Any]:
    """Every leaf under its path, so that no class has to be found again to read it."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _require_same(place: str, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises CheckpointError where two trees of arrays differ."""
    for name in [*wanted, *(name for name in stored if name not in wanted)]:
        shapes = [
            f"{np.dtype(tree[name].dtype)} {list(tree[name].shape)}" if name in tree else "none"
            for tree in (wanted, stored)
        ]
        if shapes[0] != shapes[1]:
            raise CheckpointError(
                f"{place}: {name}: expected {shapes[0]}, found {shapes[1]}; it is of another model, optimizer or"
                " algorithm: continue with the config that it was made with"
            )
