"""What a pool survives, with real processes killed and stopped.

1. A worker that dies, hangs or raises is replaced, within its deadline, and the results are those of an undisturbed
   run: nothing lost, nothing twice, no other bit.
2. A request that takes its workers down is convicted, by name and alone.
3. When no worker is left the error names worker, host and prompt.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray

from actors import Deadlines, GroupFailure, Placement, RetryPolicy, WorkerPool
from sampling.errors import WorkerError
from tests.actors.small_work import GEOMETRY, ONE_WORKER, TWO_WORKERS, all_drawn, drawn, groups, request, requests
from tests.processes import within

pytestmark = pytest.mark.ray

QUICK = RetryPolicy(backoff_s=0.1)


def disturbed(pool: WorkerPool, sig: signal.Signals, after: int) -> dict:
    """The results of a run in which the first worker gets a signal after some outcomes."""
    outcomes = []
    for outcome in pool.run(requests()):
        outcomes.append(outcome)
        if len(outcomes) == after:
            os.kill(pool.workers[0].pid, sig)
    return groups(outcomes)


@pytest.mark.parametrize("placement", [TWO_WORKERS, ONE_WORKER], ids=["two", "one"])
def test_a_killed_worker_leaves_no_trace(spec, undisturbed, placement):
    with WorkerPool(spec, placement, retry=QUICK) as pool:
        found = disturbed(pool, signal.SIGKILL, after=3)
        assert all_drawn(found) == all_drawn(undisturbed)
        if placement is ONE_WORKER:  # with two, the other may end the work before anybody misses the dead one
            assert pool.stats().restarts == 1
            assert pool.stats().engines.slots == GEOMETRY.slots


def test_a_dead_worker_is_noticed_within_ten_seconds(spec):
    """While it works, and while it has nothing to do."""
    with WorkerPool(spec, ONE_WORKER, retry=QUICK) as pool:
        for restarts, work in ((1, requests()), (2, itertools.repeat(None))):
            os.kill(pool.workers[0].pid, signal.SIGKILL)
            began = time.monotonic()
            for _ in pool.rounds(work):
                if pool.stats().restarts == restarts:
                    break
                assert time.monotonic() - began < 10
            while not pool.workers:
                next(pool.rounds(requests()))
                assert time.monotonic() - began < 60


def test_work_begins_without_workers_that_find_no_room_and_they_join_later(spec, undisturbed, monkeypatch):
    monkeypatch.setattr("actors.supervision.PATIENCE_S", 0.5)

    @ray.remote(num_cpus=1)
    class Tenant:
        def here(self):
            return True

    tenant = Tenant.remote()
    assert ray.get(tenant.here.remote(), timeout=30)
    placement = Placement(num_workers=2, cpus=ray.cluster_resources()["CPU"] / 2, threads=1)
    with WorkerPool(spec, placement) as pool:
        assert len(pool.workers) == 1
        assert all_drawn(groups(pool.run(requests()))) == all_drawn(undisturbed)
        ray.kill(tenant)
        for _ in within(60):
            outcomes = list(pool.run(requests()))
            assert all_drawn(groups(outcomes)) == all_drawn(undisturbed)
            if len({outcome.worker for outcome in outcomes}) == 2:
                break
        assert pool.stats().restarts == 0


def test_a_hung_worker_is_replaced_within_its_deadline(spec, undisturbed):
    with WorkerPool(spec, ONE_WORKER, Deadlines(heartbeat_s=1.0), QUICK) as pool:
        hung = pool.workers[0].pid
        began = time.monotonic()
        assert all_drawn(disturbed(pool, signal.SIGSTOP, after=3)) == all_drawn(undisturbed)
        assert time.monotonic() - began < 15  # detection 1.3 s, a new worker, the rest of the work
        assert pool.stats().restarts == 1
        assert pool.workers[0].pid != hung


def test_a_poisonous_request_is_convicted_alone(faulty_pool, undisturbed):
    with faulty_pool(retry=QUICK) as pool:
        good = requests(12)
        outcomes = {o.request.prompt_id: o for o in pool.run([*good[:2], request("poison"), *good[2:]])}
    failure = outcomes.pop("poison")
    assert isinstance(failure, GroupFailure)
    assert (failure.error_type, failure.attempts) == ("ActorDiedError", 3)
    assert "'poison'" in failure.message and "its process died" in failure.message
    assert len(outcomes) == 12
    for prompt_id, outcome in outcomes.items():
        assert drawn(outcome.group) == drawn(undisturbed[prompt_id])


def test_an_engine_that_raises_is_replaced_and_its_cause_named(faulty_pool, undisturbed):
    with faulty_pool(ONE_WORKER, retry=RetryPolicy(max_group_attempts=2, backoff_s=0.1)) as pool:
        outcomes = {o.request.prompt_id: o for o in pool.run([*requests(3), request("broken")])}
    failure = outcomes.pop("broken")
    assert isinstance(failure, GroupFailure)
    assert (failure.error_type, failure.attempts) == ("FloatingPointError", 2)
    assert "the numbers went away" in failure.message
    for prompt_id, outcome in outcomes.items():
        assert drawn(outcome.group) == drawn(undisturbed[prompt_id])


def test_an_answer_survives_the_worker_that_gave_it(faulty_pool):
    with faulty_pool(ONE_WORKER, retry=QUICK) as pool:
        found = {}
        for outcome in pool.run([request("p0"), request("last", 18), request("p1", 1)]):
            found[outcome.request.prompt_id] = outcome
            time.sleep(1.0)  # meanwhile answer and death arrive, to be heard in one go
    assert {prompt_id: type(outcome).__name__ for prompt_id, outcome in found.items()} == dict.fromkeys(
        ("p0", "last", "p1"), "GroupResult"
    )


def test_a_group_without_an_answer_is_given_up_at_its_deadline(faulty_pool, undisturbed):
    retry = RetryPolicy(max_group_attempts=1, backoff_s=0.1)
    with faulty_pool(TWO_WORKERS, Deadlines(group_s=2.0), retry) as pool:
        began = time.monotonic()
        outcomes = {o.request.prompt_id: o for o in pool.run([request("stuck"), request("p0")])}
        assert time.monotonic() - began < 10
    assert isinstance(outcomes["stuck"], GroupFailure)
    assert "not finished within 2 s" in outcomes["stuck"].message
    assert drawn(outcomes["p0"].group) == drawn(undisturbed["p0"])


def test_the_last_lost_worker_is_an_error_that_names_it(spec):
    with WorkerPool(spec, ONE_WORKER, retry=RetryPolicy(max_worker_restarts=0)) as pool:
        pid = pool.workers[0].pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerError) as caught:
            list(pool.run([request("p7")]))
        with pytest.raises(WorkerError, match="no worker is left"):  # and no later run waits for one
            list(pool.run([request("p7")]))
    for word in ("worker-0", f"pid {pid}", socket.gethostname(), "max_worker_restarts"):
        assert word in str(caught.value)


LOSES_ITS_NODE = """
import itertools, os, pathlib, signal, sys
from actors import Deadlines, WorkerPool, WorkerSpec
from tests.actors.small_work import GEOMETRY, ONE_WORKER, request

with WorkerPool(WorkerSpec(sys.argv[1], GEOMETRY), ONE_WORKER, Deadlines(heartbeat_s=2.0)) as pool:
    children = pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    (raylet,) = (pid for pid in children if pathlib.Path(f"/proc/{pid}/comm").read_text() == "raylet\\n")
    os.kill(int(raylet), signal.SIGKILL)
    for _ in pool.run(request(f"p{index}") for index in itertools.count()):
        pass
"""


@pytest.mark.slow
def test_a_lost_node_of_its_own_ends_a_pool_instead_of_letting_it_wait(spec):
    """In a process with a Ray of its own, whose first process is killed."""
    found = subprocess.run(
        [sys.executable, "-c", LOSES_ITS_NODE, spec.checkpoint],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "RAY_ADDRESS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "WorkerError: Ray's process on this machine (raylet) has died" in found.stderr


def test_a_worker_that_cannot_start_in_time_is_an_error(spec):
    with (
        pytest.raises(WorkerError, match=r"not ready within 0\.05 s"),
        WorkerPool(spec, ONE_WORKER, Deadlines(start_s=0.05), RetryPolicy(max_worker_restarts=1, backoff_s=0)),
    ):
        pass
