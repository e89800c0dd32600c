"""What a report is made from: a run's folder, read at any time, also while the run writes to it.

    training DIR        rollout train           sampling DIR        rollout sample
      config.yaml                                 config.yaml
      metrics.jsonl     one line a step           manifest.json
      trajectories/step-000012.parquet            trajectories/part-00000.parquet
      evaluations/step-000012.parquet
      changes.jsonl     where its config changed

Of the records only an even choice is kept. A file that cannot be read is passed over and named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from rollout.codec import read_parquet
from rollout.config_file import read_values
from rollout.learning.folder import in_words, read_changes
from rollout.manifest import MANIFEST_NAME, read_manifest
from rollout.report.metrics import METRICS_NAME, Metrics, read_metrics
from rollout.report.tally import Tally
from rollout.shards import SHARDS_NAME, check_digest
from rollout.store import CONFIG_NAME
from rollout.trajectory import Trajectory
from sampling.errors import ConfigError, RecordError, RunError

EVALUATIONS_NAME = "evaluations"

MAX_STEPS = 16
"""Steps of a training job whose completions are shown."""
MAX_GROUPS = 4
"""Prompts of each of them."""
MAX_SAMPLES = 8
"""Samples of each prompt."""
MAX_COMPARED = 8
"""Prompts of an evaluation for each way in which it can have gone: better, worse, neither."""

_STEP_FILE = re.compile(r"step-(\d+)\.parquet")


@dataclass(frozen=True)
class Shown:
    """One prompt and those of its samples that are shown side by side.

    Attributes:
        heading: where they come from: a step, or how an evaluation has changed.
        captions: one for each sample; may be empty.
        left_out: samples of the prompt that are not among them.
    """

    heading: str
    samples: tuple[Trajectory, ...]
    captions: tuple[str, ...]
    left_out: int = 0


@dataclass
class RunRecord:
    """A run as far as a report needs it.

    Attributes:
        path: its folder.
        config: the resolved configuration, as plain values.
        as_of: when the run last committed what is reported.
        metrics: of a training job; None for a sampling run.
        tally: of a sampling run's records; None for a training job.
        groups: the chosen groups, in the order of the run.
        compared: prompts of the first and the last evaluation.
        notes: what was left out and what was found, in sentences.
        faults: files that cannot be read, in words.
    """

    path: Path
    config: dict[str, Any]
    as_of: datetime
    metrics: Metrics | None = None
    tally: Tally | None = None
    groups: list[Shown] = field(default_factory=list)
    compared: list[Shown] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def read_run(path: Path) -> RunRecord:
    """Reads the folder of a training job or of a sampling run.

    Raises:
        ConfigError: it is neither.
        RunError: nothing has been written yet that could be shown.
        RecordError: its metrics or its manifest are damaged.
    """
    parts = (SHARDS_NAME, EVALUATIONS_NAME, "checkpoints")
    if (path / METRICS_NAME).exists():
        return _read_training(path)
    if (path / MANIFEST_NAME).exists():
        return _read_sampling(path)
    if (path / CONFIG_NAME).exists() and any((path / name).is_dir() for name in parts):
        raise _too_early(path)
    raise ConfigError(
        f"{path}: expected a folder made by 'rollout train' or 'rollout sample',"
        f" found neither {METRICS_NAME} nor {MANIFEST_NAME} in it"
    )


def evenly(total: int, most: int) -> list[int]:
    """At most `most` of the indices 0 .. total - 1, ascending: evenly spread, the first and the last among them.

    >>> evenly(10, 4)
    [0, 3, 6, 9]
    """
    return sorted({int(place) for place in np.linspace(0, total - 1, min(total, most)).round()}) if total else []


def _too_early(path: Path) -> RunError:
    return RunError(f"{path}: no metrics yet: no step is finished; try again after the first one")


def _read_training(path: Path) -> RunRecord:
    file = path / METRICS_NAME
    metrics = read_metrics(file)
    if not metrics.steps.size:
        raise _too_early(path)
    run = RunRecord(path, read_values(path / CONFIG_NAME), _changed_at(file), metrics=metrics)
    files = _step_files(path / SHARDS_NAME)
    chosen = [files[index] for index in evenly(len(files), MAX_STEPS)]
    for step, step_file in chosen:
        groups = _by_prompt(_rows(step_file, run))
        run.groups += [_shown(f"step {step}", groups[index]) for index in evenly(len(groups), MAX_GROUPS)]
    if files:
        run.notes.append(
            f"Completions of {len(chosen)} of {len(files)} steps are shown, evenly chosen, with at most {MAX_GROUPS}"
            f" prompts of a step and {MAX_SAMPLES} samples of a prompt."
        )
    for step, changes in read_changes(path):
        run.notes.append(f"From step {step} on the config was another: {in_words(changes)}.")
    _compare_evaluations(run)
    return run


def _read_sampling(path: Path) -> RunRecord:
    manifest = read_manifest(path)
    if not manifest.shards:
        raise RunError(f"{path}: no group is finished yet; try again when the run has committed some")
    tally = Tally(manifest)
    run = RunRecord(path, read_values(path / CONFIG_NAME), _changed_at(path / MANIFEST_NAME), tally=tally)
    most = MAX_STEPS * MAX_GROUPS
    chosen = set(evenly(manifest.groups, most))
    first = 0
    for shard in manifest.shards:
        file = path / SHARDS_NAME / shard.file
        try:
            check_digest(file, shard)
        except RecordError as error:
            run.faults.append(str(error))
        else:
            for index, (_, rows) in enumerate(groupby(_rows(file, run), key=lambda row: row.prompt_id), first):
                group = list(rows)
                tally.add(group)
                if index in chosen:
                    run.groups.append(_shown("", group))
        first += shard.groups
    run.notes.append(
        f"Completions of {len(chosen)} of {manifest.groups} prompts are shown, evenly chosen, with at most"
        f" {MAX_SAMPLES} samples of each; the figures cover all."
    )
    if manifest.finished_at is None:
        run.notes.append("The run is not finished.")
    return run


def _compare_evaluations(run: RunRecord) -> None:
    """Puts samples of the first and the last evaluation side by side, prompts sorted by what became of their reward."""
    files = _step_files(run.path / EVALUATIONS_NAME)
    if not files:
        return
    (step, last), *others = reversed(files)
    after = {group[0].prompt_id: group for group in _by_prompt(_rows(last, run))}
    if not others:
        run.notes.append("There is one evaluation so far, so nothing to compare it with.")
        chosen = [[*after.values()][index] for index in evenly(len(after), MAX_COMPARED)]
        run.compared = [_shown("evaluation", group, f"step {step}") for group in chosen]
        return
    first_step, first = others[-1]
    before = {group[0].prompt_id: group for group in _by_prompt(_rows(first, run))}
    sorted_out: dict[str, list[str]] = {"better": [], "worse": [], "as before": []}
    for prompt_id in (name for name in after if name in before):
        gain = _mean_reward(after[prompt_id]) - _mean_reward(before[prompt_id])
        sorted_out["better" if gain > 0 else "worse" if gain < 0 else "as before"].append(prompt_id)
    for heading, ids in sorted_out.items():
        for prompt_id in (ids[index] for index in evenly(len(ids), MAX_COMPARED)):
            old, new = (
                _shown(heading, side[prompt_id], f"{when}, step {at}", MAX_SAMPLES // 2)
                for side, when, at in ((before, "before", first_step), (after, "after", step))
            )
            run.compared.append(
                Shown(heading, old.samples + new.samples, old.captions + new.captions, old.left_out + new.left_out)
            )
    counts = ", ".join(f"{len(ids)} {heading}" for heading, ids in sorted_out.items())
    run.notes.append(
        f"Evaluations of step {first_step} and step {step}, by reward: {counts}; at most {MAX_COMPARED} of each"
        " are shown."
    )


def _mean_reward(group: list[Trajectory]) -> float:
    """Over the samples that have a reward; one without counts as nothing gained."""
    rewards = [row.reward for row in group if row.reward is not None]
    return sum(rewards) / len(rewards) if rewards else 0.0


def _shown(heading: str, group: list[Trajectory], caption: str = "", most: int = MAX_SAMPLES) -> Shown:
    samples = tuple(group[index] for index in evenly(len(group), most))
    return Shown(heading, samples, (caption,) * len(samples), len(group) - len(samples))


def _rows(file: Path, run: RunRecord) -> Iterator[Trajectory]:
    """Records of a file as far as it can be read; what is wrong with it becomes a fault."""
    try:
        yield from read_parquet(file)
    except RecordError as error:
        run.faults.append(str(error))


def _by_prompt(rows: Iterable[Trajectory]) -> list[list[Trajectory]]:
    groups: dict[str, list[Trajectory]] = {}
    for row in rows:
        groups.setdefault(row.prompt_id, []).append(row)
    return list(groups.values())


def _step_files(folder: Path) -> list[tuple[int, Path]]:
    """The files of a folder with their steps, ascending; those that are being written have other names."""
    names = {path: _STEP_FILE.fullmatch(path.name) for path in folder.glob("step-*.parquet")}
    return sorted((int(match[1]), path) for path, match in names.items() if match)


def _changed_at(file: Path) -> datetime:
    return datetime.fromtimestamp(file.stat().st_mtime, UTC)
