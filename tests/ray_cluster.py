"""Ray clusters for tests, in a process of their own: a process knows one Ray, and that is tests/local_ray.py's."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.processes import within

ROOT = Path(__file__).parents[1]
CPUS_PER_NODE = 3
START_S = 60.0


class RayCluster:
    """A cluster that another process holds.

    Attributes:
        address: for drivers; another one after `restart`.
    """

    def __init__(self, nodes: int, temp_dir: str) -> None:
        command = [sys.executable, str(ROOT / "tests" / "cluster_process.py")]
        command += [str(nodes), str(CPUS_PER_NODE), temp_dir]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment()
        )
        self.address = self._answer()

    def restart(self) -> None:
        """Kills every process of the cluster and starts another one."""
        self._order("restart")

    def add_host(self, slice_name: str, host: int, path: Path | str = "") -> None:
        """Adds a node that takes itself for a host of a TPU slice: 2x2x2 of v4, two hosts of four chips.

        Args:
            slice_name, host: what it takes itself for.
            path: where its Python looks for modules before anywhere else.
        """
        self._order(f"add {slice_name} {host} {path}")

    def remove_host(self, slice_name: str, host: int) -> None:
        """Kills such a node."""
        self._order(f"remove {slice_name} {host}")

    def working(self) -> list[int]:
        """Process ids of the workers that have started, on all nodes."""
        return [pid for pid in _descendants(self._process.pid) if _title(pid) == "ray::SamplingWorker"]

    @property
    def alive(self) -> int:
        """Nodes, by their first processes."""
        return sum(_title(pid).split("\0")[0].endswith("/raylet") for pid in _descendants(self._process.pid))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(START_S)

    def _order(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{order}\n".encode())
        self._process.stdin.flush()
        self.address = self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        for _ in within(START_S):
            if line := self._process.stdout.readline():
                return json.loads(line)
        raise AssertionError("unreachable")


@contextlib.contextmanager
def ray_cluster(nodes: int) -> Iterator[RayCluster]:
    """A cluster of so many nodes, CPUS_PER_NODE processors each; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as temp_dir:
        cluster = RayCluster(nodes, temp_dir)
        try:
            yield cluster
        finally:
            cluster.close()


def environment() -> dict[str, str]:
    """For the cluster and its drivers: this checkout, one way of authentication, a driver that misses Ray gives up."""
    ours = {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled", "RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
    return {**os.environ, **ours}


def _descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield int(child)
                yield from _descendants(int(child))


def _title(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0")
    return ""
