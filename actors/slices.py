"""TPU slices of several hosts: what one has, reserving it through Ray's own TPU utilities, and giving it back.

Every host of a slice gets one worker with all its chips. Workers know nothing of each other, so a host that is lost
takes its own worker with it and no other.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.spec import Placement, TpuSlice
from sampling.errors import ConfigError, WorkerError

if TYPE_CHECKING:
    from ray.util.tpu import SlicePlacementGroup

Made = TypeVar("Made")

UTILITIES = ("get_tpu_nodes_for_slice", "get_tpu_worker_resources", "slice_placement_group")
"""What is used of `ray.util.tpu`."""

GRACE_S = 2.0
"""Seconds beyond the deadline for Ray to say by itself that no slice is free."""

SLICE_NAME = "ray.io/tpu-slice-name"
WORKER_ID = "ray.io/tpu-worker-id"
"""Labels that Ray gives to the hosts of a slice."""

HOST_ENVIRONMENT = {
    # As Ray sets them where a worker has fewer chips than its host.
    "TPU_HOST_BOUNDS": "1,1,1",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
    # Their newer names and the rest of what JAX's own tests set for one process with four chips.
    "TPU_PROCESS_BOUNDS": "1,1,1",
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1",
    "TPU_PROCESS_ADDRESSES": "localhost:8471",
    "TPU_PROCESS_PORT": "8471",
    "CLOUD_TPU_TASK_ID": "0",
    # In place of what Kubernetes sets for the whole slice.
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
"""Lets the TPU runtime take a host of a slice for a slice of its own. By itself it would wait for the other hosts, to
form one machine with them. Every host of a slice of several has four chips, two by two."""


def ray_tpu() -> Any:
    """Ray's TPU utilities. They are alpha and may go, so they are imported for those alone who ask for a slice.

    Raises:
        ConfigError: this Ray lacks them.
    """
    try:
        module = importlib.import_module("ray.util.tpu")
    except ImportError:
        module = None
    if missing := [name for name in UTILITIES if not hasattr(module, name)]:
        raise ConfigError(
            f"tpu_slice: expected a Ray with ray.util.tpu.{missing[0]}, as 2.60 has it, got Ray {ray.__version__}"
            " without; install such a Ray, or use tpus and hosts that are no part of a slice"
        )
    return module


def slice_hosts(tpu_slice: TpuSlice) -> tuple[int, int]:
    """The hosts of a slice, and the TPUs that Ray counts on each: its chips, as a rule.

    Raises:
        ConfigError: Ray knows no such slice, or it has one host.
    """
    try:
        hosts, resources = ray_tpu().get_tpu_worker_resources(tpu_slice.topology, tpu_slice.version)
    except ValueError as error:
        raise ConfigError(f"tpu_slice: expected a slice that Ray knows, got {tpu_slice}: {error}") from error
    if hosts == 1:
        raise ConfigError(
            f"tpu_slice: expected a slice of several hosts, got {tpu_slice}, which is one host;"
            f" use tpus: {resources['TPU']:g} instead"
        )
    return hosts, int(resources["TPU"])


def require_slice(placement: Placement) -> None:
    """Refuses numbers of workers that do not fit the slice.

    Raises:
        ConfigError: there is not one worker for each host, or no such slice.
    """
    if placement.tpu_slice is None:
        return
    hosts, _ = slice_hosts(placement.tpu_slice)
    if placement.num_workers != hosts:
        raise ConfigError(
            f"placement: expected one worker for each of the {hosts} hosts of {placement.tpu_slice}, got"
            f" {placement.num_workers} workers; set workers.count to {hosts}"
        )


class ReservedSlice:
    """The slice of a pool, reserved when its first worker is launched and until it is given back.

    Args:
        placement: with a slice.
        start_s: seconds that reserving one may take.
    """

    def __init__(self, placement: Placement, start_s: float) -> None:
        assert placement.tpu_slice is not None, "for pools on a slice"
        self._wanted, self._cpus, self._start_s = placement.tpu_slice, placement.cpus, start_s
        self._hosts, self._tpus = slice_hosts(placement.tpu_slice)
        self._group: SlicePlacementGroup | None = None

    @property
    def gone(self) -> bool:
        """Whether there was a slice, and none of its hosts is left."""
        return self._group is not None and not self._nodes()

    def strategy(self, index: int) -> PlacementGroupSchedulingStrategy:
        """Where a worker has to start: on the host with the TPU worker id `index`.

        Raises:
            ConfigError: Ray knows no such slice.
            WorkerError: none was to be had in time.
        """
        if self.gone:
            self.give_back()
        if self._group is None:
            self._reserve()
        return PlacementGroupSchedulingStrategy(self._places, placement_group_bundle_index=index)

    def room(self, index: int) -> str:
        """Whether Ray sees the host of a worker, in words."""
        there = any(node["Labels"].get(WORKER_ID) == str(index) for node in self._nodes())
        return f"; its host, TPU worker {index} of slice {self._name!r}, is {'there' if there else 'not there'}"

    def give_back(self) -> None:
        """Lets others have the slice; its workers must have ended."""
        if self._group is not None:
            self._group.shutdown()
        self._group = None

    @property
    def _name(self) -> str:
        return self._group.bundle_label_selector[0][SLICE_NAME] if self._group else ""

    @property
    def _places(self) -> PlacementGroup:
        """One bundle for each host, in the order of their TPU worker ids."""
        places = self._group.placement_group if self._group else None
        assert places is not None, "reserve the slice first"
        return places

    def _nodes(self) -> list[dict[str, Any]]:
        return ray_tpu().get_tpu_nodes_for_slice(self._name)

    def _reserve(self) -> None:
        limit = time.monotonic() + self._start_s
        try:
            # Ray waits for a free slice as long as it is told, and then without end for a host to say its name.
            self._group = in_time(self._start_s + GRACE_S, self._ask, _undo)
            if ray.wait([self._places.ready()], timeout=max(0.0, limit - time.monotonic()))[0]:
                return
            reason = f"Ray sees {len(self._nodes())} of {self._hosts} hosts of {self._name!r}, and not all are free"
        except ValueError as error:
            raise ConfigError(f"tpu_slice: expected a slice that Ray knows, got {self._wanted}: {error}") from error
        except (TimeoutError, RuntimeError, RayError) as error:
            reason = str(error) or "Ray chose one whose first host does not tell its name; it may hang"
        self.give_back()
        raise WorkerError(
            f"{self._wanted} was not to be had within {self._start_s:g} s: {reason}. Wait until one is given back, add"
            " one to the cluster, ask for another shape, or wait longer (workers.start_deadline_s)"
        )

    def _ask(self) -> SlicePlacementGroup:
        return ray_tpu().slice_placement_group(
            self._wanted.topology,
            self._wanted.version,
            resources_per_bundle={"CPU": self._cpus, "TPU": self._tpus},
            strategy="STRICT_SPREAD",
            # By itself Ray puts bundles and hosts in any order.
            bundle_label_selector=[{WORKER_ID: str(index)} for index in range(self._hosts)],
            head_reservation_timeout_s=self._start_s,
        )


def in_time(limit_s: float, make: Callable[[], Made], undo: Callable[[Made], None]) -> Made:
    """What `make` returns or raises, though it may wait for ever: nobody waits for it longer than so many seconds.

    It runs in a thread, which an exit of the process does not wait for either. What it returns to nobody, after the
    limit or after an interrupt, is undone.

    Raises:
        TimeoutError: it took longer.
    """
    made: Future[Made] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:  # with SystemExit Ray ends what waits when it is shut down
            made.set_exception(error)

    def undo_what_came() -> None:
        if not made.exception(0):
            undo(made.result(0))

    try:
        threading.Thread(target=run, daemon=True).start()
        return made.result(limit_s)
    except BaseException:
        made.add_done_callback(lambda _: undo_what_came())
        raise


def _undo(group: SlicePlacementGroup) -> None:
    if ray.is_initialized():  # else it is gone with the connection, and Ray would open another one
        group.shutdown()
