"""Where prompts come from: a JSONL or Parquet file, reasoning-gym tasks, or a list in the config itself.

Every source is read as a stream, in order; a file of a million prompts never sits in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow
import pyarrow.parquet
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from rollout.json_values import require_json, shown
from rollout.prompts import ROW_FIELDS, Prompt
from rollout.tasks import read_tasks
from sampling.errors import ConfigError, PromptError

_PARQUET_BATCH_ROWS = 1024


def _at_least_one(items: tuple[Any, ...]) -> tuple[Any, ...]:
    if not items:
        raise ConfigError("prompts: expected at least one item in the list, got none")
    return items


def _plain_rows(rows: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    for index, row in enumerate(rows):
        require_json(row, f"prompts.rows.{index}", ConfigError)
    return rows


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    require_json(config, "prompts.tasks: config", ConfigError)
    return config


def _asks_the_question(template: str) -> str:
    if "{question}" not in template:
        raise ConfigError(f"prompts.template: expected text that contains {{question}}, got {template!r}")
    return template


class _Source(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class JsonlSource(_Source):
    """One JSON object a line, with the fields of `prompts.ROW_FIELDS`; blank lines are skipped."""

    source: Literal["jsonl"]
    path: str


class ParquetSource(_Source):
    """A Parquet file with the same columns; `sampling` and `metadata` may be structs or JSON text."""

    source: Literal["parquet"]
    path: str


class InlineSource(_Source):
    """Prompts written into the config, with the same fields."""

    source: Literal["inline"]
    rows: Annotated[
        tuple[dict[str, Any], ...], Field(strict=False), AfterValidator(_at_least_one), AfterValidator(_plain_rows)
    ]


class TaskSet(_Source):
    """One dataset of reasoning-gym.

    Attributes:
        name: registered name; the prompts are called "<name>-0", "<name>-1", ...
        size: how many entries.
        seed: seed of the entries; they do not change with the run's own seed.
        config: the dataset's own parameters.
    """

    name: str
    size: int = Field(ge=1)
    seed: int = 0
    config: Annotated[dict[str, Any], AfterValidator(_plain)] = {}


class TaskSource(_Source):
    """Verifiable tasks of reasoning-gym, as chat prompts.

    Attributes:
        tasks: the datasets, read one after the other.
        system: text of a system message; None sends none.
        template: text of the user message; `{question}` stands for the task's question.
    """

    source: Literal["reasoning_gym"]
    tasks: Annotated[tuple[TaskSet, ...], Field(strict=False), AfterValidator(_at_least_one)]
    system: str | None = None
    template: Annotated[str, AfterValidator(_asks_the_question)] = "{question}"


AnySource = JsonlSource | ParquetSource | InlineSource | TaskSource

Source = Annotated[AnySource, Field(discriminator="source")]
"""What a config's `prompts` section may hold; the key `source` tells which."""


def read_prompts(source: AnySource) -> Iterator[Prompt]:
    """The prompts of a source, in order, each checked; an id that was not given is the row's position from 0.

    Raises:
        PromptError: a row cannot be read or used, or an id comes twice; file and line are named. Or there is none.
        ConfigError: the tasks cannot be made.
    """
    seen: set[bytes] = set()
    for prompt in _read(source):
        digest = hashlib.blake2b(prompt.id.encode(), digest_size=16).digest()
        if digest in seen:
            first = next(earlier for earlier in _read(source) if earlier.id == prompt.id)
            raise PromptError(
                f"{prompt.where}: prompt id {prompt.id!r} is taken already, by {first.where};"
                " ids must be unique within a run (rows without an id are named by their position)"
            )
        seen.add(digest)
        yield prompt
    if not seen:
        raise PromptError(f"{_name(source)}: expected at least one prompt, found none")


def _name(source: AnySource) -> str:
    return source.path if isinstance(source, JsonlSource | ParquetSource) else f"prompts of source {source.source}"


def digest_prompts(source: AnySource) -> str:
    """sha256 of the file behind the source, so that a resumed run meets the same prompts; "" if there is none."""
    if not isinstance(source, JsonlSource | ParquetSource):
        return ""
    with _open(source.path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(source: AnySource) -> Iterator[Prompt]:
    match source:
        case JsonlSource():
            return _from_rows(_jsonl_rows(source.path))
        case ParquetSource():
            return _from_rows(_parquet_rows(source.path))
        case InlineSource():
            return _from_rows((f"prompts.rows[{i}]", row) for i, row in enumerate(source.rows))
        case TaskSource():
            return _task_prompts(source)


def _from_rows(rows: Iterable[tuple[str, Any]]) -> Iterator[Prompt]:
    for position, (where, row) in enumerate(rows):
        yield Prompt.from_row(row, position, where)


def _jsonl_rows(path: str) -> Iterator[tuple[str, Any]]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise PromptError(f"{where}: expected UTF-8, got {error.reason} at byte {error.start}") from error
            if text.strip():
                yield where, _parse_json(text, f"{where}: expected one JSON object")


def _parquet_rows(path: str) -> Iterator[tuple[str, Any]]:
    file = _open_parquet(path)
    unknown = [name for name in file.schema_arrow.names if name not in ROW_FIELDS]
    if unknown:
        raise PromptError(
            f"{path}: unknown column {', '.join(map(repr, unknown))}; known are {', '.join(ROW_FIELDS)}."
            " Put your own values into 'metadata'"
        )
    for number, row in enumerate(_plain_parquet_rows(file, path)):
        where = f"{path}, row {number}"
        yield where, row | {name: _parquet_object(row[name], f"{where}: {name}") for name in _OBJECTS & row.keys()}


def _plain_parquet_rows(file: pyarrow.parquet.ParquetFile, path: str) -> Iterator[dict[str, Any]]:
    try:
        for batch in file.iter_batches(batch_size=_PARQUET_BATCH_ROWS):
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{path}: cannot be read as Parquet, it may be damaged: {error}") from error


_OBJECTS = {"sampling", "metadata"}


def _parquet_object(value: Any, where: str) -> Any:
    """A struct, without the fields that only other rows of the file fill, or JSON text."""
    if isinstance(value, str):
        return _parse_json(value, f"{where}: expected JSON text")
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def _parse_json(text: str, expected: str) -> Any:
    """The value of a JSON text in which no key comes twice."""
    try:
        return json.loads(text, object_pairs_hook=_once_each)
    except json.JSONDecodeError as error:
        raise PromptError(f"{expected}; {error.msg} at column {error.colno} of {shown(text.strip())}") from error
    except RecursionError as error:
        raise PromptError(f"{expected}, got lists or objects too deep within each other") from error
    except ValueError as error:  # a key twice, or a number of thousands of digits
        raise PromptError(f"{expected}: {error}") from error


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {shown(twice)} is given twice; keep one")
    return values


def _task_prompts(source: TaskSource) -> Iterator[Prompt]:
    system = [] if source.system is None else [{"role": "system", "content": source.system}]
    for tasks in source.tasks:
        for task in read_tasks(tasks.name, tasks.size, tasks.seed, tasks.config):
            user = {"role": "user", "content": source.template.replace("{question}", task.question)}
            yield Prompt(
                id=f"{tasks.name}-{task.index}",
                messages=(*system, user),
                metadata=task.to_metadata(),
                where=f"reasoning_gym {tasks.name}, entry {task.index}",
            )


def _open(path: str) -> Any:
    try:
        return Path(path).open("rb")
    except OSError as error:
        hint = "check prompts.path" if Path(path).is_absolute() else f"prompts.path starts in {_here()}"
        raise PromptError(f"{path}: cannot read the prompts: {error.strerror}; {hint}") from error


def _open_parquet(path: str) -> pyarrow.parquet.ParquetFile:
    _open(path).close()
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise PromptError(f"{path}: expected a Parquet file: {error}; for JSON lines use source: jsonl") from error


def _here() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "the working directory, which has been removed"
