"""A run that is disturbed in every way draws what an undisturbed one does, on real processes that are really killed.

1. Workers killed every few seconds, the driver killed twice, Ray killed once: nothing lost, nothing twice, no other
   bit, and little drawn again.
2. One, two and four workers, on one node or two, write the same content; so they do where a node is lost on the way.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from rollout.config_file import dump_config
from rollout.manifest import MANIFEST_NAME, read_manifest
from rollout.shards import read_trajectories
from rollout.status import read_status
from tests.processes import within
from tests.ray_cluster import CPUS_PER_NODE, ROOT, RayCluster, environment, ray_cluster

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PROMPTS, SAMPLES = 200, 4
ROWS = PROMPTS * SAMPLES
END_S = 60.0
"""Seconds in which a driver has to end."""

WORKERS = 3
KILL_EVERY_S = 4.0

DRIVER = """
import sys
from rollout.config_file import load_config
from rollout.driver import sample_run
from rollout.progress import ProgressReporter

class Told(ProgressReporter):
    def update(self, progress):
        with open(sys.argv[4], "a") as file:
            file.write(f"{progress.tokens}\\n")

config, out, address, _, *chaos = sys.argv[1:]
sample_run(load_config(config), out, address=address, progress=Told(quiet=True), chaos=chaos)
"""
"""`rollout sample`, which leaves behind how many tokens it has had drawn, however it ends."""


class Driver:
    """A driver in a process of its own."""

    def __init__(self, config: Path, out: Path, address: str, *chaos: str) -> None:
        self._out = out
        self._told = out.with_name(f"{out.name}-{time.monotonic_ns()}")
        command = [sys.executable, "-c", DRIVER, str(config), str(out), address, str(self._told), *chaos]
        self._log = self._told.with_suffix(".log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=log, stdout=log)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def rows(self) -> int:
        """On disk."""
        return read_manifest(self._out).rows if (self._out / MANIFEST_NAME).exists() else 0

    @property
    def tokens(self) -> int:
        """That it has had drawn."""
        return int(self._told.read_text().splitlines()[-1]) if self._told.exists() else 0

    @property
    def said(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(END_S)

    def wait(self) -> int:
        return self._process.wait(END_S)


@pytest.fixture
def job(tiny_config, tmp_path):
    """Writes the configs of a job of 200 prompts with 4 samples each, which differ in where it runs."""

    def make(workers: int, tokens: int = 400) -> Path:
        config = tiny_config(
            geometry={"slots": 4, "cache_len": 512, "prefill_rows": 4, "prefill_chunk": 16},
            prompts={"source": "inline", "rows": [{"id": f"p{index}", "prompt": "abc"} for index in range(PROMPTS)]},
            sampling={"n": SAMPLES, "max_new_tokens": tokens, "ignore_eos": True},
            workers={"count": workers, "cpus": 1, "threads": 1, "max_worker_restarts": 20, "max_group_attempts": 20},
            output={"rows_per_shard": 8},
        )
        file = tmp_path / f"{workers}-{tokens}.yaml"
        file.write_text(dump_config(config))
        return file

    return make


def finished(config: Path, out: Path, cluster: RayCluster) -> str:
    """The content hash of a run that nothing disturbs."""
    driver = Driver(config, out, cluster.address)
    assert driver.wait() == 0, driver.said
    return read_status(out).content_hash


class Killer:
    """Kills one of the workers every few seconds, the same ones in the same order where they are as many."""

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster, self._random = cluster, random.Random(0)
        self._last = time.monotonic()
        self.killed = 0

    def strike(self) -> None:
        if time.monotonic() - self._last > KILL_EVERY_S and (working := self._cluster.working()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._random.choice(working), signal.SIGKILL)
                self.killed += 1
            self._last = time.monotonic()


def test_nothing_is_lost_and_nothing_twice_whatever_is_killed(job, tmp_path):
    config, out = job(WORKERS), tmp_path / "disturbed"
    drivers = []
    with ray_cluster(nodes=1) as cluster:
        undisturbed = finished(config, tmp_path / "undisturbed", cluster)
        killer = Killer(cluster)
        for rows, end in ((ROWS // 4, "driver"), (ROWS // 2, "driver"), (3 * ROWS // 4, "ray"), (ROWS, "")):
            drivers.append(driver := Driver(config, out, cluster.address))
            for _ in within(END_S):
                if driver.rows >= rows or not driver.running:
                    break
                killer.strike()
            assert driver.running or end == "", driver.said
            if end == "driver":
                driver.kill()
            elif end == "ray":
                cluster.restart()
                assert driver.wait() != 0, "without Ray there is nobody to draw the rest"
        assert driver.wait() == 0, driver.said
    status = read_status(out)
    assert (status.done, status.failed, status.state) == (ROWS, 0, "finished")
    counts = Counter((row.prompt_id, row.sample_index) for row in read_trajectories(out))
    assert counts == Counter((f"p{index}", sample) for index in range(PROMPTS) for sample in range(SAMPLES))
    assert status.content_hash == undisturbed
    assert killer.killed >= 4
    # A worker tells of each group. Of the next one it may have drawn all but a token when it, or its driver, is killed.
    unheard = (killer.killed + WORKERS * (len(drivers) - 1)) * status.tokens / PROMPTS
    extra = (sum(driver.tokens for driver in drivers) + unheard) / status.tokens - 1
    print(json.dumps({"killed": killer.killed, "extra": extra}))
    assert extra <= 0.25


def test_workers_and_nodes_change_nothing_not_even_a_node_that_is_lost(job, tmp_path):
    with ray_cluster(nodes=2) as cluster:
        hashes = {
            finished(job(workers, tokens=100), tmp_path / f"{workers}", cluster)
            for workers in (1, 2, CPUS_PER_NODE + 1)  # the last ones need both nodes
        }
        assert len(hashes) == 1
        out = tmp_path / "disturbed"
        driver = Driver(job(CPUS_PER_NODE + 1, tokens=100), out, cluster.address, f"node:after={PROMPTS // 8}")
        assert driver.wait() == 0, driver.said
        assert "was lost while it worked on prompt" in driver.said
        assert {read_status(out).content_hash} == hashes
        assert cluster.alive == 1
