"""What an engine will hold is known before it holds it, and what cannot fit is refused with numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sampling import Engine, Geometry, Request, load_checkpoint
from sampling.errors import ConfigError
from sampling.memory_plan import MemoryPlan, available_bytes, require_memory
from tests.tiny_models import tiny_llama


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return load_checkpoint(tiny_llama(tmp_path_factory.mktemp("tiny")))


def bytes_of(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("dtype", "geometry"), [("float32", Geometry(8, 48, 2, 32)), ("bfloat16", Geometry(3, 64, 1, 4))]
)
def test_the_plan_counts_what_the_engine_holds(checkpoint, dtype, geometry):
    engine = Engine(checkpoint, geometry, dtype)
    list(engine.generate([Request("p", [5, 6], given=([7],), forward=True)]))
    plan = MemoryPlan.of(checkpoint.info.config, geometry, jnp.dtype(dtype))
    assert plan.weights == bytes_of(engine._params)
    assert plan.cache == bytes_of((engine._state.cache, engine._staging.cache, engine._scorer._cache))
    state = engine._state.replace(cache=None, policy=None)
    assert bytes_of(state) <= plan.state <= 1.2 * bytes_of(state) + 2048


def test_the_workspace_covers_what_the_compiler_says(checkpoint):
    geometry = Geometry(8, 48, 2, 32)
    engine = Engine(checkpoint, geometry)
    plan = MemoryPlan.of(checkpoint.info.config, geometry, jnp.float32)
    temporary = max(
        program.memory_analysis().temp_size_in_bytes for program in (engine._programs.prefill, engine._programs.decode)
    )
    assert plan.workspace >= temporary


def test_what_cannot_fit_is_refused_with_numbers_and_a_geometry_that_would(checkpoint):
    config, wanted = checkpoint.info.config, Geometry(1000, 4096)
    with pytest.raises(
        ConfigError, match=r"1000 slots of 4096 tokens need weights .* \+ cache .* = .* are available"
    ) as caught:
        require_memory(config, wanted, jnp.float32, 64 * 2**20)
    offers = dict(part.split("=") for part in str(caught.value).split() if part.startswith("geometry.") and "=" in part)
    slots, cache_len = int(offers["geometry.slots"]), int(offers["geometry.cache_len"])
    for fits in (Geometry(slots, 4096), Geometry(1000, cache_len)):
        require_memory(config, fits, jnp.float32, 64 * 2**20)
    for too_large in (Geometry(slots + 1, 4096), Geometry(1000, cache_len + 32)):
        with pytest.raises(ConfigError):
            require_memory(config, too_large, jnp.float32, 64 * 2**20)
    with pytest.raises(ConfigError, match="no geometry of this model would fit"):
        require_memory(config, wanted, jnp.float32, 1000)


def test_the_system_tells_what_is_available():
    available = available_bytes()
    assert available is None or 2**20 < available < 2**50
    assert np.isfinite(float(available or 0))
