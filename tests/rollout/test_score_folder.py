"""rollout/scoring/folder.py: whole files in the source's order, continued by the same scoring and by no other."""

import dataclasses
import json

import numpy as np
import pytest

from rollout.config_file import validated
from rollout.scoring.config import ScoreConfig
from rollout.scoring.folder import ScoreFolder
from rollout.scoring.scored import Outcome, ScoredSequence, read_scored
from rollout.scoring.source import SourceFacts
from sampling.errors import ConfigError, RecordError

FACTS = SourceFacts("runs/a", "abc", rows=5, tokens=5, newest_version=None)


def config(**sections):
    base = {"model": {"checkpoint": "m"}, "output": {"rows_per_shard": 2}, "scorers": [{"name": "s"}, {"name": "t"}]}
    return validated(ScoreConfig, base | sections, "score.yaml")


def scored(row, scorer="s"):
    one, tokens = np.zeros(1, np.float32), np.int32([7])
    columns = dict.fromkeys(("model_logprobs", "behaviour_logprobs", "log_kept_mass", "entropy"), one)
    return ScoredSequence(
        scorer=scorer, row=row, prompt_id="p", sample_index=row, prompt_tokens=tokens, completion_tokens=tokens,
        given_len=0,
        reward=None, outcome=Outcome.SCORED, in_support=np.array([True]), policy="{}", weights_digest="w",
        numerics_fingerprint="n", **columns,
    )  # fmt: skip


def parts(folder, scorer):
    return {
        file.name: [row.row for row in read_scored(file)] for file in sorted((folder / "scored" / scorer).iterdir())
    }


def test_rows_are_cut_into_files_and_summed_up(tmp_path):
    folder = ScoreFolder.open(tmp_path, config(), FACTS)
    for row in range(5):
        folder.add(scored(row))
    folder.add(scored(0, "t"))
    folder.commit("s"), folder.commit("t"), folder.commit("t")
    assert parts(tmp_path, "s") == {
        "part-00000.parquet": [0, 1],
        "part-00001.parquet": [2, 3],
        "part-00002.parquet": [4],
    }
    summary = folder.finish()
    assert [(s.name, s.trajectories, s.tokens) for s in summary.scorers] == [("s", 5, 5), ("t", 1, 1)]
    assert json.loads((tmp_path / "summary.json").read_text())["scorers"][0]["trajectories"] == 5
    assert all(path.is_file() for path in summary.files) and len(summary.files) == 6


def test_a_scoring_goes_on_where_it_was_committed(tmp_path):
    folder = ScoreFolder.open(tmp_path, config(), FACTS)
    for row in range(3):  # the third is lost
        folder.add(scored(row))
    (tmp_path / "scored" / "s" / "part-00001.parquet.tmp").write_text("half")
    again = ScoreFolder.open(tmp_path, config(workers={"count": 2}, output={"rows_per_shard": 1}), FACTS)
    assert (again.rows_done("s"), again.rows_done("t")) == (2, 0)
    assert (again.weights_digest("s"), again.weights_digest("t")) == ("w", None)
    again.add(scored(2))
    assert parts(tmp_path, "s") == {"part-00000.parquet": [0, 1], "part-00001.parquet": [2]}


def test_a_row_out_of_turn_is_refused(tmp_path):
    folder = ScoreFolder.open(tmp_path, config(), FACTS)
    folder.add(scored(0))
    with pytest.raises(RecordError, match="scorer s: expected row 1 of the source, got 2"):
        folder.add(scored(2))


@pytest.mark.parametrize(
    ("sections", "facts", "says"),
    [
        ({}, {"sha256": "abd"}, "content of the source: 'abc' there, 'abd' here"),
        ({"sampling": {"top_p": 0.5}}, {}, "sampling.top_p: None there, 0.5 here"),
        ({"path": "replay"}, {}, "path: 'forward' there, 'replay' here"),
        ({"model": {"checkpoint": "other"}}, {}, "model.checkpoint: 'm' there, 'other' here"),
        ({"workers": {"threads": 7}}, {}, "workers.threads: 2 there, 7 here"),
        ({"ratios": {"cap": 3.0}}, {}, "ratios.cap: 2.0 there, 3.0 here"),
    ],
)
def test_another_scoring_is_refused_with_what_differs(tmp_path, sections, facts, says):
    begun = ScoreFolder.open(tmp_path, config(), FACTS)
    begun.add(scored(0))
    begun.commit("s")
    with pytest.raises(ConfigError, match="holds another scoring; these differ:") as error:
        ScoreFolder.open(tmp_path, config(**sections), dataclasses.replace(FACTS, **facts))
    assert f"\n  {says}\n" in str(error.value)


def test_a_scoring_without_rows_is_begun_anew(tmp_path):
    ScoreFolder.open(tmp_path, config(geometry={"cache_len": 1 << 20}), FACTS)
    ScoreFolder.open(tmp_path, config(), FACTS)
    assert json.loads((tmp_path / "scoring.json").read_text())["config"]["geometry"]["cache_len"] == 512


def test_a_folder_of_other_things_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"expected a new or empty folder, or a scoring to continue; it holds notes"):
        ScoreFolder.open(tmp_path, config(), FACTS)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_damage_is_named(tmp_path):
    begun = ScoreFolder.open(tmp_path / "a", config(), FACTS)
    begun.add(scored(0))
    begun.commit("s")
    scoring = tmp_path / "a" / "scoring.json"
    for text in ("{", "{}", scoring.read_text().replace('"schema_version": 2', '"schema_version": 9')):
        scoring.write_text(text)
        with pytest.raises(RecordError, match=r"scoring.json: damaged, or written by another release"):
            ScoreFolder.open(tmp_path / "a", config(), FACTS)
    folder = ScoreFolder.open(tmp_path / "b", config(output={"rows_per_shard": 1}), FACTS)
    folder.add(scored(0))
    part = tmp_path / "b" / "scored" / "s" / "part-00000.parquet"
    part.write_bytes(part.read_bytes()[:-9])
    with pytest.raises(RecordError, match=r"part-00000.parquet: cannot be read as Parquet, it may be truncated"):
        ScoreFolder.open(tmp_path / "b", config(), FACTS)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be made or written: .*; choose another --out"):
        ScoreFolder.open(tmp_path / "file" / "out", config(), FACTS)
