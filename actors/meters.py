"""Meters: what a pool tells Prometheus, through Ray's own metrics. docs/metrics.md lists the names.

Ray exports them on the driver's node, with `ray_` in front; nothing here waits for anybody.
"""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Iterable, Sequence

from ray.util.metrics import Counter, Gauge

from actors.dispatch import Loss
from actors.handle import WorkerHandle
from actors.messages import GroupFailure, GroupResult, Outcome
from sampling.engine import EngineStats

INTERVAL_S = 1.0
"""Seconds between two looks at the workers."""

COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "rollout_tokens": ("Completion tokens drawn.", ()),
    "rollout_prompt_tokens": ("Prompt tokens read.", ()),
    "rollout_row_steps": ("Rows that decode steps computed, empty slots included.", ()),
    "rollout_row_steps_wasted": ("Of these, rows of empty slots.", ()),
    "rollout_rows": ("Samples that came to an end, by the reason.", ("stop_reason",)),
    "rollout_failures": ("Groups that failed for good, by the class of the error.", ("kind",)),
    "rollout_retries": ("Groups handed out again because their worker was lost.", ()),
    "rollout_workers_lost": ("Workers lost, by the class of the error.", ("kind",)),
}

GAUGES = {
    "rollout_workers": "Workers that can take work.",
    "rollout_slots": "Slots of all workers.",
    "rollout_slots_busy": "Slots with a running row.",
    "rollout_groups_in_flight": "Groups in the hands of workers.",
    "rollout_queue_age_s": "Seconds since the oldest of them was handed out.",
    "rollout_programs_compiled": "Compiled programs that the workers hold.",
    "rollout_weights_version": "Version of the weights in service.",
    "rollout_policy_lag": "Training: versions between the oldest token of a batch and the weights it is learnt with.",
    "rollout_mismatch_p999": "Training: 99.9 % of the tokens lie nearer to the learner's own log-prob, in nats.",
    "rollout_mismatch_max": "Training: the farthest token of the last batch, in nats.",
}


class Meters:
    """The metrics of one pool."""

    def __init__(self) -> None:
        self._counters = {name: Counter(name, text, tags) for name, (text, tags) in COUNTERS.items()}
        self._gauges = {name: Gauge(name, text) for name, text in GAUGES.items()}
        self._told: Counts[str] = Counts()
        self._looked = 0.0

    def ended(self, outcomes: Iterable[Outcome]) -> None:
        """Counts rows and failures."""
        for outcome in outcomes:
            match outcome:
                case GroupResult(_, group):
                    reasons = Counts(str(completion.stop_reason) for completion in group.completions)
                    for reason, rows in reasons.items():
                        self._counters["rollout_rows"].inc(rows, {"stop_reason": reason})
                case GroupFailure(_, error_type):
                    self._counters["rollout_failures"].inc(1, {"kind": error_type})

    def lost(self, loss: Loss, retries: int) -> None:
        """Counts a lost worker, and the groups that others get."""
        self._counters["rollout_workers_lost"].inc(1, {"kind": loss.error_type})
        self._count("rollout_retries", self._told["rollout_retries"] + retries)

    def look(self, ready: Sequence[WorkerHandle], engines: EngineStats, weights_version: int) -> None:
        """Takes the state of the workers, about once a second however often it is called."""
        now = time.monotonic()
        if now - self._looked < INTERVAL_S:
            return
        self._looked = now
        self._count("rollout_tokens", engines.tokens)
        self._count("rollout_prompt_tokens", engines.prefill_tokens)
        self._count("rollout_row_steps", engines.row_steps)
        self._count("rollout_row_steps_wasted", engines.row_steps - engines.busy_row_steps)
        held = [each.since for worker in ready for each in worker.hands.values()]
        self.gauge("rollout_workers", len(ready))
        self.gauge("rollout_slots", engines.slots)
        self.gauge("rollout_slots_busy", engines.slots_busy)
        self.gauge("rollout_groups_in_flight", len(held))
        self.gauge("rollout_queue_age_s", now - min(held, default=now))
        self.gauge("rollout_programs_compiled", engines.programs_compiled)
        self.gauge("rollout_weights_version", weights_version)

    def gauge(self, name: str, value: float | None) -> None:
        """Sets one of GAUGES; None is a value that was not measured."""
        if value is not None:
            self._gauges[name].set(value)

    def _count(self, name: str, total: int) -> None:
        """Raises a counter to a total."""
        if total > self._told[name]:
            self._counters[name].inc(total - self._told[name])
            self._told[name] = total
