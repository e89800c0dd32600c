"""Crew: keeps workers alive. The one place where lost workers are noticed and replaced.

A worker is lost when its process dies, when its engine raises, when it answers no pings, or when a group outlives its
deadline. It is killed, the assignments in its hands are handed back as an event, and a replacement with the same name
is started while the budget lasts.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from actors.causes import error_type, in_words, last_lines, require_agreement
from actors.chaos import Chaos
from actors.cluster import worker_options
from actors.dispatch import Loss
from actors.handle import WorkerHandle
from actors.messages import NO_WORK, Answer, Report, Shipment, Staged, WorkerDescription, add_stats
from actors.slices import ReservedSlice
from actors.spec import Deadlines, Placement, RetryPolicy, WorkerSpec
from actors.worker import CONTROL, WEIGHTS, SamplingWorker
from sampling.engine import EngineStats
from sampling.errors import ServiceError, WorkerError

_log = logging.getLogger(__name__)

FETCH_S = 30.0
"""Seconds to fetch a value that Ray has reported as ready."""

PATIENCE_S = 10.0
"""Seconds that the first worker waits for the others before work begins."""

PINGS_PER_HEARTBEAT = 4
_LOSSES_TOLD = 3


@dataclass(frozen=True)
class Answered:
    """A worker finished some assignments."""

    worker: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Lost:
    """A worker was lost with these assignments in its hands."""

    loss: Loss
    tickets: tuple[int, ...]


Event = Answered | Lost


class Crew:
    """Starts, watches and replaces workers; within `cluster.connected`.

    Attributes:
        restarts: replacements so far.
        standards: by version of the weights, what all workers that have them must agree with: the first that was ready,
            and what was published since.
        newest: the weights that every worker is to have; None is the checkpoint's.
    """

    def __init__(
        self, spec: WorkerSpec, placement: Placement, deadlines: Deadlines, retry: RetryPolicy, chaos: Chaos
    ) -> None:
        chaos.require(placement)
        self.restarts = 0
        self.standards: dict[int, WorkerDescription] = {}
        self.newest: Shipment | None = None
        self._spec, self._placement, self._deadlines, self._retry = spec, placement, deadlines, retry
        self._chaos = chaos
        remote: Any = ray.remote  # its annotations know no concurrency groups
        options = worker_options(placement, spec.plugins)
        self._actor_class = remote(concurrency_groups={CONTROL: 1, WEIGHTS: 1}, **options)(
            chaos.worker_class(SamplingWorker)
        )
        self._workers = [WorkerHandle(f"worker-{index}", index) for index in range(placement.num_workers)]
        self._slice = ReservedSlice(placement, deadlines.start_s) if placement.tpu_slice else None
        self._work_of_lost = NO_WORK
        self._first_ready = 0.0
        self._losses: deque[Loss] = deque(maxlen=_LOSSES_TOLD)
        self._looked = time.monotonic()

    @property
    def ready(self) -> list[WorkerHandle]:
        """Workers that can take assignments."""
        return [worker for worker in self._workers if worker.description]

    @property
    def complete(self) -> bool:
        """Whether every worker is ready or given up."""
        return len(self.ready) == len(self._workers)

    @property
    def can_begin(self) -> bool:
        """Whether work can begin: one worker is ready, and nobody is still expected soon. Others join as they come."""
        if not self.ready:
            return False
        expected = [worker for worker in self._workers if not worker.description and not worker.lost]
        return not expected or time.monotonic() - self._first_ready > PATIENCE_S

    @property
    def standard(self) -> WorkerDescription:
        """What every worker that is ready agrees with."""
        return self.standards[self.newest.version if self.newest else 0]

    def adopt(self, shipment: Shipment, staged: Staged) -> None:
        """From now on a worker is ready with these weights and no others; those that are have to be told."""
        self.standards[shipment.version] = dataclasses.replace(
            self.standard, policy_version=shipment.version, **dataclasses.asdict(staged)
        )
        self.newest = shipment

    def stats(self) -> EngineStats:
        """Counts of all workers as last heard, and the work of those that were lost."""
        return add_stats([self._work_of_lost, *(worker.stats for worker in self._workers)])

    def poll(self, timeout_s: float) -> list[Event]:
        """What happened since the last call; waits at most so many seconds for something to happen.

        Raises:
            WorkerError: the last worker was lost and its restarts are spent, two workers disagree, or no TPU slice was
                to be had in time.
            CheckpointError, ConfigError: what the workers are told to build cannot be built.
        """
        if not self._workers:
            raise self._nobody_left()
        for worker in self._workers:
            if worker.actor is None and time.monotonic() >= worker.start_after:
                self._launch(worker)
        events: list[Event] = []
        while arrived := self._arrived(timeout_s):
            events += [event for hear in arrived for event in hear()]
            timeout_s = 0
        self._chaos.strike(self.ready)
        # Judged after all that has arrived was heard, so that a driver which was busy convicts nobody.
        for worker in list(self._workers):
            if worker.actor is not None and (missed := self._missed_deadline(worker)):
                events += self.lose(worker, TimeoutError(missed))
        if not self.complete and time.monotonic() - self._looked > self._deadlines.heartbeat_s:
            self._looked = time.monotonic()
            self._require_node()
            events += self._lose_waiting_for_slice()
        return events

    def shutdown(self) -> None:
        """Ends every worker's process, and gives back what was reserved for them."""
        for worker in self._workers:
            worker.kill()
        if self._slice:
            self._slice.give_back()

    def _launch(self, worker: WorkerHandle) -> None:
        actor_class = self._actor_class
        if self._slice:
            actor_class = actor_class.options(scheduling_strategy=self._slice.strategy(worker.index))
        worker.actor = actor_class.remote(worker.name, self._spec)
        worker.started = time.monotonic()
        worker.starting = worker.actor.start.remote()

    def _arrived(self, timeout_s: float) -> list[Callable[[], list[Event]]]:
        """Waits for the first message, and returns what hears each that is there."""
        hearers = {ref: hear for worker in self._workers for ref, hear in self._awaited(worker)}
        if not hearers:
            time.sleep(timeout_s)
            return []
        if timeout_s > 0:
            ray.wait(list(hearers), num_returns=1, timeout=timeout_s)
        return [hearers[ref] for ref in ray.wait(list(hearers), num_returns=len(hearers), timeout=0)[0]]

    def _awaited(self, worker: WorkerHandle) -> Iterator[tuple[Any, Callable[[], list[Event]]]]:
        """What may arrive from a worker, each with the function that hears it."""
        since_ping_s = time.monotonic() - worker.pinged
        if worker.description and not worker.ping and since_ping_s > self._deadlines.heartbeat_s / PINGS_PER_HEARTBEAT:
            worker.ping, worker.pinged = worker.actor.ping.remote(), time.monotonic()
        if worker.starting is not None:
            yield worker.starting, lambda: self._hear(worker, self._description)
        if worker.stream is not None:
            yield worker.stream, lambda: self._hear(worker, self._report)
        if worker.ping is not None:
            yield worker.ping, lambda: self._hear(worker, self._ping)
        if worker.asked is not None:
            yield worker.asked, lambda: self._hear(worker, self._reply)

    def _hear(self, worker: WorkerHandle, read: Callable[[WorkerHandle], list[Event]]) -> list[Event]:
        if worker.actor is None:  # lost a moment ago, by another of its messages
            return []
        try:
            events = read(worker)
        except (RayError, StopIteration) as error:
            return self.lose(worker, error)
        worker.heard = time.monotonic()
        return events

    def _description(self, worker: WorkerHandle) -> list[Event]:
        description: WorkerDescription = ray.get(worker.starting, timeout=FETCH_S)
        require_agreement(self.standards.setdefault(description.policy_version, description), description)
        if self.newest and description.policy_version != self.newest.version:
            worker.starting = worker.actor.renew.remote(self.newest)
            return []
        worker.description, worker.starting = description, None
        self._first_ready = self._first_ready or time.monotonic()
        worker.stats = dataclasses.replace(
            NO_WORK, slots=self._spec.geometry.slots, programs_compiled=description.programs_compiled
        )
        worker.stream = worker.actor.serve.remote()
        return []

    def _report(self, worker: WorkerHandle) -> list[Event]:
        item: Any = next(worker.stream)
        report: Report = ray.get(item, timeout=FETCH_S)
        worker.stats, worker.restarts = report.stats, 0
        worker.answered += len(report.answers)
        for answer in report.answers:
            worker.release(answer.ticket)
        return [Answered(worker.name, report.answers)]

    def _ping(self, worker: WorkerHandle) -> list[Event]:
        worker.stats = ray.get(worker.ping, timeout=FETCH_S)
        worker.ping = None
        return []

    def _reply(self, worker: WorkerHandle) -> list[Event]:
        try:
            worker.reply = ray.get(worker.asked, timeout=FETCH_S)
        except RayTaskError as error:  # something is wrong with the weights, and the worker itself is well
            worker.reply = error
        worker.asked = None
        return []

    def _missed_deadline(self, worker: WorkerHandle) -> str | None:
        """Which deadline a worker has missed, in words."""
        now, deadlines = time.monotonic(), self._deadlines
        if not worker.description:
            late = now - worker.started > deadlines.start_s
            return f"it was not ready within {deadlines.start_s:g} s{self._room(worker)}" if late else None
        if worker.ping and now - max(worker.pinged, worker.heard) > deadlines.heartbeat_s:
            return f"it answered nothing for {deadlines.heartbeat_s:g} s; its process hangs"
        if worker.asked is not None and now - worker.asked_at > deadlines.publish_s:
            return f"weights were not checked, or not taken over, within {deadlines.publish_s:g} s"
        for held in worker.hands.values():
            if now - held.since > deadlines.group_s:
                prompt_id = held.assignment.request.prompt_id
                return f"prompt {prompt_id!r} was not finished within {deadlines.group_s:g} s"
        return None

    def lose(self, worker: WorkerHandle, cause: BaseException) -> list[Event]:
        """Ends a lost worker and plans its replacement."""
        if isinstance(cause, RayTaskError) and isinstance(cause.cause, ServiceError) and not worker.description:
            raise cause.cause  # the order cannot be filled; any other worker would say the same
        loss = Loss(worker.name, error_type(cause), _account(worker, cause))
        lost = Lost(loss, tuple(worker.hands))
        self._losses.append(loss)
        _log.warning("%s", loss.message)
        work = dataclasses.replace(worker.stats, slots=0, slots_busy=0, waiting=0, programs_compiled=0)
        self._work_of_lost = add_stats([self._work_of_lost, work])
        worker.restarts += not worker.alone  # what was alone with the worker is to blame, the worker is not
        worker.start_after = time.monotonic() + self._retry.pause_s(worker.restarts)
        worker.kill()
        worker.lost = True
        if worker.restarts > self._retry.max_worker_restarts:
            self._workers.remove(worker)
        else:
            self.restarts += 1
        if not self._workers:
            raise self._nobody_left() from cause
        return [lost]

    def _require_node(self) -> None:
        """Nothing can be launched any more when Ray's own process on this machine is gone; it would be waited for."""
        here = ray.get_runtime_context().get_node_id()
        if not all(node["Alive"] for node in ray.nodes() if node["NodeID"] == here):
            raise WorkerError(
                "Ray's process on this machine (raylet) has died, so no worker can be started any more;"
                f" start again.{self._story()}"
            )

    def _lose_waiting_for_slice(self) -> list[Event]:
        """Workers that wait for their hosts wait in vain when all of these are gone; another slice may be there."""
        if not self._slice or not self._slice.gone:
            return []
        waiting = [worker for worker in self._workers if worker.actor is not None and not worker.description]
        return [event for worker in waiting for event in self.lose(worker, TimeoutError("its TPU slice is gone"))]

    def _nobody_left(self) -> WorkerError:
        return WorkerError(
            f"no worker is left; the limit of {self._retry.max_worker_restarts} restarts in a row"
            f" (max_worker_restarts) is reached.{self._story()}"
        )

    def _story(self) -> str:
        return "\n".join([" The last losses:", *(loss.message for loss in self._losses)])

    def _room(self, worker: WorkerHandle) -> str:
        """What a worker asks of Ray beside what is free."""
        if self._slice:
            return self._slice.room(worker.index)
        place, free = self._placement, ray.available_resources()
        asked = {"CPU": place.cpus, "GPU": place.gpus, "TPU": place.tpus}
        return "; free of what it asks for: " + ", ".join(
            f"{free.get(name, 0):g} {name} of {amount:g} wanted" for name, amount in asked.items() if amount
        )


def _account(worker: WorkerHandle, cause: BaseException) -> str:
    """Who was lost, where, with what in its hands, why, and its last words."""
    seen = worker.description
    place = f" (pid {seen.pid} on {seen.host})" if seen else ""
    prompts = [repr(held.assignment.request.prompt_id) for held in worker.hands.values()]
    more = f" and {len(prompts) - 3} more" if len(prompts) > 3 else ""
    doing = f" while it worked on prompt {', '.join(prompts[:3])}{more}" if prompts else ""
    log = [f"  log: {line}" for line in last_lines(seen.log_files if seen else ())]
    return "\n".join([f"{worker.name}{place} was lost{doing}: {in_words(cause)}", *log])
