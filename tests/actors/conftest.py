"""A tiny checkpoint, workers for it, and the undisturbed results that all disturbed ones must equal."""

from __future__ import annotations

import sys

import pytest
import ray

from actors import Deadlines, RetryPolicy, WorkerPool, WorkerSpec
from sampling.types import Group
from tests.actors import faulty_worker
from tests.actors.small_work import GEOMETRY, ONE_WORKER, TWO_WORKERS, groups, requests
from tests.local_ray import local_ray  # noqa: F401, a fixture
from tests.tiny_models import tiny_llama

ray.cloudpickle.register_pickle_by_value(sys.modules[faulty_worker.__name__])


@pytest.fixture(scope="session")
def spec(local_ray, tmp_path_factory) -> WorkerSpec:  # noqa: F811
    path = tiny_llama(tmp_path_factory.mktemp("checkpoint") / "llama")
    return WorkerSpec(str(path), GEOMETRY)


@pytest.fixture(scope="session")
def pool(spec):
    """Two workers for the tests that disturb nobody."""
    with WorkerPool(spec, TWO_WORKERS) as pool:
        yield pool


@pytest.fixture(scope="session")
def undisturbed(spec) -> dict[str, Group]:
    """What one worker that nothing happens to answers to `requests()`."""
    with WorkerPool(spec, ONE_WORKER) as pool:
        return groups(pool.run(requests()))


@pytest.fixture
def faulty_pool(spec, monkeypatch):
    """Makes pools of FaultyWorkers, whose prompt ids say what goes wrong."""
    monkeypatch.setattr("actors.supervision.SamplingWorker", faulty_worker.FaultyWorker)

    def make(placement=TWO_WORKERS, deadlines: Deadlines | None = None, retry: RetryPolicy | None = None):
        return WorkerPool(spec, placement, deadlines, retry)

    return make
