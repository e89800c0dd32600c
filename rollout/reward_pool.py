"""RewardPool: scorers in processes of their own, each score with a time limit. No scorer can hold up or end the run."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Self

import cloudpickle

from rollout.json_values import shown
from rollout.prompts import Prompt
from rollout.rewards import REWARD_TIMEOUT_S, Reward, Score, require_reward
from sampling.errors import ConfigError, RunError, WorkerError

START_S = 60.0
"""Seconds in which a scorer's process has to be ready: it imports what the scorer needs."""

DYING_S = 1.0
"""Seconds in which a process is gone that was killed, or that has closed its end."""

CLOSED = "the scorers are closed; use them as `with RewardPool(...) as rewards:`"

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]);"
    " from rollout.reward_process import serve; serve(int(sys.argv[1]))"
)
"""Python of a scorer's process. It never runs the driver's main module, so that a script needs no guard."""


class RewardPool:
    """Processes that score. A context manager: they live within it and no longer.

        with RewardPool(reward) as rewards:
            scores = rewards.score(prompt, texts).result()

    A score that takes too long, or that ends its process, is this text's failure and no other's: a new process goes on
    with the next text.

    Args:
        reward: what scores; it is pickled, and functions of scripts and notebooks are, too.
        timeout_s: seconds that one score may take.
        workers: processes.
    Raises:
        ConfigError: the scorer cannot be called with a prompt and a text, or cannot be pickled; or a number is out of
            range.
    """

    def __init__(self, reward: Reward, timeout_s: float = REWARD_TIMEOUT_S, workers: int = 1) -> None:
        require_reward(reward)
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
            raise ConfigError(f"reward_timeout_s: expected seconds above 0, got {shown(timeout_s)}")
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise ConfigError(f"reward_workers: expected a whole number of at least 1, got {shown(workers)}")
        try:
            pickled = cloudpickle.dumps(reward)
        except Exception as error:  # whatever its __reduce__ raises
            raise ConfigError(
                f"reward: cannot be sent to a process of its own: {type(error).__name__}: {error};"
                " open files, locks and connections within the function, not before"
            ) from error
        self._pickled, self._timeout_s, self._workers = pickled, timeout_s, workers
        self._scorers: list[_Scorer] = []

    def __enter__(self) -> Self:
        """Starts the processes, without waiting for them.

        Raises:
            RunError: the pool is open already.
        """
        if self._scorers:
            raise RunError("the pool is open already; enter it once, or use two pools")
        self._scorers = [_Scorer(self._pickled, self._timeout_s) for _ in range(self._workers)]
        self._idle: queue.SimpleQueue[_Scorer] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(self._workers, "scorer")
        for scorer in self._scorers:
            self._idle.put(scorer)
            self._threads.submit(self._score, None, ())
        return self

    def __exit__(self, *_: object) -> None:
        for scorer in self._scorers:
            scorer.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._scorers = []

    def score(self, prompt: Prompt, texts: Sequence[str]) -> Future[tuple[Score, ...]]:
        """Scores the completions of one prompt, one after the other, while the caller does something else.

        Returns:
            One score for each text. The future raises ConfigError if the scorer cannot be loaded in its process, and
            WorkerError if that process cannot be started.
        """
        return self._threads.submit(self._score, prompt, tuple(texts))

    def _score(self, prompt: Prompt | None, texts: tuple[str, ...]) -> tuple[Score, ...]:
        scorer = self._idle.get_nowait()  # a thread has the scorers for itself that it takes; there are as many
        try:
            return scorer.score(prompt, texts)
        finally:
            self._idle.put(scorer)


class _Scorer:
    """One process that scores, started when it is needed and there is none. Used by one thread at a time."""

    def __init__(self, pickled: bytes, timeout_s: float) -> None:
        self._pickled, self._timeout_s = pickled, timeout_s
        self._lock = threading.Lock()  # between starting and closing
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def score(self, prompt: Prompt | None, texts: tuple[str, ...]) -> tuple[Score, ...]:
        """One score for each text; without texts a process is started, and that is all."""
        scores: list[Score] = []
        self._ready()
        while len(scores) < len(texts):
            connection = self._ready()
            try:
                connection.send((prompt, texts[len(scores) :]))
                while len(scores) < len(texts):
                    if not _arrives(connection, self._timeout_s):
                        raise TimeoutError
                    scores.append(connection.recv())
            except (TimeoutError, BlockingIOError):
                self._end()
                scores.append(Score(error=f"timed out after {self._timeout_s:g} s"))
            except (EOFError, OSError):
                scores.append(Score(error=f"the scorer's process ended with {self._end(DYING_S)}"))
        return tuple(scores)

    def close(self) -> None:
        """Ends the process for good; a thread that waits for it hears of that."""
        with self._lock:
            self._closed = True
            self._kill()

    def _ready(self) -> Connection:
        """The connection to a process that waits for work."""
        if self._connection:
            return self._connection
        self._connection = self._launch()
        try:
            self._connection.send((self._pickled, self._timeout_s))
            if not _arrives(self._connection, START_S):
                self._end()
                raise WorkerError(f"reward: its process was not ready within {START_S:g} s")
            refused = self._connection.recv()
        except (EOFError, OSError) as error:
            raise WorkerError(f"reward: its process ended with {self._end(DYING_S)} while it started") from error
        if refused:
            self._end()
            raise ConfigError(f"reward: cannot be loaded in a process of its own: {refused}")
        return self._connection

    def _launch(self) -> Connection:
        with self._lock:
            if self._closed:
                raise RunError(CLOSED)
            ours, theirs = socket.socketpair()
            # The kernel gives up on a process that reads nothing: no wait is without an end.
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(START_S), 0))
            with theirs:
                try:
                    # In a group of its own, which Ctrl-C does not reach and which is ended as a whole. What a scorer
                    # prints goes to standard error.
                    self._process = subprocess.Popen(
                        [sys.executable, "-c", _BOOTSTRAP, str(theirs.fileno()), json.dumps(sys.path)],
                        stdin=subprocess.DEVNULL,
                        stdout=2,
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,
                    )
                except OSError as error:
                    ours.close()
                    raise WorkerError(f"reward: no process can be started for it: {error}") from error
            return Connection(ours.detach())

    def _end(self, patience_s: float = 0.0) -> str:
        """Ends the process, and says how it ended if it did so by itself within some seconds."""
        with self._lock:
            assert self._process is not None and self._connection is not None
            if patience_s:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(patience_s)
            self._kill()
            self._connection.close()
            status, self._process, self._connection = self._process.returncode, None, None
            if self._closed:
                raise RunError(CLOSED)
        if status is None or status >= 0:
            return f"exit status {status}"
        name = signal.Signals(-status).name
        return f"{name} (out of memory?)" if -status == signal.SIGKILL else name

    def _kill(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(DYING_S)


def _arrives(connection: Connection, timeout_s: float) -> bool:
    """Whether something arrives in time. Looks twice, so that a driver that was busy convicts nobody."""
    return connection.poll(timeout_s) or connection.poll(0)


def reward_pool(reward: Reward | None, timeout_s: float, workers: int) -> AbstractContextManager[RewardPool | None]:
    """The processes of a config's scorer; none without one."""
    return contextlib.nullcontext() if reward is None else RewardPool(reward, timeout_s, workers)
