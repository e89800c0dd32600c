"""What a pool promises.

1. The workers do not show: one, two, a split group, another order of arrival, all give the same bits.
2. Requests are pulled as there is room, may be held back, and a run that was broken off leaves nothing behind.
3. A bad request is an answer of its own and touches no other.
4. A closed pool leaves no process.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from actors import Deadlines, GroupFailure, GroupResult, Placement, WorkerPool, WorkerSpec
from actors.cluster import connected, worker_environment
from sampling.errors import CheckpointError, ConfigError, RunError
from sampling.params import SamplingParams
from sampling.types import Request
from tests.actors.small_work import GEOMETRY, ONE_WORKER, all_drawn, drawn, groups, request, requests

pytestmark = pytest.mark.ray


def test_two_workers_give_the_bits_of_one(pool, undisturbed):
    outcomes = list(pool.run(requests()))
    assert {outcome.worker for outcome in outcomes} == {"worker-0", "worker-1"}
    assert all_drawn(groups(outcomes)) == all_drawn(undisturbed)


@pytest.mark.parametrize("parts", [[8], [4, 4], [2, 2, 2, 2]])
def test_a_group_split_over_workers_keeps_its_samples(pool, parts):  # B038
    whole = Request("split", np.array([5, 6, 7]), SamplingParams(n=8, max_new_tokens=6), run_seed=1)
    (reference,) = pool.run([whole])
    cuts = np.split(np.arange(8), np.cumsum(parts)[:-1])
    pieces = [
        Request("split", whole.prompt_tokens, whole.params, run_seed=1, sample_indices=tuple(map(int, cut)))
        for cut in cuts
    ]
    found = [row for outcome in pool.run(pieces) for row in drawn(outcome.group)]
    assert sorted(found, key=lambda row: row[1]) == drawn(reference.group)
    assert len({row[2] for row in found}) == 8


def test_latencies_change_nothing(faulty_pool, spec, undisturbed):  # B069
    file = Path(spec.checkpoint) / "latencies.json"
    orders = set()
    with faulty_pool() as pool:
        for latencies in itertools.permutations([0.15, 0.0, 0.3]):
            file.write_text(json.dumps({f"p{index}": s for index, s in enumerate(latencies)}))
            found = groups(pool.run(requests(3)))
            orders.add(tuple(found))
            assert all_drawn(found) == {name: drawn(undisturbed[name]) for name in ("p0", "p1", "p2")}
    file.unlink()
    assert len(orders) > 1, "the latencies did not reorder anything"


def test_bad_requests_fail_by_name_and_alone(pool, undisturbed):  # B065
    good = requests(4)
    bad = [
        Request("too long", np.full(GEOMETRY.cache_len, 5), SamplingParams(n=2)),
        Request("no token", np.array([5, 10**6])),
        Request("no eos", np.array([5]), SamplingParams(eos_token_ids=(10**6,))),
    ]
    outcomes = {outcome.request.prompt_id: outcome for outcome in pool.run([good[0], *bad, *good[1:]])}
    assert len(outcomes) == 7
    for name, error_type, words in (
        ("too long", "PromptError", "64 tokens leave no room"),
        ("no token", "PromptError", "1000000 at position 1"),
        ("no eos", "ConfigError", "sampling.eos_token_ids"),
    ):
        failure = outcomes[name]
        assert isinstance(failure, GroupFailure)
        assert (failure.error_type, failure.attempts) == (error_type, 1)
        assert words in failure.message
    for r in good:
        assert drawn(outcomes[r.prompt_id].group) == drawn(undisturbed[r.prompt_id])


def test_requests_are_pulled_as_there_is_room(pool):
    pulled = itertools.count()
    endless = (request(f"e{next(pulled)}", 3) for _ in itertools.count())
    finished = sum(1 for _ in itertools.islice(pool.run(endless), 20))
    rows_in_hand = 2 * 2 * GEOMETRY.slots
    assert next(pulled) <= finished + 1 + rows_in_hand


def test_a_run_that_was_broken_off_leaves_nothing_behind(pool):
    first = [Request(f"p{i}", np.array([5, i + 4]), SamplingParams(n=2, max_new_tokens=40), 1) for i in range(12)]
    again = [Request(r.prompt_id, r.prompt_tokens, r.params, run_seed=2) for r in first]
    for _ in pool.run(first):
        break
    found = groups(pool.run(again))
    assert all_drawn(found) == all_drawn(groups(pool.run(again)))
    assert all_drawn(found) != all_drawn(groups(pool.run(first)))


def test_a_second_run_ends_the_first(pool):
    first = pool.run(requests())
    next(first)
    assert len(list(pool.run(requests(3)))) == 3
    with pytest.raises(RunError, match="another run was begun"):
        list(first)


def test_a_source_may_hold_back_while_something_is_under_way(pool):
    finished = []

    def one_at_a_time():
        for index in range(4):
            while len(finished) < index:
                yield None
            yield request(f"p{index}", index)

    for outcome in pool.run(one_at_a_time()):
        finished.append(outcome.request.prompt_id)
    assert finished == ["p0", "p1", "p2", "p3"]
    with pytest.raises(RunError, match="holds back"):
        list(pool.run(itertools.chain([request("p0")], itertools.repeat(None))))


def test_an_error_of_the_source_reaches_the_caller(pool):
    def broken():
        yield request("p0")
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        list(pool.run(broken()))
    assert groups(pool.run(requests(2)))


def test_counts_add_up(pool):
    before = pool.stats().engines
    found = groups(pool.run(requests()))
    after = pool.stats()
    tokens = sum(c.completion_tokens.size for group in found.values() for c in group.completions)
    assert after.engines.tokens - before.tokens == tokens
    assert after.engines.groups - before.groups == len(found)
    assert after.engines.programs_compiled == before.programs_compiled
    assert (after.workers, after.restarts, after.engines.slots) == (2, 0, 2 * GEOMETRY.slots)


def test_workers_describe_themselves(pool, spec):
    first, second = pool.workers
    assert first.pid != second.pid
    assert first.weights_digest == second.weights_digest and first.fingerprint == second.fingerprint
    assert first.fingerprint["threads"] == 1
    assert first.checkpoint.path == Path(spec.checkpoint)
    assert all(Path(file).is_file() for file in first.log_files)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted through /proc")
def test_threads_are_those_of_the_placement(pool):
    for worker in pool.workers:
        names = [task.joinpath("comm").read_text().strip() for task in Path(f"/proc/{worker.pid}/task").iterdir()]
        assert names.count("tf_XLAEigen") == 1
        modules = Path(f"/proc/{worker.pid}/maps").read_text()
        assert "libtorch" not in modules, "a worker samples tokens; it has no use for torch or Transformers"


def test_the_driver_opens_no_device():
    code = "import rollout; from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[2])


def test_a_checkpoint_that_is_not_there_is_said_at_once(local_ray):
    began = time.monotonic()
    with (
        pytest.raises(CheckpointError, match="no such file or directory"),
        WorkerPool(WorkerSpec("nowhere/at/all", GEOMETRY), ONE_WORKER),
    ):
        pass
    assert time.monotonic() - began < 30


def test_a_closed_pool_leaves_no_process(spec):
    with (
        pytest.raises(KeyboardInterrupt),
        WorkerPool(spec, ONE_WORKER) as pool,
    ):
        pid = pool.workers[0].pid
        next(pool.run(requests()))
        raise KeyboardInterrupt
    limit = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < limit:
        time.sleep(0.05)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(RunError, match="closed"):
        pool.stats()


@pytest.mark.parametrize(
    ("setting", "place"),
    [
        (lambda: Placement(num_workers=0), "placement.num_workers"),
        (lambda: Placement(threads=0), "placement.threads"),
        (lambda: Placement(gpus=1, tpus=1), "GPUs or TPUs"),
        (lambda: Deadlines(group_s=0), "deadlines.group_s"),
    ],
)
def test_settings_are_checked(setting, place):
    with pytest.raises(ConfigError, match=place):
        setting()


def test_outcomes_say_who_drew_them(pool):
    (outcome,) = pool.run([request("p0")])
    assert isinstance(outcome, GroupResult)
    assert outcome.worker in {worker.name for worker in pool.workers}


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nowhere", "127.0.0.1:port", ":", 5])
def test_an_address_where_nothing_listens_is_said_at_once(address, monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.shutdown", lambda: None)  # the session's own Ray is needed by other tests
    with (
        pytest.raises(ConfigError, match=f"address: expected that of a running Ray cluster .*, got {address!r}: "),
        connected(address, Placement()),
    ):
        pass


def test_a_signal_waits_until_ray_has_started_and_a_second_one_does_not(monkeypatch):
    """Ray's core aborts the process when an exception comes in between."""
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def init(signals):
        def start(**_):
            for _ in range(signals):
                signal.raise_signal(signal.SIGINT)
            signal.signal(signal.SIGTERM, lambda *_: None)  # as Ray does
            seen.append("started")

        return start

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.shutdown", lambda: seen.append("shut down"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for signals, expected in ((1, ["started", "shut down"]), (2, ["shut down"])):
        monkeypatch.setattr("ray.init", init(signals))
        with pytest.raises(KeyboardInterrupt), connected(None, Placement()):
            seen.append("entered")
        assert seen == expected
        assert signal.getsignal(signal.SIGTERM) is before
        seen.clear()


def test_workers_without_a_gpu_never_open_one():  # B068
    assert worker_environment(Placement())["JAX_PLATFORMS"] == "cpu"
    assert worker_environment(Placement(gpus=1))["JAX_PLATFORMS"] == "cuda,cpu"
    assert worker_environment(Placement(tpus=4))["JAX_PLATFORMS"] == "tpu,cpu"
    assert worker_environment(Placement(threads=3))["NPROC"] == "3"


def test_workers_that_share_a_gpu_share_its_memory(monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.2")  # the driver's own
    assert "XLA_CLIENT_MEM_FRACTION" not in worker_environment(Placement(gpus=1))
    assert worker_environment(Placement(gpus=0.4))["XLA_CLIENT_MEM_FRACTION"] == "0.36"
