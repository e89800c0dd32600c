"""A Ray cluster of several nodes on this machine: the process that tests/ray_cluster.py starts. Ends with its input.

Any line of its input lets it kill every process and start anew. It tells the address.
"""

import json
import sys

import ray._private.utils
from ray.cluster_utils import Cluster

ray._private.utils.write_ray_address = lambda *_, **__: None  # "auto" is not to find it


def started(nodes: int, cpus: int, temp_dir: str) -> Cluster:
    # Lost nodes are noticed in seconds, as a short test needs it; Ray's own limits suit real networks.
    settings = {"num_cpus": cpus, "include_dashboard": False, "temp_dir": temp_dir}
    health = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
    cluster = Cluster(True, head_node_args={**settings, "_system_config": health})
    for _ in range(nodes - 1):
        cluster.add_node(**settings)
    return cluster


def main() -> None:
    nodes, cpus, temp_dir = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    cluster = started(nodes, cpus, temp_dir)
    try:
        print(json.dumps(cluster.address), flush=True)
        for _ in sys.stdin:
            for node in reversed(cluster.list_all_nodes()):
                cluster.remove_node(node, allow_graceful=False)
            cluster = started(nodes, cpus, temp_dir)
            print(json.dumps(cluster.address), flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
