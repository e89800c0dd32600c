"""Progress of a long run: a live bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import rich.progress
from rich.console import Console


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        rows_done: samples finished, failed ones included.
        rows_total: samples expected; None while the source has not been read to its end.
        tokens: completion tokens drawn so far by this start of the run.
        slots_busy: rows decoding at this moment, over all workers.
        slots_total: rows that could decode at the same time.
    """

    rows_done: int
    rows_total: int | None
    tokens: int
    slots_busy: int
    slots_total: int


class ProgressReporter:
    """Shows progress on a console; a context manager. Quiet reporters swallow everything.

    Args:
        console: where to write; standard error by default, so that standard output stays clean.
        quiet: show nothing.
        interval_s: seconds between plain lines when the console is no terminal.
        check: called before anything is shown, and by quiet reporters too; ends the run by raising.
        clock: seconds, monotonic; replaced in tests.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        quiet: bool = False,
        interval_s: float = 5.0,
        check: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(stderr=True)
        self._quiet = quiet
        self._interval_s = interval_s
        self._check = check
        self._clock = clock
        self._started_s = self._last_line_s = clock()
        self._first: Progress | None = None
        self._bar: rich.progress.Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def check(self) -> None:
        """Raises where the run is to end; shows nothing."""
        self._check()

    def message(self, text: str) -> None:
        """Shows one line, above the bar if there is one."""
        self._check()
        if not self._quiet:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(self, progress: Progress) -> None:
        """Takes the latest figures; cheap enough to be called at every finished row."""
        self._check()
        if self._quiet:
            return
        if self._first is None:
            self._first, self._started_s = progress, self._clock()
            self._last_line_s = self._started_s
        if self._console.is_terminal:
            self._draw_bar(progress)
        elif self._clock() - self._last_line_s >= self._interval_s or progress.rows_done == progress.rows_total:
            self._last_line_s = self._clock()
            self.message(self._line(progress))

    def _line(self, progress: Progress) -> str:
        total = "?" if progress.rows_total is None else progress.rows_total
        return f"{progress.rows_done}/{total} rows, {self._figures(progress)}, ETA {self._eta(progress)}"

    def _figures(self, progress: Progress) -> str:
        assert self._first is not None
        elapsed_s = max(self._clock() - self._started_s, 1e-9)
        tokens_per_s = (progress.tokens - self._first.tokens) / elapsed_s if elapsed_s > 1e-6 else 0.0
        return f"{tokens_per_s:,.0f} tokens/s, {progress.slots_busy}/{progress.slots_total} slots busy"

    def _eta(self, progress: Progress) -> str:
        assert self._first is not None
        done = progress.rows_done - self._first.rows_done
        if progress.rows_total is None or done <= 0:
            return "?"
        left_s = (self._clock() - self._started_s) / done * (progress.rows_total - progress.rows_done)
        minutes, seconds = divmod(round(left_s), 60)
        return f"{minutes}:{seconds:02d}"

    def _draw_bar(self, progress: Progress) -> None:
        if self._bar is None:
            self._bar = rich.progress.Progress(
                rich.progress.BarColumn(),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TextColumn("rows, {task.description}"),
                console=self._console,
            )
            self._bar.add_task("", total=None)
            self._bar.start()
        self._bar.update(
            self._bar.task_ids[0],
            completed=progress.rows_done,
            total=progress.rows_total,
            description=f"{self._figures(progress)}, ETA {self._eta(progress)}",
        )
