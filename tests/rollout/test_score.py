"""rollout/scoring/job.py on real workers.

1.  A run scored under its own weights and policies is the run: to the bit by replay, within rounding by forward passes.
2.  Other weights and policies give what an uncached forward and plain NumPy give; what they remove is counted.
3.  Every sequence ends once per scorer, in the order of the source: scored, skipped or failed with a reason.
4.  An interrupted scoring goes on where it was, and ends with the same content as one that was left alone.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from click.testing import CliRunner

from rollout.cli import main
from rollout.config_file import validated
from rollout.driver import sample_run
from rollout.progress import ProgressReporter
from rollout.scoring.config import ScoreConfig, load_score_config
from rollout.scoring.job import WINDOW_ROUNDS, score_source
from rollout.scoring.scored import Outcome, read_scored
from rollout.shards import read_trajectories
from sampling import load_checkpoint
from sampling.errors import CheckpointError, ConfigError, PromptError
from sampling.models import Transformer
from tests.rollout.conftest import prompt_row
from tests.tiny_models import TOKENIZER_LEN, tiny_llama

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

TEMPERATURE, TOP_K = 1.5, 220
COLUMNS = ("behaviour_logprobs", "model_logprobs", "log_kept_mass", "entropy")


@pytest.fixture(scope="module")
def other_checkpoint(tmp_path_factory):
    return str(tiny_llama(tmp_path_factory.mktemp("other") / "llama", seed=77))


@pytest.fixture(scope="module")
def finished(local_ray, tmp_path_factory):
    """A run with samples of mixed policies, two of which failed, and its scoring under four scorers."""
    folder = tmp_path_factory.mktemp("scores")

    def make(config, other):
        if not (folder / "run").exists():
            sample_run(config, folder / "run")
            scorers = [
                {"name": "replayed", "path": "replay"},
                {"name": "forward"},
                {"name": "other", "checkpoint": other, "sampling": {"temperature": TEMPERATURE, "top_k": TOP_K}},
                {"name": "other-replayed", "checkpoint": other, "sampling": {"top_p": 0.8}, "path": "replay"},
            ]
            (folder / "score.yaml").write_text(json.dumps({"scorers": scorers, "output": {"rows_per_shard": 7}}))
            config = load_score_config(folder / "run", folder / "score.yaml")
            make.summary = score_source(folder / "run", config, folder / "scored")
        return folder

    make.summary = None
    return make


@pytest.fixture
def folder(finished, tiny_config, other_checkpoint):
    rows = [*map(prompt_row, range(6)), {"id": "long", "prompt": "a" * 70, "n": 2}, *map(prompt_row, range(6, 12))]
    return finished(tiny_config(prompts={"source": "inline", "rows": rows}), other_checkpoint)


@pytest.fixture
def summary(folder, finished):
    return {scorer.name: scorer for scorer in finished.summary.scorers}


def scored_rows(folder, name):
    return [row for file in sorted((folder / "scored" / name).glob("*.parquet")) for row in read_scored(file)]


def pairs(folder, name):
    """Each completed record of the run with its scored row."""
    records, rows = list(read_trajectories(folder / "run")), scored_rows(folder / "scored", name)
    assert [(row.prompt_id, row.sample_index) for row in rows] == [(r.prompt_id, r.sample_index) for r in records]
    return [(record, row) for record, row in zip(records, rows, strict=True) if not record.failed]


def test_every_sequence_is_there_once_in_the_order_of_the_source(folder, summary):
    for name, scorer in summary.items():
        rows = scored_rows(folder / "scored", name)
        assert [row.row for row in rows] == list(range(26))
        assert (scorer.trajectories, scorer.scored, scorer.skipped, scorer.failed) == (26, 24, 2, 0)
        skipped = [row for row in rows if row.outcome is Outcome.SKIPPED]
        assert {row.prompt_id for row in skipped} == {"long"}
        assert all("leave no room in a cache of 64" in row.failure for row in skipped)


def test_a_replay_is_the_record_to_the_bit(folder, summary):
    for record, row in pairs(folder, "replayed"):
        for name in COLUMNS:
            assert getattr(row, name).tobytes() == getattr(record, name).tobytes(), name
        assert json.loads(row.policy) == record.policy
        assert row.weights_digest == record.weights_digest
        assert row.numerics_fingerprint == record.numerics_fingerprint
        assert row.log_ratio == 0.0 and row.clipped_ratio == 1.0 and row.ended_at is None
    assert summary["replayed"].ratios.ess == pytest.approx(24.0)
    assert summary["replayed"].ratios.kl.k2 == 0.0
    assert summary["replayed"].out_of_support_share == 0.0


def test_forward_passes_are_the_record_within_rounding(folder, summary):
    for record, row in pairs(folder, "forward"):
        for name in COLUMNS:
            np.testing.assert_allclose(getattr(row, name), getattr(record, name), atol=1e-4, err_msg=name)
        assert row.ended_at is None
    assert summary["forward"].ratios.ess_share == pytest.approx(1.0, abs=1e-6)
    assert summary["forward"].mean_behaviour_logprob == pytest.approx(
        summary["replayed"].mean_behaviour_logprob, abs=1e-5
    )


def log_softmax(scores):
    """float64, row by row."""
    shifted = scores.astype(np.float64) - scores.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.fixture(scope="module")
def uncached(other_checkpoint):
    """Scores [completion_len, vocab] of the other model, from one forward over the whole sequence without a cache."""
    checkpoint = load_checkpoint(other_checkpoint)
    model, weights = Transformer(checkpoint.info.config), {"params": checkpoint.params}

    @jax.jit
    def forward(tokens):
        hidden, _ = model.apply(weights, tokens, jnp.arange(tokens.size, dtype=jnp.int32)[None])
        return model.apply(weights, hidden, method="logits")

    def scores(record):
        tokens = np.zeros((1, 64), np.int32)  # what follows the sequence cannot reach back to it
        sequence = np.concatenate([record.prompt_tokens, record.completion_tokens])
        tokens[0, : sequence.size] = sequence
        return np.asarray(forward(tokens))[0, record.prompt_tokens.size - 1 : sequence.size - 1]

    return scores


def expected_top_k(scores):
    """Behaviour log-probs [completion_len, vocab] at TEMPERATURE among the TOP_K best."""
    known = np.where(np.arange(scores.shape[-1]) < TOKENIZER_LEN, scores, -np.inf) / TEMPERATURE
    best = np.sort(known, axis=-1)[:, -TOP_K][:, None]
    return log_softmax(np.where(known >= best, known, -np.inf))


def test_other_weights_and_policy_are_those_of_an_uncached_forward(folder, summary, uncached):
    removed, log_weights, tokens = 0, [], 0
    for record, row in pairs(folder, "other"):
        scores, drawn = uncached(record), record.completion_tokens[:, None]
        model = np.take_along_axis(log_softmax(scores), drawn, axis=-1)[:, 0]
        law = expected_top_k(scores)
        behaviour = np.take_along_axis(law, drawn, axis=-1)[:, 0]
        np.testing.assert_allclose(row.model_logprobs, model, atol=1e-4)
        np.testing.assert_allclose(row.behaviour_logprobs, behaviour, atol=1e-4)
        np.testing.assert_array_equal(row.in_support, np.isfinite(behaviour))
        with np.errstate(invalid="ignore"):
            entropy = -np.nansum(np.exp(law) * law, axis=-1)
        np.testing.assert_allclose(row.entropy, entropy, atol=1e-4)
        expected = behaviour.sum() - record.behaviour_logprobs.sum(dtype=np.float64)
        np.testing.assert_allclose(row.log_ratio, expected, atol=1e-3)
        removed, tokens = removed + int(np.isneginf(behaviour).sum()), tokens + behaviour.size
        log_weights.append(row.log_ratio)
    found = summary["other"]
    assert found.tokens == tokens and removed > 0
    assert found.out_of_support_share == removed / tokens
    assert found.zero_probability_share == np.isneginf(log_weights).mean() > 0
    weights = np.exp(np.array(log_weights))
    assert weights.any()
    assert found.ratios.ess == pytest.approx(weights.sum() ** 2 / (weights**2).sum())


def test_a_replay_under_another_policy_goes_no_further_than_the_record(folder, uncached):
    for record, row in pairs(folder, "other-replayed"):
        model = np.take_along_axis(log_softmax(uncached(record)), record.completion_tokens[:, None], axis=-1)[:, 0]
        np.testing.assert_allclose(row.model_logprobs, model, atol=1e-4)
        assert row.behaviour_logprobs.size == record.completion_len


def test_summary_and_files_say_the_same(folder, summary):
    written = json.loads((folder / "scored" / "summary.json").read_text())
    assert [scorer["name"] for scorer in written["scorers"]] == list(summary)
    assert written["scorers"][2]["ratios"]["ess"] == summary["other"].ratios.ess
    files = sorted(path.name for path in (folder / "scored" / "scored" / "other").iterdir())
    assert files == [f"part-0000{n}.parquet" for n in range(4)]


def test_the_same_command_leaves_a_finished_scoring_alone(folder, finished):
    before = {path: path.read_bytes() for path in (folder / "scored").rglob("*.parquet")}
    config = load_score_config(folder / "run", folder / "score.yaml")
    assert score_source(folder / "run", config, folder / "scored").to_dict() == finished.summary.to_dict()
    assert {path: path.read_bytes() for path in (folder / "scored").rglob("*.parquet")} == before


def foreign(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_sequences_of_another_system_and_all_that_can_befall_them(tiny_checkpoint, tmp_path):
    """From the command line: no log-probs, versions, a sequence too long, one without tokens, one that failed there."""
    source = foreign(
        tmp_path / "rows.jsonl",
        [
            {"id": "a", "prompt_ids": [5, 6], "response_ids": [7, 8, 9], "policy_versions": [1, 1, 2]},
            {"id": "a", "prompt_ids": [5, 6], "response_ids": [7] * 40},
            {"id": "a", "prompt_ids": [5, 6], "response_ids": []},
            {"id": "b", "prompt_ids": [5] * 33, "response_ids": [2]},
            {"id": "c", "prompt_ids": [5], "response_ids": [2, 2, 7], "policy_versions": [3, 3, 3]},
            {"id": "d", "prompt_ids": [5], "response_ids": [7], "failure": "lost"},
            {"id": "e", "prompt_ids": [5] * 6, "response_ids": [7]},
        ],
    )
    sets = {
        "model.checkpoint": tiny_checkpoint, "geometry": "{slots: 4, cache_len: 32, prefill_chunk: 16}",
        "workers": "{cpus: 0, threads: 1}", "sampling": "{suppress_tokens: [8], max_length: 6}",
    }  # fmt: skip
    arguments = [f"--set={key}={value}" for key, value in sets.items()]
    result = CliRunner().invoke(main, ["score", str(source), "--out", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 1
    too_long = "and completion of 40 tokens do not fit a cache of 32; raise geometry.cache_len"
    assert result.stderr.splitlines()[-4:] == [
        "rollout: 3 sequence(s) could not be scored, as told under `failure`:",
        f"  default: prompt 'a', sample 1: prompt of 2 {too_long}",
        f"  default: prompt 'b', sample 0: prompt of 33 {too_long.replace('40', '1')}",
        "  default: prompt 'e', sample 0: ConfigError: prompt 'e': sampling.max_length: expected more than the prompt's"
        " 6 tokens, got 6",
    ]
    assert "no recorded log-probs" in result.stdout and "versions behind" in result.stdout
    rows = scored_rows(tmp_path / "out", "default")
    outcomes = ["scored", "failed", "skipped", "failed", "scored", "skipped", "failed"]
    assert [row.outcome for row in rows] == outcomes
    assert [row.failure for row in rows][2:6:3] == ["the completion has no tokens", "the record failed: lost"]
    assert rows[0].in_support.tolist() == [True, False, True] and rows[0].log_ratio is None
    assert rows[4].ended_at == 0  # two end-of-sequence tokens before the last
    assert (rows[0].staleness_max, rows[4].staleness_max) == (2, 0)
    assert rows[0].staleness_mean == pytest.approx(5 / 3)
    (scorer,) = json.loads((tmp_path / "out" / "summary.json").read_text())["scorers"]
    assert (scorer["trajectories"], scorer["scored"], scorer["skipped"], scorer["failed"]) == (7, 2, 2, 3)
    assert scorer["ratios"] is None and scorer["tokens"] == 6
    assert [(age["age"], age["trajectories"], age["tokens"]) for age in scorer["staleness"]] == [
        (0, 1, 3), (1, 0, 1), (2, 1, 2),
    ]  # fmt: skip


def test_undefined_scores_are_failures_and_harm_nobody_else(tmp_path):
    """A checkpoint in which one token's embedding is NaN: whatever follows that token has no log-prob.

    The source is longer than what may be handed out ahead of the oldest unanswered sequence.
    """
    weights = safetensors.numpy.load_file(tiny_llama(tmp_path / "llama") / "model.safetensors")
    weights["model.embed_tokens.weight"][9] = np.nan
    safetensors.numpy.save_file(weights, tmp_path / "llama" / "model.safetensors", {"format": "pt"})
    completions = [[7, 9, 8], [7, 8, 6], [9, 9, 8]] * 15
    sections = {
        "model": {"checkpoint": str(tmp_path / "llama")},
        "geometry": {"slots": 2, "cache_len": 32, "prefill_chunk": 16},
        "workers": {"cpus": 0, "threads": 1},
        "sampling": {"temperature": 1.0},
        "scorers": [{"name": "forward"}, {"name": "replay", "path": "replay"}],
    }
    assert len(completions) > WINDOW_ROUNDS * 2
    config = validated(ScoreConfig, sections, "score.yaml")
    source = foreign(tmp_path / "rows.jsonl", [{"prompt_ids": [5, 6], "response_ids": ids} for ids in completions])
    summary = score_source(source, config, tmp_path / "out")
    assert [(scorer.scored, scorer.failed) for scorer in summary.scorers] == [(15, 30), (15, 30)]
    for scorer in ("forward", "replay"):
        rows = scored_rows(tmp_path / "out", scorer)
        assert [row.row for row in rows] == list(range(45))
        for row in rows:
            if row.completion_tokens.tolist() == [7, 8, 6]:
                assert np.all(np.isfinite(row.behaviour_logprobs))
            else:
                assert "undefined" in row.failure
    assert rows[0].failure == "the row ended with undefined_distribution at token 2 of 3"


def test_an_interrupted_scoring_goes_on_and_changed_weights_stop_it(folder, tmp_path):
    checkpoint, out = tmp_path / "llama", tmp_path / "out"
    tiny_llama(checkpoint)
    sets = [f"model.checkpoint={checkpoint}", "path=replay", "output.rows_per_shard=3"]
    config = load_score_config(folder / "run", None, sets)
    parts = out / "scored" / "default"

    def stop():
        if (parts / "part-00000.parquet").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_source(folder / "run", config, out, progress=ProgressReporter(quiet=True, check=stop))
    committed = len(scored_rows(out, "default"))
    assert 0 < committed < 26 and not (out / "summary.json").exists()

    tiny_llama(checkpoint, seed=77)
    with pytest.raises(ConfigError, match=f"{checkpoint} has changed. Restore it, or choose another --out"):
        score_source(folder / "run", config, out)

    tiny_llama(checkpoint)
    assert score_source(folder / "run", config, out).failed == 0
    undisturbed = scored_rows(folder / "scored", "replayed")
    for ours, theirs in zip(scored_rows(out, "default"), undisturbed, strict=True):
        assert (ours.row, ours.outcome, ours.failure) == (theirs.row, theirs.outcome, theirs.failure)
        for name in COLUMNS:
            assert getattr(ours, name).tobytes() == getattr(theirs, name).tobytes()


def test_a_source_that_changes_on_the_way_gives_no_summary(tiny_checkpoint, tmp_path):
    source = foreign(tmp_path / "rows.jsonl", [{"prompt_ids": [5], "response_ids": [7]}])
    sections = {"model": {"checkpoint": tiny_checkpoint}, "workers": {"cpus": 0, "threads": 1}, "sampling": {}}
    sections["geometry"] = {"slots": 4, "cache_len": 32, "prefill_chunk": 16}
    config = validated(ScoreConfig, sections, "score.yaml")

    class Edited(ProgressReporter):
        def message(self, text):
            if text.startswith("starting"):
                foreign(source, [{"prompt_ids": [5], "response_ids": [8]}])

    with pytest.raises(ConfigError, match="was changed while it was scored"):
        score_source(source, config, tmp_path / "out", progress=Edited(quiet=True))
    assert not (tmp_path / "out" / "summary.json").exists()


BAD = [
    (
        {},
        {"response_ids": [TOKENIZER_LEN]},
        r"line 2: completion_tokens\[0\]: expected token ids in 0 .. 265, those of",
    ),
    ({}, {"prompt_ids": [5, 300]}, r"line 2: prompt_tokens\[1\]: expected token ids in 0 .. 265, .* got 300"),
    ({"sampling": "recorded"}, {}, "line 1: expected a policy, which scorer 'default' takes from each record, found"),
    (
        {"sampling": "recorded"},
        {"policy": {"temperatur": 1.0}},
        "line 2: policy: sampling.temperatur: no such parameter; did you mean temperature",
    ),
    ({"sampling": {"suppress_tokens": [270]}}, {}, "scorer default: sampling.suppress_tokens: expected token ids in"),
]


@pytest.mark.parametrize(("sections", "row", "says"), BAD, ids=range(len(BAD)))
def test_bad_input_is_named_before_any_worker_starts(tiny_checkpoint, tmp_path, sections, row, says):
    first = {"prompt_ids": [5], "response_ids": [7]} | ({"policy": {}} if "policy" in row else {})
    source = foreign(tmp_path / "rows.jsonl", [first, first | row])
    base = {"model": {"checkpoint": tiny_checkpoint}, "sampling": {"temperature": 1.0}}
    config = validated(ScoreConfig, base | sections, "score.yaml")
    with pytest.raises((PromptError, ConfigError), match=says):
        score_source(source, config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_is_not_there_is_named(tmp_path):
    source = foreign(tmp_path / "rows.jsonl", [{"prompt_ids": [5], "response_ids": [7]}])
    config = validated(ScoreConfig, {"model": {"checkpoint": "nowhere"}, "sampling": {}}, "score.yaml")
    with pytest.raises(CheckpointError, match="nowhere"):
        score_source(source, config, tmp_path / "out")
