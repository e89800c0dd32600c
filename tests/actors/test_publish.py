"""What publishing weights promises.

1. Afterwards every worker draws the bits of a pool that was started with those weights.
2. In flight: each token records its version; tokens of the old weights are those of an undisturbed run, and rows of the
   new ones alone are those of a pool started with them.
3. Weights that one worker refuses, or that do not arrive as they were sent, are in service nowhere.
4. A worker that dies afterwards, or amid it, is replaced by one that has the newest weights.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import ray

from actors import Deadlines, WorkerPool, WorkerSpec
from sampling import Checkpoint, SamplingParams, load_checkpoint
from sampling.checkpoints import weights_digest
from sampling.errors import CheckpointError, ConfigError
from sampling.models import Transformer
from sampling.types import Request
from sampling.weights import canary_logprobs
from tests.actors.small_work import GEOMETRY, ONE_WORKER, TWO_WORKERS, all_drawn, drawn, groups, requests
from tests.actors.test_faults import QUICK
from tests.processes import within
from tests.sampling.test_weights import bits, changed
from tests.tiny_models import TOKENIZER_LEN, tiny_llama

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def other(local_ray, tmp_path_factory) -> WorkerSpec:
    """A checkpoint of the same form with other weights."""
    return WorkerSpec(str(tiny_llama(tmp_path_factory.mktemp("other") / "llama", seed=1)), GEOMETRY)


@pytest.fixture(scope="module")
def published(other) -> Checkpoint:
    return load_checkpoint(other.checkpoint)


@pytest.fixture(scope="module")
def started_with_it(other):
    """A pool that was started with the weights that are published."""
    with WorkerPool(other, ONE_WORKER) as pool:
        yield pool


@pytest.fixture(scope="module")
def expected(started_with_it):
    """What `requests()` get from it."""
    return all_drawn(groups(started_with_it.run(requests())))


@pytest.fixture
def faults(spec):
    """Writes faults.json, whole at once: workers read it at any moment."""
    file = Path(spec.checkpoint) / "faults.json"

    def write(**by_worker):
        unready = file.with_suffix(".unready")
        unready.write_text(json.dumps({k.replace("_", "-"): v for k, v in by_worker.items()}))
        unready.replace(file)

    yield write
    file.unlink(missing_ok=True)


def versions(found) -> set[int]:
    return {int(v) for group in found.values() for c in group.completions for v in c.policy_versions}


def require_service(pool, published, version):
    """Everything that the pool and its workers say of the weights is about these."""
    digest = weights_digest(published.params)
    for described in (pool.description, *pool.workers):
        assert (described.policy_version, described.weights_digest) == (version, digest)
    assert pool.weights_digest(version) == digest


def test_afterwards_every_worker_draws_the_bits_of_a_pool_started_with_the_weights(spec, published, expected):
    model = Transformer(published.info.config)
    ours = canary_logprobs(model, published.params, TOKENIZER_LEN)
    with WorkerPool(spec, TWO_WORKERS) as pool:
        first_digest = pool.description.weights_digest
        publication = pool.publish(published.params, 3, canary=ours)
        require_service(pool, published, 3)
        outcomes = list(pool.run(requests()))
        programs = pool.stats().engines.programs_compiled
    found = groups(outcomes)
    assert {outcome.worker for outcome in outcomes} == {"worker-0", "worker-1"}
    assert all_drawn(found) == expected and versions(found) == {3}
    assert publication.weights_digest == weights_digest(published.params) != first_digest
    np.testing.assert_allclose(publication.canary_logprobs, ours, atol=1e-5)
    assert programs == 2 * 3


def test_weights_may_be_published_by_the_source_of_requests_and_while_a_run_waits(spec, expected, published):
    with WorkerPool(spec, ONE_WORKER) as pool:
        first, *others = requests()
        waits = 0

        def source():
            pool.publish(published.params, 1)
            yield first
            pool.publish(published.params, 2)
            yield from others

        def on_wait():
            nonlocal waits
            waits += 1
            if waits == 2:
                pool.publish(published.params, 3)

        found = groups(pool.run(source(), on_wait))
        assert all_drawn(found) == expected
        assert pool.description.policy_version == 3 and versions(found) <= {1, 2, 3}


def long_requests() -> list[Request]:
    params = SamplingParams(n=3, max_new_tokens=45, ignore_eos=True)
    return [Request(f"p{i}", np.arange(4, 8 + i), params, run_seed=3) for i in range(8)]


def test_rows_in_flight_go_on_and_each_token_records_its_version(faulty_pool, faults, started_with_it, published):
    new = groups(started_with_it.run(long_requests()))
    with faulty_pool(TWO_WORKERS) as pool:
        old = groups(pool.run(long_requests()))
        pool.publish(load_checkpoint(pool.description.checkpoint.path).params, 1)  # compiles the canary
        faults(worker_0="slow", worker_1="slow")
        run = pool.run(long_requests())
        outcomes = [next(run)]
        publication = pool.publish(published.params, 2)
        outcomes += run
    kinds = set()
    for name, group in groups(outcomes).items():
        for completion, undisturbed, of_new in zip(
            group.completions, old[name].completions, new[name].completions, strict=True
        ):
            row = completion.policy_versions
            assert np.all(np.diff(row) >= 0)
            before = int(np.sum(row == 1))
            kinds.add((before > 0, before < row.size))
            if before:
                assert bits(completion, before) == bits(undisturbed, before)
            else:
                assert bits(completion) == bits(of_new)
    assert kinds == {(True, False), (True, True), (False, True)}
    assert publication.stood_still_s < 0.1


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (
            "final_norm/scale",
            None,
            r"version 0 stays: worker-[01]: weights: expected float32 \[32\] at final_norm/scale",
        ),
        (
            "final_norm/scale",
            np.full(32, np.nan, np.float32),
            "worker-[01]: weights: final_norm/scale: expected finite",
        ),
        (
            "embedding",
            np.zeros((2, 2), np.float32),
            r"worker-[01]: weights: embedding: expected .*, got float32 \[2, 2",
        ),
        ("head", np.full((272, 32), 3e38, np.float32), "worker-[01]: weights: expected finite log-probs"),
        ("head", "text", "worker-[01]: weights: head: expected float32"),
    ],
)
def test_weights_that_are_refused_are_in_service_nowhere(pool, undisturbed, published, path, value, words):
    with pytest.raises(CheckpointError, match=words):
        pool.publish(changed(published.params, path, value), 1)
    require_old(pool, undisturbed)


def require_old(pool, undisturbed):
    assert {worker.policy_version for worker in pool.workers} == {pool.description.policy_version} == {0}
    found = groups(pool.run(requests(8)))
    assert all_drawn(found) == {name: drawn(undisturbed[name]) for name in sorted(found)}
    assert versions(found) == {0} and pool.stats().restarts == 0


def test_weights_that_score_unlike_the_publishers_are_in_service_nowhere(pool, undisturbed, published):
    said = canary_logprobs(Transformer(published.info.config), published.params, TOKENIZER_LEN)
    for canary, words in ((said + np.float32(0.01), "of the publisher's, got 1.0"), (said[:3], "log-probs, got")):
        with pytest.raises(CheckpointError, match=words):
            pool.publish(published.params, 1, canary=canary)
    for version in (0, -1, 2**31, "1"):
        with pytest.raises(ConfigError, match="version: expected"):
            pool.publish(published.params, version)
    require_old(pool, undisturbed)


def test_weights_that_arrive_damaged_are_in_service_nowhere(faulty_pool, faults, undisturbed, published):
    with faulty_pool() as pool:
        faults(worker_1="damage")
        with pytest.raises(CheckpointError, match=r"expected worker-1 to have received digest .* got 00"):
            pool.publish(published.params, 1)
        faults()
        require_old(pool, undisturbed)
        pool.publish(published.params, 1)
        require_service(pool, published, 1)


def test_the_replacement_of_a_worker_has_the_newest_weights(spec, expected, published):
    with WorkerPool(spec, ONE_WORKER, retry=QUICK) as pool:
        pool.publish(published.params, 1)
        killed = pool.workers[0].pid
        os.kill(killed, signal.SIGKILL)
        found = groups(pool.run(requests()))
        assert all_drawn(found) == expected and versions(found) == {1}
        assert pool.stats().restarts == 1 and pool.workers[0].pid != killed
        require_service(pool, published, 1)


@pytest.mark.parametrize(("placement", "fault"), [(TWO_WORKERS, "kill"), (ONE_WORKER, "hang")])
def test_a_worker_that_is_lost_amid_it_is_replaced_by_one_that_has_them(
    faulty_pool, faults, expected, published, placement, fault
):
    with faulty_pool(placement, Deadlines(publish_s=2.0), QUICK) as pool:
        faults(worker_0=fault)
        pool.publish(published.params, 1)
        limit = time.monotonic() + 30
        found = groups(pool.run(requests()))
        assert all_drawn(found) == expected and versions(found) == {1}
        while len(pool.workers) < placement.num_workers and time.monotonic() < limit:
            assert versions(groups(pool.run(requests()))) == {1}
        assert len(pool.workers) == placement.num_workers and pool.stats().restarts == 1
        require_service(pool, published, 1)


def test_weights_that_are_out_of_service_leave_rays_store(spec, published):
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(published.params))

    def held() -> float:
        return ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"]

    before = -1.0  # Ray tells late what others have let go of
    for _ in within(30, every_s=2):
        if before == (before := held()):
            break
    with WorkerPool(spec, TWO_WORKERS) as pool:
        for version in range(1, 13):
            pool.publish(published.params, version)
            assert groups(pool.run(requests(2)))
        for _ in within(15, every_s=0.2):
            if size <= held() - before < 3 * size:  # those in service, and those that a worker is about to let go
                break
    for _ in within(15, every_s=0.2):
        if held() - before < size:
            break
