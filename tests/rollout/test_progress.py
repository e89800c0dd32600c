"""Tests rollout/progress.py on consoles that are terminals and consoles that are not."""

import io

from rich.console import Console

from rollout.progress import Progress, ProgressReporter


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def reporter(clock, *, terminal=False, **settings):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    return ProgressReporter(console, clock=clock, **settings), console.file


def test_plain_lines_come_every_few_seconds_and_at_the_end():
    clock = Clock()
    progress, out = reporter(clock, interval_s=5)
    with progress:
        for second, rows in ((0, 0), (1, 8), (4, 16), (6, 20), (7, 30), (8, 40)):
            clock.now_s = float(second)
            progress.update(Progress(rows, 40, rows * 10, 32, 32))
    assert out.getvalue().splitlines() == [
        "20/40 rows, 33 tokens/s, 32/32 slots busy, ETA 0:06",
        "40/40 rows, 50 tokens/s, 32/32 slots busy, ETA 0:00",
    ]


def test_speed_and_eta_count_from_where_this_start_began():
    clock = Clock()
    progress, out = reporter(clock, interval_s=5)
    progress.update(Progress(100, 200, 0, 0, 8))
    clock.now_s = 10.0
    progress.update(Progress(110, 200, 50, 8, 8))
    assert out.getvalue() == "110/200 rows, 5 tokens/s, 8/8 slots busy, ETA 1:30\n"


def test_an_unknown_total_is_shown_as_such():
    clock = Clock()
    progress, out = reporter(clock, interval_s=0)
    clock.now_s = 1.0
    progress.update(Progress(3, None, 9, 1, 8))
    assert out.getvalue() == "3/? rows, 0 tokens/s, 1/8 slots busy, ETA ?\n"


def test_a_terminal_gets_a_bar_with_the_same_figures():
    clock = Clock()
    progress, out = reporter(clock, terminal=True)
    with progress:
        progress.update(Progress(0, 40, 0, 32, 32))
        clock.now_s = 2.0
        progress.update(Progress(20, 40, 100, 31, 32))
        progress.message("worker-1 was restarted")
    text = out.getvalue()
    assert "20/40" in text and "50 tokens/s, 31/32 slots busy, ETA 0:02" in text
    assert "worker-1 was restarted" in text


def test_messages_are_shown_as_they_are_and_quiet_shows_nothing():
    clock = Clock()
    progress, out = reporter(clock)
    progress.message("[red]loading[/red] model")
    assert out.getvalue() == "[red]loading[/red] model\n"
    quiet, out = reporter(clock, quiet=True)
    quiet.message("x")
    quiet.update(Progress(1, 1, 1, 1, 1))
    assert out.getvalue() == ""
