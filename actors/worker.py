"""SamplingWorker: the Ray actor that hosts one engine and decodes for as long as it lives.

One streaming call, `serve`, decodes for ever; requests reach it through `submit` while it runs, so the engine's slots
are refilled continuously and never drain between requests. `submit` and `ping` run on a thread of their own and
answer at once, whatever the engine does. On another one weights are checked while the engine goes on with the old ones;
it takes them over between two of its steps.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from actors.messages import NO_WORK, Answer, Assignment, Rejection, Report, Shipment, Staged, WorkerDescription
from actors.spec import WorkerSpec

if TYPE_CHECKING:
    from sampling.engine import Engine, EngineStats
    from sampling.types import Group, Request
    from sampling.weights import StagedWeights

CONTROL = "control"
"""Concurrency group of the calls that answer at once."""

WEIGHTS = "weights"
"""Concurrency group of the calls about weights: one after the other, beside everything else."""

IDLE_WAIT_S = 1.0
"""Longest wait of a worker without work, so that no wait is unbounded."""


class SamplingWorker:
    """Hosts one engine. A plain class; `actors.supervision` makes it an actor.

    Args:
        name: for messages and records.
        spec: what to build.
    """

    def __init__(self, name: str, spec: WorkerSpec) -> None:
        self._name = name
        self._spec = spec
        self._engine: Engine | None = None
        self._description: WorkerDescription | None = None
        self._staged: StagedWeights | None = None
        self._inbox: queue.SimpleQueue[Assignment | _Swap] = queue.SimpleQueue()
        self._desk = _Desk()

    def start(self) -> WorkerDescription:
        """Loads the weights and compiles the engine's programs.

        Raises:
            CheckpointError, ConfigError: the checkpoint, the engine's settings or a plugin cannot be used.
        """
        import jax

        from sampling.checkpoints import load_checkpoint, weights_digest  # here, and here alone, JAX opens a device
        from sampling.engine import Engine

        began = time.monotonic()
        checkpoint = load_checkpoint(self._spec.checkpoint)
        digest = weights_digest(checkpoint.params)
        devices, plugins = jax.local_devices(), self._spec.plugins  # all devices that Ray has given to this worker
        self._engine = Engine(checkpoint, self._spec.geometry, self._spec.dtype, devices=devices, plugins=plugins)
        self._description = WorkerDescription(
            name=self._name,
            host=socket.gethostname(),
            pid=os.getpid(),
            node=ray.get_runtime_context().get_node_id(),
            log_files=_log_files(),
            checkpoint=checkpoint.info,
            weights_digest=digest,
            fingerprint=self._engine.fingerprint,
            memory=str(self._engine.memory_plan),
            programs_compiled=self._engine.stats().programs_compiled,
            start_s=time.monotonic() - began,
        )
        return self._description

    def renew(self, shipment: Shipment) -> WorkerDescription:
        """Takes weights over before `serve` is called.

        Raises:
            CheckpointError: as in `stage`.
        """
        assert self._engine is not None and self._description is not None, "start() comes first"
        weights, found = self._checked(shipment)
        self._engine.load_weights(weights, shipment.version)
        self._description = dataclasses.replace(
            self._description, policy_version=shipment.version, **dataclasses.asdict(found)
        )
        return self._description

    @ray.method(concurrency_group=WEIGHTS)
    def stage(self, shipment: Shipment) -> Staged:
        """Checks weights and keeps them ready, in place of those that were kept before.

        Raises:
            CheckpointError: they are of another form, not finite, or give scores that are not.
        """
        self._staged = None
        self._staged, found = self._checked(shipment)
        return found

    @ray.method(concurrency_group=WEIGHTS)
    def swap(self, version: int, deadline_s: float) -> float:
        """Takes over what `stage` keeps, between two steps of the engine; returns the seconds that it stood still."""
        assert self._staged is not None, "stage() comes first"
        swap, self._staged = _Swap(self._staged, version), None
        self._inbox.put(swap)
        stood_still_s, _ = swap.made.result(deadline_s)
        return stood_still_s

    @ray.method(concurrency_group=WEIGHTS)
    def unstage(self) -> None:
        """Forgets what `stage` keeps."""
        self._staged = None

    def serve(self) -> Iterator[Report]:
        """Decodes for ever and reports answers as soon as there are some, many at a time.

        An error of the engine itself ends the call: what the slots hold can then no longer be trusted.
        """
        engine = self._engine
        assert engine is not None, "start() comes first"
        while True:
            self._collect(engine, wait=engine.idle and not self._desk.waiting)
            answers = self._desk.admit(engine)
            answers += [self._desk.settle(group) for group in engine.step()]
            if answers:
                yield Report(tuple(answers), engine.stats())

    @ray.method(concurrency_group=CONTROL)
    def submit(self, assignments: list[Assignment]) -> None:
        """Puts requests into the worker's queue; their answers come out of `serve`."""
        for assignment in assignments:
            self._inbox.put(assignment)

    @ray.method(concurrency_group=CONTROL)
    def ping(self) -> EngineStats:
        """Shows that the process lives, and what it has done so far."""
        return self._engine.stats() if self._engine else NO_WORK

    def _checked(self, shipment: Shipment) -> tuple[StagedWeights, Staged]:
        from sampling.checkpoints import weights_digest

        assert self._engine is not None, "start() comes first"
        params = self._received(shipment)
        weights = self._engine.stage_weights(params)
        return weights, Staged(weights_digest(params), tuple(weights.canary_logprobs().tolist()))

    def _received(self, shipment: Shipment) -> Any:
        return ray.get(shipment.weights[0], timeout=shipment.deadline_s)

    def _collect(self, engine: Engine, wait: bool) -> None:
        """Moves what has arrived to the desk; waits a moment for the first if there is nothing else to do."""
        try:
            while True:
                arrived = self._inbox.get(wait, IDLE_WAIT_S)
                if isinstance(arrived, _Swap):
                    arrived.make(engine)
                else:
                    self._desk.waiting.append(arrived)
                wait = False
        except queue.Empty:
            pass


@dataclass(frozen=True)
class _Swap:
    """Weights that wait for the engine to be between two steps.

    Attributes:
        made: the seconds that the engine stood still, and the old weights: freeing them is left to another thread.
    """

    weights: StagedWeights
    version: int
    made: Future[tuple[float, Any]] = dataclasses.field(default_factory=Future)

    def make(self, engine: Engine) -> None:
        began = time.monotonic()
        old = engine.load_weights(self.weights, self.version)
        self.made.set_result((time.monotonic() - began, old))


class _Desk:
    """Knows which ticket each group of the engine belongs to.

    The engine names groups by prompt id and sample indices. A request with the name of one that is still running,
    left over from a run that was broken off, waits until the other has left: their answers cannot be mixed up.
    """

    def __init__(self) -> None:
        self.waiting: list[Assignment] = []
        self._running: dict[tuple[str, tuple[int, ...]], int] = {}

    def admit(self, engine: Engine) -> list[Answer]:
        """Gives the engine what it can take and answers for what it refuses."""
        refused, held = [], []
        for assignment in self.waiting:
            name = _request_name(assignment.request)
            if name in self._running:
                held.append(assignment)
                continue
            try:
                engine.submit(assignment.request)
                self._running[name] = assignment.ticket
            except Exception as error:  # whatever is wrong with one request is an answer, not the end of the worker
                refused.append(Answer(assignment.ticket, Rejection(type(error).__name__, str(error))))
        self.waiting = held
        return refused

    def settle(self, group: Group) -> Answer:
        """The answer that a finished group is."""
        indices = tuple(completion.sample_index for completion in group.completions)
        return Answer(self._running.pop((group.prompt_id, indices)), group)


def _request_name(request: Request) -> tuple[str, tuple[int, ...]]:
    return request.prompt_id, request.sample_indices


def _log_files() -> tuple[str, ...]:
    """Files behind standard output and standard error, where the system can tell."""
    links = [Path(f"/proc/self/fd/{descriptor}") for descriptor in (1, 2)]
    targets = dict.fromkeys(os.readlink(link) for link in links if link.is_symlink())
    return tuple(target for target in targets if target.startswith("/") and not target.startswith("/dev/"))
