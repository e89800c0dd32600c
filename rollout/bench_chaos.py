"""`rollout bench chaos`: the same job undisturbed and disturbed. What was drawn has to be the same, to the bit."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from actors import Chaos
from rollout.config import RunConfig
from rollout.driver import sample_run
from rollout.progress import Progress, ProgressReporter
from rollout.status import read_status
from sampling.errors import ConfigError, RunError, WorkerError

STARTS = 5
"""Times that a run is begun again before it is given up."""


@dataclass(frozen=True)
class ChaosReport:
    """What came of it.

    Attributes:
        happened: faults that came about.
        ended: why starts of the disturbed run ended before it was finished; the next one continued.
        samples, tokens: of the undisturbed run.
        undisturbed, disturbed: `shards.content_hash` of the two runs.
        extra_work: tokens that the disturbed run drew more than once, as a share of all. What a worker drew between its
            last sign of life and its end is not known.
        faults: what is wrong, one line each.
    """

    happened: tuple[str, ...]
    ended: tuple[str, ...]
    samples: int
    tokens: int
    undisturbed: str
    disturbed: str
    extra_work: float
    faults: tuple[str, ...]

    def lines(self) -> list[str]:
        """For people."""
        return [
            *self.faults,
            *(f"happened     {fault}" for fault in self.happened),
            *(f"begun again  after {why}" for why in self.ended),
            f"undisturbed  {self.undisturbed}",
            f"disturbed    {self.disturbed}",
            f"{self.samples} samples, {self.tokens} tokens, at least {self.extra_work:.1%} of them drawn again",
            "passed" if not self.faults else f"failed: {len(self.faults)} faults",
        ]


def usual_faults(workers: int) -> tuple[str, ...]:
    """Something of every kind that a job on one machine can have."""
    last = workers - 1
    return (
        f"slow:worker={last},seconds=0.02",
        "kill:worker=0,after=1",
        f"stall:worker={last},after=2",
        "write:after=3",
    )


def compare_runs(
    config: RunConfig,
    faults: Sequence[str] = (),
    out_dir: Path | None = None,
    *,
    address: str | None = None,
    progress: ProgressReporter | None = None,
) -> ChaosReport:
    """Samples a config twice, the second time with faults, and begins again where one ends the run.

    Args:
        faults: as for `actors.Fault.parse`; by default `usual_faults`.
        out_dir: a new folder, in which both runs are kept; by default neither is.
        address: of a running Ray cluster; None starts Ray on this machine.
        progress: where to show how far the runs are.
    Raises:
        ConfigError: as `sample_run`; or the folder is there already.
        WorkerError, RunError: the disturbed run could not be finished.
    """
    chaos = Chaos.of(faults or usual_faults(config.workers.count))
    if out_dir is not None and out_dir.exists():
        raise ConfigError(f"{out_dir}: expected a new folder; runs that were begun before would not be compared whole")
    with contextlib.ExitStack() as closing:
        out = out_dir or Path(closing.enter_context(tempfile.TemporaryDirectory()))
        counting = _Counting(progress or ProgressReporter(quiet=True))
        sample_run(config, out / "undisturbed", address=address, progress=counting)
        counting.tokens = 0
        ended: list[str] = []
        while True:
            try:
                sample_run(config, out / "disturbed", address=address, progress=counting, chaos=chaos)
                break
            except (RunError, WorkerError) as error:
                ended.append(str(error).splitlines()[0])
                if len(ended) == STARTS:
                    raise
        whole, disturbed = read_status(out / "undisturbed"), read_status(out / "disturbed")
    problems = [f"did not come about: {fault}; the job is too small for it" for fault in chaos.pending]
    if whole.content_hash != disturbed.content_hash:
        problems.append("the disturbed run drew something else")
    return ChaosReport(
        happened=tuple(map(str, chaos.happened)),
        ended=tuple(ended),
        samples=whole.done + whole.failed,
        tokens=whole.tokens,
        undisturbed=whole.content_hash,
        disturbed=disturbed.content_hash,
        extra_work=max(0.0, counting.tokens / max(whole.tokens, 1) - 1),
        faults=tuple(problems),
    )


class _Counting(ProgressReporter):
    """Hands on what it is told, and counts the tokens of several starts.

    Attributes:
        tokens: drawn since the count was last set to 0.
    """

    def __init__(self, shown: ProgressReporter) -> None:
        super().__init__(quiet=True)
        self._shown = shown
        self._of_this_start = 0
        self.tokens = 0

    def check(self) -> None:
        self._shown.check()

    def message(self, text: str) -> None:
        self._shown.message(text)

    def update(self, progress: Progress) -> None:
        fewer = progress.tokens < self._of_this_start  # another start begins to count
        self.tokens += progress.tokens - (0 if fewer else self._of_this_start)
        self._of_this_start = progress.tokens
        self._shown.update(progress)
