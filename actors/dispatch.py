"""Ledger: which requests of a run are where. A pure state machine, without Ray and without a clock.

A request is fresh in the caller's iterable, then running on a worker, then settled; a lost worker sends it back to be
retried, until its attempts are spent. Every request that was taken from the iterable ends exactly once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from actors.messages import Answer, Assignment, GroupFailure, GroupResult, Outcome, Rejection
from sampling.types import Request


@dataclass(frozen=True)
class _Case:
    """A request under way and the workers that were lost with it."""

    request: Request
    losses: int = 0


@dataclass(frozen=True)
class Loss:
    """Why a worker was lost.

    Attributes:
        worker: its name.
        error_type: class of the error.
        message: what happened, in words.
    """

    worker: str
    error_type: str
    message: str


class Ledger:
    """Hands out requests, takes answers and losses.

    Args:
        requests: pulled one at a time, when a worker has room; a None among them means "nothing yet, ask again
            after the next outcome".
        tickets: numbers never used before in this pool.
        max_attempts: losses after which a request itself is blamed.
    """

    def __init__(self, requests: Iterable[Request | None], tickets: Iterator[int], max_attempts: int) -> None:
        self._fresh = iter(requests)
        self._ahead: Request | None = None
        self._exhausted = False
        self._held_back = False
        self._tickets = tickets
        self._max_attempts = max_attempts
        self._retries: deque[_Case] = deque()
        self._running: dict[int, _Case] = {}

    def done(self) -> bool:
        """Whether every request has ended. Looks for another one where nothing else is left, workers or not."""
        if self._running or self._retries:
            return False
        self._ahead = self._ahead or self._pull()
        return self._exhausted and self._ahead is None

    @property
    def stuck(self) -> bool:
        """Whether the caller holds requests back although no outcome is under way that could change its mind."""
        return self._held_back and not (self._ahead or self._running or self._retries)

    def take(self, idle: bool) -> tuple[Assignment, bool] | None:
        """The next request to be handed to a worker, and whether that worker must do nothing else meanwhile.

        Retries come before fresh requests. A request on its last attempt goes to an idle worker alone: if that one
        is lost too, the request is to blame and no other.

        Args:
            idle: whether the worker in question has nothing else to do.
        """
        for place, case in enumerate(self._retries):
            alone = case.losses > 0 and case.losses == self._max_attempts - 1
            if idle or not alone:
                del self._retries[place]
                return self._run(case), alone
        request, self._ahead = self._ahead or self._pull(), None
        return (self._run(_Case(request)), False) if request else None

    def put_back(self, assignment: Assignment) -> None:
        """Takes back an assignment that no worker has seen."""
        self._retries.appendleft(self._running.pop(assignment.ticket))

    def settle(self, answer: Answer, worker: str) -> Outcome | None:
        """The outcome that an answer is; None for one that nobody waits for any more."""
        case = self._running.pop(answer.ticket, None)
        if case is None:
            return None
        match answer.result:
            case Rejection(error_type, message):
                return GroupFailure(case.request, error_type, message, case.losses + 1, worker)
            case group:
                return GroupResult(case.request, group, worker)

    def lose(self, tickets: Iterable[int], loss: Loss) -> list[GroupFailure]:
        """Sends the requests of a lost worker back to be retried; returns those whose attempts are spent."""
        spent = []
        for ticket in tickets:
            case = self._running.pop(ticket, None)
            if case is None:
                continue
            losses = case.losses + 1
            if losses < self._max_attempts:
                self._retries.append(_Case(case.request, losses))
            else:
                spent.append(GroupFailure(case.request, loss.error_type, loss.message, losses, loss.worker))
        return spent

    def _pull(self) -> Request | None:
        if self._exhausted:
            return None
        try:
            request = next(self._fresh)
        except StopIteration:
            self._exhausted = True
            return None
        self._held_back = request is None
        return request

    def _run(self, case: _Case) -> Assignment:
        ticket = next(self._tickets)
        self._running[ticket] = case
        return Assignment(ticket, case.request)
