"""Sequences of other systems, under whatever usual names, and refusals that name row and field."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from rollout.codec import write_parquet
from rollout.scoring.foreign import NAMES, read_foreign
from sampling.errors import ConfigError, PromptError
from tests.rollout.records import group, trajectory

ROW = {"prompt_ids": [5, 6], "response_ids": [7, 8, 9]}


def jsonl(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def parquet(tmp_path, columns, **types):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(
        pa.table({name: pa.array(values, types.get(name)) for name, values in columns.items()}), path
    )
    return path


def test_a_line_of_ids_is_enough(tmp_path):
    (found,) = read_foreign(jsonl(tmp_path, ROW))
    assert found.prompt_tokens.tolist() == [5, 6] and found.completion_tokens.tolist() == [7, 8, 9]
    assert found.prompt_tokens.dtype == found.completion_tokens.dtype == np.int32
    assert (found.row, found.prompt_id, found.sample_index) == (0, "0", 0)
    assert found.behaviour_logprobs is found.policy_versions is found.policy is found.reward is found.failure is None


@pytest.mark.parametrize(
    "names",
    [
        {field: names[min(place, len(names) - 1)] for field, names in NAMES.items()}
        for place in range(max(map(len, NAMES.values())))
    ],
    ids=lambda names: names["completion_tokens"],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_every_field_under_each_of_its_names(tmp_path, names, kind):
    values = {
        "prompt_tokens": [5],
        "completion_tokens": [7, 8],
        "behaviour_logprobs": [-0.5, 0],
        "prompt_id": "a",
        "sample_index": 3,
        "given_len": 1,
        "forced": [0],
        "policy_versions": [4, 5],
        "policy": {"temperature": 0.5},
        "reward": 1,
    }
    row = {names[field]: value for field, value in values.items()} | {"anything": "else"}
    path = (
        jsonl(tmp_path, row) if kind == "jsonl" else parquet(tmp_path, {name: [value] for name, value in row.items()})
    )
    (found,) = read_foreign(path)
    assert found.completion_tokens.tolist() == [7, 8] and found.prompt_tokens.tolist() == [5]
    assert found.given_len == 1 and found.forced.tolist() == [0]
    assert found.behaviour_logprobs.tolist() == [-0.5, 0.0] and found.behaviour_logprobs.dtype == np.float32
    assert (found.prompt_id, found.sample_index, found.reward) == ("a", 3, 1.0)
    assert found.policy_versions.tolist() == [4, 5]
    assert found.policy == '{"temperature":0.5}'


def test_our_own_files_can_be_read_like_any_other(tmp_path):
    records = [*group("a"), trajectory("b", behaviour_logprobs=np.float32([-0.25, -1.5]))]
    with (tmp_path / "part.parquet").open("wb") as file:
        write_parquet(file, records)
    found = list(read_foreign(tmp_path / "part.parquet"))
    assert [(s.row, s.prompt_id, s.sample_index) for s in found] == [(0, "a", 0), (1, "a", 1), (2, "b", 0)]
    for sequence, record in zip(found, records, strict=True):
        assert sequence.behaviour_logprobs.tobytes() == record.behaviour_logprobs.tobytes()
        assert json.loads(sequence.policy)["top_p"] == 0.95


def test_samples_of_a_prompt_are_counted_where_no_index_tells(tmp_path):
    rows = [ROW | {"id": name} for name in ("a", "b", "a", "a", 7)]
    found = list(read_foreign(jsonl(tmp_path, *rows)))
    assert [(s.prompt_id, s.sample_index) for s in found] == [("a", 0), ("b", 0), ("a", 1), ("a", 2), ("7", 0)]


def test_blank_lines_are_skipped_and_lines_count_from_one(tmp_path):
    found = list(read_foreign(jsonl(tmp_path, "\ufeff", ROW, "\n", ROW)))
    assert [(s.row, s.where[-6:]) for s in found] == [(0, "line 1"), (1, "line 3")]


def test_our_own_name_goes_before_another(tmp_path):
    (found,) = read_foreign(jsonl(tmp_path, ROW | {"prompt_id": "mine", "id": "other"}))
    assert found.prompt_id == "mine"


def test_a_given_token_may_be_one_that_the_law_removes(tmp_path):
    logprobs = {"logprobs": [-np.inf, -1.0, -1.0]}
    (found,) = read_foreign(jsonl(tmp_path, ROW | logprobs | {"given_len": 1}))
    assert found.behaviour_logprobs[0] == -np.inf
    with pytest.raises(PromptError, match=r"logprobs\[0\]: expected a finite log-probability"):
        list(read_foreign(jsonl(tmp_path, ROW | logprobs)))


def test_large_lists_and_fixed_ones_are_lists(tmp_path):
    path = parquet(
        tmp_path,
        {"prompt_ids": [[5], [6]], "completion_ids": [[7, 8], [9, 10]], "logprobs": [[-1.0, -2.0], [-3.0, -4.0]]},
        prompt_ids=pa.large_list(pa.int64()),
        completion_ids=pa.list_(pa.uint16(), 2),
        logprobs=pa.list_(pa.float64()),
    )
    assert [s.completion_tokens.tolist() for s in read_foreign(path)] == [[7, 8], [9, 10]]


BAD = [
    (
        {"prompt_ids": [5]},
        "line 1: expected the completion's ids under one of completion_tokens, .*; found prompt_ids$",
    ),
    ({"prompt": "a", "response": "b"}, "found prompt, response; text is not enough"),
    (ROW | {"prompt_ids": None}, "prompt_ids: expected a list of token ids, got none"),
    (ROW | {"prompt_ids": []}, "prompt_ids: expected at least one token, got none"),
    (ROW | {"response_ids": "789"}, "response_ids: expected a flat list of token ids, got '789'"),
    (ROW | {"response_ids": [[7], [8]]}, r"response_ids: expected a flat list of token ids, got \[\[7\]"),
    (ROW | {"response_ids": [[7], [8, 9]]}, "expected a flat list of token ids"),
    (ROW | {"response_ids": [7.0]}, r"response_ids: expected a list of token ids, got \[7.0\]"),
    (ROW | {"response_ids": [7, None]}, "expected a list of token ids"),
    (ROW | {"response_ids": [True]}, "expected a list of token ids"),
    (ROW | {"response_ids": [7, -100]}, r"response_ids\[1\]: expected token ids in 0 .. 2\^31 - 1, got -100"),
    (ROW | {"logprobs": [-1.0, -2.0]}, "logprobs: expected 3 log-probs, one per completion token, got 2; cut off padd"),
    (ROW | {"logprobs": [-1.0, 0.5, -1.0]}, r"logprobs\[1\]: expected a finite log-probability <= 0, got 0.5"),
    (ROW | {"logprobs": [-1.0, -1.0, -np.inf]}, r"logprobs\[2\]: expected a finite log-probability <= 0, got -inf"),
    (ROW | {"logprobs": [np.nan, -1.0, -1.0]}, r"logprobs\[0\]: expected a finite log-probability <= 0, got nan"),
    (ROW | {"logprobs": ["a", "b", "c"]}, "logprobs: expected a list of numbers"),
    (ROW | {"old_logprobs": [0, 0, 0], "rollout_log_probs": [0, 0, 0]}, "rename the right one to behaviour_logprobs"),
    (ROW | {"policy_versions": [1]}, "policy_versions: expected 3 version numbers, one per completion token, got 1"),
    (ROW | {"policy": "{"}, "policy: expected JSON text"),
    (ROW | {"policy": [1]}, r"policy: expected an object of sampling parameters, got \[1\]"),
    (ROW | {"policy": {"top_p": np.nan}}, "policy.top_p: expected a finite number"),
    (ROW | {"id": 1.5}, "id: expected text or a whole number, got 1.5"),
    (ROW | {"sample_index": -1}, "sample_index: expected a whole number in 0 .. 2147483647, got -1"),
    (ROW | {"forced": [1, 1]}, "forced: expected ascending places in 0 .. 2, got"),
    (ROW | {"forced": [3]}, "forced: expected ascending places in 0 .. 2, got"),
    (ROW | {"given_len": 4}, "given_len: expected a whole number in 0 .. 3, got 4"),
    (ROW | {"reward": "good"}, "reward: expected a number, got 'good'"),
    ("[1, 2]\n", r"line 1: expected one JSON object, got \[1, 2\]"),
    ('{"prompt_ids": [1,\n', "line 1: expected one JSON object: "),
]


@pytest.mark.parametrize(("row", "says"), BAD, ids=range(len(BAD)))
def test_a_bad_row_is_named(tmp_path, row, says):
    with pytest.raises(PromptError, match=says):
        list(read_foreign(jsonl(tmp_path, row)))


def test_the_row_is_named_not_the_first(tmp_path):
    path = parquet(tmp_path, {"prompt_ids": [[5]] * 3, "response_ids": [[7], [7], [7, 8]], "logprobs": [[0.0]] * 3})
    with pytest.raises(PromptError, match=r"rows.parquet, row 2: logprobs: expected 2 log-probs"):
        list(read_foreign(path))


def test_files_that_are_none_are_named(tmp_path):
    (tmp_path / "a.csv").write_text("a")
    with pytest.raises(ConfigError, match=r"a.csv: expected a run's folder, or a file that ends in .parquet or .jsonl"):
        list(read_foreign(tmp_path / "a.csv"))
    with pytest.raises(ConfigError, match=r"none.jsonl: cannot be read: No such file"):
        list(read_foreign(tmp_path / "none.jsonl"))
    (tmp_path / "a.parquet").write_text("a")
    with pytest.raises(ConfigError, match=r"a.parquet: cannot be read as Parquet"):
        list(read_foreign(tmp_path / "a.parquet"))
    with pytest.raises(PromptError, match=r"rows.jsonl: expected at least one row, found none"):
        list(read_foreign(jsonl(tmp_path, "\n\n")))
    with pytest.raises(PromptError, match=r"rows.parquet: expected the prompt's ids .*; found completion_ids$"):
        list(read_foreign(parquet(tmp_path, {"completion_ids": [[7]]})))
