"""A scoring on disk.

    DIR/scoring.json                        what is scored, and under what
    DIR/scored/NAME/part-00000.parquet      the sequences under the scorer NAME, in the order of the source
    DIR/summary.json                        the figures; written last

Every file is written whole under a temporary name, then renamed. A kill loses only rows that were not committed, and
the same command computes those again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from rollout.atomic import TEMPORARY_SUFFIX, write_atomically
from rollout.config import differences
from rollout.json_values import shown
from rollout.scoring.config import ScoreConfig
from rollout.scoring.scored import SCHEMA_VERSION, ScoredSequence, count_scored, read_scored, write_scored
from rollout.scoring.source import SourceFacts
from rollout.scoring.summary import ScoreSummary, Tally
from sampling.errors import ConfigError, RecordError

SCORING_NAME = "scoring.json"
SUMMARY_NAME = "summary.json"
SCORED_NAME = "scored"


class ScoreFolder:
    """Writes a scoring, or continues one."""

    def __init__(self, path: Path, config: ScoreConfig, source: SourceFacts) -> None:
        self.path = path
        self._config = config
        self._source = source
        self._buffers: dict[str, list[ScoredSequence]] = {law.name: [] for law in config.laws}
        self._parts = {name: _parts(path, name) for name in self._buffers}
        self._committed = {name: sum(map(count_scored, parts)) for name, parts in self._parts.items()}

    @classmethod
    def open(cls, path: Path, config: ScoreConfig, source: SourceFacts) -> Self:
        """Makes the folder, or opens that of the same scoring again. One without rows is begun anew, whatever it was.

        Raises:
            ConfigError: it holds another scoring (what differs is named) or other files, or cannot be made.
            RecordError: a file in it is damaged.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            names = {entry.name for entry in path.iterdir() if not entry.name.endswith(TEMPORARY_SUFFIX)}
            if SCORING_NAME in names:
                if any(path.rglob("part-*.parquet")):
                    _require_same(path, config, source)
            elif names:
                found = ", ".join(sorted(names)[:5])
                raise ConfigError(f"{path}: expected a new or empty folder, or a scoring to continue; it holds {found}")
            _write_json(path / SCORING_NAME, _facts(config, source))
            for leftover in path.rglob(f"*{TEMPORARY_SUFFIX}"):
                leftover.unlink()
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be made or written: {error.strerror}; choose another --out, or make room for it"
            ) from error
        return cls(path, config, source)

    def rows_done(self, name: str) -> int:
        """Sequences of a scorer that are on disk: the first so many of the source."""
        return self._committed[name]

    def weights_digest(self, name: str) -> str | None:
        """Of the weights behind a scorer's sequences on disk; None without any."""
        return next((row.weights_digest for row in self._rows(name)), None)

    def add(self, row: ScoredSequence) -> None:
        """Takes a scorer's next sequence; commits a file when enough have come together.

        Raises:
            RecordError: it is not the next one.
        """
        buffer = self._buffers[row.scorer]
        expected = self._committed[row.scorer] + len(buffer)
        if row.row != expected:
            raise RecordError(f"{self.path}: scorer {row.scorer}: expected row {expected} of the source, got {row.row}")
        buffer.append(row)
        if len(buffer) >= self._config.output.rows_per_shard:
            self.commit(row.scorer)

    def commit(self, name: str) -> None:
        """Writes what was added for a scorer since the last commit."""
        rows = self._buffers[name]
        if not rows:
            return
        part = self.path / SCORED_NAME / name / f"part-{len(self._parts[name]):05d}.parquet"
        part.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(part, lambda file: write_scored(file, rows))
        self._parts[name].append(part)
        self._committed[name] += len(rows)
        self._buffers[name] = []

    def finish(self) -> ScoreSummary:
        """Sums up the files of all scorers, one file in memory at a time, and writes the summary."""
        summaries = []
        for law in self._config.laws:
            tally = Tally(self._config.ratios, self._source.newest_version)
            for row in self._rows(law.name):
                tally.add(row)
            summaries.append(tally.summary(law))
        parts = [part for parts in self._parts.values() for part in parts]
        files = (*parts, self.path / SUMMARY_NAME, self.path / SCORING_NAME)
        summary = ScoreSummary(
            self._source.path, self._config.ratios, self._source.newest_version, tuple(summaries), files
        )
        _write_json(self.path / SUMMARY_NAME, summary.to_dict())
        return summary

    def _rows(self, name: str) -> Iterator[ScoredSequence]:
        for part in self._parts[name]:
            yield from read_scored(part)


def _parts(path: Path, name: str) -> list[Path]:
    return sorted((path / SCORED_NAME / name).glob("part-*.parquet"))


def _facts(config: ScoreConfig, source: SourceFacts) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, "source": asdict(source), "config": config.to_dict()}


def _require_same(path: Path, config: ScoreConfig, source: SourceFacts) -> None:
    file = path / SCORING_NAME
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        sha256, theirs = facts["source"]["sha256"], ScoreConfig.model_validate(facts["config"])
        if facts["schema_version"] != SCHEMA_VERSION:
            raise ValueError
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{file}: damaged, or written by another release; choose another --out") from error
    changed = {} if sha256 == source.sha256 else {"content of the source": (sha256, source.sha256)}
    changed |= differences(theirs, config)
    if changed:
        lines = [f"  {key}: {shown(there)} there, {shown(here)} here" for key, (there, here) in changed.items()]
        advice = "Choose another --out, or give the same values to continue that scoring"
        raise ConfigError("\n".join([f"{path}: holds another scoring; these differ:", *lines, advice]))


def _write_json(path: Path, values: Any) -> None:
    text = json.dumps(values, indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))
