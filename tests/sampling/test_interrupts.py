"""An engine that is interrupted is as good as new, and one that works for long holds no more than at the beginning."""

import dataclasses
import os
import resource
import signal
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from sampling import Engine, Geometry, Request, SamplingParams, load_checkpoint
from tests.sampling.test_engine import GEOMETRY, MIXED, assert_same_bits, prompt, rows
from tests.tiny_models import tiny_llama

STEADY = SamplingParams(max_new_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return load_checkpoint(tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def engine(checkpoint):
    return Engine(checkpoint, GEOMETRY)


def mixed_work():
    """More requests than slots, every second one also scored."""
    drawn = [Request(f"p{i}", prompt(i), MIXED[i % len(MIXED)].replace(n=2), run_seed=5) for i in range(12)]
    return drawn + [Request(f"s{i}", prompt(i), STEADY, given=(prompt(i + 30, 20),), forward=True) for i in range(6)]


@pytest.fixture(scope="module")
def undisturbed(engine):
    return rows(engine.generate(mixed_work()))


def assert_as_new(engine, undisturbed):
    assert engine.idle and engine.waiting == 0 and engine.step() == []
    assert engine.stats().slots_busy == 0 and sorted(engine._free) == list(range(GEOMETRY.slots))
    assert_same_bits(undisturbed, rows(engine.generate(mixed_work())))


class Interrupted:
    """A compiled program after which the interrupt comes: it has taken its arrays, and nobody has its result."""

    def __init__(self, program, calls):
        self.program, self.calls = program, calls

    def __call__(self, *arguments):
        result = self.program(*arguments)
        self.calls -= 1
        if self.calls == 0:
            raise KeyboardInterrupt
        return result


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("name", ["prefill", "admit", "decode"])
def test_an_interrupt_while_a_program_holds_the_slots(engine, undisturbed, name, calls):
    whole = engine._programs
    program = getattr(whole, name)
    every_width = {width: Interrupted(one, calls) for width, one in program.items()} if name == "decode" else None
    engine._programs = dataclasses.replace(whole, **{name: every_width or Interrupted(program, calls)})
    with pytest.raises(KeyboardInterrupt):
        list(engine.generate(mixed_work()))
    engine._programs = whole
    assert_as_new(engine, undisturbed)


@pytest.mark.parametrize("name", ["_pass", "_fork"])
def test_an_interrupt_while_a_pass_holds_the_sequences(engine, undisturbed, name):
    scorer = engine._scorer
    whole = getattr(scorer, name)
    setattr(scorer, name, Interrupted(whole, 2))
    with pytest.raises(KeyboardInterrupt):
        list(engine.generate(mixed_work()))
    setattr(scorer, name, whole)
    assert_as_new(engine, undisturbed)


def test_ctrl_c_at_any_moment(engine, undisturbed):
    """Real signals, from the first call to the last.

    Python drops an exception that is raised in a finalizer, and an interrupt that lands there is lost for everybody; a
    person presses the keys again.
    """
    began = time.perf_counter()
    list(engine.generate(mixed_work()))
    whole = time.perf_counter() - began
    interrupted = 0
    for delay in np.linspace(0, whole, 25):
        heard = threading.Event()

        def press_until_heard(delay=delay, heard=heard):
            while not heard.wait(delay):
                os.kill(os.getpid(), signal.SIGINT)
                delay = 5.0

        person = threading.Thread(target=press_until_heard)
        try:
            person.start()
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                list(engine.generate(mixed_work()))
        except KeyboardInterrupt:
            heard.set()
            interrupted += 1
        heard.set()
        person.join()
        assert engine.idle and engine.stats().slots_busy == 0
    assert interrupted == 25
    assert_as_new(engine, undisturbed)


def test_a_caller_that_raises_or_leaves(engine, undisturbed):
    with pytest.raises(ZeroDivisionError):
        for _ in engine.generate(mixed_work()):
            raise ZeroDivisionError
    assert_as_new(engine, undisturbed)
    for _ in engine.generate(mixed_work()):
        break
    assert_as_new(engine, undisturbed)


def test_a_bad_request_withdraws_those_before_it(engine, undisturbed):
    with pytest.raises(ValueError, match="leave no room"):
        list(engine.generate([*mixed_work(), Request("long", prompt(1, 48))]))
    assert_as_new(engine, undisturbed)


def resident_mb():
    """MiB of memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="only Linux tells what a process holds now")
def test_ten_thousand_requests_leave_nothing_behind(checkpoint):
    engine = Engine(checkpoint, Geometry(slots=64, cache_len=32, prefill_rows=8, prefill_chunk=8))
    short = SamplingParams(max_new_tokens=2, ignore_eos=True)

    def answered(count, first):
        work = (Request(f"p{first + i}", prompt(i % 7, 4), short) for i in range(count))
        return sum(len(group.completions) for group in engine.generate(work))

    assert answered(2000, 0) == 2000
    arrays, memory = len(jax.live_arrays()), resident_mb()
    assert answered(8000, 2000) == 8000
    assert len(jax.live_arrays()) == arrays
    assert resident_mb() < memory + 24
    assert engine.idle and sorted(engine._free) == list(range(64))
    stats = engine.stats()
    assert stats.groups == stats.completions == 10_000 and stats.tokens == 20_000
