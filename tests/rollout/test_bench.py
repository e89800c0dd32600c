"""Tests rollout/bench.py on a tiny model: what is counted is right, and what is timed adds up."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from click.testing import CliRunner

from rollout.bench import throughput, turns
from rollout.bench_workloads import POLICIES, Shape
from rollout.cli import bench, main
from rollout.step_parts import matrix_products
from sampling import load_checkpoint
from tests.rollout.stub_vllm import stub_vllm  # noqa: F401, a fixture

SHAPE = Shape(
    prompt_len=8, new_tokens=10, group_prompts=3, group_prompt_len=20, group_size=4, rounds=3, median=5, longest=14
)

SUM_OF_LONG_TAIL = 1 + 2 + 2 + 3 + 4 + 5 + 6 + 7 + 9 + 11 + 14 + 14
"""Twelve quantiles of a log-normal distribution of median 5, cut at 14."""

WANTED = {"uniform": 40, "filters": 40, "groups": 120, "longtail": SUM_OF_LONG_TAIL, "single": 10}


@pytest.mark.parametrize("name", POLICIES)
def test_every_workload_is_measured(name, tiny_checkpoint):
    found = throughput(tiny_checkpoint, name, slots=4, repeats=2, shape=SHAPE)
    assert found.faults == () and found.against == {}
    assert found.tokens == WANTED[name] and [repeat.tokens for repeat in found.repeats] == [found.tokens] * 2
    assert found.compiled_during == 0 and found.programs_compiled == 3
    for repeat in found.repeats:
        assert repeat.busy_row_steps == found.tokens  # a row-step is a token, since no row is failed
        assert repeat.tokens_per_s == pytest.approx(found.tokens / repeat.seconds)
        assert repeat.step_over_floor == pytest.approx(repeat.step_ms / repeat.floor_ms)
        decoding = repeat.step_ms * repeat.steps / 1e3 / repeat.seconds
        assert repeat.prefill_share + repeat.host_share + decoding == pytest.approx(1)
        assert min(repeat.prefill_share, repeat.host_share, repeat.sampling_share, repeat.floor_ms) > 0
    assert found.tokens_per_s == pytest.approx(np.mean([repeat.tokens_per_s for repeat in found.repeats]))
    steps = found.repeats[0].steps
    assert found.occupancy == pytest.approx(found.tokens / (4 * steps)) and 0 < found.occupancy <= 1
    assert found.wasted_row_steps["overall"] == pytest.approx(1 - found.occupancy)
    assert json.loads(json.dumps(dataclasses.asdict(found)))["load_average"].keys() == {"before", "after"}
    assert any(line.startswith("tokens/s") for line in found.lines())


def test_full_slots_waste_nothing_and_one_row_leaves_the_others_idle(tiny_checkpoint):
    uniform = throughput(tiny_checkpoint, "uniform", slots=4, repeats=1, shape=SHAPE)
    assert uniform.occupancy == 1 and uniform.occupancy_while_queued is None
    assert uniform.wasted_row_steps == {"overall": 0, "while_queued": None}
    single = throughput(tiny_checkpoint, "single", slots=4, repeats=1, shape=SHAPE)
    assert single.occupancy == 1 / 4


def test_a_queue_keeps_the_slots_busier_than_its_end_does(tiny_checkpoint):
    found = throughput(tiny_checkpoint, "longtail", slots=4, repeats=1, shape=SHAPE)
    assert found.occupancy_while_queued is not None
    assert found.occupancy < found.occupancy_while_queued <= 1
    assert found.wasted_row_steps["while_queued"] == pytest.approx(1 - found.occupancy_while_queued)
    (repeat,) = found.repeats
    assert 0 < repeat.queued_steps < repeat.steps


@pytest.mark.parametrize(
    ("repeats", "peer_repeats", "order"),
    [(2, 0, "AA"), (2, 2, "ABBA"), (5, 2, "AAABBAA"), (4, 4, "ABBAABBA"), (1, 1, "AB"), (3, 3, "ABBABA")],
)
def test_a_peers_runs_lie_between_ours(repeats, peer_repeats, order):
    assert turns(repeats, peer_repeats) == [{"A": "ours", "B": "theirs"}[turn] for turn in order]


def test_a_ratio_is_ours_over_theirs_and_a_peer_that_draws_too_little_is_a_fault(tiny_checkpoint, stub_vllm):  # noqa: F811
    def measure():
        return throughput(tiny_checkpoint, "groups", slots=4, repeats=2, against="vllm", peer_repeats=2, shape=SHAPE)

    found = measure()
    peer = found.against["vllm"]
    assert found.faults == () and len(peer.repeats) == 2 and peer.facts["vllm"] == "stub"
    assert peer.tokens_per_s == pytest.approx(np.mean(peer.repeats))
    assert peer.ratio == pytest.approx(found.tokens_per_s / peer.tokens_per_s)
    assert f"ours is {peer.ratio:.2f} times that" in found.lines()[-1]
    stub_vllm(tokens_less=1)
    assert measure().faults == ("expected 120 tokens, got 108",) * 2


@pytest.mark.slow
def test_transformers_draws_the_same_workload(tiny_checkpoint):
    found = throughput(tiny_checkpoint, "longtail", slots=4, repeats=2, against="transformers", shape=SHAPE)
    peer = found.against["transformers"]
    assert found.faults == ()
    assert peer.ratio == pytest.approx(found.tokens_per_s / peer.tokens_per_s) and peer.peak_rss_mb > 100
    assert peer.facts["batches"] == 3 and peer.facts["threads"] == 2 and peer.facts["dtype"] == "torch.float32"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_floor_is_every_matrix_of_a_step_once(tiny_checkpoint, dtype):
    checkpoint = load_checkpoint(tiny_checkpoint)
    *layers, scores = matrix_products(checkpoint, 3, dtype)()
    assert {str(product.dtype) for product in layers} == {dtype} and scores.dtype == np.float32
    assert scores.shape == (checkpoint.info.config.vocab_size, 3)
    features = {"qkv": (4 + 2 * 2) * 6, "o": 32, "gate_up": 2 * 40, "down": 32}
    assert sorted(product.shape for product in layers) == sorted((size, 3) for size in [*features.values()] * 2)
    np.testing.assert_allclose(scores[:, 0], checkpoint.params["head"].sum(1), rtol=0.05, atol=0.05)  # of ones


def test_the_command_prints_and_writes_what_was_found(tiny_checkpoint, tmp_path):
    file = tmp_path / "figures.json"
    arguments = ["bench", "--workload", "single", "--model", tiny_checkpoint, "--slots", "2", "--repeats", "1"]
    result = CliRunner().invoke(main, [*arguments, "--json", str(file)])
    assert (result.exit_code, result.stderr) == (0, "")
    figures = json.loads(file.read_text())
    assert figures["workload"] == "single" and figures["tokens"] == 64 and figures["occupancy"] == 0.5
    assert f"tokens/s         {figures['tokens_per_s']:10.1f}" in result.stdout.splitlines()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "expected --workload or a command"),
        (["--slots", "4", "sampling"], "options go after the command: rollout bench sampling"),
        (["--workload", "uniform", "--peer-python", "python"], "--peer-python goes with --against"),
        (["--workload", "unifrom"], "'unifrom' is not one of"),
    ],
)
def test_a_wrong_command_is_refused_before_anything_is_loaded(arguments, words):
    result = CliRunner().invoke(main, ["bench", *arguments])
    assert result.exit_code == 2 and words in result.stderr


def test_the_command_offers_every_workload():
    (option,) = (option for option in bench.params if option.name == "workload")
    assert list(option.type.choices) == list(POLICIES)  # pyright: ignore[reportAttributeAccessIssue]
