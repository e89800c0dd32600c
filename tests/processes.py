"""Whether processes live, for tests about those that must not."""

from __future__ import annotations

import time
from collections.abc import Iterator


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be collected does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def await_end(*pids: int, within_s: float) -> None:
    """Fails where one of the processes runs longer."""
    deadline = time.monotonic() + within_s
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, [pid for pid in pids if alive(pid)]
        time.sleep(0.05)


def within(seconds: float, every_s: float = 0.05) -> Iterator[None]:
    """Goes on until the caller breaks off; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(every_s)
    raise AssertionError(f"it did not happen within {seconds:g} s")
