"""Reads sequences that other systems have drawn: prompt and completion ids in a Parquet or JSONL file.

One row is one completion. Each field may have one of several names (NAMES); other columns are left alone. What cannot
be used is refused with its row and what was found: nothing is padded, cut or guessed.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from rollout.json_values import canonical_json, is_utf8, require_json, shown
from rollout.trajectory import MAX_ROUNDING_NATS
from sampling.errors import ConfigError, PromptError

NAMES = {
    "prompt_tokens": ("prompt_tokens", "prompt_ids", "prompt_token_ids"),
    "completion_tokens": ("completion_tokens", "completion_ids", "response_ids", "completion_token_ids"),
    "behaviour_logprobs": ("behaviour_logprobs", "logprobs", "old_logprobs", "rollout_log_probs"),
    "prompt_id": ("prompt_id", "id"),
    "sample_index": ("sample_index",),
    "given_len": ("given_len",),
    "forced": ("forced",),
    "policy_versions": ("policy_versions",),
    "policy": ("policy",),
    "reward": ("reward",),
    "failure": ("failure",),
}
"""Names under which a file may hold each field, ours first; the first two fields are required."""

SUFFIXES = (".parquet", ".jsonl")

_REQUIRED = {"prompt_tokens": "the prompt's ids", "completion_tokens": "the completion's ids"}
_BATCH_ROWS = 256


@dataclass(frozen=True, eq=False)
class RecordedSequence:
    """One completion as somebody recorded it, ours or another system's.

    Attributes:
        row: its place in the source, from 0.
        where: the same for people ("file.jsonl, line 3").
        prompt_id: its prompt's id.
        sample_index: which sample of the prompt; where the source does not tell, the rows of that prompt before it.
        prompt_tokens: int32 [prompt_len], at least one.
        completion_tokens: int32 [completion_len].
        given_len: how many of them, from the first on, were given and not drawn: the beginning of a branch.
        forced: int32, ascending, the places of tokens that were forced and not drawn.
        behaviour_logprobs: float32 [completion_len], nats: of the law that drew them, finite where it did; None if not
            recorded.
        policy_versions: int32 [completion_len]: version of the weights that drew each token; None if not recorded.
        policy: JSON of the parameters that it was drawn under, as in our records; None if not recorded.
        reward: its score, or None.
        failure: why there is no usable completion, or None.
    """

    row: int
    where: str
    prompt_id: str
    sample_index: int
    prompt_tokens: np.ndarray
    completion_tokens: np.ndarray
    given_len: int = 0
    forced: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    behaviour_logprobs: np.ndarray | None = None
    policy_versions: np.ndarray | None = None
    policy: str | None = None
    reward: float | None = None
    failure: str | None = None


def read_foreign(path: Path) -> Iterator[RecordedSequence]:
    """The sequences of a file, in order, each checked; a few hundred rows in memory at a time.

    Raises:
        ConfigError: the file cannot be read, or is of another kind.
        PromptError: a row cannot be used; file, row and field are named. Or there is none.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"{path}: expected a run's folder, or a file that ends in {' or '.join(SUFFIXES)}, got {path.suffix!r}"
        )
    samples: Counter[str] = Counter()
    row = -1
    for row, (where, values) in enumerate(_jsonl_rows(path) if path.suffix == ".jsonl" else _parquet_rows(path)):
        sequence = _sequence(values, row, where, samples)
        samples[sequence.prompt_id] += 1
        yield sequence
    if row < 0:
        raise PromptError(f"{path}: expected at least one row, found none")


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                values = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                raise PromptError(f"{where}: expected one JSON object: {error}") from error
            if not isinstance(values, dict):
                raise PromptError(f"{where}: expected one JSON object, got {shown(values)}")
            yield where, values


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    _open(path).close()
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            present = file.schema_arrow.names
            _fields(present, str(path))
            columns = [name for names in NAMES.values() for name in names if name in present]
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
                for values in batch.to_pylist():
                    yield f"{path}, row {number}", values
                    number += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as Parquet, it may be damaged: {error}") from error


def _open(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def _fields(present: Sequence[str], where: str) -> dict[str, str]:
    """Which of the names that are present holds each field. Our own name goes before any other."""
    chosen = {}
    for field, names in NAMES.items():
        found = [name for name in names if name in present]
        if len(found) > 1 and found[0] != field:
            raise PromptError(f"{where}: {' and '.join(found)} could all be {field}; rename the right one to {field}")
        if found:
            chosen[field] = found[0]
        elif field in _REQUIRED:
            text = "; text is not enough, since other ids may spell the same text"
            hint = text if {"prompt", "completion", "response", "text", "messages"} & set(present) else ""
            raise PromptError(
                f"{where}: expected {_REQUIRED[field]} under one of {', '.join(names)};"
                f" found {', '.join(present) or 'nothing'}{hint}"
            )
    return chosen


def _sequence(values: Mapping[str, Any], row: int, where: str, samples: Counter[str]) -> RecordedSequence:
    fields = _fields(list(values), where)
    given = {field: values[name] for field, name in fields.items() if values[name] is not None}
    for field in _REQUIRED:
        if field not in given:
            raise PromptError(f"{where}: {fields[field]}: expected a list of token ids, got none")
    prompt, completion = (_ids(given[field], f"{where}: {fields[field]}") for field in _REQUIRED)
    if not prompt.size:
        raise PromptError(f"{where}: {fields['prompt_tokens']}: expected at least one token, got none")
    prompt_id = given.get("prompt_id", row)
    if isinstance(prompt_id, bool) or not isinstance(prompt_id, str | int) or not is_utf8(str(prompt_id)):
        raise PromptError(f"{where}: {fields['prompt_id']}: expected text or a whole number, got {shown(prompt_id)}")
    sample_index = _whole(given.get("sample_index", samples[str(prompt_id)]), 2**31 - 1, f"{where}: sample_index")
    given_len = _whole(given.get("given_len", 0), completion.size, f"{where}: given_len")
    forced = _ids(given.get("forced", []), f"{where}: forced", "places")
    if np.any(forced >= completion.size) or np.any(np.diff(forced) <= 0):
        expected = f"ascending places in 0 .. {completion.size - 1}"
        raise PromptError(f"{where}: forced: expected {expected}, got {shown(forced.tolist())}")
    reward = given.get("reward")
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
        raise PromptError(f"{where}: reward: expected a number, got {shown(reward)}")
    logprobs, versions = None, None
    if "behaviour_logprobs" in given:
        place = f"{where}: {fields['behaviour_logprobs']}"
        logprobs = _logprobs(given["behaviour_logprobs"], completion.size, given_len, place)
    if "policy_versions" in given:
        versions = _ids(given["policy_versions"], f"{where}: policy_versions", "version numbers")
        _require_length(versions, completion.size, f"{where}: policy_versions", "version numbers")
    failure = given.get("failure")
    return RecordedSequence(
        row=row,
        where=where,
        prompt_id=str(prompt_id),
        sample_index=sample_index,
        prompt_tokens=prompt,
        completion_tokens=completion,
        given_len=given_len,
        forced=forced,
        behaviour_logprobs=logprobs,
        policy_versions=versions,
        policy=_policy(given["policy"], f"{where}: policy") if "policy" in given else None,
        reward=None if reward is None else float(reward),
        failure=None if failure is None else str(failure),
    )


def _ids(value: Any, where: str, what: str = "token ids") -> np.ndarray:
    array = _array(value, where, what)
    if array.size and array.dtype.kind not in "iu":
        raise PromptError(f"{where}: expected a list of {what}, got {shown(value)}")
    outside = np.flatnonzero((array < 0) | (array >= 2**31))
    if outside.size:
        raise PromptError(f"{where}[{outside[0]}]: expected {what} in 0 .. 2^31 - 1, got {array[outside[0]]}")
    return array.astype(np.int32)


def _whole(value: Any, most: int, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise PromptError(f"{where}: expected a whole number in 0 .. {most}, got {shown(value)}")
    return value


def _logprobs(value: Any, completion_len: int, given_len: int, where: str) -> np.ndarray:
    array = _array(value, where, "log-probs")
    if array.size and array.dtype.kind not in "fiu":
        raise PromptError(f"{where}: expected a list of numbers, one log-prob per token, got {shown(value)}")
    _require_length(array, completion_len, where, "log-probs")
    drawn = np.arange(completion_len) >= given_len
    bad = np.flatnonzero(~(array <= MAX_ROUNDING_NATS) | (drawn & ~np.isfinite(array)))
    if bad.size:
        raise PromptError(
            f"{where}[{bad[0]}]: expected a finite log-probability <= 0, got {array[bad[0]]};"
            " a token that was drawn has one"
        )
    return array.astype(np.float32)


def _array(value: Any, where: str, what: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError:  # lists of unequal lengths
        array = np.zeros((0, 0))
    if not isinstance(value, list) or array.ndim != 1:
        raise PromptError(f"{where}: expected a flat list of {what}, got {shown(value)}")
    return array


def _require_length(array: np.ndarray, completion_len: int, where: str, what: str) -> None:
    if array.size != completion_len:
        raise PromptError(
            f"{where}: expected {completion_len} {what}, one per completion token, got {array.size};"
            " cut off padding, and leave out what belongs to the prompt"
        )


def _policy(value: Any, where: str) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise PromptError(f"{where}: expected JSON text: {error}") from error
    if not isinstance(value, dict):
        raise PromptError(f"{where}: expected an object of sampling parameters, got {shown(value)}")
    given = {name: item for name, item in value.items() if item is not None}  # Arrow fills structs up with nulls
    require_json(given, where, PromptError)
    return canonical_json(given)
