"""How a command ends on SIGINT (Ctrl-C) and SIGTERM (a scheduler): in order, with one line and its own exit code."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

STOPPED_WORDS = "rollout: interrupted; start the same command again to continue"


class Stopped(KeyboardInterrupt):
    """A signal asked for the end of the process: SIGINT from a keyboard, SIGTERM from a scheduler."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.exit_code = 128 + signum


@contextlib.contextmanager
def stopping_at_once() -> Iterator[None]:
    """Within it a signal ends the process: nothing runs yet, and libraries half imported raise what they like."""

    def leave(signum: int, _: object) -> None:
        os.write(2, f"{STOPPED_WORDS}\n".encode())
        os._exit(128 + signum)

    with _on_signals(leave):
        yield


@contextlib.contextmanager
def stopping_in_order() -> Iterator[Callable[[], None]]:
    """Within it a signal raises; gives a function that raises once more, for the case that it got lost.

    Python drops an exception that is raised in a destructor or in a callback of compiled code.
    """
    seen: list[int] = []

    def stop(signum: int, _: object) -> None:
        seen.append(signum)
        raise Stopped(signum)

    def check() -> None:
        if seen:
            raise Stopped(seen[0])

    with _on_signals(stop):
        try:
            yield check
        except SystemExit as error:
            if error.code != signal.SIGTERM:
                raise
            raise Stopped(signal.SIGTERM) from None  # as Ray puts it while it starts


@contextlib.contextmanager
def _on_signals(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Within it `handler` is called on SIGINT and SIGTERM, where they are not ignored (as in a script's background)."""
    ours = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {signum: signal.getsignal(signum) for signum in ours}
    for signum, default in ours.items():
        if before[signum] == default:
            signal.signal(signum, handler)
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)
