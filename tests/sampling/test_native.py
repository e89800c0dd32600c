"""Attention in native code: what XLA's own operations compute, and a row's bits are its own."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sampling import Geometry, native
from sampling.fingerprint import numerics_fingerprint
from sampling.models.attention import attend_cached

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not native.registered(), reason="no C++ compiler here")


def layer(rows, kv_heads, group, head_dim, block_len, blocks, seed=0):
    """Queries, keys and values of random numbers."""
    rng = np.random.default_rng(seed)
    shapes = (
        (rows, 1, kv_heads, group, head_dim),
        (blocks, rows, kv_heads, head_dim, block_len),
        (blocks, rows, kv_heads, block_len, head_dim),
    )
    return [jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes]


def places(*positions):
    return jnp.asarray(positions, jnp.int32)[:, None]


def numbered(rows):
    return jnp.arange(rows, dtype=jnp.int32)


@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "block_len", "blocks"),
    [(3, 3, 64, 64, 3), (1, 8, 128, 64, 2), (2, 1, 80, 24, 5), (2, 5, 20, 7, 12), (1, 1, 1, 1, 70)],
)
def test_it_is_the_attention_of_xlas_operations(kv_heads, group, head_dim, block_len, blocks, window):
    queries, keys, values = layer(6, kv_heads, group, head_dim, block_len, blocks)
    capacity = block_len * blocks
    positions = places(-1, 0, 1, capacity // 2, capacity - 2, capacity - 1)
    rows = numbered(6)[::-1]
    got = native.attend(queries, keys, values, positions, window, rows)
    np.testing.assert_allclose(got, attend_cached(queries, keys, values, positions, window, rows), rtol=0, atol=2e-6)
    np.testing.assert_array_equal(got[0], jnp.zeros_like(got[0]))


def test_the_weights_of_far_scores():
    """One key is ahead of the others by 0 to 300 nats: weights from 1 down to where they are no float any more."""
    ahead = np.arange(0, 301, 1, dtype=np.float32)
    keys = jnp.zeros((1, ahead.size, 1, 1, 2), jnp.float32).at[0, :, 0, 0, 0].set(ahead)
    values = jnp.zeros((1, ahead.size, 1, 2, 1), jnp.float32).at[0, :, 0, 1, 0].set(1.0)
    queries = jnp.ones((ahead.size, 1, 1, 1, 1), jnp.float32)
    got = native.attend(queries, keys, values, jnp.ones((ahead.size, 1), jnp.int32), None, numbered(ahead.size))
    expected = 1 / (1 + np.exp(ahead.astype(np.float64)))
    normal = expected > 1e-37
    np.testing.assert_allclose(got.ravel()[normal], expected[normal], rtol=5e-7)
    assert (np.asarray(got.ravel()[~normal]) <= 2e-37).all()


def test_a_rows_bits_are_its_own():
    queries, keys, values = layer(40, 3, 3, 64, 64, 4)
    positions = jnp.asarray(np.random.default_rng(1).integers(0, 256, (40, 1)), jnp.int32)
    together = np.asarray(native.attend(queries, keys, values, positions, None, numbered(40)))
    for some in ([7], [39, 0], list(range(8, 24)), list(range(39, -1, -1))):
        few = jnp.asarray(some, jnp.int32)
        apart = native.attend(queries[few], keys, values, positions[few], None, few)
        np.testing.assert_array_equal(apart, together[some])
        moved = native.attend(queries[few], keys[:, few], values[:, few], positions[few], None, numbered(len(some)))
        np.testing.assert_array_equal(moved, together[some])
    longer = [jnp.concatenate([each, jnp.full_like(each, 7.0)]) for each in (keys, values)]
    np.testing.assert_array_equal(native.attend(queries, *longer, positions, None, numbered(40)), together)


def test_what_lies_beyond_a_row_or_in_another_reaches_nothing():
    queries, keys, values = layer(3, 2, 3, 64, 64, 2)
    positions = places(70, 10, 127)
    clean = np.asarray(native.attend(queries, keys, values, positions, None, numbered(3)))
    beyond = keys.at[1, 0, :, :, 7:].set(jnp.nan), values.at[1, 0, :, 7:].set(jnp.nan)
    np.testing.assert_array_equal(native.attend(queries, *beyond, positions, None, numbered(3)), clean)
    for broken in ((keys.at[0, 1, 0, 5, 3].set(jnp.nan), values), (keys, values.at[0, 1, 0, 3, 5].set(jnp.inf))):
        got = np.asarray(native.attend(queries, *broken, positions, None, numbered(3)))
        np.testing.assert_array_equal(got[[0, 2]], clean[[0, 2]])
        assert not np.isfinite(got[1, 0, 0]).all()
        np.testing.assert_array_equal(got[1, 0, 1], clean[1, 0, 1])


def test_fingerprints_name_it_where_it_is_used():
    geometry = Geometry()
    assert numerics_fingerprint(geometry, "float32")["native"] == native.registered() != ""
    assert numerics_fingerprint(geometry, "bfloat16")["native"] == ""
    assert numerics_fingerprint(geometry, "float32", num_devices=4)["native"] == ""


def started(folder, program, **environment):
    """A process of its own, with an empty folder for compiled code."""
    variables = {**os.environ, "ROLLOUT_NATIVE_CACHE": str(folder), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


NAME = "from sampling import native; print(native.registered())"


def test_processes_that_compile_at_the_same_time_share_one_result(tmp_path):
    both = [started(tmp_path, NAME) for _ in range(2)]
    names = [process.communicate(timeout=240)[0].strip() for process in both]
    assert names == [native.registered()] * 2
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"ROLLOUT_NATIVE": "off"}, "ROLLOUT_NATIVE is off"),
        ({"CXX": "no-such-compiler", "PATH": ""}, "no C++ compiler was found; install g++ or clang++"),
        ({"CXX": "false"}, "ended with 1"),
        ({"ROLLOUT_NATIVE_CACHE": "/proc/nowhere"}, "/proc/nowhere"),
    ],
)
def test_without_it_xlas_operations_do_the_work_and_the_reason_is_told(tmp_path, environment, why):
    program = (
        "import logging; logging.basicConfig(level='INFO')\n"
        "from sampling import Geometry\n"
        "from sampling.fingerprint import numerics_fingerprint\n"
        "print(repr(numerics_fingerprint(Geometry(), 'float32')['native']))"
    )
    out, errors = started(tmp_path, program, **environment).communicate(timeout=120)
    assert out.strip() == "''", errors
    assert "no native attention, which takes longer: " in errors and why in errors
    assert list(tmp_path.iterdir()) == []


def test_it_runs_in_compiled_programs_beside_other_operations():
    queries, keys, values = layer(5, 3, 3, 64, 64, 2)
    positions = places(3, 60, 64, 100, 127)

    @jax.jit
    def twice(queries):
        once = native.attend(queries, keys, values, positions, None, numbered(5))
        return native.attend(once * 2, keys, values, positions, None, numbered(5)) + 1

    once = native.attend(queries, keys, values, positions, None, numbered(5))
    expected = native.attend(once * 2, keys, values, positions, None, numbered(5)) + 1
    np.testing.assert_array_equal(twice(queries), expected)
