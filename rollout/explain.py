"""`rollout explain`: why one recorded token was drawn, told by the programs that drew it, beside the record."""

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

import jax
import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.dataset

from actors.cluster import match_worker
from rollout.codec import from_table
from rollout.comparison import CHAIN_BOUND, OTHER_NUMERICS_BOUND
from rollout.config_file import load_config
from rollout.driver import placement_of
from rollout.json_values import shown
from rollout.manifest import Shard, read_manifest
from rollout.progress import ProgressReporter
from rollout.shards import SHARDS_NAME, check_digest
from rollout.trajectory import Trajectory
from sampling.checkpoints import load_checkpoint, weights_digest
from sampling.engine import Engine
from sampling.errors import CheckpointError, ConfigError, RecordError
from sampling.explain import explain, place_in
from sampling.explanation import Candidate, Explanation
from sampling.fingerprint import fingerprint_digest
from sampling.params import SamplingParams
from sampling.plugins import load_plugins
from sampling.types import StopReason

COMPARED = ("behaviour_logprob", "model_logprob", "log_kept_mass", "entropy")
"""What is compared besides the token itself, all in nats."""

_SUGGESTED_AMONG = 20_000
"""Prompt ids among which a similar one is looked for: comparing many more takes minutes."""


@dataclass(frozen=True)
class Recorded:
    """What the record says of the token; see Trajectory.

    Attributes:
        given: the token was not drawn: the row was made to begin with it.
        forced: it was not drawn: the policy forced it.
        behaviour_logprob, model_logprob, log_kept_mass, entropy: nats.
        stop_reason: why the row ended with this token; None if it went on.
    """

    given: bool
    forced: bool
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
        warnings: what else has to be known: numerics that are not the run's, damaged files that were passed over.
    """

    prompt_id: str
    sample_index: int
    recorded: Recorded
    explanation: Explanation
    faults: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def differences(self) -> dict[str, float]:
        """How far what was computed again is from the record, by name, nats; NaN where the record was not measured."""
        pairs = {name: (getattr(self.explanation, name), getattr(self.recorded, name)) for name in COMPARED}
        return {name: 0.0 if ours == theirs else abs(ours - theirs) for name, (ours, theirs) in pairs.items()}

    def to_json(self) -> str:
        """One JSON object. Infinities and NaN are the strings "inf", "-inf" and "nan"."""
        values = {**dataclasses.asdict(self), "agrees": not self.faults, "differences": self.differences()}
        return json.dumps(_plain(values), allow_nan=False)


class RunExplainer:
    """Explains tokens of one run, in this process. The engine is made for the first of them and kept.

    Args:
        path: the folder of a finished or unfinished run.
        progress: where to say that the weights are being loaded.
    Raises:
        ConfigError: the folder holds no run.
        RecordError: the manifest is damaged.
    """

    def __init__(self, path: str | Path, progress: ProgressReporter | None = None) -> None:
        self._path = Path(path)
        self._manifest, self._config = read_manifest(self._path), load_config(self._path / "config.yaml")
        self._progress = progress or ProgressReporter(quiet=True)
        self._engine: Engine | None = None
        self._weights_digest = ""

    def match_workers(self) -> None:
        """Gives this process the bits and the compiled programs of the run's workers; see `match_worker`."""
        match_worker(placement_of(self._config.workers))

    def explain(self, prompt_id: str, sample_index: int, place: int, top: int = 5) -> TokenReport:
        """Goes once more through the step that drew a token. The engine decodes as many steps as there are before it.

        Args:
            prompt_id, sample_index: the record.
            place: of the token in the completion, from 0; negative counts from the end.
            top: how many of the best tokens to show at each point.
        Raises:
            ConfigError: there is no such record or token; or a plugin of the run is missing or of another version.
            RecordError: the record or its file is damaged.
            CheckpointError: the checkpoint cannot be read, or is not what drew the record.
        """
        where = f"prompt {shown(prompt_id)}, sample {sample_index}"
        record, faults, warnings = self._find(prompt_id, sample_index)
        if not record.completion_len:
            raise ConfigError(f"{where}: no token was drawn, so there is none to explain: {record.failure}")
        try:
            place = place_in(record.completion_len, place)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error

        engine = self._engine_of(record, where)
        _require_tokens(record, engine.info.tokenizer_len, where)
        params = SamplingParams.from_dict(record.policy)
        found = explain(engine, record.prompt_tokens, record.completion_tokens, place, params, record.key, top=top)
        recorded = Recorded(
            given=place < record.given_len,
            forced=place in record.forced,
            behaviour_logprob=float(record.behaviour_logprobs[place]),
            model_logprob=float(record.model_logprobs[place]),
            log_kept_mass=float(record.log_kept_mass[place]),
            entropy=float(record.entropy[place]),
            stop_reason=_ended_with(record, place),
        )
        report = TokenReport(prompt_id, sample_index, recorded, found)
        same = fingerprint_digest(engine.fingerprint) == record.numerics_fingerprint
        bound = CHAIN_BOUND if same else OTHER_NUMERICS_BOUND[self._config.model.dtype]
        if not same:
            apart = _apart(self._manifest.numerics.get(record.numerics_fingerprint, {}), engine.fingerprint)
            warnings.append(f"the numerics are not the run's ({apart}): compared within {bound} nats")
        if not (found.agrees or recorded.given):
            # Where no log-prob moves by more than the bound, no cumulative probability moves by more than this.
            may_be = not same and _missed_by(found) <= math.expm1(bound)
            (warnings if may_be else faults).append(_disagreement(found))
        faults += _faults(report, bound, may_end=place + 1 >= record.given_len)
        return dataclasses.replace(report, faults=tuple(faults), warnings=tuple(warnings))

    def _engine_of(self, record: Trajectory, where: str) -> Engine:
        """The engine that the run's workers had, with the weights that drew a record; on one device, if they had more
        than there are here."""
        model = self._config.model
        if self._engine is None:
            load_plugins(self._config.plugins)  # a fault of theirs is told before the weights are read
            self._progress.message(f"loading {model.checkpoint}")
            checkpoint = load_checkpoint(model.checkpoint)
            self._weights_digest = weights_digest(checkpoint.params)
            numerics, devices = self._manifest.numerics.get(record.numerics_fingerprint, {}), jax.local_devices()
            count = numerics.get("num_devices", 1)
            devices = devices[: count if count <= len(devices) else 1]
            plugins = self._config.plugins
            self._engine = Engine(checkpoint, self._config.geometry, model.dtype, devices=devices, plugins=plugins)
        if self._weights_digest != record.weights_digest:
            raise CheckpointError(
                f"{model.checkpoint}: expected weights of digest {record.weights_digest}, which drew {where}, got"
                f" {self._weights_digest}; put them back, or say in {self._path / 'config.yaml'} where they are"
            )
        return self._engine

    def _find(self, prompt_id: str, sample_index: int) -> tuple[Trajectory, list[str], list[str]]:
        """The record, what is wrong with the file that holds it, and the files before it that cannot be read."""
        of_prompt = pyarrow.compute.field("prompt_id") == prompt_id
        damaged: list[str] = []
        for shard in self._manifest.shards:
            file = self._path / SHARDS_NAME / shard.file
            try:
                samples = _read(file, ["sample_index"], of_prompt).column(0).to_pylist()
            except RecordError as error:
                damaged.append(str(error))
                continue
            if not samples:
                continue
            if sample_index not in samples:
                raise ConfigError(
                    f"sample: expected one of prompt {shown(prompt_id)}, {_listed(sorted(samples))}, got {sample_index}"
                )
            row = _read(file, None, of_prompt & (pyarrow.compute.field("sample_index") == sample_index))
            passed_over = [f"passed over {fault}" for fault in damaged]
            return next(from_table(row, str(file))), _digest_faults(file, shard), passed_over
        if damaged:
            raise RecordError(f"{damaged[0]}. No other file holds prompt {shown(prompt_id)}")
        raise self._no_such_prompt(prompt_id)

    def _no_such_prompt(self, prompt_id: str) -> ConfigError:
        if not self._manifest.shards:
            return ConfigError(f"{self._path}: expected a run with samples, this one has committed none yet")
        files = (self._path / SHARDS_NAME / shard.file for shard in self._manifest.shards)
        ids = (prompt for file in files for prompt in _read(file, ["prompt_id"]).column(0).unique().to_pylist())
        known = list(itertools.islice(ids, _SUGGESTED_AMONG))
        near = difflib.get_close_matches(prompt_id, known, n=1)
        hint = f"did you mean {shown(near[0])}? " if near else ""
        return ConfigError(
            f"prompt: {self._path} has none of id {shown(prompt_id)}; {hint}some that it has: {_listed(known)}"
        )


def named(candidate: Candidate) -> str:
    """A token for people: its id and its text in quotes, control characters and broken bytes escaped."""
    return f"{candidate.token} {quoted(candidate.text)}"


def quoted(text: str) -> str:
    """A token's text in quotes on one line."""
    return "'" + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text) + "'"


def _require_tokens(record: Trajectory, known: int, where: str) -> None:
    """Raises RecordError where the record holds an id that is none of the `known` tokens."""
    for name in ("prompt_tokens", "completion_tokens"):
        ids = getattr(record, name)
        outside = np.flatnonzero((ids < 0) | (ids >= known))
        if outside.size:
            wrong = f"{name}[{outside[0]}]: expected a token id in 0 .. {known - 1}, got {ids[outside[0]]}"
            raise RecordError(f"{where}: {wrong}")


def _ended_with(record: Trajectory, place: int) -> StopReason | None:
    """Why the row ended with a token; a failed one did not end with its last token, it had no next."""
    last = place == record.completion_len - 1
    return record.stop_reason if last and not record.failed else None


def _apart(there: dict[str, Any], here: dict[str, Any]) -> str:
    """The facts in which two numerics differ."""
    if not there:
        return "the manifest does not say which those are"
    names = [name for name in dict.fromkeys([*there, *here]) if there.get(name) != here.get(name)]
    return ", ".join(f"{name}: {shown(there.get(name))} there, {shown(here.get(name))} here" for name in names)


def _missed_by(found: Explanation) -> float:
    """How far the uniform lies outside the share of the row's own token; NaN where nothing can be drawn."""
    return max(found.token.low - found.uniform, found.uniform - found.token.high)


def _disagreement(found: Explanation) -> str:
    again = "nothing, its scores are no distribution" if found.drawn is None else named(found.drawn)
    return (
        f"THE DRAW DISAGREES: the record has {named(found.token)}, drawing again gives {again};"
        f" the uniform misses the recorded token's share by {_missed_by(found):.2g}"
    )


def _faults(report: TokenReport, bound: float, may_end: bool) -> Iterator[str]:
    """Where figures and end disagree by more than `bound` nats; no row ends (`may_end`) while more tokens are given."""
    found, recorded = report.explanation, report.recorded
    for name, difference in report.differences().items():
        ours, theirs = getattr(found, name), getattr(recorded, name)
        if not (difference <= bound or math.isnan(theirs)):  # NaN was not measured
            yield f"{name}: recorded {theirs:.6f}, recomputed {ours:.6f}: more than {bound} nats apart"
    if found.forced != recorded.forced:
        theirs, ours = ("forced" if token.forced else "not forced" for token in (recorded, found))
        yield f"recorded as {theirs}, recomputed as {ours}"
    if may_end and found.stop_reason != recorded.stop_reason:
        theirs, ours = (reason or "none, it goes on" for reason in (recorded.stop_reason, found.stop_reason))
        yield f"stop reason after this token: recorded {theirs}; recomputed {ours}"


def _digest_faults(file: Path, shard: Shard) -> list[str]:
    try:
        check_digest(file, shard)
    except RecordError as error:
        return [str(error)]
    return []


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
