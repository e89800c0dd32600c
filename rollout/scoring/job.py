"""score_source: recorded sequences under other weights and policies, on one page.

For each checkpoint, one after the other, a pool of workers; for each scorer of it, one pass over the source. Rows go to
disk in the order of the source, and every sequence ends exactly once per scorer: scored, skipped or failed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actors import GroupFailure, WorkerPool
from actors import Outcome as Answer
from rollout.driver import worker_pool
from rollout.json_values import canonical_json
from rollout.progress import Progress, ProgressReporter
from rollout.scoring.config import Law, ScoreConfig, ScorePath
from rollout.scoring.folder import ScoreFolder
from rollout.scoring.foreign import RecordedSequence
from rollout.scoring.scored import Outcome, ScoredSequence
from rollout.scoring.source import SourceFacts, digest_source, read_sequences, recorded_params, survey
from rollout.scoring.summary import ScoreSummary
from sampling.errors import ConfigError
from sampling.fingerprint import fingerprint_digest
from sampling.params import SamplingParams
from sampling.plugins import load_plugins
from sampling.types import Completion, Request

WINDOW_ROUNDS = 8
"""Sequences handed out ahead of the oldest unanswered one, as a multiple of all slots: what reordering may hold."""


def score_source(
    source: str | Path,
    config: ScoreConfig,
    out_dir: str | Path,
    *,
    address: str | None = None,
    progress: ProgressReporter | None = None,
) -> ScoreSummary:
    """Scores every sequence of a source under every scorer of the config, or continues what was begun in the folder.

    Args:
        source: a run's folder, or a Parquet or JSONL file with prompt and completion ids.
        out_dir: a new folder, or that of the same scoring.
        address: of a running Ray cluster; None starts Ray on this machine.
        progress: where to show how far the scoring is.
    Raises:
        ConfigError, PromptError, CheckpointError: the input has to change; found before any worker is started.
        RecordError: a file of the source or the folder is damaged.
        WorkerError: all workers were lost. What was finished is on disk, and a later start continues.
    """
    source = Path(source)
    progress = progress or ProgressReporter(quiet=True)
    progress.message(f"reading {source}")
    plugins = load_plugins(config.plugins)
    config = config.model_copy(update={"plugins": plugins.refs})  # with their versions, for the folder to keep
    facts = survey(source, config.laws, plugins)
    folder = ScoreFolder.open(Path(out_dir), config, facts)
    missing = [law for law in config.laws if folder.rows_done(law.name) < facts.rows]
    report = _Report(progress, facts.rows * len(config.laws), sum(folder.rows_done(law.name) for law in config.laws))
    for checkpoint in dict.fromkeys(law.checkpoint for law in missing):
        progress.message(f"starting {config.workers.count} worker(s) with {checkpoint}")
        model = config.model.model_copy(update={"checkpoint": checkpoint})
        with worker_pool(config.model_copy(update={"model": model}), address) as pool:
            for law in (law for law in missing if law.checkpoint == checkpoint):
                _score(source, law, pool, folder, config, facts, report)
    if missing and digest_source(source) != facts.sha256:
        raise ConfigError(f"{source}: was changed while it was scored; score it again, with another --out")
    return folder.finish()


def _score(
    source: Path,
    law: Law,
    pool: WorkerPool,
    folder: ScoreFolder,
    config: ScoreConfig,
    facts: SourceFacts,
    report: _Report,
) -> None:
    """What is missing of one scorer."""
    origin = {
        "scorer": law.name,
        "weights_digest": pool.description.weights_digest,
        "numerics_fingerprint": fingerprint_digest(pool.description.fingerprint),
    }
    done, earlier = folder.rows_done(law.name), folder.weights_digest(law.name)
    if earlier not in (None, origin["weights_digest"]):
        raise ConfigError(
            f"{folder.path}: scorer {law.name!r} has rows made with weights {earlier}, this start has"
            f" {origin['weights_digest']}: {law.checkpoint} has changed. Restore it, or choose another --out"
        )

    def emit(row: ScoredSequence) -> None:
        folder.add(row)
        report.count(row)

    line = _InOrder(done, emit)
    work = _Work(law, config, facts.newest_version, origin)
    window_rows = WINDOW_ROUNDS * pool.slots
    waiting: dict[int, list[RecordedSequence]] = {}

    def requests() -> Iterator[Request | None]:
        for group in work.groups(itertools.islice(read_sequences(source), done, None)):
            while group[0].row - line.next_row >= window_rows:
                yield None
            unscored = work.unscorable(group)
            for row in unscored:
                line.put(row)
            left_out = {row.row for row in unscored}
            scorable = [sequence for sequence in group if sequence.row not in left_out]
            if scorable:
                waiting[scorable[0].row] = scorable
                yield work.request(scorable)

    try:
        for answer in pool.run(requests(), lambda: report.show(pool)):
            for row in work.results(waiting.pop(answer.request.sample_indices[0]), answer):
                line.put(row)
    finally:
        folder.commit(law.name)
    report.show(pool)


class _Work:
    """What one scorer makes of sequences: requests on the way out, rows on the way back.

    Args:
        newest_version: of the source.
        origin: scorer, weights_digest, numerics_fingerprint.
    """

    def __init__(self, law: Law, config: ScoreConfig, newest_version: int | None, origin: dict[str, str]) -> None:
        self._law = law
        self._cache_len = config.geometry.cache_len
        self._group_rows = config.geometry.slots
        self._ratios = config.ratios
        self._newest_version = newest_version
        self._origin = origin

    def groups(self, sequences: Iterable[RecordedSequence]) -> Iterator[list[RecordedSequence]]:
        """Sequences in a row that share prompt and policy, and so one prefill; a few at most."""
        for _, alike in itertools.groupby(sequences, key=self._shared):
            while group := list(itertools.islice(alike, self._group_rows)):
                yield group

    def _shared(self, sequence: RecordedSequence) -> tuple[Any, ...]:
        return sequence.prompt_id, sequence.prompt_tokens.tobytes(), sequence.policy

    def unscorable(self, group: list[RecordedSequence]) -> list[ScoredSequence]:
        """The rows of those that no worker need see."""
        rows = []
        for sequence in group:
            prompt, completion = sequence.prompt_tokens.size, sequence.completion_tokens.size
            if sequence.failure is not None:
                rows.append(self._unscored(sequence, Outcome.SKIPPED, f"the record failed: {sequence.failure}"))
            elif not completion:
                rows.append(self._unscored(sequence, Outcome.SKIPPED, "the completion has no tokens"))
            elif prompt + completion > self._cache_len:
                why = (
                    f"prompt of {prompt} and completion of {completion} tokens do not fit a cache of"
                    f" {self._cache_len}; raise geometry.cache_len"
                )
                rows.append(self._unscored(sequence, Outcome.FAILED, why))
        return rows

    def request(self, group: list[RecordedSequence]) -> Request:
        """The sample indices are the sequences' rows in the source: no log-prob of a given token depends on them."""
        first, params = group[0], self._params(group[0])
        replay = self._law.path is ScorePath.REPLAY
        if replay and not params.forced_eos:
            # Nothing need be drawn after the last given token. Only a forced end looks at the budget before it is up.
            longest = max(sequence.completion_tokens.size for sequence in group)
            params = params.replace(max_new_tokens=min(params.max_new_tokens, max(longest, params.min_new_tokens, 1)))
        return Request(
            first.prompt_id,
            first.prompt_tokens,
            params,
            sample_indices=tuple(sequence.row for sequence in group),
            given=tuple(sequence.completion_tokens for sequence in group),
            forward=not replay,
        )

    def _params(self, sequence: RecordedSequence) -> SamplingParams:
        if self._law.params is not None:
            return self._law.params
        assert sequence.policy is not None  # the survey has seen to it
        return recorded_params(sequence.policy)

    def results(self, group: list[RecordedSequence], answer: Answer) -> Iterator[ScoredSequence]:
        """The rows that an answer gives, one for each sequence asked for."""
        if isinstance(answer, GroupFailure):
            tried = f" (after {answer.attempts} attempts)" if answer.attempts > 1 else ""
            failure = f"{answer.error_type}: {answer.message}{tried}"
            yield from (self._unscored(sequence, Outcome.FAILED, failure) for sequence in group)
            return
        completions = answer.group.completions
        budget = self._params(group[0]).max_new_tokens
        policy = canonical_json(completions[0].params.replace(max_new_tokens=budget).to_dict())
        for sequence, completion in zip(group, completions, strict=True):
            fault = _fault(sequence, completion)
            if fault:
                yield self._unscored(sequence, Outcome.FAILED, fault)
            else:
                yield ScoredSequence.of(
                    sequence,
                    completion,
                    ratios=self._ratios,
                    newest_version=self._newest_version,
                    policy=policy,
                    **self._origin,
                )

    def _unscored(self, sequence: RecordedSequence, outcome: Outcome, failure: str) -> ScoredSequence:
        return ScoredSequence.unscored(sequence, outcome, failure, **self._origin)


def _fault(sequence: RecordedSequence, completion: Completion) -> str:
    """What is wrong with an answer; "" if it covers the sequence."""
    length = sequence.completion_tokens.size
    if completion.completion_tokens.size < length:
        return f"the row ended with {completion.stop_reason} at token {completion.completion_tokens.size} of {length}"
    for name in ("model_logprobs", "behaviour_logprobs", "log_kept_mass", "entropy"):
        undefined = np.flatnonzero(np.isnan(getattr(completion, name)[:length]))
        if undefined.size:
            return f"{name} of completion token {undefined[0]} is undefined: the model's scores are NaN or infinite"
    return ""


class _InOrder:
    """Hands rows on in the order of the source, each as soon as all before it are there."""

    def __init__(self, next_row: int, emit: Callable[[ScoredSequence], None]) -> None:
        self.next_row = next_row
        self._emit = emit
        self._early: dict[int, ScoredSequence] = {}

    def put(self, row: ScoredSequence) -> None:
        """Takes a row, whose turn may have come or not."""
        self._early[row.row] = row
        while self.next_row in self._early:
            self._emit(self._early.pop(self.next_row))
            self.next_row += 1


@dataclass
class _Report:
    """Shows how far the scoring is."""

    progress: ProgressReporter
    rows_total: int
    rows_done: int
    tokens: int = 0

    def count(self, row: ScoredSequence) -> None:
        """A row is done."""
        self.rows_done += 1
        self.tokens += row.model_logprobs.size

    def show(self, pool: WorkerPool) -> None:
        """The figures so far."""
        busy = pool.stats().engines.slots_busy
        self.progress.update(Progress(self.rows_done, self.rows_total, self.tokens, busy, pool.slots))
