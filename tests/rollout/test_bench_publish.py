"""The figures of `rollout bench publish` are those of what was done."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.bench_publish import ROUNDS, publish_cost


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_parts_are_parts_of_the_whole_and_memory_is_seen(tiny_checkpoint):
    cost = publish_cost(tiny_checkpoint, workers=1, slots=4, tokens=20, repeats=2)
    assert cost.tokens == ROUNDS * 4 * 20
    assert 0 <= cost.stood_still_s <= cost.whole_s < cost.disturbed_s
    assert cost.put_s + cost.staged_s + cost.swapped_s == pytest.approx(cost.whole_s, abs=0.05)
    assert cost.weights_bytes < 1e6
    if Path("/proc/self/smaps_rollup").exists():
        assert cost.memory_bytes and cost.peak_bytes and cost.peak_bytes > 100 * cost.weights_bytes
    assert len(cost.lines()) == 7 and "1 workers, which draw 320 tokens" in cost.lines()[0]
