"""What runs in a scorer's process: it reads prompts with texts from its driver, and answers each text with a Score.

The process ends with its driver, however that ends, and takes along what the scorer has started.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import threading
from multiprocessing.connection import Connection

from rollout.rewards import judge

GRACE_S = 5.0
"""Seconds past its limit after which a score ends its process by itself. Its driver does so sooner, unless it died."""


def serve(socket: int) -> None:
    """Scores until the driver closes its end.

    First come the pickled scorer and the limit of one score in seconds; the answer is None, or why the scorer cannot be
    loaded. Then come pairs of a prompt and a list of texts.

    Args:
        socket: file descriptor of this end.
    """
    _end_with_driver(socket)
    connection = Connection(socket)
    pickled, limit_s = connection.recv()
    try:
        reward = pickle.loads(pickled)
    except Exception as error:  # foreign code is imported here
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send(None)
    with open(os.devnull, "w") as nowhere:
        while True:
            try:
                prompt, texts = connection.recv()
            except EOFError:
                return
            for text in texts:
                # A thread of C, which also ends code that never gives up Python's lock, such as a runaway regex.
                faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=nowhere)
                connection.send(judge(reward, prompt, text))
            faulthandler.cancel_dump_traceback_later()


def _end_with_driver(socket: int) -> None:
    """Ends the process group as soon as the driver's end of the socket is closed, by whatever."""
    hangup = select.poll()
    hangup.register(socket, 0)

    def watch() -> None:
        hangup.poll()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="driver's end", daemon=True).start()
