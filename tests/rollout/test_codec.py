"""Tests rollout/codec.py. What it promises:

1. A record read back equals the record written, to the bit, over msgpack and over Parquet.
2. Types do not depend on the data: a file of empty completions has the same schema as any other (case B084).
3. Ids and log-probs are stored, never remade from text (case B083).
4. What it does not know it refuses, by name.
"""

import dataclasses
import io
import sys

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.codec import (
    PARQUET_SCHEMA,
    decode,
    decode_array,
    encode,
    encode_array,
    from_table,
    read_parquet,
    to_table,
    write_parquet,
)
from rollout.trajectory import LOGPROB_DEFINITION, SCHEMA_VERSION, Trajectory
from sampling.errors import RecordError
from tests import strategies
from tests.rollout.records import trajectory

NO_TOKENS = {
    "completion_tokens": np.zeros(0, np.int32),
    "behaviour_logprobs": np.zeros(0, np.float32),
    "model_logprobs": np.zeros(0, np.float32),
    "log_kept_mass": np.zeros(0, np.float32),
    "entropy": np.zeros(0, np.float32),
    "policy_versions": np.zeros(0, np.int32),
}


@given(strategies.trajectories())
def test_msgpack_round_trip_is_exact(record):
    assert decode(encode(record)) == record


@given(st.lists(strategies.trajectories(), max_size=4))
def test_parquet_round_trip_is_exact(records):
    file = io.BytesIO()
    write_parquet(file, records)
    file.seek(0)
    table = pyarrow.parquet.read_table(file)
    assert table.schema == PARQUET_SCHEMA
    assert list(from_table(table)) == records


@given(st.lists(strategies.float32_bits, max_size=6))
def test_every_float32_survives_both_ways(bits):
    array = np.array(bits, np.uint32).view(np.float32)
    again = decode_array(msgpack.unpackb(msgpack.packb(encode_array(array))), "x")
    assert again.dtype == np.float32 and again.tobytes() == array.tobytes()
    lawful = np.where(array > 0, np.float32(-1), array)
    tokens = np.zeros(array.size, np.int32)
    record = trajectory(
        completion_tokens=tokens,
        policy_versions=tokens,
        behaviour_logprobs=np.zeros(array.size, np.float32),
        model_logprobs=lawful,
        log_kept_mass=lawful,
    )
    (table_again,) = from_table(to_table([record]))
    assert table_again.model_logprobs.tobytes() == lawful.tobytes()
    file = io.BytesIO()
    write_parquet(file, [record])
    (file_again,) = from_table(pyarrow.parquet.read_table(file))
    assert file_again.model_logprobs.tobytes() == lawful.tobytes()


def test_bytes_are_little_endian_on_every_machine():
    message = encode_array(np.array([1, 256], ">i4"))
    assert message == {"dtype": "<i4", "shape": [2], "data": b"\x01\0\0\0\0\x01\0\0"}
    again = decode_array(message, "x")
    assert again.tolist() == [1, 256] and again.dtype.byteorder in ("=", "<" if sys.byteorder == "little" else ">")


def test_b083_ids_and_logprobs_are_stored_and_not_remade_from_text():
    record = trajectory(text="ab")  # a tokenizer with ambiguous merges would encode "ab" as [9]
    again = decode(encode(record))
    assert again.completion_tokens.tolist() == [7, 8]
    assert again.behaviour_logprobs.tobytes() == np.array([-0.5, -0.7], np.float32).tobytes()
    with pytest.raises(RecordError, match="none may be padded or dropped"):
        dataclasses.replace(record, completion_tokens=np.array([9], np.int32))


def test_b084_empty_completions_keep_their_types_and_shards_read_as_one(tmp_path):
    shards = [tmp_path / "part-0.parquet", tmp_path / "part-1.parquet"]
    drawn = trajectory(
        "q",
        completion_tokens=np.array([5, 6], np.int32),
        model_logprobs=np.array([-np.inf, np.nan], np.float32),
    )
    for path, records in zip(shards, ([trajectory("p", i, **NO_TOKENS) for i in (0, 1)], [drawn]), strict=True):
        with path.open("wb") as file:
            write_parquet(file, records)
    schemas = [pyarrow.parquet.read_schema(path) for path in shards]
    assert schemas[0] == schemas[1] == PARQUET_SCHEMA
    table = pa.concat_tables([pyarrow.parquet.read_table(path) for path in shards])
    assert table.schema.field("completion_tokens").type.value_type == pa.int32()
    assert table.schema.field("behaviour_logprobs").type.value_type == pa.float32()
    records = list(from_table(table))
    assert [record.completion_len for record in records] == [0, 0, 2]
    assert records[2] == drawn


def test_unicode_metadata_and_prompt_ids_survive(tmp_path):
    record = trajectory("naïve-🍕", metadata={"Größe": ["日本語", None, 2**80, 1e-300]}, text="🍕!")
    assert decode(encode(record)) == record
    with (tmp_path / "x.parquet").open("wb") as file:
        write_parquet(file, [record])
    assert list(read_parquet(tmp_path / "x.parquet")) == [record]


def test_schema_covers_every_field_and_names_its_version():
    assert PARQUET_SCHEMA.names == [field.name for field in dataclasses.fields(Trajectory)]
    file = io.BytesIO()
    write_parquet(file, [])
    metadata = pyarrow.parquet.read_schema(file).metadata
    assert metadata[b"rollout.schema_version"] == b"3" and SCHEMA_VERSION == 3
    assert metadata[b"rollout.logprob_definition"].decode() == LOGPROB_DEFINITION


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(schema_version=9), "expected trajectory schema version 3, got 9"),
        (lambda m: m.pop("schema_version"), "expected trajectory schema version 3, got None"),
        (lambda m: m.update(logprobs=[]), "unknown field 'logprobs'"),
        (lambda m: m.pop("behaviour_logprobs"), "missing field 'behaviour_logprobs'"),
        (lambda m: m.update(key={"dtype": "<u4", "shape": [2], "data": b"123"}), "key: expected an array"),
        (lambda m: m.update(key={"dtype": "|O", "shape": [1], "data": b"12345678"}), "key: expected an array"),
        (lambda m: m.update(policy="{"), "policy: expected JSON text"),
    ],
)
def test_a_message_that_is_not_ours_is_refused_by_name(change, message):
    fields = msgpack.unpackb(encode(trajectory()))
    change(fields)
    with pytest.raises(RecordError, match=message):
        decode(msgpack.packb(fields))


def test_every_cut_of_a_message_is_refused():
    data = encode(trajectory())
    for end in range(len(data)):
        with pytest.raises(RecordError):
            decode(data[:end])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop_columns(["key"]), "missing column 'key'"),
        (lambda t: t.append_column("extra", pa.array(["x"])), "unknown column 'extra'"),
        (lambda t: t.replace_schema_metadata({}), "expected trajectory schema version 3, got None"),
        (lambda t: t.replace_schema_metadata({"rollout.schema_version": "9"}), "version 3, got 9"),
        (
            lambda t: t.set_column(t.schema.names.index("stop_reason"), "stop_reason", pa.array([1])),
            "column 'stop_reason': expected string, got int64",
        ),
    ],
)
def test_a_table_that_is_not_ours_is_refused_by_name(change, message):
    with pytest.raises(RecordError, match=message):
        list(from_table(change(to_table([trajectory()])), "part-0.parquet"))


def test_a_truncated_or_missing_file_is_named(tmp_path):
    path = tmp_path / "part-0.parquet"
    with pytest.raises(RecordError, match=r"part-0\.parquet"):
        list(read_parquet(path))
    with path.open("wb") as file:
        write_parquet(file, [trajectory()])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RecordError, match=r"part-0\.parquet: cannot be read as Parquet, it may be truncated"):
        list(read_parquet(path))
