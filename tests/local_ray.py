"""One private Ray for the whole test session, which every pool joins: starting it takes seconds."""

from __future__ import annotations

import pytest
import ray


@pytest.fixture(scope="session")
def local_ray():
    """Ray on this machine, connected to this process."""
    if ray.is_initialized():  # by this fixture, asked for from another folder of tests
        yield
        return
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=200 << 20,
    )
    yield
    ray.shutdown()
