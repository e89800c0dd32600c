"""What drivers and workers say to each other, and what a pool says to its caller: frozen plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sampling.checkpoints import CheckpointInfo
from sampling.engine import EngineStats
from sampling.types import Group, Request


@dataclass(frozen=True)
class GroupResult:
    """A request that was answered.

    Attributes:
        request: what was asked.
        group: its completions.
        worker: name of the worker that drew them.
    """

    request: Request
    group: Group
    worker: str


@dataclass(frozen=True)
class GroupFailure:
    """A request that will not be answered.

    Attributes:
        request: what was asked.
        error_type: class of the error, such as "PromptError".
        message: what went wrong, in words.
        attempts: workers that tried.
        worker: name of the last of them.
    """

    request: Request
    error_type: str
    message: str
    attempts: int
    worker: str


Outcome = GroupResult | GroupFailure
"""How a request ends; each ends exactly once."""


@dataclass(frozen=True)
class WorkerDescription:
    """What a worker that is ready says of itself.

    Attributes:
        name: of the worker; a replacement has the name of its predecessor.
        host: host name.
        pid: process id on that host.
        node: Ray's id of the node.
        log_files: where the process writes standard output and standard error, on that host.
        checkpoint: what is known of the checkpoint, besides its weights.
        weights_digest: digest of the exact bits of the weights.
        fingerprint: what the bits of results depend on besides the weights.
        memory: what the engine was planned to hold, in words.
        programs_compiled: programs that the engine holds.
        start_s: seconds it took to load and compile.
        policy_version: version of the weights; 0 is the checkpoint's.
        canary_logprobs: what published weights say of the canary's text, see `sampling.weights`; none for version 0.
    """

    name: str
    host: str
    pid: int
    node: str
    log_files: tuple[str, ...]
    checkpoint: CheckpointInfo
    weights_digest: str
    fingerprint: dict[str, Any]
    memory: str
    programs_compiled: int
    start_s: float
    policy_version: int = 0
    canary_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Assignment:
    """A request on its way to a worker.

    Attributes:
        ticket: names the assignment, once in the life of a pool. Prompt ids cannot: a later run may use them again.
        request: what is asked.
    """

    ticket: int
    request: Request


@dataclass(frozen=True)
class Shipment:
    """Weights on their way to the workers.

    Attributes:
        version: names them.
        weights: Ray's reference to a nested dict of NumPy arrays, in a tuple: Ray would hold back all later calls of a
            worker until an argument that is a reference has come.
        deadline_s: seconds to wait for them, and for the moment to take them over.
    """

    version: int
    weights: tuple[Any]
    deadline_s: float


@dataclass(frozen=True)
class Staged:
    """What a worker has found of weights that it could take over; the attributes are those of WorkerDescription."""

    weights_digest: str
    canary_logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Publication:
    """Weights that every worker draws with.

    Attributes:
        version, weights_digest, canary_logprobs: as in WorkerDescription.
        put_s: seconds to put them into Ray's store.
        staged_s: seconds until every worker had checked them; generation goes on meanwhile.
        swapped_s: seconds until every worker had taken them over, between two steps of its engine.
        stood_still_s: the longest that an engine stood still for it.
    """

    version: int
    weights_digest: str
    canary_logprobs: tuple[float, ...]
    put_s: float
    staged_s: float
    swapped_s: float
    stood_still_s: float


@dataclass(frozen=True)
class Rejection:
    """Why an engine refused a request: the class of the error and its message."""

    error_type: str
    message: str


@dataclass(frozen=True)
class Answer:
    """How an assignment ended on its worker."""

    ticket: int
    result: Group | Rejection


@dataclass(frozen=True)
class Report:
    """What a serving worker sends: answers since the last report, and its counts so far."""

    answers: tuple[Answer, ...]
    stats: EngineStats


NO_WORK = EngineStats(**{field.name: 0 for field in dataclasses.fields(EngineStats)})
"""Counts of an engine that never was."""


def add_stats(parts: Iterable[EngineStats]) -> EngineStats:
    """Counts of several engines together."""
    totals = dataclasses.asdict(NO_WORK)
    for part in parts:
        for name, count in dataclasses.asdict(part).items():
            totals[name] += count
    return EngineStats(**totals)
