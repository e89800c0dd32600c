"""TPU slices of several hosts, on nodes that take themselves for such hosts: the workers draw on their CPUs.

Ray reserves, refuses, and gives back as it would on real ones; what the TPU runtime does there, no test can tell.
"""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from actors import Placement, TpuSlice
from actors.cluster import connected, worker_environment
from actors.slices import require_slice, slice_hosts
from rollout.config_file import parse_config
from rollout.driver import placement_of
from sampling.errors import ConfigError
from tests.ray_cluster import ROOT, environment, ray_cluster
from tests.tiny_models import tiny_llama

SLICE = TpuSlice("2x2x2", "v4")

DRIVER = """
import os, signal, sys, time
import ray
from actors import Deadlines, Placement, TpuSlice, WorkerPool, WorkerSpec, supervision
from actors.worker import SamplingWorker
from sampling.errors import WorkerError
from tests.actors.small_work import GEOMETRY, ONE_WORKER, all_drawn, groups, request, requests

class OnCpu(SamplingWorker):
    def start(self):
        import jax
        assert os.environ["JAX_PLATFORMS"] == "tpu,cpu" and os.environ["TPU_HOST_BOUNDS"] == "1,1,1"
        assert ray.get_runtime_context().get_accelerator_ids()["TPU"] == ["0", "1", "2", "3"]
        jax.config.update("jax_platforms", "cpu")
        return super().start()

address, checkpoint = sys.argv[1:]
spec = WorkerSpec(checkpoint, GEOMETRY)
placement = Placement(2, cpus=0, threads=1, tpu_slice=TpuSlice("2x2x2", "v4"))

def slice_pool(start_s=60.0, heartbeat_s=20.0):
    return WorkerPool(spec, placement, Deadlines(start_s=start_s, heartbeat_s=heartbeat_s), address=address)

def free():
    return {name: ray.available_resources().get(name, 0) for name in ("TPU", "TPU-v4-16-head")}

def await_that(condition):
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.1)

def tell(what):
    print(what, flush=True)

def ordered(order):
    tell(order)
    assert sys.stdin.readline(), "the test is gone"

def undisturbed():
    ray.init(address=address, log_to_driver=False, logging_level="error")
    with WorkerPool(spec, ONE_WORKER) as pool:
        return all_drawn(groups(pool.run(requests())))

def hosts(pool):
    labels = {node["NodeID"]: node["Labels"] for node in ray.nodes()}
    told = {worker.name: labels[worker.node] for worker in pool.workers}
    return {name: (told[name]["ray.io/tpu-slice-name"], told[name]["ray.io/tpu-worker-id"]) for name in sorted(told)}

def drawn_while(pool, order, until):
    # Draws, and goes on with more until it has happened what the order is to bring about.
    orders = [order]
    def enough():
        yield from requests(6)
        ordered(orders.pop())
        yield from requests()[6:]
        limit = time.monotonic() + 60
        more = 0
        while not until():
            assert time.monotonic() < limit, "it did not happen"
            more += 1
            yield request(f"more{more}")
    found = groups(pool.run(enough()))
    return all_drawn({name: group for name, group in found.items() if not name.startswith("more")})
"""
"""What every driver begins with. It runs in a process of its own, since a process knows one Ray."""

HELD_WORKERS = """
import pathlib, sys, time
while any(part.endswith("default_worker.py") for part in sys.orig_argv):
    if not pathlib.Path(__file__).with_name("held").exists():
        break
    time.sleep(0.1)
"""
"""Python runs it first of all: no worker process of Ray gets any further while the file is there."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("checkpoint") / "llama")


@pytest.fixture
def cluster():
    """A head without TPUs, and a slice of two hosts."""
    with ray_cluster(nodes=1) as cluster:
        for host in range(2):
            cluster.add_host("a", host)
        yield cluster


def drive(cluster, checkpoint, code, orders=None):
    """Runs a driver, does to the cluster what it orders, and returns what else it tells."""
    command = [sys.executable, "-c", DRIVER + code, cluster.address, str(checkpoint)]
    pipe = subprocess.PIPE
    driver = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )
    end = threading.Timer(110, driver.kill)
    end.start()
    told = []
    try:
        for line in driver.stdout:
            told.append(line.rstrip("\n"))
            if act := (orders or {}).get(told[-1]):
                act()
                driver.stdin.write("done\n")
                driver.stdin.flush()
        assert driver.wait(10) == 0, "\n".join(told)
    finally:
        end.cancel()
        driver.kill()
        driver.wait(10)
    return "\n".join(told)


@pytest.mark.ray
@pytest.mark.slow
def test_a_slice_is_reserved_and_refused_and_given_back(cluster, checkpoint):
    told = drive(
        cluster,
        checkpoint,
        """
expected = undisturbed()
supervision.SamplingWorker = OnCpu
for _ in range(2):
    with slice_pool() as pool:
        assert hosts(pool) == {"worker-0": ("a", "0"), "worker-1": ("a", "1")}, hosts(pool)
        assert free() == {"TPU": 0, "TPU-v4-16-head": 0}, free()
        assert all_drawn(groups(pool.run(requests()))) == expected
        began = time.monotonic()
        try:
            with slice_pool(start_s=1):
                raise AssertionError("there is but one slice")
        except WorkerError as error:
            tell(error)
        assert time.monotonic() - began < 5
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.alarm(2)
        try:
            with slice_pool():
                raise AssertionError("there is but one slice")
        except KeyboardInterrupt:
            tell("interrupted")
    await_that(lambda: free() == {"TPU": 8, "TPU-v4-16-head": 1})
ordered("a host goes away")
await_that(lambda: free() == {"TPU": 4, "TPU-v4-16-head": 1})
try:
    with slice_pool(start_s=2):
        raise AssertionError("half of the slice is away")
except WorkerError as error:
    tell(error)
await_that(lambda: free() == {"TPU": 4, "TPU-v4-16-head": 1})
""",
        {"a host goes away": lambda: cluster.remove_host("a", 1)},
    )
    assert "not to be had within 2 s: Ray sees 1 of 2 hosts of 'a', and not all are free. Wait until" in told
    assert "a slice 2x2x2 of TPU v4 was not to be had within 1 s: Ray sees 1 with the head of a v4-16, and none" in told
    assert told.count("interrupted") == 2
    assert "workers.start_deadline_s" in told


@pytest.mark.ray
@pytest.mark.slow
def test_a_host_that_is_lost_and_comes_back_costs_its_own_worker_alone(cluster, checkpoint):
    def lose_and_return():
        cluster.remove_host("a", 1)
        cluster.add_host("a", 1)

    drive(
        cluster,
        checkpoint,
        """
expected = undisturbed()
supervision.SamplingWorker = OnCpu
with slice_pool() as pool:
    pids = {worker.name: worker.pid for worker in pool.workers}
    until = lambda: pool.stats().restarts and pool.stats().workers == 2
    assert drawn_while(pool, "a host is lost", until) == expected
    assert hosts(pool) == {"worker-0": ("a", "0"), "worker-1": ("a", "1")}, hosts(pool)
    assert [worker.name for worker in pool.workers if worker.pid == pids[worker.name]] == ["worker-0"]
""",
        {"a host is lost": lose_and_return},
    )


@pytest.mark.ray
@pytest.mark.slow
def test_a_slice_that_is_lost_is_replaced_by_another_one_or_the_run_ends(cluster, checkpoint):
    def lose(name):
        for host in range(2):
            cluster.remove_host(name, host)

    def replace():
        lose("a")
        for host in range(2):
            cluster.add_host("b", host)

    told = drive(
        cluster,
        checkpoint,
        """
expected = undisturbed()
supervision.SamplingWorker = OnCpu
with slice_pool(start_s=20, heartbeat_s=5) as pool:
    until = lambda: set(hosts(pool).values()) == {("b", "0"), ("b", "1")}
    assert drawn_while(pool, "a is replaced", until) == expected
    try:
        drawn_while(pool, "b is lost", lambda: False)
    except WorkerError as error:
        tell(error)
""",
        {"a is replaced": replace, "b is lost": lambda: lose("b")},
    )
    assert (
        "a slice 2x2x2 of TPU v4 was not to be had within 20 s: Ray sees 0 with the head of a v4-16, and none" in told
    )


@pytest.mark.ray
@pytest.mark.slow
def test_a_host_whose_processes_do_not_start_holds_up_no_other(checkpoint, tmp_path):
    held = tmp_path / "held"
    held.touch()
    (tmp_path / "sitecustomize.py").write_text(HELD_WORKERS)
    with ray_cluster(nodes=1) as cluster:
        cluster.add_host("a", 0, tmp_path)
        cluster.add_host("a", 1)
        drive(
            cluster,
            checkpoint,
            """
supervision.SamplingWorker = OnCpu
began = time.monotonic()
with slice_pool() as pool:
    assert time.monotonic() - began < 40  # Ray by itself would ask the first host for the slice's name, and wait
    assert hosts(pool) == {"worker-1": ("a", "1")}, hosts(pool)
    drawn = drawn_while(pool, "the host works again", lambda: pool.stats().workers == 2)
    assert len(drawn) == len(requests())
    assert hosts(pool) == {"worker-0": ("a", "0"), "worker-1": ("a", "1")}, hosts(pool)
""",
            {"the host works again": held.unlink},
        )


def test_a_ray_without_tpu_utilities_is_refused_where_a_slice_is_asked_for(monkeypatch):
    monkeypatch.delattr("ray.util.tpu.slice_placement_group")
    with pytest.raises(
        ConfigError, match=r"ray.util.tpu has in 2.60, .* no attribute 'slice_placement_group'; install"
    ):
        require_slice(Placement(2, tpu_slice=SLICE))
    monkeypatch.setitem(sys.modules, "ray.util.tpu", None)
    with pytest.raises(ConfigError, match=r"ray.util.tpu has in 2.60, got Ray [\d.]+: import of ray.util.tpu halted"):
        require_slice(Placement(2, tpu_slice=SLICE))
    require_slice(Placement(2))


def test_who_asks_for_no_slice_needs_no_tpu_utilities():
    code = """
import sys
from types import ModuleType
import ray.util.tpu
sys.modules["ray.util.tpu"] = ray.util.tpu = ModuleType("ray.util.tpu")
from actors import Placement, WorkerPool
from actors.cluster import worker_environment
from actors.slices import require_slice
require_slice(Placement(2)), worker_environment(Placement(2))
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), timeout=60, check=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Placement(2, gpus=1, tpu_slice=SLICE), "expected no GPUs and TPUs beside tpu_slice"),
        (lambda: Placement(2, tpus=4, tpu_slice=SLICE), "got 0 GPUs and 4 TPU chips"),
        (lambda: Placement(2, tpu_slice="2x2x2"), r"tpu_slice: expected TpuSlice\(...\), got '2x2x2'"),
        (lambda: TpuSlice("", "v4"), "tpu_slice.topology: expected text, got ''"),
        (lambda: slice_hosts(TpuSlice("2x2x2", "v5e")), "expected a slice that Ray knows, .*Invalid accelerator_type"),
        (lambda: slice_hosts(TpuSlice("two", "v4")), "expected a slice that Ray knows, got a slice two of TPU v4"),
        (lambda: slice_hosts(TpuSlice("2x6", "v4")), "a slice 2x6 of TPU v4: 2x6 is no topology of v4"),
        (lambda: slice_hosts(TpuSlice("2x2x1", "v4")), "which is one host; use tpus: 4 instead"),
        (lambda: slice_hosts(TpuSlice("2x4", "v6e")), "which is one host; use tpus: 8 instead"),
        (lambda: require_slice(Placement(1, tpu_slice=SLICE)), "2 hosts .*, got 1 workers; set workers.count to 2"),
    ],
)
def test_what_contradicts_a_slice_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_machine_is_no_slice(monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.shutdown", lambda: None)  # the session's own Ray is needed by other tests
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with (
        pytest.raises(ConfigError, match="expected that of a Ray cluster with"),
        connected(None, Placement(2, tpu_slice=SLICE)),
    ):
        pass


def test_a_worker_has_all_chips_of_its_host_and_sees_no_others():
    assert slice_hosts(SLICE) == (2, 4)
    assert slice_hosts(TpuSlice("4x4", "v6e")) == (4, 4)
    seen = worker_environment(Placement(2, tpu_slice=SLICE))
    assert (seen["JAX_PLATFORMS"], seen["TPU_HOST_BOUNDS"], seen["TPU_CHIPS_PER_HOST_BOUNDS"]) == (
        "tpu,cpu",
        "1,1,1",
        "2,2,1",
    )
    assert not any(name.startswith("TPU_") for name in worker_environment(Placement(tpus=4)))


def test_a_config_names_a_slice():
    values = {
        "model": {"checkpoint": "x"},
        "prompts": {"source": "jsonl", "path": "prompts.jsonl"},
        "workers": {"count": 2, "tpu_slice": {"topology": "2x2x2", "version": "v4"}},
    }
    config = parse_config(values)
    assert placement_of(config.workers) == Placement(2, tpu_slice=SLICE)
    assert parse_config(config.to_dict()) == config
    values["workers"]["tpu_slice"] = {"topology": "2x2x2"}
    with pytest.raises(ConfigError, match=r"workers.tpu_slice.version: expected a value, got none"):
        parse_config(values)
