"""`rollout explain`: why one recorded token was drawn, found out again and set beside the record."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.dataset

from rollout.codec import from_table
from rollout.config_file import load_config
from rollout.json_values import shown
from rollout.manifest import Manifest, read_manifest
from rollout.progress import ProgressReporter
from rollout.shards import SHARDS_NAME, check_digest
from rollout.trajectory import Trajectory
from sampling.checkpoints import load_backend, load_checkpoint, weights_digest
from sampling.errors import CheckpointError, ConfigError, RecordError
from sampling.explain import explain, place_in
from sampling.explanation import Candidate, Explanation
from sampling.params import SamplingParams
from sampling.types import StopReason
from sampling.vocabulary import Vocabulary, vocabulary_pieces

BOUND = {"float32": 1e-3, "bfloat16": 0.2}
"""Largest difference, in nats, that other sums explain, by dtype of the matrix products."""

COMPARED = ("behaviour_logprob", "model_logprob", "log_kept_mass", "entropy")
"""What is compared besides the token itself, all in nats."""

_SUGGESTED_AMONG = 20_000
"""Prompt ids among which a similar one is looked for: comparing many more takes minutes."""


@dataclass(frozen=True)
class Recorded:
    """What the record says of the token; see Trajectory.

    Attributes:
        given: the token was not drawn: the row was made to begin with it.
        behaviour_logprob, model_logprob, log_kept_mass, entropy: nats.
        stop_reason: why the row ended with this token; None if it went on.
    """

    given: bool
    behaviour_logprob: float
    model_logprob: float
    log_kept_mass: float
    entropy: float
    stop_reason: StopReason | None


@dataclass(frozen=True)
class TokenReport:
    """A recorded token and how it came about.

    Attributes:
        prompt_id, sample_index: the record.
        recorded: what it says of the token.
        explanation: what was computed again.
        faults: where the two disagree, in words; empty if they agree.
    """

    prompt_id: str
    sample_index: int
    recorded: Recorded
    explanation: Explanation
    faults: tuple[str, ...]

    def differences(self) -> dict[str, float]:
        """How far what was computed again is from the record, by name, nats; NaN where the record was not measured."""
        pairs = {name: (getattr(self.explanation, name), getattr(self.recorded, name)) for name in COMPARED}
        return {name: 0.0 if ours == theirs else abs(ours - theirs) for name, (ours, theirs) in pairs.items()}

    def to_json(self) -> str:
        """One JSON object. Infinities and NaN are the strings "inf", "-inf" and "nan"."""
        values = {**dataclasses.asdict(self), "agrees": not self.faults, "differences": self.differences()}
        return json.dumps(_plain(values), allow_nan=False)


def explain_token(
    path: str | Path,
    prompt_id: str,
    sample_index: int,
    place: int,
    top: int = 5,
    progress: ProgressReporter | None = None,
) -> TokenReport:
    """Explains one token of a run folder, in this process.

    Args:
        path: the folder of a finished or unfinished run.
        prompt_id, sample_index: the record.
        place: of the token in the completion, from 0; negative counts from the end.
        top: how many of the best tokens to show at each point.
        progress: where to say that the weights are being loaded.
    Raises:
        ConfigError: the folder holds no run, or there is no such record or token.
        RecordError: the manifest, the record or its file is damaged.
        CheckpointError: the checkpoint cannot be read, or is not what drew the record.
    """
    path = Path(path)
    manifest, config = read_manifest(path), load_config(path / "config.yaml")
    record, faults = _find(path, manifest, prompt_id, sample_index)
    where = f"prompt {shown(prompt_id)}, sample {sample_index}"
    if not record.completion_len:
        raise ConfigError(f"{where}: no token was drawn, so there is none to explain: {record.failure}")
    try:
        place = place_in(record.completion_len, place)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error

    if progress is not None:
        progress.message(f"loading {config.model.checkpoint}")
    checkpoint = load_checkpoint(config.model.checkpoint)
    digest = weights_digest(checkpoint.params)
    if digest != record.weights_digest:
        raise CheckpointError(
            f"{config.model.checkpoint}: expected weights of digest {record.weights_digest}, which drew {where}, got"
            f" {digest}; put those weights back, or say in {path / 'config.yaml'} where they are"
        )
    vocab_size = checkpoint.info.config.vocab_size
    for name in ("prompt_tokens", "completion_tokens"):
        ids = getattr(record, name)
        outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if outside.size:
            wrong = f"{name}[{outside[0]}]: expected a token id in 0 .. {vocab_size - 1}, got {ids[outside[0]]}"
            raise RecordError(f"{where}: {wrong}")

    explanation = explain(
        checkpoint,
        record.prompt_tokens,
        record.completion_tokens,
        place,
        SamplingParams.from_dict(record.policy),
        record.key,
        config.model.dtype,
        vocabulary=Vocabulary.from_pieces(vocabulary_pieces(load_backend(checkpoint.info), vocab_size)),
        cache_len=config.geometry.cache_len,
        top=top,
    )
    recorded = Recorded(
        given=place < record.given_len,
        behaviour_logprob=float(record.behaviour_logprobs[place]),
        model_logprob=float(record.model_logprobs[place]),
        log_kept_mass=float(record.log_kept_mass[place]),
        entropy=float(record.entropy[place]),
        stop_reason=_ended_with(record, place),
    )
    report = TokenReport(prompt_id, sample_index, recorded, explanation, ())
    faults += _faults(report, BOUND[config.model.dtype], may_end=place + 1 >= record.given_len)
    return dataclasses.replace(report, faults=tuple(faults))


def named(candidate: Candidate) -> str:
    """A token for people: its id and its text in quotes, control characters and broken bytes escaped."""
    return f"{candidate.token} {quoted(candidate.text)}"


def quoted(text: str) -> str:
    """A token's text in quotes on one line."""
    return "'" + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text) + "'"


def _ended_with(record: Trajectory, place: int) -> StopReason | None:
    """Why the row ended with a token; a failed one did not end with its last token, it had no next."""
    last = place == record.completion_len - 1
    return record.stop_reason if last and not record.failed else None


def _faults(report: TokenReport, bound: float, may_end: bool) -> Iterator[str]:
    """Where record and recomputation disagree; a row does not end (`may_end`) while more tokens are given."""
    found, recorded = report.explanation, report.recorded
    if not found.agrees and not recorded.given:
        again = "nothing, its scores are no distribution" if found.drawn is None else named(found.drawn)
        missed = max(found.token.low - found.uniform, found.uniform - found.token.high)
        yield (
            f"THE DRAW DISAGREES: the record has {named(found.token)}, drawing again gives {again}."
            f" The uniform misses the recorded token's share by {missed:.2g}: where that is small, the numerics differ;"
            " where it is not, the record is wrong"
        )
    for name, difference in report.differences().items():
        if difference > bound:  # never where the record holds NaN, not measured
            ours, theirs = getattr(found, name), getattr(recorded, name)
            yield f"{name}: recorded {theirs:.6f}, recomputed {ours:.6f}: more than {bound} nats apart"
    if may_end and found.stop_reason != recorded.stop_reason:
        theirs, ours = (reason or "none, it goes on" for reason in (recorded.stop_reason, found.stop_reason))
        yield f"stop reason after this token: recorded {theirs}; recomputed {ours}"


def _find(path: Path, manifest: Manifest, prompt_id: str, sample_index: int) -> tuple[Trajectory, list[str]]:
    """The record, and what is wrong with the file that holds it. Reads that file's rows of the prompt alone."""
    of_prompt = pyarrow.compute.field("prompt_id") == prompt_id
    for shard in manifest.shards:
        file = path / SHARDS_NAME / shard.file
        samples = _read(file, ["sample_index"], of_prompt).column(0).to_pylist()
        if not samples:
            continue
        if sample_index not in samples:
            raise ConfigError(
                f"sample: expected one of prompt {shown(prompt_id)}, {_listed(sorted(samples))}, got {sample_index}"
            )
        faults = []
        try:
            check_digest(file, shard)
        except RecordError as error:
            faults.append(str(error))
        row = _read(file, None, of_prompt & (pyarrow.compute.field("sample_index") == sample_index))
        return next(from_table(row, str(file))), faults

    if not manifest.shards:
        raise ConfigError(f"{path}: expected a run with samples, this one has committed none yet")
    files = (path / SHARDS_NAME / shard.file for shard in manifest.shards)
    ids = (prompt for file in files for prompt in _read(file, ["prompt_id"]).column(0).unique().to_pylist())
    known = list(itertools.islice(ids, _SUGGESTED_AMONG))
    near = difflib.get_close_matches(prompt_id, known, n=1)
    hint = f"did you mean {shown(near[0])}? " if near else ""
    raise ConfigError(f"prompt: {path} has none of id {shown(prompt_id)}; {hint}some that it has: {_listed(known)}")


def _read(file: Path, columns: list[str] | None, condition: pyarrow.compute.Expression | None = None) -> pa.Table:
    """Rows of a file of trajectories that fulfil a condition."""
    try:
        return pyarrow.dataset.dataset(file, format="parquet").to_table(columns, filter=condition)
    except (pa.ArrowException, OSError) as error:
        raise RecordError(f"{file}: cannot be read as Parquet, it may be truncated: {error}") from error


def _listed(values: Sequence[Any], most: int = 5) -> str:
    words = ", ".join(shown(value) for value in values[:most])
    return f"{words}, ..." if len(values) > most else words


def _plain(value: Any) -> Any:
    """A value as JSON knows it."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
