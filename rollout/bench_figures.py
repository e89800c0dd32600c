"""What `rollout bench --workload NAME` finds: one repeat, a peer, and the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Repeat:
    """One run of the workload; means over it.

    Attributes:
        seconds: in the engine, all of its calls.
        tokens, tokens_per_s: drawn.
        steps, row_steps, busy_row_steps: as EngineStats counts them.
        queued_steps, queued_busy_row_steps: those of them done while requests waited.
        step_ms: time in the decode program, per step.
        floor_ms, choice_ms: a run of the step's matrix products, and of its choice of tokens, by themselves.
        step_over_floor, sampling_share: step_ms over floor_ms, and choice_ms over step_ms.
        prefill_share, host_share: of the seconds, in the programs that read and admit prompts, and in none.
    """

    seconds: float
    tokens: int
    tokens_per_s: float
    steps: int
    row_steps: int
    busy_row_steps: int
    queued_steps: int
    queued_busy_row_steps: int
    step_ms: float
    floor_ms: float
    choice_ms: float
    step_over_floor: float
    sampling_share: float
    prefill_share: float
    host_share: float


@dataclass(frozen=True)
class Comparison:
    """A peer on the same workload.

    Attributes:
        tokens_per_s: median of its runs; only wanted tokens count.
        ratio: ours over theirs.
        repeats: tokens per second of each run.
        peak_rss_mb: of its process.
        facts: versions and settings.
    """

    tokens_per_s: float
    ratio: float
    repeats: tuple[float, ...]
    peak_rss_mb: int
    facts: dict[str, Any]


@dataclass(frozen=True)
class Throughput:
    """What was measured: medians of the repeats where nothing else is said.

    Attributes:
        workload, model, dtype, slots, cache_len, seed: what ran.
        rows, tokens: completions of one repeat, and tokens wanted of them.
        tokens_per_s, step_ms, floor_ms, step_over_floor, prefill_share, sampling_share, host_share: see Repeat.
        occupancy: slots with a running row, over the steps; occupancy_while_queued: only over those done while requests
            waited, None if none was.
        wasted_row_steps: share of the computed rows that advanced nothing, `overall` and `while_queued`. Steps of few
            rows compute fewer than there are slots.
        programs_compiled: by the engine since it was made; compiled_during: by anything in the timed repeats.
        peak_rss_mb: MiB of this process at its peak, the weights' loading included, before it makes the copies that the
            parts of a step need.
        planned_mb: MiB that the engine's plan allows for weights, cache, state and workspace.
        load_average: the machine's over 1, 5 and 15 minutes, `before` and `after` the timed repeats. Our own threads
            are part of it.
        fingerprint: see sampling/fingerprint.py.
        repeats: every one of them.
        against: peers by name.
        faults: why the figures are not to be used, one line each.
    """

    workload: str
    model: str
    dtype: str
    slots: int
    cache_len: int
    seed: int
    rows: int
    tokens: int
    tokens_per_s: float
    step_ms: float
    floor_ms: float
    step_over_floor: float
    occupancy: float
    occupancy_while_queued: float | None
    wasted_row_steps: dict[str, float | None]
    prefill_share: float
    sampling_share: float
    host_share: float
    programs_compiled: int
    compiled_during: int
    peak_rss_mb: int
    planned_mb: dict[str, int]
    load_average: dict[str, tuple[float, float, float]]
    fingerprint: dict[str, Any]
    repeats: tuple[Repeat, ...]
    against: dict[str, Comparison]
    faults: tuple[str, ...]

    def lines(self) -> list[str]:
        """For people."""
        queued = self.occupancy_while_queued
        before, after = self.load_average["before"][0], self.load_average["after"][0]
        return [
            *self.faults,
            f"{self.workload}: {self.rows} rows, {self.tokens} tokens; {self.slots} slots of {self.cache_len},"
            f" {self.dtype}; medians of {len(self.repeats)}",
            f"tokens/s         {self.tokens_per_s:10.1f}",
            f"decode step      {self.step_ms:10.2f} ms   {self.step_over_floor:.2f} times its matrix products"
            f" ({self.floor_ms:.2f} ms)",
            f"choice of tokens {self.sampling_share:10.1%} of the step",
            f"prefill          {self.prefill_share:10.1%} of the time",
            f"host             {self.host_share:10.1%} of the time",
            f"occupancy        {self.occupancy:10.1%} of the slots"
            + ("" if queued is None else f"   {queued:.1%} while requests waited"),
            f"wasted           {self.wasted_row_steps['overall']:10.1%} of the computed rows",
            f"compiled         {self.programs_compiled:10d} programs, {self.compiled_during} of them in timed repeats",
            f"peak memory      {self.peak_rss_mb:10d} MiB, {sum(self.planned_mb.values())} of them planned",
            f"load average     {before:10.2f} before, {after:.2f} after",
            *(
                f"{name:16} {peer.tokens_per_s:10.1f} tokens/s; ours is {peer.ratio:.2f} times that"
                for name, peer in self.against.items()
            ),
        ]
