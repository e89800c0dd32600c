"""A long run of short requests is as fast and as small at its end as at its beginning."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest
import ray

from rollout.driver import sample_run
from rollout.progress import Progress, ProgressReporter
from rollout.shards import read_trajectories

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("local_ray")]

ROWS = 20_000
WINDOW = ROWS // 100
MIB = 1 << 20
STORE = 200 * MIB
"""Size of the store of tests/local_ray.py; Ray tells what is free of it."""


class Reading(NamedTuple):
    """At a moment of a run: rows that are done, the time, bytes of the driver's memory, bytes in Ray's store."""

    rows: int
    seconds: float
    memory: int
    store: int


class Watching(ProgressReporter):
    """Takes a reading every so many rows."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.readings: list[Reading] = []

    def update(self, progress: Progress) -> None:
        if progress.rows_done >= WINDOW * len(self.readings):
            store = STORE - int(ray.available_resources()["object_store_memory"])
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            memory = pages * os.sysconf("SC_PAGE_SIZE")
            self.readings.append(Reading(progress.rows_done, time.monotonic(), memory, store))


def rate(readings: list[Reading]) -> float:
    """Rows per second: the median over the windows, since other work on the machine slows some of them."""
    return median((b.rows - a.rows) / (b.seconds - a.seconds) for a, b in itertools.pairwise(readings))


def test_twenty_thousand_requests_leave_nothing_behind(tiny_config, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"id": "p{index}", "prompt_tokens": [5, 6]}}\n' for index in range(ROWS)))
    config = tiny_config(
        geometry={"slots": 64, "cache_len": 16, "prefill_rows": 64, "prefill_chunk": 128},
        prompts={"source": "jsonl", "path": str(file)},
        sampling={"max_new_tokens": 1},
        output={"rows_per_shard": 500},
    )
    watching = Watching()
    summary = sample_run(config, tmp_path / "run", progress=watching)
    assert summary.trajectories == ROWS and summary.failed == 0
    assert [row.prompt_id for row in read_trajectories(tmp_path / "run")] == [f"p{index}" for index in range(ROWS)]
    readings = watching.readings
    tenth = len(readings) // 10
    first, last = readings[1 : tenth + 1], readings[-tenth - 1 : -1]  # the ends, where workers lack work, left out
    print(json.dumps({"first": rate(first), "last": rate(last), "seconds": summary.wall_s}))
    print([(r.rows, r.memory // MIB, r.store) for r in readings[::5]])
    assert rate(last) > 0.9 * rate(first)
    assert max(reading.store for reading in readings) < MIB
    assert readings[-1].memory - readings[tenth].memory < 8 * MIB
