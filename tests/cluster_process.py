"""A Ray cluster of several nodes on this machine: the process that tests/ray_cluster.py starts. Ends with its input.

A line of its input is an order; when it is carried out the process tells the address.

restart                 kills every process and starts anew
add SLICE HOST          adds a node that takes itself for a host of a TPU slice of two, four chips each
add SLICE HOST PATH     the same, and its Python looks for modules at PATH first
remove SLICE HOST       kills that node
"""

import json
import os
import sys

import ray._private.utils
from ray.cluster_utils import Cluster

ray._private.utils.write_ray_address = lambda *_, **__: None  # "auto" is not to find it


def started(nodes: int, settings: dict) -> Cluster:
    # Lost nodes are noticed in seconds, as a short test needs it; Ray's own limits suit real networks.
    health = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
    cluster = Cluster(True, head_node_args={**settings, "_system_config": health})
    for _ in range(nodes - 1):
        cluster.add_node(**settings)
    return cluster


def tpu_host(slice_name: str, host: str, *path: str) -> dict:
    """What a node of a slice 2x2x2 of TPU v4 tells Ray, and what its processes find in their environment."""
    head = {"TPU-v4-16-head": 1} if host == "0" else {}
    names = {"slice-name": slice_name, "worker-id": host, "pod-type": "v4-16", "topology": "2x2x2"}
    told = {"NAME": slice_name, "WORKER_ID": host, "ACCELERATOR_TYPE": "v4-16", "TOPOLOGY": "2x2x2"}
    environment = {f"TPU_{name}": value for name, value in told.items()}
    return {
        "resources": {"TPU": 4, **head},
        "labels": {f"ray.io/tpu-{name}": value for name, value in names.items()},
        "env_vars": {**environment, "PYTHONPATH": os.pathsep.join([*path, os.environ["PYTHONPATH"]])},
    }


def main() -> None:
    nodes, cpus, temp_dir = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    settings = {"num_cpus": cpus, "include_dashboard": False, "temp_dir": temp_dir}
    cluster, hosts = started(nodes, settings), {}
    try:
        print(json.dumps(cluster.address), flush=True)
        for line in sys.stdin:
            match line.split():
                case ["restart"]:
                    for node in reversed(cluster.list_all_nodes()):
                        cluster.remove_node(node, allow_graceful=False)
                    cluster = started(nodes, settings)
                case ["add", slice_name, host, *path]:
                    hosts[slice_name, host] = cluster.add_node(**settings, **tpu_host(slice_name, host, *path))
                case ["remove", slice_name, host]:
                    cluster.remove_node(hosts.pop((slice_name, host)), allow_graceful=False)
            print(json.dumps(cluster.address), flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
