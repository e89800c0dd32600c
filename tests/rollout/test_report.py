"""Tests rollout/report/. What it promises:

1.  A page stands alone: it asks nothing of a network, and no text of a run becomes markup or code in it.
2.  A run can be reported at any time; what is missing, cut off or damaged is said, and nothing else is lost.
3.  What is shown is what is recorded: ids, log-probs and rewards; what is left out is counted.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest
from click.testing import CliRunner

from rollout.cli import main
from rollout.codec import read_parquet
from rollout.report.figures import THEME
from rollout.report.job import write_report
from rollout.report.metrics import read_metrics
from rollout.report.panels import training_charts
from rollout.report.pieces import spell, visible
from rollout.report.reading import MAX_GROUPS, MAX_SAMPLES, MAX_STEPS, read_run
from rollout.rewards import Score
from sampling.errors import ConfigError, RecordError, RunError
from tests.rollout.records import group, trajectory
from tests.rollout.test_store import write_run
from tests.rollout.training_folder import EVIL, write, write_training
from tests.tiny_models import TOKENIZER_LEN, byte_tokenizer


def encode(text):
    return byte_tokenizer().encode(text, add_special_tokens=False)


@pytest.fixture(scope="module")
def training(tiny_checkpoint, tmp_path_factory):
    return write_training(tmp_path_factory.mktemp("training") / "toy", tiny_checkpoint, encode)


@pytest.fixture(scope="module")
def reported(training):
    return write_report(training)


@pytest.fixture
def run(training, tmp_path):
    """A copy of the training folder that a test may change."""
    return shutil.copytree(training, tmp_path / "toy", ignore=shutil.ignore_patterns("report"))


class Page(HTMLParser):
    """What a browser would find in a page: elements with attributes, scripts, and the text outside of them."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.scripts, self.text, self._inside = [], [], "", []
        self.feed(path.read_text())
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data):
        if self._inside and self._inside[-1] == "script":
            self.scripts[-1] += data
        else:
            self.text += data

    @property
    def views(self):
        return {view["name"]: view["groups"] for view in json.loads(self.scripts[0])}


def call(*arguments):
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def test_the_page_of_a_training_job_holds_its_figures_and_its_completions(training, reported):
    page = Page(reported.page)
    assert reported.faults == () and reported.page == training / "report" / "index.html"
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in reported.figures)
    names = {file.stem for file in reported.figures}
    assert names >= set("reward accuracy lengths kl mismatch lag throughput occupancy ratios entropy".split())
    assert names >= {"clip_fraction", "grad_norm", "overview"}
    tags = [tag for tag, _ in page.elements]
    assert tags.count("figure") == tags.count("svg") == len(reported.figures) - 1
    assert len(page.views["Samples"]) == 12 * MAX_GROUPS and len(page.views["Evaluations"]) == 6


def test_what_is_shown_of_a_token_is_what_is_recorded(training, reported):
    record = next(iter(read_parquet(training / "trajectories" / "step-000001.parquet")))
    shown = Page(reported.page).views["Samples"][0]
    sample = shown["samples"][0]
    assert (shown["prompt_id"], shown["heading"], len(shown["samples"])) == (record.prompt_id, "step 1", 4)
    assert sample["ids"] == record.completion_tokens.tolist()
    np.testing.assert_allclose(sample["behaviour"], record.behaviour_logprobs, atol=6e-5)
    np.testing.assert_allclose(sample["model"], record.model_logprobs, atol=6e-5)
    np.testing.assert_allclose(sample["kept"], np.exp(record.log_kept_mass), atol=6e-5)
    assert "".join(sample["pieces"]) == record.text
    assert (sample["reward"], sample["stop"], sample["length"]) == (
        record.reward,
        record.stop_reason,
        record.completion_len,
    )
    assert sample["versions"] == [0, 1] and sum(count for _, count in sample["runs"]) == record.completion_len
    assert json.loads(shown["metadata"]) == record.metadata


def test_evaluations_stand_side_by_side_sorted_by_what_became_of_them(training, reported):
    groups = Page(reported.page).views["Evaluations"]
    rewards = {(g["prompt_id"], s["caption"]): s["reward"] for g in groups for s in g["samples"]}
    for shown in groups:
        assert [sample["caption"] for sample in shown["samples"]] == ["before, step 0", "after, step 12"]
        old, new = (sample["reward"] for sample in shown["samples"])
        assert shown["heading"] == ("better" if new > old else "worse" if new < old else "as before")
    for step, caption in ((0, "before, step 0"), (12, "after, step 12")):
        for record in read_parquet(training / "evaluations" / f"step-{step:06}.parquet"):
            assert rewards[record.prompt_id, caption] == record.reward
    assert {shown["heading"] for shown in groups} > {"better"}


def test_the_page_asks_nothing_of_a_network(reported):
    page = Page(reported.page)
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href", "srcset", "action", "data", "poster"):
                assert value.startswith("#"), (tag, name, value)
            assert not name.startswith("on"), (tag, name)
    assert not {tag for tag, _ in page.elements} & {"link", "img", "iframe", "object", "embed", "base"}
    text = reported.page.read_text()
    assert "@import" not in text and all(link.startswith("#") for link in re.findall(r"url\(([^)]*)\)", text))


def test_the_only_script_that_may_run_is_the_pages_own(reported):
    page = Page(reported.page)
    policy = next(a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    data, script = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    assert "innerHTML" not in script and "eval" not in script and json.loads(data)


def test_text_of_a_run_stays_text(run):
    tokens = np.array(encode(EVIL), np.int32)
    nats = np.full(tokens.size, -0.5, np.float32)
    evil = trajectory(
        EVIL,
        prompt_tokens=tokens,
        completion_tokens=tokens,
        behaviour_logprobs=nats,
        model_logprobs=nats,
        log_kept_mass=nats,
        metadata={EVIL: EVIL},
        score=Score(error=EVIL),
    )
    write(run / "trajectories" / "step-000001.parquet", [evil])
    with (run / "config.yaml").open("a") as config:
        config.write(f"comment: {json.dumps(EVIL)}\n")
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": 13, EVIL: 1.0}) + "\n")
    page = Page(write_report(run).page)
    assert len(page.scripts) == 2 and "alert(1)" not in page.scripts[1]
    assert not any(tag == "img" or "onerror" in attributes for tag, attributes in page.elements)
    shown = page.views["Samples"][0]
    assert "".join(shown["samples"][0]["pieces"]) == shown["prompt"] == shown["prompt_id"] == visible(EVIL)
    assert shown["samples"][0]["problem"] == visible(EVIL)
    assert page.text.count("alert(1)") >= 2  # the metric's title, and the configuration


@pytest.mark.parametrize(
    "tail", ['{"step": 13, "reward_m', '{"step": 13, "words": "é'.encode()[:-1], "{", '{"step": 1']
)
def test_a_last_line_that_is_being_written_is_left_out(run, tail):
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(tail if isinstance(tail, bytes) else tail.encode())
    assert read_metrics(run / "metrics.jsonl").steps.tolist() == [*range(1, 13)]


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"step": true}', '{"step": 1.5}', "nonsense"])
def test_any_other_line_must_be_a_step(run, line):
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(f"{line}\n{text}")
    with pytest.raises(RecordError, match=r"metrics\.jsonl, line 1: expected .* got"):
        write_report(run)


def test_metrics_that_were_not_measured_are_named_and_the_rest_is_drawn(run):
    lines = [
        {"step": 1, "reward_mean": 0.5, "kl": None},
        {"step": 2, "reward_mean": 1, "loss": float("nan"), "extra": 3},
    ]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    report = write_report(run)
    assert [file.stem for file in report.figures] == ["reward", "other-extra", "overview"]
    text = Page(report.page).text
    assert re.search(r"Not measured, so not shown: .*\bkl, entropy\b", text)
    assert "loss is NaN or infinite at 1 step(s)" in text


def test_the_figures_at_the_top_go_from_first_to_last(run):
    lines = [{"step": step, "reward_mean": step / 100, "step_s": 6.0, "tokens": 500} for step in range(1, 101)]
    lines[0]["initial_eval_accuracy"], lines[99]["eval_accuracy"] = 0.25, 0.5
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    text = Page(write_report(run).page).text
    for said in ("0.030 → 0.980", "means of the first 5 and the last 5 steps", "25.0% → 50.0%", "10.0 min", "50 k"):
        assert said in text


def test_a_step_without_any_number_is_a_page_without_figures(run):
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    report = write_report(run)
    assert report.figures == () and len(Page(report.page).views["Samples"]) == 12 * MAX_GROUPS


def test_a_job_that_is_writing_can_be_reported(run):
    (run / "trajectories" / "step-000013.parquet.tmp").write_bytes(b"PAR1")
    shutil.rmtree(run / "evaluations")
    report = write_report(run)
    assert report.faults == () and list(Page(report.page).views) == ["Samples"]
    shutil.rmtree(run / "trajectories")
    assert "browser" not in [attributes.get("id") for _, attributes in Page(write_report(run).page).elements]


def test_a_config_that_changed_on_the_way_is_told(run):
    (run / "changes.jsonl").write_text(
        '{"step": 7, "changes": {"learner.learning_rate": [0.1, 0.2]}}\n{"step": 9, "chan'
    )
    notes = read_run(run).notes
    assert "From step 7 on the config was another: learner.learning_rate 0.1 -> 0.2." in notes
    assert not any("step 9" in note for note in notes)


def test_one_evaluation_stands_alone(run):
    for step in (4, 8, 12):
        (run / "evaluations" / f"step-{step:06}.parquet").unlink()
    page = Page(write_report(run).page)
    assert [len(shown["samples"]) for shown in page.views["Evaluations"]] == [1] * 6
    assert "one evaluation so far" in page.text


def test_a_damaged_file_is_named_and_the_rest_is_shown(run):
    for name in ("trajectories/step-000005.parquet", "evaluations/step-000000.parquet"):
        (run / name).write_bytes((run / name).read_bytes()[:-20])
    result = call(run)
    assert result.exit_code == 1 and "index.html" in result.stdout
    assert "step-000005.parquet" in result.stderr and "step-000000.parquet" in result.stderr
    page = Page(run / "report" / "index.html")
    assert "step-000005.parquet" in page.text
    assert {shown["heading"] for shown in page.views["Samples"]} == {f"step {step}" for step in range(1, 13)} - {
        "step 5"
    }


def test_without_the_tokenizer_ids_stand_for_texts(run):
    (run / "config.yaml").write_text("model: {checkpoint: nowhere}\n")
    page = Page(write_report(run).page)
    sample = page.views["Samples"][0]["samples"][0]
    assert sample["pieces"] == [f"[{token}]" for token in sample["ids"]]
    assert "tokenizer cannot be read" in page.text and "nowhere" in page.text


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {}\n")
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match="expected a folder made by 'rollout train' or 'rollout sample'"):
            write_report(folder)
    assert call(tmp_path).exit_code == 2 and not (tmp_path / "report").exists()


@pytest.mark.parametrize("content", [None, "", '{"step'])
def test_before_the_first_step_there_is_nothing_to_report(run, content):
    (run / "metrics.jsonl").unlink() if content is None else (run / "metrics.jsonl").write_text(content)
    with pytest.raises(RunError, match="no metrics yet"):
        write_report(run)


def test_what_is_left_out_is_chosen_evenly_and_counted(run, monkeypatch):
    for step in range(1, 41):
        rows = [row for item in range(9) for row in group(f"p{item}", 20)]
        write(run / "trajectories" / f"step-{step:06}.parquet", rows)
    record = read_run(run)
    steps = list(dict.fromkeys(shown.heading for shown in record.groups))
    assert len(steps) == MAX_STEPS and (steps[0], steps[-1]) == ("step 1", "step 40")
    assert [shown.samples[0].prompt_id for shown in record.groups[:MAX_GROUPS]] == ["p0", "p3", "p5", "p8"]
    assert {(len(shown.samples), shown.left_out) for shown in record.groups} == {(MAX_SAMPLES, 20 - MAX_SAMPLES)}
    assert any(note.startswith(f"Completions of {MAX_STEPS} of 40 steps are shown") for note in record.notes)


def test_the_bytes_of_every_token_are_shown_as_the_tokenizer_decodes_them(training):
    from rollout.report.job import _spelling

    bytes_of = _spelling(read_run(training))
    text = "Ünïcödé 漢字 😀 the thing\n\n"
    assert "".join(spell(encode(text), bytes_of)) == text
    assert bytes_of(TOKENIZER_LEN + 3) == b""


def test_a_sampling_run_is_reported_too(tmp_path):
    write_run(tmp_path / "run", [f"p{index}" for index in range(100)])
    result = call(tmp_path / "run", "--out", tmp_path / "page")
    page = Page(tmp_path / "page" / "index.html")
    assert result.exit_code == 0 and not (tmp_path / "run" / "report").exists()
    assert len(page.views["Samples"]) == MAX_STEPS * MAX_GROUPS
    assert {"lengths.png", "logprobs.png", "entropy.png", "kept-mass.png"} <= {
        f.name for f in (tmp_path / "page").iterdir()
    }
    assert "64 of 100 prompts are shown" in page.text


def test_a_sampling_run_with_a_damaged_file_is_reported_without_it(tmp_path):
    write_run(tmp_path / "run", "abcdef")
    (tmp_path / "run" / "trajectories" / "part-00001.parquet").write_bytes(b"PAR1")
    report = write_report(tmp_path / "run")
    assert [shown["prompt_id"] for shown in Page(report.page).views["Samples"]] == ["a", "b", "e", "f"]
    assert len(report.faults) == 1 and "part-00001.parquet" in report.faults[0]


def test_a_sampling_run_without_groups_has_nothing_to_report(tmp_path):
    write_run(tmp_path / "run", "")
    with pytest.raises(RunError, match="no group is finished yet"):
        write_report(tmp_path / "run")


def test_every_number_of_a_job_has_a_figure(run):
    metrics = read_metrics(run / "metrics.jsonl")
    charts, absent = training_charts(metrics)
    assert absent == [] and len({chart.name for chart in charts}) == len(charts)
    assert not [chart.title for chart in charts if chart.section == "Other metrics"]
    reward = next(chart for chart in charts if chart.name == "reward")
    assert reward.description.startswith("Reward by step: mean from 0.")


def test_the_pages_colours_are_the_figures_own(reported):
    style = reported.page.read_text()
    for colour, variable in THEME.items():
        assert f"{variable}: {colour};" in style
        assert style.count(f"{variable}:") == 2  # one more for the dark
    assert "var(--series-0)" in style and "var(--ink)" in style
