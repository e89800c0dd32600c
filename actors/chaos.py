"""Faults on order: what is to go wrong in a run, when, and to whom.

Plain data until a pool is given it. Then the driver tells a worker that has done so many groups what to do to itself,
with real signals; a run without faults has neither the method nor the worker's class.

    kill      the worker's process ends at once (SIGKILL)
    stall     the worker's process stops where it is (SIGSTOP): there, and silent
    slow      every round of the worker's engine takes `seconds` longer, from then on
    corrupt   one bit of the weights is another when they reach the worker
    node      a node of the cluster, not the driver's own, ends with all that runs on it
    write     a file of the run cannot be written: the disk is full
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
import ray

from actors.handle import WorkerHandle
from actors.messages import Shipment
from actors.spec import Placement
from actors.worker import CONTROL, SamplingWorker
from sampling.engine import Engine
from sampling.errors import ConfigError

TOLD_S = 10.0
"""Longest wait until a worker has heard of a fault."""

Kind = Literal["kill", "stall", "slow", "corrupt", "node", "write"]

_KEYS: dict[Kind, tuple[str, ...]] = {
    "kill": ("worker", "after"),
    "stall": ("worker", "after"),
    "slow": ("worker", "after", "seconds"),
    "corrupt": ("worker", "after"),
    "node": ("after",),
    "write": ("after",),
}


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, once.

    Attributes:
        kind: what; the module's docstring lists them.
        worker: to which worker, by number.
        after: what comes first: groups that the worker has answered (`node`: all workers), weights that it has
            received (`corrupt`), files that were written (`write`).
        seconds: how much longer (`slow`).
    """

    kind: Kind
    worker: int = 0
    after: int = 0
    seconds: float = 0.1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `kind` or `kind:key=value,...`, such as `kill:worker=1,after=20`.

        Raises:
            ConfigError: another kind, a key that the kind does not have, or a value out of range.
        """
        name, _, settings = text.partition(":")
        kind: Kind | None = next((kind for kind in get_args(Kind) if kind == name), None)
        if kind is None:
            raise ConfigError(f"chaos: {text}: expected one of {', '.join(_KEYS)}, got {name!r}")
        values: dict[str, Any] = {}
        for setting in filter(None, settings.split(",")):
            key, _, value = setting.partition("=")
            if key not in _KEYS[kind] or key in values:
                raise ConfigError(f"chaos: {text}: expected each of {', '.join(_KEYS[kind])} once, got {setting!r}")
            try:
                values[key] = float(value) if key == "seconds" else int(value)
            except ValueError:
                values[key] = -1
            if not 0 <= values[key] <= 1e6:
                raise ConfigError(f"chaos: {text}: {key}: expected a number from 0 to a million, got {value!r}")
        return cls(kind, **values)

    def __str__(self) -> str:
        return f"{self.kind}:" + ",".join(f"{key}={getattr(self, key):g}" for key in _KEYS[self.kind])


class Chaos:
    """The faults of a run, each to come once, however often the run is begun again with the same object.

    Attributes:
        pending: what has not come yet.
        happened: what has.
    """

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.pending = list(faults)
        self.happened: list[Fault] = []
        self._written = 0

    @classmethod
    def of(cls, faults: Chaos | Sequence[str]) -> Chaos:
        """Faults as they are given on a command line; or what is one already."""
        return faults if isinstance(faults, Chaos) else cls(map(Fault.parse, faults))

    def worker_class(self, usual: type) -> type:
        """The class of the workers; `usual` where nothing happens to any."""
        return FragileWorker if any(fault.kind != "write" for fault in self.pending) else usual

    def require(self, placement: Placement) -> None:
        """Refuses faults that these workers, on this cluster, can never have.

        Raises:
            ConfigError: there is no such worker, or no other node.
        """
        for fault in self.pending:
            if fault.worker >= placement.num_workers:
                raise ConfigError(f"chaos: {fault}: expected a worker below {placement.num_workers}")
            if fault.kind == "node" and sum(node["Alive"] for node in ray.nodes()) < 2:
                raise ConfigError(f"chaos: {fault}: expected a cluster of several nodes, got one; see --address")

    def strike(self, ready: Sequence[WorkerHandle]) -> None:
        """Lets happen to workers what is due."""
        for fault in [fault for fault in self.pending if fault.kind != "write"]:
            for worker in ready:
                if worker.description and _is_due(fault, worker, ready):
                    told = worker.actor.suffer.remote(fault)
                    if fault.kind == "corrupt":  # the next weights may be sent in a moment, and overtake it
                        ray.wait([told], timeout=TOLD_S)
                    self._has_happened(fault)
                    break

    def before_write(self, path: Path) -> None:
        """Raises where the file cannot be written.

        Raises:
            OSError: the fault is due.
        """
        for fault in [fault for fault in self.pending if fault.kind == "write"]:
            if self._written >= fault.after:
                self._has_happened(fault)
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (chaos)", str(path))
        self._written += 1

    def _has_happened(self, fault: Fault) -> None:
        self.pending.remove(fault)
        self.happened.append(fault)


def _is_due(fault: Fault, worker: WorkerHandle, ready: Sequence[WorkerHandle]) -> bool:
    if fault.kind == "node":
        elsewhere = worker.description and worker.description.node != ray.get_runtime_context().get_node_id()
        return bool(elsewhere) and sum(each.answered for each in ready) >= fault.after
    if worker.name != f"worker-{fault.worker}":
        return False
    return fault.kind == "corrupt" or worker.answered >= fault.after  # weights are counted where they arrive


class FragileWorker(SamplingWorker):
    """A worker that does to itself what it is told to."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pause_s = 0.0
        self._received_so_far = 0
        self._damaged: int | None = None

    @ray.method(concurrency_group=CONTROL)
    def suffer(self, fault: Fault) -> None:
        """Lets a fault happen."""
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stall":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "node":
                os.kill(_raylet(), signal.SIGKILL)
            case "slow":
                self._pause_s = fault.seconds
            case "corrupt":
                self._damaged = fault.after

    def _collect(self, engine: Engine, wait: bool) -> None:
        super()._collect(engine, wait)
        time.sleep(self._pause_s)

    def _received(self, shipment: Shipment) -> Any:
        params = super()._received(shipment)
        if self._damaged is not None and self._received_so_far >= self._damaged:
            params, self._damaged = _with_one_bit_changed(params), None
        self._received_so_far += 1
        return params


def _raylet() -> int:
    """Process id of Ray's process of this node: it is the parent of its workers, and they follow it."""
    parent = os.getppid()
    name = Path(f"/proc/{parent}/comm").read_text().strip()
    if name != "raylet":
        raise RuntimeError(f"expected the parent of a worker to be raylet, got {name}")
    return parent


def _with_one_bit_changed(params: Any) -> Any:
    import jax

    (first, *others), tree = jax.tree.flatten(params)
    damaged = np.array(first, order="C")
    damaged.reshape(-1).view(np.uint8)[0] ^= 1
    return jax.tree.unflatten(tree, [damaged, *others])
