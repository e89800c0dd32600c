"""`rollout bench publish`: what it costs to publish weights while workers draw: seconds, memory, and the stall."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from actors import Placement, Publication, WorkerPool, WorkerSpec
from sampling.checkpoints import load_checkpoint
from sampling.params import SamplingParams
from sampling.types import Geometry, Request

PROMPT_LEN = 32
ROUNDS = 4
"""Requests of a run, as a multiple of all slots. Weights are published when the first round has ended."""

LOOK_S = 0.1
"""Seconds between two looks at the memory."""


@dataclass(frozen=True)
class PublishCost:
    """Seconds are medians over the publications but the first, for which the workers compile something.

    Attributes:
        workers, tokens: workers, and tokens that a run draws.
        weights_bytes: of the published arrays.
        first_s, whole_s: from the call of `publish` to its return.
        put_s, staged_s, swapped_s, stood_still_s: its parts, see `actors.Publication`; the last is the largest seen.
        undisturbed_s, disturbed_s: a run without a publication, and with one amid it.
        memory_bytes, peak_bytes: of this process and the workers, what they share counted once: with one set of weights
            published, and at most while others were. None where the system does not tell.
    """

    workers: int
    tokens: int
    weights_bytes: int
    first_s: float
    whole_s: float
    put_s: float
    staged_s: float
    swapped_s: float
    stood_still_s: float
    undisturbed_s: float
    disturbed_s: float
    memory_bytes: int | None
    peak_bytes: int | None

    def lines(self) -> list[str]:
        """For people."""
        memory = "this system does not tell"
        if self.memory_bytes is not None and self.peak_bytes is not None:
            memory = (
                f"{self.peak_bytes / 1e6:.0f} MB at most, {self.memory_bytes / 1e6:.0f} MB before;"
                " this process and the workers, shared pages once"
            )
        return [
            f"{self.weights_bytes / 1e6:.0f} MB of weights to {self.workers} workers, which draw {self.tokens} tokens",
            f"publication        {self.whole_s:8.3f} s   (the first, which compiles the canary: {self.first_s:.3f} s)",
            f"  into the store   {self.put_s:8.3f} s",
            f"  checked          {self.staged_s:8.3f} s   while the old weights draw",
            f"  taken over       {self.swapped_s:8.3f} s   an engine stands still for"
            f" {1e3 * self.stood_still_s:.2f} ms at most",
            f"generation         {self.undisturbed_s:8.3f} s   with a publication amid it: {self.disturbed_s:.3f} s",
            f"memory             {memory}",
        ]


def publish_cost(
    reference: str,
    *,
    workers: int = 2,
    slots: int = 8,
    tokens: int = 64,
    dtype: Literal["float32", "bfloat16"] = "float32",
    repeats: int = 3,
) -> PublishCost:
    """Publishes a checkpoint's own weights, under other versions, to workers that were started with it.

    Args:
        reference: the checkpoint, as `inspect_checkpoint` takes it.
        workers: how many, on this machine.
        slots: of each worker's engine.
        tokens: that every row draws.
        dtype: of the model's matrix products.
        repeats: runs without a publication, and as many with one, in turns.
    """
    checkpoint = load_checkpoint(reference)
    rng = np.random.default_rng(0)
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    prompts = rng.integers(5, checkpoint.info.tokenizer_len, (ROUNDS * slots * workers, PROMPT_LEN))
    requests = [Request(f"p{index}", prompt, params) for index, prompt in enumerate(prompts)]
    spec = WorkerSpec(reference, Geometry(slots=slots, cache_len=PROMPT_LEN + tokens), dtype)
    publications: list[Publication] = []
    times: dict[str, list[float]] = {"undisturbed": [], "disturbed": [], "whole": []}
    with WorkerPool(spec, Placement(workers, cpus=0)) as pool:
        for _ in pool.run(requests[: slots * workers]):
            pass
        began = time.perf_counter()
        pool.publish(checkpoint.params, 1)
        first_s = time.perf_counter() - began
        memory = _Memory([os.getpid(), *(worker.pid for worker in pool.workers)])
        before = memory.bytes_now()
        with memory.watched():
            for repeat in range(repeats):
                began = time.perf_counter()
                for _ in pool.run(requests):
                    pass
                times["undisturbed"].append(time.perf_counter() - began)
                began = time.perf_counter()
                run = pool.run(requests)
                next(run)
                called = time.perf_counter()
                publications.append(pool.publish(checkpoint.params, 2 + repeat))
                times["whole"].append(time.perf_counter() - called)
                for _ in run:
                    pass
                times["disturbed"].append(time.perf_counter() - began)
    parts = {name: [getattr(one, name) for one in publications] for name in ("put_s", "staged_s", "swapped_s")}
    return PublishCost(
        workers=workers,
        tokens=len(requests) * tokens,
        weights_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(checkpoint.params)),
        first_s=first_s,
        stood_still_s=max(one.stood_still_s for one in publications),
        memory_bytes=before,
        peak_bytes=memory.peak,
        **{f"{name}_s": statistics.median(values) for name, values in times.items()},
        **{name: statistics.median(values) for name, values in parts.items()},
    )


class _Memory:
    """Bytes that processes hold; pages that some of them share are counted once."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._files = [Path(f"/proc/{pid}/smaps_rollup") for pid in pids]
        self.peak: int | None = None

    def bytes_now(self) -> int | None:
        """None where the system does not tell."""
        try:
            return sum(_pss(file) for file in self._files)
        except OSError:
            return None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within it `peak` is kept up to date, by a thread of its own."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(LOOK_S) and (seen := self.bytes_now()) is not None:
                self.peak = max(seen, self.peak or 0)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join(LOOK_S + 10)


def _pss(file: Path) -> int:
    line = next(line for line in file.read_text().splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) << 10
