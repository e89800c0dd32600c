"""A Ray cluster of several nodes on this machine: the process that tests/ray_cluster.py starts. Ends with its input.

Each line of its input is answered with the cluster's address: `restart` kills every process and starts anew, `drop`
kills the last node.
"""

import json
import sys

import ray._private.utils
from ray.cluster_utils import Cluster

ray._private.utils.write_ray_address = lambda *_, **__: None  # "auto" is not to find it


def started(nodes: int, temp_dir: str) -> Cluster:
    # Lost nodes are noticed in seconds, as a short test needs it; Ray's own limits suit real networks.
    settings = {"num_cpus": 4, "include_dashboard": False, "temp_dir": temp_dir}
    health = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
    cluster = Cluster(True, head_node_args={**settings, "_system_config": health})
    for _ in range(nodes - 1):
        cluster.add_node(**settings)
    return cluster


def drop(cluster: Cluster) -> None:
    """Kills the last node; the head where there is no other."""
    cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)


def main() -> None:
    nodes, temp_dir = int(sys.argv[1]), sys.argv[2]
    cluster = started(nodes, temp_dir)
    try:
        print(json.dumps(cluster.address), flush=True)
        for line in sys.stdin:
            drop(cluster)
            if line.strip() == "restart":
                while cluster.list_all_nodes():
                    drop(cluster)
                cluster = started(nodes, temp_dir)
            print(json.dumps(cluster.address), flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
