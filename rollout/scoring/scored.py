"""ScoredSequence: one recorded sequence under one scorer, and its Parquet columns.

The file's metadata carries the schema version and what each column means; another version is refused by name.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from rollout.scoring.config import RatiosConfig
from rollout.scoring.foreign import RecordedSequence
from rollout.scoring.ratios import sequence_ratios, token_log_ratios
from rollout.trajectory import drawn_places
from sampling.errors import RecordError
from sampling.types import Completion

SCHEMA_VERSION = 2
"""Version of the columns below."""


class Outcome(enum.StrEnum):
    """How a sequence fared with a scorer. Every sequence has exactly one outcome per scorer."""

    SCORED = "scored"
    SKIPPED = "skipped"
    """The record has no usable completion, which is no fault of the scoring."""
    FAILED = "failed"


MEANINGS = {
    "scorer": "name of the scorer",
    "row": "place of the sequence in the source, from 0",
    "prompt_id": "the prompt's id in the source",
    "sample_index": "which sample of the prompt",
    "prompt_tokens": "ids of the prompt",
    "completion_tokens": "ids of the completion",
    "given_len": "how many of them, from the first on, were given and not drawn: the beginning of a branch. Ratios and"
    " staleness are about those that were drawn",
    "forced": "places of those that were forced and not drawn, such as the end of thinking",
    "reward": "the source's reward; null without",
    "outcome": "scored, skipped (the record has no usable completion) or failed",
    "failure": "why it was skipped or failed; null for a scored sequence",
    "model_logprobs": "nats per token: of the scorer's untouched model, at temperature 1",
    "behaviour_logprobs": "nats per token: log of the probability with which the scorer's policy draws this token after"
    " those before it, after every transform, filter and renormalisation; -inf where the policy has removed it",
    "log_kept_mass": "nats per token: log of the model's probability mass on the tokens that the policy left in",
    "entropy": "nats per token: of the distribution that the scorer's policy draws from",
    "in_support": "per token: whether the scorer's policy left it in",
    "ended_at": "the first token before the last with which the scorer's stopping rules would have ended it all;"
    " null if there is none. No ratio takes notice of it",
    "left_grammar_at": "the first token that the scorer's grammar does not allow; it and all after it have the log-prob"
    " -inf under the policy. Null if there is none",
    "recorded_logprobs": "nats per token: behaviour log-probs of the source; null without",
    "recorded_logprob": "nats: their sum over the drawn tokens",
    "log_ratio": "nats: sum of behaviour_logprobs - recorded_logprobs over the drawn tokens, the log of the"
    " completion's importance ratio; -inf if one is out of support; null without recorded log-probs or drawn tokens",
    "mean_log_ratio": "nats: log_ratio per token",
    "clipped_ratio": "truncated importance weight: min(exp(log_ratio), ratios.cap)",
    "ppo_clip_fraction": "share of the tokens whose ratio is further than ratios.clip_epsilon from 1",
    "policy_versions": "version of the weights that drew each token; null if the source does not tell",
    "staleness_mean": "versions: mean over tokens of the source's newest version minus the token's",
    "staleness_max": "versions: the largest of those differences",
    "policy": "JSON: every parameter of the scorer's policy in effect; empty if not scored",
    "weights_digest": "digest of the scorer's weights",
    "numerics_fingerprint": "digest of what the bits depend on besides weights and sequence",
}
"""The columns of a file, in order, and what each means."""


def _no_nats() -> np.ndarray:
    return np.zeros(0, np.float32)


def _no_flags() -> np.ndarray:
    return np.zeros(0, np.bool_)


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoredSequence:
    """One recorded sequence under one scorer; MEANINGS says what the fields are.

    Per-token arrays have one entry per completion token. For a sequence that was not scored they are empty, and what
    follows from them is None.
    """

    scorer: str
    row: int
    prompt_id: str
    sample_index: int
    prompt_tokens: np.ndarray
    completion_tokens: np.ndarray
    given_len: int
    forced: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    reward: float | None
    outcome: Outcome
    failure: str | None = None
    model_logprobs: np.ndarray = field(default_factory=_no_nats)
    behaviour_logprobs: np.ndarray = field(default_factory=_no_nats)
    log_kept_mass: np.ndarray = field(default_factory=_no_nats)
    entropy: np.ndarray = field(default_factory=_no_nats)
    in_support: np.ndarray = field(default_factory=_no_flags)
    ended_at: int | None = None
    left_grammar_at: int | None = None
    recorded_logprobs: np.ndarray | None = None
    recorded_logprob: float | None = None
    log_ratio: float | None = None
    mean_log_ratio: float | None = None
    clipped_ratio: float | None = None
    ppo_clip_fraction: float | None = None
    policy_versions: np.ndarray | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    policy: str = ""
    weights_digest: str
    numerics_fingerprint: str

    @classmethod
    def of(
        cls,
        sequence: RecordedSequence,
        completion: Completion,
        *,
        ratios: RatiosConfig,
        newest_version: int | None,
        policy: str,
        **origin: Any,
    ) -> Self:
        """A sequence that was scored.

        Args:
            completion: the answer; what it holds beyond the sequence's last token is left out.
            newest_version: the largest policy version of the source.
            policy: JSON of the parameters in effect.
            origin: scorer, weights_digest, numerics_fingerprint.
        """
        scored = slice(0, sequence.completion_tokens.size)
        drawn = drawn_places(sequence.completion_tokens.size, sequence.given_len, sequence.forced)
        behaviour = completion.behaviour_logprobs[scored]
        measures: dict[str, Any] = {}
        any_drawn = bool(drawn.any())
        if (recorded := sequence.behaviour_logprobs) is not None and any_drawn:
            log_ratios = token_log_ratios(behaviour[drawn], recorded[drawn])
            measures = asdict(sequence_ratios(log_ratios, ratios.cap, ratios.clip_epsilon))
            measures["recorded_logprob"] = float(recorded[drawn].sum(dtype=np.float64))
        if (versions := sequence.policy_versions) is not None and newest_version is not None and any_drawn:
            ages = newest_version - versions[drawn]
            measures |= {"staleness_mean": float(ages.mean()), "staleness_max": int(ages.max())}
        return cls(
            outcome=Outcome.SCORED,
            model_logprobs=completion.model_logprobs[scored],
            behaviour_logprobs=behaviour,
            log_kept_mass=completion.log_kept_mass[scored],
            entropy=completion.entropy[scored],
            in_support=~np.isneginf(behaviour),
            ended_at=completion.ended_at,
            left_grammar_at=completion.left_grammar_at,
            recorded_logprobs=sequence.behaviour_logprobs,
            policy_versions=sequence.policy_versions,
            policy=policy,
            **measures,
            **_identity(sequence),
            **origin,
        )

    @classmethod
    def unscored(cls, sequence: RecordedSequence, outcome: Outcome, failure: str, **origin: Any) -> Self:
        """A sequence that was skipped or failed, and why; `origin` as in `of`."""
        return cls(outcome=outcome, failure=failure, **_identity(sequence), **origin)


def _identity(sequence: RecordedSequence) -> dict[str, Any]:
    names = ("row", "prompt_id", "sample_index", "prompt_tokens", "completion_tokens", "given_len", "forced", "reward")
    return {name: getattr(sequence, name) for name in names}


_INT32, _FLOAT32, _BOOL = (pa.list_(pa.field("item", item, False)) for item in (pa.int32(), pa.float32(), pa.bool_()))
_TYPES: dict[str, pa.DataType] = {
    "row": pa.int64(),
    "in_support": _BOOL,
    **dict.fromkeys(("sample_index", "given_len", "ended_at", "left_grammar_at", "staleness_max"), pa.int32()),
    **dict.fromkeys(("prompt_tokens", "completion_tokens", "forced", "policy_versions"), _INT32),
    **dict.fromkeys(
        ("model_logprobs", "behaviour_logprobs", "log_kept_mass", "entropy", "recorded_logprobs"), _FLOAT32
    ),
    **dict.fromkeys(("recorded_logprob", "log_ratio", "mean_log_ratio", "clipped_ratio"), pa.float64()),
    **dict.fromkeys(("ppo_clip_fraction", "staleness_mean", "reward"), pa.float64()),
}
"""Types of the columns that are not text."""

_OPTIONAL = {
    *(
        "reward",
        "failure",
        "ended_at",
        "left_grammar_at",
        "recorded_logprobs",
        "recorded_logprob",
        "log_ratio",
        "mean_log_ratio",
    ),
    *("clipped_ratio", "ppo_clip_fraction", "policy_versions", "staleness_mean", "staleness_max"),
}
_VERSION_KEY = b"rollout.scored_schema_version"

SCORED_SCHEMA = pa.schema(
    [pa.field(name, _TYPES.get(name, pa.string()), name in _OPTIONAL) for name in MEANINGS],
    {_VERSION_KEY: str(SCHEMA_VERSION), b"rollout.scored_columns": json.dumps(MEANINGS)},
)
"""Columns of a file of scored sequences; the metadata says what each means."""


def write_scored(file: BinaryIO, rows: Sequence[ScoredSequence]) -> None:
    """Writes one Parquet file."""
    columns = [pa.array([getattr(row, column.name) for row in rows], column.type) for column in SCORED_SCHEMA]
    texts: Any = [column.name for column in SCORED_SCHEMA if pa.types.is_string(column.type)]
    table = pa.Table.from_arrays(columns, schema=SCORED_SCHEMA)
    pyarrow.parquet.write_table(table, file, compression="zstd", use_dictionary=texts)


def read_scored(path: str | Path) -> Iterator[ScoredSequence]:
    """Reads one Parquet file, a batch of rows at a time.

    Raises:
        RecordError: the file is missing, damaged, of another version, or holds something else.
    """
    with _opened(path) as file:
        for batch in file.iter_batches(batch_size=256):
            columns = [_values(batch.column(name), name) for name in SCORED_SCHEMA.names]
            for values in zip(*columns, strict=True):
                yield ScoredSequence(**dict(zip(SCORED_SCHEMA.names, values, strict=True)))


def count_scored(path: str | Path) -> int:
    """Rows of a file, without reading them.

    Raises:
        RecordError: as `read_scored`.
    """
    with _opened(path) as file:
        return file.metadata.num_rows


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[pyarrow.parquet.ParquetFile]:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            version = (schema.metadata or {}).get(_VERSION_KEY, b"none").decode()
            if version != str(SCHEMA_VERSION):
                raise RecordError(
                    f"{path}: expected version {SCHEMA_VERSION} of scored sequences, got {version};"
                    " read it with the release that wrote it"
                )
            if not schema.equals(SCORED_SCHEMA):
                names = ", ".join(SCORED_SCHEMA.names)
                raise RecordError(f"{path}: expected columns {names}, got {', '.join(schema.names)}")
            yield file
    except (pa.ArrowException, OSError) as error:
        raise RecordError(f"{path}: cannot be read as Parquet, it may be truncated: {error}") from error


def _values(column: pa.Array, name: str) -> list[Any]:
    if name == "outcome":
        return [Outcome(value) for value in column.to_pylist()]
    if not isinstance(column, pa.ListArray):
        return column.to_pylist()
    flat, offsets = column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()
    valid = column.is_valid().to_pylist()
    return [
        flat[start:end] if there else None
        for (start, end), there in zip(itertools.pairwise(offsets), valid, strict=True)
    ]
