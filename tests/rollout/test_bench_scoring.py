"""Tests rollout/bench_scoring.py on a tiny model."""

from __future__ import annotations

from rollout.bench_scoring import scoring_cost


def test_scores_and_replays_are_timed_and_agree(tiny_checkpoint):
    cost = scoring_cost(tiny_checkpoint, rows=2, tokens=8)
    assert min(cost.generation, cost.replay, *cost.forward_few.values()) > 0 and max(cost.distance) < 1e-3
    assert set(cost.forward_few) == set(cost.replay_few) == {1, 2}
    assert any(line.startswith("keeping the records") for line in cost.lines())
