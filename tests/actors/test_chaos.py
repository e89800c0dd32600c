"""Faults on order: they are read or refused by name, they do happen, and no result shows them."""

from __future__ import annotations

import time

import pytest

from actors import Chaos, Deadlines, Fault, RetryPolicy, WorkerPool
from sampling.checkpoints import load_checkpoint
from sampling.errors import CheckpointError, ConfigError
from tests.actors.small_work import ONE_WORKER, TWO_WORKERS, all_drawn, groups, requests

QUICK = RetryPolicy(backoff_s=0.1)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill", Fault("kill")),
        ("kill:worker=1,after=20", Fault("kill", 1, 20)),
        ("slow:seconds=0.5,worker=2", Fault("slow", 2, seconds=0.5)),
        ("node:after=3", Fault("node", after=3)),
        ("write:after=0", Fault("write")),
    ],
)
def test_faults_are_read(text, fault):
    assert Fault.parse(text) == fault == Fault.parse(str(fault))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kil", "chaos: kil: expected one of kill, stall, slow, corrupt, node, write, got 'kil'"),
        ("kill:seconds=1", "expected each of worker, after once, got 'seconds=1'"),
        ("kill:after=1,after=2", "expected each of worker, after once, got 'after=2'"),
        ("node:worker=1", "expected each of after once, got 'worker=1'"),
        ("kill:after", "after: expected a number from 0 to a million, got ''"),
        ("kill:after=-1", "after: expected a number from 0 to a million, got '-1'"),
        ("slow:seconds=nan", "seconds: expected a number from 0 to a million, got 'nan'"),
    ],
)
def test_what_is_no_fault_is_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        Chaos.of([text])


def test_only_those_who_ask_for_it_have_workers_that_can_be_told():
    assert Chaos().worker_class(str) is str and Chaos.of(["write"]).worker_class(str) is str
    assert Chaos.of(["kill"]).worker_class(str) is not str


@pytest.mark.ray
@pytest.mark.parametrize(
    ("text", "words"), [("kill:worker=2", "expected a worker below 2"), ("node", "expected a cluster of several nodes")]
)
def test_what_cannot_happen_is_refused(spec, text, words):
    with pytest.raises(ConfigError, match=words), WorkerPool(spec, TWO_WORKERS, chaos=Chaos.of([text])):
        pass


@pytest.mark.ray
@pytest.mark.parametrize("kind", ["kill", "stall"])
def test_a_worker_that_is_lost_leaves_no_trace(spec, undisturbed, kind):
    chaos = Chaos.of([f"{kind}:worker=0,after=3"])
    with WorkerPool(spec, ONE_WORKER, Deadlines(heartbeat_s=1.0), QUICK, chaos=chaos) as pool:
        assert all_drawn(groups(pool.run(requests()))) == all_drawn(undisturbed)
        assert pool.stats().restarts == 1
    assert [str(fault) for fault in chaos.happened] == [f"{kind}:worker=0,after=3"] and not chaos.pending


@pytest.mark.ray
def test_a_slow_worker_is_slow_and_draws_the_same(spec, undisturbed):
    chaos = Chaos.of(["slow:worker=0,after=0,seconds=0.2"])
    with WorkerPool(spec, ONE_WORKER, chaos=chaos) as pool:
        began = time.monotonic()
        found = groups(pool.run(requests(6)))
        assert time.monotonic() - began > 0.4
    assert all_drawn(found).items() <= all_drawn(undisturbed).items()


@pytest.mark.ray
@pytest.mark.parametrize("worker", [0, 1])
def test_weights_that_are_damaged_on_their_way_are_sent_again(spec, undisturbed, worker, caplog):
    params = load_checkpoint(spec.checkpoint).params
    with WorkerPool(spec, TWO_WORKERS, chaos=Chaos.of([f"corrupt:worker={worker},after=1"])) as pool:
        before = pool.description.weights_digest
        pool.publish(params, 1)
        assert not caplog.records
        assert pool.publish(params, 2).weights_digest == before
        assert "weights of version 2 are sent again" in caplog.text and "expected" in caplog.text
        assert {each.weights_digest for each in pool.workers} == {before}
        assert all_drawn(groups(pool.run(requests(6)))).keys() == {f"p{index}" for index in range(6)}


@pytest.mark.ray
def test_weights_that_stay_damaged_are_in_service_nowhere(spec):
    chaos = Chaos.of(["corrupt:worker=0,after=0", "corrupt:worker=1,after=1"])
    with WorkerPool(spec, TWO_WORKERS, chaos=chaos) as pool:
        with pytest.raises(CheckpointError, match="the weights of version 1 are not in service, version 0 stays"):
            pool.publish(load_checkpoint(spec.checkpoint).params, 1)
        assert {each.policy_version for each in pool.workers} == {0}
