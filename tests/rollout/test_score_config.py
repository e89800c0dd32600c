"""rollout/scoring/config.py: what a scoring config means, what a run's folder adds to it, and refusals."""

from pathlib import Path

import pytest

from rollout.config_file import parse_config, validated
from rollout.scoring.config import NO_BUDGET, ScoreConfig, ScorePath, load_score_config
from rollout.store import RunFolder
from sampling.errors import ConfigError
from sampling.params import SamplingParams

ROOT = Path(__file__).parents[2]
MODEL = {"model": {"checkpoint": "models/a"}}


def parsed(**sections):
    return validated(ScoreConfig, MODEL | sections, "score.yaml")


@pytest.fixture
def run(tmp_path):
    """The folder of a run that has only begun."""
    values = {
        "model": {"checkpoint": "models/run", "dtype": "bfloat16"},
        "prompts": {"source": "inline", "rows": [{"prompt": "a"}]},
        "geometry": {"slots": 4, "cache_len": 64},
        "workers": {"threads": 1},
        "sampling": {"temperature": 0.7},
    }
    RunFolder.open(tmp_path / "run", parse_config(values)).close()
    return tmp_path / "run"


def test_without_a_config_the_run_scores_itself(run):
    config = load_score_config(run)
    assert (config.model.checkpoint, config.model.dtype) == ("models/run", "bfloat16")
    assert (config.geometry.slots, config.geometry.cache_len, config.workers.threads) == (4, 64, 1)
    (law,) = config.laws
    assert (law.name, law.checkpoint, law.params, law.path) == ("default", "models/run", None, ScorePath.FORWARD)


def test_a_config_says_only_what_is_different(run, tmp_path):
    (tmp_path / "score.yaml").write_text("model: {checkpoint: models/new}\nworkers: {count: 3}\n")
    config = load_score_config(run, tmp_path / "score.yaml", ["sampling.top_p=0.9", "workers.cpus=2"])
    assert (config.model.checkpoint, config.model.dtype) == ("models/new", "bfloat16")
    assert (config.workers.count, config.workers.cpus, config.workers.threads) == (3, 2, 1)
    (law,) = config.laws
    assert law.params == SamplingParams(top_p=0.9, max_new_tokens=NO_BUDGET)  # the run's 0.7 plays no part


def test_a_scorer_replaces_what_it_names():
    config = parsed(
        path="replay",
        sampling={"temperature": 0.5},
        scorers=[
            {"name": "plain"},
            {"name": "recorded", "sampling": "recorded", "path": "forward"},
            {"name": "new", "checkpoint": "models/b", "sampling": {"max_new_tokens": 8}},
        ],
    )
    plain, recorded, new = config.laws
    assert (plain.checkpoint, plain.path, plain.params.temperature) == ("models/a", ScorePath.REPLAY, 0.5)
    assert (recorded.params, recorded.path) == (None, ScorePath.FORWARD)
    assert (new.checkpoint, new.params) == ("models/b", SamplingParams(max_new_tokens=8))


def test_the_resolved_config_reads_back_equal():
    config = parsed(sampling={"logit_bias": {5: "-inf"}}, scorers=[{"name": "a", "sampling": "recorded"}])
    assert validated(ScoreConfig, config.to_dict(), "again") == config


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"model": {}}, "model.checkpoint: expected a value, got none; add it to the file or give --set"),
        ({"sampling": "same"}, "sampling: expected 'recorded' or sampling parameters, got 'same'"),
        ({"sampling": {"temperatur": 1}}, "sampling.temperatur: no such key; did you mean 'temperature'"),
        ({"path": "fast"}, "path: expected 'forward' or 'replay', got 'fast'"),
        ({"scorers": []}, "scorers: expected at least one item"),
        ({"scorers": [{"name": "a"}, {"name": "A"}]}, "scorers: expected distinct names, got 'a' twice"),
        ({"scorers": [{"name": "a/b"}]}, "scorers.0.name: expected up to 64 letters, digits, .*, got 'a/b'"),
        ({"scorers": [{"checkpoint": "x"}]}, "scorers.0.name: expected a value, got none"),
        (
            {"scorers": [{"name": "a"}, {"name": "b", "sampling": {"top_p": 3}}]},
            r"scorers.1.sampling.top_p: expected a number in \(0, 1\]; 1 is off, got 3",
        ),
        ({"scorers": [{"name": "a", "sampling": "same"}]}, "scorers.0.sampling: expected 'recorded' or"),
        ({"scorers": [{"name": "a", "chekpoint": "x"}]}, "scorers.0.chekpoint: no such key; did you mean 'checkpoint'"),
        ({"ratios": {"cap": 0}}, "ratios.cap: expected more than 0, got 0"),
        ({"ratios": {"clip_epsilon": 1.5}}, "ratios.clip_epsilon: expected less than 1"),
        ({"prompts": {"source": "inline"}}, "prompts: no such key; known are model, geometry, plugins, workers"),
    ],
)
def test_a_bad_value_is_named_with_what_was_expected(sections, says):
    with pytest.raises(ConfigError, match=says):
        parsed(**sections)


def test_a_source_without_a_run_needs_a_checkpoint(tmp_path):
    source = tmp_path / "rows.jsonl"
    with pytest.raises(ConfigError, match=r"rows.jsonl: no such file or folder; expected that of a run, or a .parquet"):
        load_score_config(source)
    source.touch()
    with pytest.raises(ConfigError, match=r"model.checkpoint: expected a value, got none; .* --set model.checkpoint="):
        load_score_config(source)
    config = load_score_config(source, None, ["model.checkpoint=models/a"])
    assert config.laws[0].checkpoint == "models/a"


def test_the_example_of_the_docs_is_good(run):
    config = load_score_config(run, ROOT / "configs" / "score-quickstart.yaml")
    assert [law.name for law in config.laws] == ["recorded", "unfiltered", "sharper"]


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"expected a folder made by 'rollout sample', found no manifest.json in it"):
        load_score_config(tmp_path)


def test_an_override_is_blamed_and_not_the_file(run):
    with pytest.raises(ConfigError, match=r"sampling.top_p: .* got 3  \(--set\)"):
        load_score_config(run, None, ["sampling.top_p=3"])
