"""What `rollout score` reads: the trajectories of one of our runs, or a file that another system wrote.

`survey` reads it once before anything is started, so that a bad row costs seconds and not hours.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollout.json_values import canonical_json
from rollout.manifest import read_manifest
from rollout.scoring.config import Law
from rollout.scoring.foreign import RecordedSequence, read_foreign
from rollout.shards import read_trajectories
from sampling.checkpoints import inspect_checkpoint
from sampling.errors import ConfigError, PromptError
from sampling.params import SamplingParams
from sampling.plugins import Plugins
from sampling.plugins.contract import require_contract


@dataclass(frozen=True)
class SourceFacts:
    """What is scored.

    Attributes:
        path: where it was found.
        sha256: of its content.
        rows: sequences in it.
        tokens: completion tokens in it.
        newest_version: largest policy version in it; None if it tells none.
    """

    path: str
    sha256: str
    rows: int
    tokens: int
    newest_version: int | None


def read_sequences(source: Path) -> Iterator[RecordedSequence]:
    """The sequences of a run's folder or a file, in order, as a stream.

    Raises:
        ConfigError: the source cannot be read, or is of another kind.
        PromptError: a row of a file cannot be used.
        RecordError: a file of a run is damaged.
    """
    return _from_run(source) if source.is_dir() else read_foreign(source)


def digest_source(source: Path) -> str:
    """sha256 of what `read_sequences` reads, hexadecimal, so that a continued job meets the same rows.

    Raises:
        ConfigError: the source cannot be read.
    """
    if source.is_dir():
        shards = read_manifest(source).shards
        return hashlib.sha256(" ".join(shard.sha256 for shard in shards).encode()).hexdigest()
    try:
        with source.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror}") from error


def _from_run(folder: Path) -> Iterator[RecordedSequence]:
    row = -1
    for row, record in enumerate(read_trajectories(folder)):
        yield RecordedSequence(
            row=row,
            where=f"{folder}, prompt {record.prompt_id!r}, sample {record.sample_index}",
            prompt_id=record.prompt_id,
            sample_index=record.sample_index,
            prompt_tokens=record.prompt_tokens,
            completion_tokens=record.completion_tokens,
            given_len=record.given_len,
            forced=record.forced,
            behaviour_logprobs=record.behaviour_logprobs,
            policy_versions=record.policy_versions,
            policy=canonical_json(record.policy),
            reward=record.reward,
            failure=record.failure,
        )
    if row < 0:
        raise ConfigError(f"{folder}: expected at least one committed trajectory, found none; let the run go on first")


def survey(source: Path, laws: Sequence[Law], plugins: Plugins) -> SourceFacts:
    """Reads the whole source and checks each row against each law.

    Args:
        plugins: those that policies may name.
    Raises:
        ConfigError, PromptError: a row, a policy or a plugin cannot be used.
        CheckpointError: a checkpoint cannot be found.
        RecordError: a file of a run is damaged.
    """
    checkpoints = {law.checkpoint: inspect_checkpoint(law.checkpoint) for law in laws}
    known = {name: checkpoint.tokenizer_len for name, checkpoint in checkpoints.items()}
    for vocab_size in {checkpoint.config.vocab_size for checkpoint in checkpoints.values()}:
        require_contract(plugins, vocab_size)
    for law in laws:
        if law.params:
            plugins.resolved(law.params, f"scorer {law.name}: sampling")
            law.params.require_tokens(known[law.checkpoint], f"scorer {law.name}: sampling")
    rows = tokens = 0
    newest: int | None = None
    for sequence in read_sequences(source):
        rows, tokens = rows + 1, tokens + sequence.completion_tokens.size
        if sequence.failure is None:
            for checkpoint, num_tokens in known.items():
                _require_ids(sequence, checkpoint, num_tokens)
            for law in laws:
                if law.params is None:
                    _require_policy(sequence, law, known[law.checkpoint], plugins)
        versions = sequence.policy_versions
        if versions is not None and versions.size:
            newest = int(versions.max()) if newest is None else max(newest, int(versions.max()))
    return SourceFacts(str(source), digest_source(source), rows, tokens, newest)


@functools.lru_cache(maxsize=4096)
def recorded_params(policy: str) -> SamplingParams:
    """The parameters in a record's `policy`.

    Raises:
        ConfigError: they are not what this release knows.
    """
    return SamplingParams.from_dict(json.loads(policy))


def _require_ids(sequence: RecordedSequence, checkpoint: str, known: int) -> None:
    for name in ("prompt_tokens", "completion_tokens"):
        ids = getattr(sequence, name)
        outside = np.flatnonzero((ids < 0) | (ids >= known))
        if outside.size:
            raise PromptError(
                f"{sequence.where}: {name}[{outside[0]}]: expected token ids in 0 .. {known - 1}, those of"
                f" {checkpoint}, got {ids[outside[0]]}"
            )


def _require_policy(sequence: RecordedSequence, law: Law, known: int, plugins: Plugins) -> None:
    if sequence.policy is None:
        raise PromptError(
            f"{sequence.where}: expected a policy, which scorer {law.name!r} takes from each record, found none;"
            " name it yourself, as in --set sampling.temperature=1.0"
        )
    fault = _fault(sequence.policy, known, plugins)
    if fault:
        raise PromptError(f"{sequence.where}: policy: {fault}")


@functools.lru_cache(maxsize=4096)
def _fault(policy: str, known: int, plugins: Plugins) -> str:
    try:
        plugins.resolved(recorded_params(policy)).require_tokens(known, "sampling")
    except ConfigError as error:
        return str(error)
    return ""
