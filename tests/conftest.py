"""Makes JAX strict for every test, once: CPU only, no silent dtype or rank promotion, compiled programs on disk."""

import os
import signal
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("NPROC", "2")  # threads belong to the geometry: the same for every process of a test
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("ROLLOUT_NATIVE_CACHE", os.environ["JAX_COMPILATION_CACHE_DIR"] + "/native")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; processes inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import jax
import jax.monitoring
import pytest

# The same examples every time: a test that fails, fails for everybody.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None)
hypothesis.settings.load_profile("suite")

# Of this run alone: a grammar that older code has compiled would hide a fault.
_grammars = tempfile.TemporaryDirectory()
os.environ["ROLLOUT_GRAMMAR_CACHE"] = _grammars.name

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_collection_modifyitems(items):
    """Cheap tests first: then the slow ones, those with the real model, and those that start Ray."""
    cost = ("slow", "real", "ray")
    items.sort(
        key=lambda item: max(
            (cost.index(mark.name) + 1 for mark in item.iter_markers() if mark.name in cost), default=0
        )
    )


@pytest.fixture
def compilations():
    """A list that grows by one with every program that JAX compiles, or fetches from its cache, during the test."""
    seen = []

    def listener(event, *_, **__):
        if event.endswith("backend_compile_duration"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listener)
