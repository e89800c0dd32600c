"""WorkerHandle: one worker as seen from the driver. What it holds, what is awaited from it, when it was heard of."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from actors.messages import NO_WORK, Assignment, WorkerDescription
from sampling.engine import EngineStats


@dataclass(frozen=True)
class Held:
    """An assignment in a worker's hands since a moment of time.monotonic()."""

    assignment: Assignment
    since: float


@dataclass
class WorkerHandle:
    """The name stays, processes come and go. Times are of time.monotonic().

    Attributes:
        name: of the worker and its replacements.
        index: which worker it is, from 0; on a TPU slice that of its host.
        restarts: in a row, without a finished group in between.
        answered: groups, by its predecessors too.
        lost: whether it had a predecessor.
        start_after: when the next process may be launched.
        actor, starting, stream, ping: Ray's handles to the process and to what is awaited from it; None if nothing.
        started, pinged, heard: when it was launched, last pinged, last heard of.
        description: what it says of itself; None until it is ready.
        asked, asked_at, reply: a call about weights that is awaited, and since when; what came of the last one: its
            value, or the error that it raised.
        stats: its counts as last heard.
        hands: assignments under way, by ticket.
        alone: whether what it holds tolerates no neighbours.
    """

    name: str
    index: int
    restarts: int = 0
    answered: int = 0
    lost: bool = False
    start_after: float = 0.0
    actor: Any = None
    starting: Any = None
    stream: Any = None
    ping: Any = None
    started: float = 0.0
    pinged: float = 0.0
    heard: float = 0.0
    description: WorkerDescription | None = None
    asked: Any = None
    asked_at: float = 0.0
    reply: Any = None
    stats: EngineStats = NO_WORK
    hands: dict[int, Held] = field(default_factory=dict)
    alone: bool = False

    @property
    def rows(self) -> int:
        """Samples in its hands."""
        return sum(len(held.assignment.request.sample_indices) for held in self.hands.values())

    def assign(self, assignment: Assignment, alone: bool) -> None:
        """Sends a request; its answer comes with a report."""
        self.hands[assignment.ticket] = Held(assignment, time.monotonic())
        self.alone = alone
        self.actor.submit.remote([assignment])

    def ask(self, call: Any) -> None:
        """Awaits a call about weights; its outcome becomes the reply."""
        self.asked, self.asked_at, self.reply = call, time.monotonic(), None

    def release(self, ticket: int) -> None:
        """Takes an answered assignment out of its hands."""
        self.hands.pop(ticket, None)
        self.alone = self.alone and bool(self.hands)

    def kill(self) -> None:
        """Ends the process, hung or not, and forgets it."""
        if self.actor is not None:
            with contextlib.suppress(RayError):
                ray.kill(self.actor, no_restart=True)
        self.actor = self.starting = self.stream = self.ping = self.description = None
        self.asked = self.reply = None
        self.stats, self.hands, self.alone = NO_WORK, {}, False
