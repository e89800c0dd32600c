"""What a pool tells Prometheus: the names of docs/metrics.md, with the numbers of the run."""

from __future__ import annotations

import json
import re
import urllib.request
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import ray

from actors import Chaos, RetryPolicy, WorkerPool
from actors.meters import COUNTERS, GAUGES
from sampling.types import Request
from tests.actors.small_work import ONE_WORKER, requests
from tests.processes import within

ROOT = Path(__file__).parents[2]
EXPORTED = {*(f"ray_{name}_total" for name in COUNTERS), *(f"ray_{name}" for name in GAUGES)}


def scraped() -> dict[str, dict[str, float]]:
    """What Ray exports of ours now: by name, then by label."""
    (node,) = ray.nodes()
    page = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    found: dict[str, dict[str, float]] = defaultdict(dict)
    with urllib.request.urlopen(page, timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            if seen := re.fullmatch(r"(ray_rollout_\w+){(.*)} (\S+)", line):
                label = re.search(r'(?:stop_reason|kind)="(\w+)"', seen[2])
                found[seen[1]][label[1] if label else ""] = float(seen[3])
    return found


@pytest.mark.ray
def test_a_run_can_be_followed_from_outside(spec):
    before = None
    for _ in within(60, every_s=11):  # Ray reports every ten seconds, also what tests before this one have counted
        earlier, before = before, scraped()
        if earlier == before:
            break
    refused = Request("no token", np.array([5, 10**6]))
    chaos = Chaos.of(["kill:worker=0,after=5"])
    with WorkerPool(spec, ONE_WORKER, retry=RetryPolicy(backoff_s=0.1), chaos=chaos) as pool:
        outcomes = list(pool.run([*requests(), refused]))
        pool.tell(policy_lag=2, mismatch_p999=0.25, mismatch_max=None)
        rows = [row for outcome in outcomes if hasattr(outcome, "group") for row in outcome.group.completions]

        def grown(name: str, label: str = "") -> float:
            return now[name].get(label, 0) - before[name].get(label, 0)

        for _ in within(40, every_s=1):  # Ray reports every ten seconds
            now = scraped()
            if now["ray_rollout_policy_lag"] and grown("ray_rollout_failures_total", "PromptError"):
                break
        assert grown("ray_rollout_failures_total", "PromptError") == 1
        for reason in {row.stop_reason for row in rows}:
            expected = sum(row.stop_reason == reason for row in rows)
            assert grown("ray_rollout_rows_total", reason) == expected
        assert grown("ray_rollout_workers_lost_total", "ActorDiedError") == 1
        assert grown("ray_rollout_retries_total") >= 1
        assert 0 < grown("ray_rollout_row_steps_wasted_total") < grown("ray_rollout_row_steps_total")
        assert now["ray_rollout_policy_lag"] == {"": 2} and now["ray_rollout_mismatch_p999"] == {"": 0.25}
        assert now["ray_rollout_workers"] and now["ray_rollout_slots"] and now["ray_rollout_programs_compiled"]
        assert now.keys() <= EXPORTED


def test_the_names_are_documented_and_the_dashboard_shows_them_all():
    documented = re.findall(r"^\| `(ray_\w+)`", (ROOT / "docs" / "metrics.md").read_text(), re.M)
    assert sorted(documented) == sorted(EXPORTED)
    dashboard = json.loads((ROOT / "configs" / "grafana-dashboard.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert {name for text in asked for name in re.findall(r"ray_rollout_\w+", text)} == EXPORTED
