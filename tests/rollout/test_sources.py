"""Tests rollout/sources.py: files, tasks and lists become streams of prompts with unique ids."""

import itertools
import json
import sys
from datetime import date

import pyarrow as pa
import pyarrow.parquet
import pytest

from rollout import tasks
from rollout.config_file import parse_config
from rollout.sources import (
    InlineSource,
    JsonlSource,
    ParquetSource,
    TaskSource,
    digest_prompts,
    read_prompts,
)
from sampling.errors import ConfigError, PromptError
from sampling.params import SamplingParams

SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def jsonl(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return JsonlSource(source="jsonl", path=str(path))


def task_source(**changes):
    fields = {"source": "reasoning_gym", "tasks": [{"name": "chain_sum", "size": 3, "config": SUM}], **changes}
    return TaskSource.model_validate(fields)


def test_jsonl_rows_come_in_order_with_positions_as_missing_ids(tmp_path):
    source = jsonl(tmp_path, '\ufeff{"prompt": "é"}', "", '{"id": "x", "prompt_tokens": [1]}', '{"prompt": "c"}', "")
    prompts = list(read_prompts(source))
    assert [(prompt.id, prompt.text, prompt.tokens) for prompt in prompts] == [
        ("0", "é", None),
        ("x", None, (1,)),
        ("2", "c", None),
    ]
    assert prompts[1].where == f"{source.path}, line 3"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "line 2: expected one JSON object; Expecting ',' delimiter at column 15"),
        ("[1]", r"line 2: expected an object with .*, got \[1\]"),
        (b'{"prompt": "\xff"}', "line 2: expected UTF-8, got invalid start byte at byte 12"),
        ('{"prompt": ""}', "line 2: prompt '1': prompt: empty"),
        ('{"prompt": "a", "n": 0}', "line 2: prompt '1': sampling.n"),
        (
            '{"prompt": "a", "prompt": "b"}',
            "line 2: expected one JSON object: the key 'prompt' is given twice; keep one",
        ),
        (
            '{"prompt": "a", "metadata": {"b": 1, "b": 1}}',
            "line 2: expected one JSON object: the key 'b' is given twice",
        ),
        ('{"prompt": "a", "id": ' + "9" * 5000 + "}", "line 2: expected one JSON object: Exceeds the limit"),
        ("[" * 100_000, "line 2: expected one JSON object, got lists or objects too deep within each other"),
        ('{"prompt": "a", "metadata": ' + '{"b":' * 500 + "1" + "}" * 501, "line 2: prompt '1': metadata.*100 levels"),
        ('{"prompt": "a", "sampling": {"temperature": NaN}}', "line 2: prompt '1': sampling.temperature"),
    ],
)
def test_a_malformed_line_is_named_by_its_number_and_the_rows_before_it_are_read(tmp_path, line, message):
    rows = read_prompts(jsonl(tmp_path, '{"prompt": "ok"}', line))
    assert next(rows).text == "ok"
    with pytest.raises(PromptError, match=rf"prompts\.jsonl, {message}"):
        next(rows)


def test_duplicate_ids_are_refused_with_both_places(tmp_path):
    source = jsonl(tmp_path, '{"id": "2", "prompt": "a"}', '{"prompt": "b"}', '{"prompt": "c"}')
    with pytest.raises(PromptError) as caught:
        list(read_prompts(source))
    assert str(caught.value).startswith(
        f"{source.path}, line 3: prompt id '2' is taken already, by {source.path}, line 1"
    )


def test_rows_are_read_only_when_asked_for():
    rows = InlineSource(source="inline", rows=[{"prompt": "a"}, {"prompt": ""}])
    assert next(read_prompts(rows)).text == "a", "the bad second row has not been read yet"


def test_a_long_file_can_be_read_from_its_beginning(tmp_path):
    lines = (json.dumps({"prompt": str(i)}) for i in range(5000))
    first = list(itertools.islice(read_prompts(jsonl(tmp_path, *lines, "{broken")), 3))
    assert [prompt.text for prompt in first] == ["0", "1", "2"]


def test_parquet_reads_the_same_rows_as_jsonl(tmp_path):
    rows = [
        {"id": "a", "prompt": "x", "n": 2, "sampling": {"top_k": 3}, "metadata": {"k": "v"}},
        {"id": "b", "prompt_tokens": [1, 2], "sampling": {"temperature": 0.5}},
        {"id": "c", "messages": [{"role": "user", "content": "hi"}]},
    ]
    path = tmp_path / "p.parquet"
    names = ["id", "prompt", "prompt_tokens", "messages", "n", "sampling", "metadata"]
    table = pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
    pyarrow.parquet.write_table(table, path)
    source = ParquetSource(source="parquet", path=str(path))
    assert list(read_prompts(source)) == list(read_prompts(jsonl(tmp_path, *map(json.dumps, rows))))


def test_parquet_takes_json_text_and_numbers_rows_across_batches(tmp_path):
    path = tmp_path / "p.parquet"
    size = 2500
    table = pa.table({"prompt": [f"t{i}" for i in range(size - 1)] + [""], "sampling": ['{"top_k": 3}'] * size})
    pyarrow.parquet.write_table(table, path)
    prompts = read_prompts(ParquetSource(source="parquet", path=str(path)))
    good = list(itertools.islice(prompts, size - 1))
    assert good[-1].id == "2498" and good[-1].params(SamplingParams()).top_k == 3
    with pytest.raises(PromptError, match=r"p\.parquet, row 2499: .*empty"):
        next(prompts)


def test_files_that_cannot_be_prompts_are_named(tmp_path):
    with pytest.raises(PromptError, match=r"no\.jsonl: cannot read the prompts: No such file"):
        list(read_prompts(JsonlSource(source="jsonl", path=str(tmp_path / "no.jsonl"))))
    (tmp_path / "x.parquet").write_text("text")
    with pytest.raises(PromptError, match=r"x\.parquet: expected a Parquet file"):
        list(read_prompts(ParquetSource(source="parquet", path=str(tmp_path / "x.parquet"))))
    pyarrow.parquet.write_table(pa.table({"question": ["a"]}), tmp_path / "y.parquet")
    with pytest.raises(PromptError, match=r"y\.parquet: unknown column 'question'"):
        list(read_prompts(ParquetSource(source="parquet", path=str(tmp_path / "y.parquet"))))


def test_tasks_become_chat_prompts_that_carry_their_task():
    source = task_source(system="Be brief.", template="{question} {Now}")
    prompts = list(read_prompts(source))
    assert [prompt.id for prompt in prompts] == ["chain_sum-0", "chain_sum-1", "chain_sum-2"]
    task = tasks.Task.from_metadata(prompts[1].metadata)
    assert (task.dataset, task.index, task.size, task.seed) == ("chain_sum", 1, 3, 0)
    assert prompts[1].messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"{task.question} {{Now}}"},
    )
    assert prompts == list(read_prompts(source)), "the same seed gives the same tasks"


def test_several_datasets_follow_each_other_and_repeats_are_refused():
    both = task_source(tasks=[{"name": "chain_sum", "size": 1}, {"name": "basic_arithmetic", "size": 1}])
    assert [prompt.id for prompt in read_prompts(both)] == ["chain_sum-0", "basic_arithmetic-0"]
    twice = task_source(tasks=[{"name": "chain_sum", "size": 1}, {"name": "chain_sum", "size": 1}])
    with pytest.raises(PromptError, match="prompt id 'chain_sum-0' is taken already"):
        list(read_prompts(twice))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"name": "chain_sun", "size": 1}, "no dataset 'chain_sun'; did you mean chain_sum"),
        ({"name": "chain_sum", "size": 1, "config": {"terms": 2}}, "chain_sum refuses its config .*'terms'"),
        ({"name": "chain_sum", "size": 1, "config": {"min_terms": 0}}, "min_terms must be positive"),
    ],
)
def test_a_task_that_cannot_be_made_is_a_config_error(task, message):
    with pytest.raises(ConfigError, match=message):
        list(read_prompts(task_source(tasks=[task])))


def test_without_reasoning_gym_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # Python then finds no module of this name
    tasks._dataset.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'rollout-sampling\[tasks\]'"):
        list(read_prompts(task_source()))


def test_the_digest_follows_the_file_and_not_its_name(tmp_path):
    first = digest_prompts(jsonl(tmp_path, '{"prompt": "a"}'))
    assert first == digest_prompts(jsonl(tmp_path, '{"prompt": "a"}'))
    assert first != digest_prompts(jsonl(tmp_path, '{"prompt": "b"}'))
    assert digest_prompts(task_source()) == ""


@pytest.mark.parametrize("lines", [[""], ["", "  ", "\r"], ["\ufeff"]])
def test_a_source_without_prompts_is_refused(tmp_path, lines):
    source = jsonl(tmp_path, *lines)
    with pytest.raises(PromptError, match=f"{source.path}: expected at least one prompt, found none"):
        list(read_prompts(source))


def test_jsonl_takes_the_line_ends_of_windows(tmp_path):
    source = jsonl(tmp_path, '\ufeff{"prompt": "a"}\r', "\r", '{"prompt": "b"}\r')
    assert [prompt.text for prompt in read_prompts(source)] == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"source": "inline", "rows": [{"prompt": "a", "metadata": {"day": date(2026, 1, 2)}}]},
            "got date; convert it",
        ),
        ({"source": "inline", "rows": [{"prompt": "a", "metadata": {"x": b"a"}}]}, "got bytes; convert it"),
        (
            {"source": "inline", "rows": [{"prompt": "a", "sampling": {"top_p": float("inf")}}]},
            "expected a finite number",
        ),
        ({"source": "inline", "rows": [{"prompt": "a", "sampling": {1: 2}}]}, "expected text as keys, got 1"),
        (
            {"source": "reasoning_gym", "tasks": [{"name": "chain_sum", "size": 1, "config": {"x": float("nan")}}]},
            "config.x: expected a finite number",
        ),
    ],
)
def test_a_config_holds_nothing_that_its_file_could_not(changes, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({"model": {"checkpoint": "x"}, "prompts": changes})


def test_a_damaged_parquet_file_is_named(tmp_path):
    path = tmp_path / "p.parquet"
    pa.parquet.write_table(pa.table({"prompt": [str(i) * 50 for i in range(500)]}), path, use_dictionary=False)
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + bytes(200) + whole[300:])
    with pytest.raises(PromptError, match=r"p\.parquet: cannot be read as Parquet, it may be damaged"):
        list(read_prompts(ParquetSource(source="parquet", path=str(path))))
    for text in (b"", whole[:-1], b"PAR1" + bytes(100) + b"PAR1"):
        path.write_bytes(text)
        with pytest.raises(PromptError, match=r"p\.parquet: expected a Parquet file"):
            list(read_prompts(ParquetSource(source="parquet", path=str(path))))
