"""TPU slices of several hosts: what one has, reserving it through Ray's own TPU utilities, and giving it back.

Every host of a slice gets one worker with all its chips. Workers know nothing of each other, so a host that is lost
takes its own worker with it and no other.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.spec import Placement, TpuSlice
from sampling.errors import ConfigError, WorkerError

if TYPE_CHECKING:
    from ray.util.tpu import SlicePlacementGroup

SLICE_NAME = "ray.io/tpu-slice-name"
WORKER_ID = "ray.io/tpu-worker-id"
POD_TYPE = "ray.io/tpu-pod-type"
"""Labels that Ray gives to the hosts of a slice."""

UTILITIES = (
    "TPUAcceleratorManager",
    "get_tpu_nodes_for_slice",
    "get_tpu_version_from_type",
    "get_tpu_worker_resources",
    "infer_tpu_pod_type_from_topology",
    "slice_placement_group",
)
"""What is used of `ray.util.tpu`."""

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
        import ray.util.tpu as tpu

        for name in UTILITIES:
            getattr(tpu, name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"tpu_slice: expected a Ray with the utilities that ray.util.tpu has in 2.60, got Ray {ray.__version__}:"
            f" {error}; install such a Ray, or use tpus and hosts that are no part of a slice"
        ) from error
    return tpu


def slice_hosts(tpu_slice: TpuSlice) -> tuple[int, int]:
    """The hosts of a slice, and the TPUs that Ray counts on each: its chips, as a rule.

    Raises:
        ConfigError: Ray knows no such slice, or it has one host.
    """
    tpu, topology = ray_tpu(), tpu_slice.topology
    try:
        version = tpu.get_tpu_version_from_type(tpu_slice.version)
        hosts, resources = tpu.get_tpu_worker_resources(topology, version)
        if not tpu.TPUAcceleratorManager.is_valid_tpu_accelerator_topology(version, topology):
            raise ValueError(f"{topology} is no topology of {version}")
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
        self._head: PlacementGroup | None = None
        self._group: SlicePlacementGroup | None = None
        self._name = ""

    @property
    def gone(self) -> bool:
        """Whether there was a slice, and none of its hosts is left."""
        return self._group is not None and not self._nodes()

    def strategy(self, index: int) -> PlacementGroupSchedulingStrategy:
        """Where a worker has to start: on the host with the TPU worker id `index`.

        Raises:
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
        if self._head is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(self._head)
        self._head = self._group = None

    @property
    def _places(self) -> PlacementGroup:
        """One bundle for each host, in the order of their TPU worker ids."""
        places = self._group.placement_group if self._group else None
        assert places is not None, "reserve the slice first"
        return places

    def _nodes(self) -> list[dict[str, Any]]:
        return ray_tpu().get_tpu_nodes_for_slice(self._name)

    def _reserve(self) -> None:
        """Takes the head of a slice, which one at a time can have, and then the slice."""
        self.give_back()  # what was interrupted
        limit = time.monotonic() + self._start_s
        try:
            reason = self._take_head(limit) or self._take_hosts(limit)
        except RayError as error:
            reason = str(error)
        if not reason:
            return
        self.give_back()
        raise WorkerError(
            f"{self._wanted} was not to be had within {self._start_s:g} s: {reason}. Wait until one is given back, add"
            " one to the cluster, ask for another shape, or wait longer (workers.start_deadline_s)"
        )

    def _take_head(self, limit: float) -> str:
        """Chooses a slice. Returns why it cannot; empty where it can.

        As `slice_placement_group` would do it, but for a task that it starts on the host to learn the slice's name: it
        waits for that without end. The label of the host has the name, too.
        """
        tpu = ray_tpu()
        version = tpu.get_tpu_version_from_type(self._wanted.version)
        pod_type = tpu.infer_tpu_pod_type_from_topology(self._wanted.topology, version)
        labels = {WORKER_ID: "0", POD_TYPE: pod_type}
        self._head = placement_group([{f"TPU-{pod_type}-head": 1}], bundle_label_selector=[labels])
        if not _placed(self._head, limit):
            known = [node for node in ray.nodes() if node["Alive"] and labels.items() <= node["Labels"].items()]
            return f"Ray sees {len(known)} with the head of a {pod_type}, and none is free"
        node_id = placement_group_table(self._head)["bundles_to_node_id"][0]
        found = {node["NodeID"]: node["Labels"] for node in ray.nodes() if node["Alive"]}
        self._name = found.get(node_id, {}).get(SLICE_NAME, "")
        return "" if self._name else f"the host that Ray chose was lost, or it has no label {SLICE_NAME}"

    def _take_hosts(self, limit: float) -> str:
        """Reserves all hosts of that slice. Returns why it cannot; empty where it can."""
        self._group = ray_tpu().slice_placement_group(
            self._wanted.topology,
            self._wanted.version,
            resources_per_bundle={"CPU": self._cpus, "TPU": self._tpus},
            strategy="STRICT_SPREAD",
            # By itself Ray puts bundles and hosts in any order.
            bundle_label_selector=[{SLICE_NAME: self._name, WORKER_ID: str(index)} for index in range(self._hosts)],
        )
        if _placed(self._places, limit):
            return ""
        return f"Ray sees {len(self._nodes())} of {self._hosts} hosts of {self._name!r}, and not all are free"


def _placed(group: PlacementGroup, limit: float) -> bool:
    """Whether Ray finds room for a group before a moment of time.monotonic()."""
    return bool(ray.wait([group.ready()], timeout=max(0.0, limit - time.monotonic()))[0])
