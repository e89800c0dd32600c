"""Tests the parts of rollout/report/ that need no run: text by tokens, what is left out, bins, means."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rollout.report import browser
from rollout.report.figures import moving_mean
from rollout.report.metrics import read_metrics
from rollout.report.page import embedded_json
from rollout.report.panels import bin_edges
from rollout.report.pieces import spell, visible
from rollout.report.reading import evenly
from tests.rollout.records import trajectory
from tests.rollout.training_folder import EVIL


def test_embedded_json_cannot_leave_its_element():
    text = embedded_json([EVIL, {"</script": "<!--"}])
    assert not set("<>&\u2028\u2029") & set(text) and json.loads(text) == [EVIL, {"</script": "<!--"}]


def test_of_a_step_that_was_taken_twice_the_later_counts(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        "\n".join(json.dumps({"step": step, "loss": loss}) for step, loss in [(1, 1), (2, 2), (3, 3), (2, 5)])
    )
    metrics = read_metrics(file)
    assert metrics.steps.tolist() == [1, 2, 3] and metrics.columns["loss"].tolist() == [1, 5, 3]


def test_evaluations_are_told_by_the_steps_before_them(tmp_path):
    file = tmp_path / "metrics.jsonl"
    lines = [{"initial_eval_accuracy": 0.1}, {"eval_accuracy": 0.4}, {}, {"eval_accuracy": 0.7}]
    file.write_text("\n".join(json.dumps({"step": step, **line}) for step, line in enumerate(lines)))
    steps, values = read_metrics(file).evaluations("eval_accuracy")
    assert steps.tolist() == [0, 2, 4] and values.tolist() == [0.1, 0.4, 0.7]
    assert [values.size for values in read_metrics(file).evaluations("eval_reward_mean")] == [0, 0]


def test_a_long_completion_is_shown_from_both_ends():
    row = trajectory(
        completion_tokens=np.arange(4, 204, dtype=np.int32),
        **{name: np.full(200, -1, np.float32) for name in ("behaviour_logprobs", "model_logprobs", "log_kept_mass")},
    )
    (shown,) = browser.browse([browser.Shown("", (row,), ("",))], lambda token: bytes([token % 128]), 80)
    sample = shown["samples"][0]
    assert sample["ids"] == [*range(4, 64), *range(184, 204)]
    assert (sample["gap"], sample["left_out"], sample["length"]) == (60, 120, 200)


@pytest.mark.parametrize(
    ("lengths", "budget", "longest"),
    [([], 10, 64), ([100, 200], 1000, 200), ([100, 200, 900], 900, 600), ([500] * 4, 1000, 250), ([500] * 4, 4, 64)],
)
def test_the_longest_completions_give_way_first(lengths, budget, longest):
    assert browser.longest_shown(lengths, budget) == longest


def test_numbers_that_json_lacks():
    given = trajectory(
        given_len=1,
        behaviour_logprobs=np.array([-np.inf, -0.5], np.float32),
        model_logprobs=np.array([np.nan, -0.5], np.float32),
    )
    (shown,) = browser.browse([browser.Shown("", (given,), ("",))], lambda _: b"a", 80)
    sample = json.loads(embedded_json(shown))["samples"][0]
    assert (sample["behaviour"], sample["model"]) == (["-Infinity", -0.5], [None, -0.5])


def test_a_character_belongs_to_the_token_that_completes_it():
    tokens = {0: b"a", 1: b"\xe2", 2: b"\x96\x81", 3: b"\xff", 4: b"b\xf0\x9f", 5: b"\x98\x80"}
    assert spell([0, 1, 2, 4, 5], tokens.__getitem__) == ["a", "", "▁", "b", "😀"]
    assert spell([2, 0], tokens.__getitem__, before=[1]) == ["▁", "a"]
    assert spell([3, 0, 1], tokens.__getitem__) == ["\ufffd", "a", "\ufffd"]
    assert spell([], tokens.__getitem__, before=[1]) == []


def test_characters_that_steer_a_display_are_written_out():
    assert visible("a\tb\nc\x00\u202e\u200b\u200d") == "a\tb\nc<U+0000><U+202E><U+200B>\u200d"


@pytest.mark.parametrize(
    ("values", "edges"),
    [
        ([0.0, 1.0, 1.0], [-0.5, 0.5, 1.5]),
        ([3, 3], [2.5, 3.5]),
        ([0.25, 0.25], [-0.25, 0.75]),
        ([0.5, 2.5], np.linspace(0.5, 2.5, 41)),
        ([1, 90], np.arange(0.5, 91, 3)),
    ],
)
def test_every_number_falls_into_a_bin(values, edges):
    np.testing.assert_allclose(bin_edges(values), edges)
    assert np.histogram(values, bin_edges(values))[0].sum() == len(values)


def test_the_moving_mean_is_over_what_was_measured():
    y = np.array([1.0, 2.0, np.nan, 4.0, 9.0])
    np.testing.assert_allclose(moving_mean(y, 3), [1.5, 1.5, 3.0, 6.5, 6.5])
    assert np.isnan(moving_mean(np.full(3, np.nan), 3)).all()


@pytest.mark.parametrize(
    ("total", "most", "chosen"), [(0, 4, []), (1, 4, [0]), (3, 4, [0, 1, 2]), (10, 4, [0, 3, 6, 9])]
)
def test_evenly(total, most, chosen):
    assert evenly(total, most) == chosen
