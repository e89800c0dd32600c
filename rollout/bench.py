"""`rollout bench --workload NAME`: the engine's throughput, beside parts of its step and other engines.

Absolute times of a shared machine say little, so everything that is compared takes turns: parts of a decode step run
between the calls of the engine, and a peer's runs stand between the engine's own (ours, theirs, theirs, ours).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import fmean, median
from typing import Any

import jax
import jax.monitoring

from rollout.bench_against import Peer, PeerRun, peer_job, transformers_folder
from rollout.bench_figures import Comparison, Repeat, Throughput
from rollout.bench_workloads import Shape, Workload, workload
from rollout.step_parts import Part, choice, matrix_products, random_rows, seconds
from sampling import Engine, inspect_checkpoint, load_checkpoint
from sampling.errors import ConfigError

PART_EVERY = 4
"""Decode steps for each timed run of the parts."""


def throughput(
    reference: str,
    name: str,
    *,
    slots: int = 32,
    dtype: str = "float32",
    repeats: int = 5,
    seed: int = 0,
    against: str | None = None,
    peer_python: str | None = None,
    peer_repeats: int = 2,
    shape: Shape | None = None,
) -> Throughput:
    """Measures one engine, warm, and the peer if one is named.

    Args:
        reference: the checkpoint, as `inspect_checkpoint` takes it.
        name: of the workload.
        slots: rows that may be resident at the same time.
        dtype: of the model's matrix products.
        repeats: timed runs of the whole workload.
        seed: of lengths and ids, and of the draws.
        against: "transformers" or "vllm".
        peer_python: the interpreter that has the peer; by default this one.
        peer_repeats: timed runs of the peer.
        shape: other sizes of the workload than the published ones.
    Raises:
        ConfigError: there is no such workload or interpreter, or the interpreter lacks the peer.
        CheckpointError: the checkpoint cannot be read.
        RunError: the peer failed.
    """
    info = inspect_checkpoint(reference)
    work = workload(name, info.tokenizer_len, slots, seed, shape)
    with contextlib.ExitStack() as stack:
        peer = None
        if against:
            if jax.default_backend() != "cpu":
                raise ConfigError(f"--against {against}: peers run on the CPU, but JAX has {jax.default_backend()}")
            folder = stack.enter_context(transformers_folder(info))
            peer = stack.enter_context(Peer(against, peer_python, peer_job(work, info, folder, dtype, seed)))
        checkpoint = load_checkpoint(reference)
        engine = Engine(checkpoint, work.geometry, dtype)
        for _ in engine.generate(work.requests):
            pass  # warm
        peak_rss_mb = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        longest = max(request.prompt_tokens.size for request in work.requests)
        state, logits = random_rows(info.config.vocab_size, slots, history=2 * longest)
        parts = {
            "floor": matrix_products(checkpoint, slots, dtype),
            "choice": choice(info, work.params, state, logits),
        }
        for part in parts.values():
            seconds(part)

        clock = _ProgramClock(engine)
        ours: list[Repeat] = []
        theirs: list[PeerRun] = []
        before = os.getloadavg()
        with _compilations() as compiled:
            for turn in turns(repeats, peer_repeats if peer else 0):
                if turn == "ours":
                    ours.append(_drawn(engine, work, clock, parts))
                elif peer:
                    theirs.append(peer.run())
        after = os.getloadavg()

    def middle(figure: str) -> float:
        return median(getattr(repeat, figure) for repeat in ours)

    tokens_per_s = middle("tokens_per_s")
    occupancy = _share([(repeat.busy_row_steps, repeat.steps * slots) for repeat in ours])
    queued = _share([(repeat.queued_busy_row_steps, repeat.queued_steps * slots) for repeat in ours])
    useful = _share([(repeat.busy_row_steps, repeat.row_steps) for repeat in ours])
    assert occupancy is not None and useful is not None  # something was drawn
    return Throughput(
        workload=name,
        model=reference,
        dtype=dtype,
        slots=slots,
        cache_len=work.geometry.cache_len,
        seed=seed,
        rows=work.rows,
        tokens=work.tokens,
        tokens_per_s=tokens_per_s,
        step_ms=middle("step_ms"),
        floor_ms=middle("floor_ms"),
        step_over_floor=middle("step_over_floor"),
        occupancy=occupancy,
        occupancy_while_queued=queued,
        wasted_row_steps={"overall": 1 - useful, "while_queued": None if queued is None else 1 - queued},
        prefill_share=middle("prefill_share"),
        sampling_share=middle("sampling_share"),
        host_share=middle("host_share"),
        programs_compiled=engine.stats().programs_compiled,
        compiled_during=len(compiled),
        peak_rss_mb=peak_rss_mb,
        planned_mb={name: round(count / 2**20) for name, count in dataclasses.asdict(engine.memory_plan).items()},
        load_average={"before": before, "after": after},
        fingerprint=engine.fingerprint,
        repeats=tuple(ours),
        against={against: _comparison(theirs, tokens_per_s, peer.facts)} if against and peer else {},
        faults=_faults(work, [*ours, *theirs], len(compiled)),
    )


def turns(repeats: int, peer_repeats: int) -> list[str]:
    """Who runs when: every two runs of theirs lie between two halves of ours, so that drift hits both alike."""
    pairs = max(-(-peer_repeats // 2), 1)
    order = []
    for pair in range(pairs):
        own = repeats * (pair + 1) // pairs - repeats * pair // pairs
        order += ["ours"] * (own - own // 2)
        order += ["theirs"] * min(2, peer_repeats - 2 * pair)
        order += ["ours"] * (own // 2)
    return order


class _ProgramClock:
    """Seconds in each compiled program of an engine, which keeps no time of its own: its programs are wrapped."""

    def __init__(self, engine: Engine) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        programs = engine._programs
        every = {field.name: getattr(programs, field.name) for field in dataclasses.fields(programs)}
        timed: dict[str, Any] = {
            name: self._timed(name, program) for name, program in every.items() if callable(program)
        }
        timed["decode"] = {width: self._timed("decode", program) for width, program in programs.decode.items()}
        engine._programs = dataclasses.replace(programs, **timed)

    def _timed(self, name: str, program: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = jax.block_until_ready(program(*arguments))
            self.seconds[name] += time.perf_counter() - began
            return result

        return run


def _drawn(engine: Engine, work: Workload, clock: _ProgramClock, parts: dict[str, Part]) -> Repeat:
    """Draws the workload once. The parts run between the engine's calls, outside the time that counts."""
    clock.seconds.clear()
    start, tokens, queued_steps, queued_busy, due = engine.stats(), 0, 0, 0, 0
    times = {name: [seconds(part)] for name, part in parts.items()}
    began = time.perf_counter()
    for request in work.requests:
        engine.submit(request)
    total = time.perf_counter() - began
    while not engine.idle:
        earlier = engine.stats()
        began = time.perf_counter()
        groups = engine.step()
        total += time.perf_counter() - began
        now = engine.stats()
        tokens += sum(completion.completion_tokens.size for group in groups for completion in group.completions)
        if engine.waiting:  # a call admits before it decodes
            queued_steps += now.steps - earlier.steps
            queued_busy += now.busy_row_steps - earlier.busy_row_steps
        due += now.steps - earlier.steps
        for _ in range(due // PART_EVERY):
            for name, part in parts.items():
                times[name].append(seconds(part))
        due %= PART_EVERY
    end = engine.stats()
    steps, decoding = end.steps - start.steps, clock.seconds["decode"]
    prefilling = sum(clock.seconds.values()) - decoding
    step, floor, chosen = decoding / steps, fmean(times["floor"]), fmean(times["choice"])
    return Repeat(
        seconds=total,
        tokens=tokens,
        tokens_per_s=tokens / total,
        steps=steps,
        row_steps=end.row_steps - start.row_steps,
        busy_row_steps=end.busy_row_steps - start.busy_row_steps,
        queued_steps=queued_steps,
        queued_busy_row_steps=queued_busy,
        step_ms=1e3 * step,
        floor_ms=1e3 * floor,
        choice_ms=1e3 * chosen,
        step_over_floor=step / floor,
        sampling_share=chosen / step,
        prefill_share=prefilling / total,
        host_share=1 - (prefilling + decoding) / total,
    )


def _share(counts: list[tuple[int, int]]) -> float | None:
    """The first of the second number, over all repeats; None where there is nothing."""
    part, whole = (sum(column) for column in zip(*counts, strict=True))
    return part / whole if whole else None


def _comparison(theirs: list[PeerRun], tokens_per_s: float, facts: dict[str, Any]) -> Comparison:
    speeds = tuple(run.tokens / run.seconds for run in theirs)
    return Comparison(
        tokens_per_s=median(speeds),
        ratio=tokens_per_s / median(speeds),
        repeats=speeds,
        peak_rss_mb=max(run.peak_rss_mb for run in theirs),
        facts=facts,
    )


def _faults(work: Workload, runs: list[Repeat | PeerRun], compiled: int) -> tuple[str, ...]:
    faults = [f"expected {work.tokens} tokens, got {run.tokens}" for run in runs if run.tokens != work.tokens]
    return (*faults, *([f"{compiled} programs were compiled in timed repeats"] if compiled else []))


@contextlib.contextmanager
def _compilations() -> Iterator[list[str]]:
    """A list that grows with every program that JAX compiles, or fetches from its cache, within it."""
    seen: list[str] = []

    def listen(event: str, *_: Any, **__: Any) -> None:
        if event.endswith("backend_compile_duration"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
