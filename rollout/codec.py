"""Trajectories to bytes and back, exact to the bit: msgpack for the wire, Parquet for files.

Both carry the schema version and refuse what they do not know, by name. Nothing is pickled. Dicts travel as JSON
text, arrays as little-endian bytes, and float columns avoid Parquet's dictionary encoding, which merges NaNs.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet

from rollout.json_values import canonical_json
from rollout.trajectory import LOGPROB_DEFINITION, SCHEMA_VERSION, Trajectory
from sampling.errors import RecordError

_INT32, _FLOAT32 = pa.list_(pa.field("item", pa.int32(), False)), pa.list_(pa.field("item", pa.float32(), False))
_COLUMNS: dict[str, pa.DataType] = {
    "run_id": pa.string(),
    "prompt_id": pa.string(),
    "group_id": pa.string(),
    "sample_index": pa.int32(),
    "prompt_tokens": _INT32,
    "completion_tokens": _INT32,
    "given_len": pa.int32(),
    "behaviour_logprobs": _FLOAT32,
    "model_logprobs": _FLOAT32,
    "log_kept_mass": _FLOAT32,
    "entropy": _FLOAT32,
    "policy_versions": _INT32,
    "support_sizes": _INT32,
    "support_ids": _INT32,
    "policy": pa.string(),
    "key": pa.list_(pa.field("item", pa.uint32(), False)),
    "stop_reason": pa.string(),
    "status": pa.string(),
    "failure": pa.string(),
    "reward": pa.float64(),
    "reward_error": pa.string(),
    "weights_digest": pa.string(),
    "numerics_fingerprint": pa.string(),
    "wait_s": pa.float64(),
    "decode_s": pa.float64(),
    "worker": pa.string(),
    "text": pa.string(),
    "metadata": pa.string(),
    "forced": _INT32,
}
_ARRAYS = {
    name: np.dtype(column.value_type.to_pandas_dtype())
    for name, column in _COLUMNS.items()
    if isinstance(column, pa.ListType)
}
_JSON = ("policy", "metadata")
_OPTIONAL = ("failure", "reward", "reward_error")
_VERSION_KEY = b"rollout.schema_version"

PARQUET_SCHEMA = pa.schema(
    [pa.field(name, column, nullable=name in _OPTIONAL) for name, column in _COLUMNS.items()],
    {_VERSION_KEY: str(SCHEMA_VERSION), b"rollout.logprob_definition": LOGPROB_DEFINITION},
)
"""Columns of a file of trajectories, one row a sample; `policy` and `metadata` are JSON text."""


def encode(trajectory: Trajectory) -> bytes:
    """One trajectory as a msgpack map of `schema_version` and every field."""
    message: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
    for name, value in _values(trajectory).items():
        message[name] = encode_array(value) if name in _ARRAYS else value
    return bytes(msgpack.packb(message) or b"")


def decode(data: bytes) -> Trajectory:
    """Reads what `encode` wrote.

    Raises:
        RecordError: the bytes are damaged, of another schema version, or break the record's invariants.
    """
    try:
        message = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise RecordError(f"trajectory message: not msgpack, or cut off: {error}") from error
    if not isinstance(message, dict):
        raise RecordError(f"trajectory message: expected a map, got {type(message).__name__}")
    check_version(message.pop("schema_version", None), "trajectory message")
    _check_names(message, "trajectory message", "field")
    arrays = {name: decode_array(message[name], name) for name in _ARRAYS}
    return _trajectory({**message, **arrays}, "trajectory message")


def encode_array(array: np.ndarray) -> dict[str, Any]:
    """A numeric array as plain values: dtype, shape and little-endian bytes. NaN payloads survive."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return {"dtype": little.dtype.str, "shape": list(array.shape), "data": little.tobytes()}


def decode_array(message: Any, name: str) -> np.ndarray:
    """Reads what `encode_array` wrote.

    Raises:
        RecordError: dtype, shape and bytes do not fit together.
    """
    try:
        dtype = np.dtype(message["dtype"])
        if dtype.hasobject:
            raise ValueError(f"dtype {dtype} is no number")
        array = np.frombuffer(message["data"], dtype).reshape(message["shape"])
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{name}: expected an array with dtype, shape and data: {error}") from error
    return array.astype(dtype.newbyteorder("="), copy=False)


def to_table(trajectories: Sequence[Trajectory]) -> pa.Table:
    """Trajectories as an Arrow table with PARQUET_SCHEMA, whatever their lengths: no type is inferred."""
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    for trajectory in trajectories:
        for name, value in _values(trajectory).items():
            columns[name].append(value)
    arrays = [
        _list_column(columns[field.name], field.type)
        if field.name in _ARRAYS
        else pa.array(columns[field.name], field.type)
        for field in PARQUET_SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=PARQUET_SCHEMA)


def from_table(table: pa.Table | pa.RecordBatch, where: str = "table") -> Iterator[Trajectory]:
    """The trajectories of a table.

    Raises:
        RecordError: schema version, columns or a row are not what PARQUET_SCHEMA promises; `where` is named.
    """
    version = (table.schema.metadata or {}).get(_VERSION_KEY)
    check_version(int(version) if version and version.isdigit() else version, where)
    _check_names(table.schema.names, where, "column")
    for field in PARQUET_SCHEMA:
        if table.schema.field(field.name).type != field.type:
            got = table.schema.field(field.name).type
            raise RecordError(f"{where}: column {field.name!r}: expected {field.type}, got {got}")
    batches = table.to_batches() if isinstance(table, pa.Table) else [table]
    for batch in batches:
        columns = {name: _column_values(batch.column(name), name) for name in _COLUMNS}
        for row in range(batch.num_rows):
            yield _trajectory({name: column[row] for name, column in columns.items()}, where)


def write_parquet(file: BinaryIO, trajectories: Sequence[Trajectory]) -> None:
    """Writes one Parquet file."""
    options: Any = {"use_dictionary": [n for n, column in _COLUMNS.items() if pa.types.is_string(column)]}
    pyarrow.parquet.write_table(to_table(trajectories), file, compression="zstd", **options)


def read_parquet(path: str | Path) -> Iterator[Trajectory]:
    """Reads one Parquet file, a batch of rows at a time.

    Raises:
        RecordError: the file is missing, truncated or damaged, or holds something else.
    """
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                yield from from_table(batch.replace_schema_metadata(file.schema_arrow.metadata), str(path))
    except (pa.ArrowException, OSError) as error:
        raise RecordError(f"{path}: cannot be read as Parquet, it may be truncated: {error}") from error


def check_version(version: Any, where: str) -> None:
    """Refuses any schema version but our own.

    Raises:
        RecordError: the version differs.
    """
    if version != SCHEMA_VERSION:
        raise RecordError(
            f"{where}: expected trajectory schema version {SCHEMA_VERSION}, got {version!r};"
            " read it with the release that wrote it"
        )


def _values(trajectory: Trajectory) -> dict[str, Any]:
    values = {name: getattr(trajectory, name) for name in _COLUMNS}
    for name in _JSON:
        values[name] = canonical_json(values[name])
    return {**values, "stop_reason": str(trajectory.stop_reason), "status": str(trajectory.status)}


def _trajectory(values: Mapping[str, Any], where: str) -> Trajectory:
    parsed = dict(values)
    for name in _JSON:
        try:
            parsed[name] = json.loads(parsed[name])
        except (TypeError, ValueError) as error:
            raise RecordError(f"{where}: {name}: expected JSON text, got {parsed[name]!r}") from error
    try:
        return Trajectory(**parsed)
    except RecordError as error:
        raise RecordError(f"{where}: {error}") from error


def _check_names(names: Mapping[str, Any] | Sequence[str], where: str, kind: str) -> None:
    unknown = [name for name in names if name not in _COLUMNS]
    missing = [name for name in _COLUMNS if name not in names]
    if unknown or missing:
        faults = [f"unknown {kind} {name!r}" for name in unknown] + [f"missing {kind} {name!r}" for name in missing]
        raise RecordError(f"{where}: {', '.join(faults)}")


def _list_column(values: Sequence[np.ndarray], column: pa.ListType) -> pa.ListArray:
    dtype = column.value_type.to_pandas_dtype()
    offsets = np.cumsum([0, *(value.size for value in values)], dtype=np.int64)
    flat = np.concatenate([np.zeros(0, dtype), *values])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat, column.value_type), type=column)


def _column_values(column: pa.Array, name: str) -> Sequence[Any] | list[np.ndarray]:
    if name not in _ARRAYS:
        return column.to_pylist()
    flat, offsets = column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()
    return [flat[start:end] for start, end in itertools.pairwise(offsets)]
