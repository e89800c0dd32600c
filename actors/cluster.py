"""The Ray cluster beneath a pool: joining or starting one, and what each worker's process is given."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import signal
import site
import socket
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from actors.slices import HOST_ENVIRONMENT, require_slice, slice_hosts
from actors.spec import Placement
from sampling.errors import ConfigError
from sampling.plugins import PluginRefs

CONNECT_S = 10.0
"""Seconds for a cluster's port to answer."""

GPU_MEMORY = 0.9
"""Share of a GPU's memory that the processes on it divide among them, by the shares of the GPU that they ask for."""

_SOURCE_ROOT = Path(__file__).resolve().parents[1]
_WORKER_PACKAGES = ("sampling", "actors")
"""All that a worker imports."""


@contextlib.contextmanager
def connected(address: str | None, placement: Placement, plugins: PluginRefs | None = None) -> Iterator[PluginRefs]:
    """Within it this process is connected to Ray.

    A connection that exists already is used and left open. Otherwise the process joins the cluster at `address`, or
    at RAY_ADDRESS as Ray's job submission sets it, or starts a private one on this machine and ends it afterwards.
    A private one takes token authentication, as Ray does by default; RAY_AUTH_MODE, which Ray reads on import, has
    to be the same for all nodes and drivers of a shared one.

    Args:
        address: of a running cluster ("host:port", "ray://host:port" or "auto"); None starts one.
        placement: a private cluster gets at least the processors that it asks for, be they real or not.
        plugins: those of the workers; to a cluster that is joined, their code is carried where it is not installed.
    Yields:
        The plugins as workers load them.
    Raises:
        ConfigError: no cluster answers at the address, a private one would lack GPUs or TPUs, or the workers are not
            as many as the hosts of their slice.
    """
    plugins = plugins or PluginRefs()
    require_slice(placement)
    if ray.is_initialized():
        yield plugins
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    address = address or os.environ.get("RAY_ADDRESS")
    if placement.tpu_slice and not address:
        raise ConfigError(
            f"address: expected that of a Ray cluster with {placement.tpu_slice}, got none; one machine is no slice"
        )
    try:
        with _signals_held():
            if address:
                _join(address, quiet, plugins)
            else:
                cpus = max(os.cpu_count() or 1, math.ceil(placement.num_workers * placement.cpus))
                ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
        if not address:
            _require_devices(placement)
        yield plugins.carried(_plugin_code(plugins)) if address else plugins
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Within it SIGINT and SIGTERM wait for the end: an exception amid the start of Ray's core aborts the process.

    A second signal does not wait. Afterwards the handlers are the old ones; Ray's own for SIGTERM prints stacks.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    held: list[int] = []

    def put_back() -> None:
        for signum, handler in before.items():
            signal.signal(signum, handler)

    def hold(signum: int, _: object) -> None:
        held.append(signum)
        if len(held) > 1:
            put_back()
            signal.raise_signal(signum)

    for signum, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(signum, hold)
    try:
        yield
    finally:
        put_back()
        if held:
            signal.raise_signal(held[0])


def _join(address: str, quiet: dict[str, Any], plugins: PluginRefs) -> None:
    """Connects to a running cluster. Its port is tried first: Ray itself would try for minutes."""
    try:
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if address != "auto":
            socket.create_connection((host, int(port)), CONNECT_S).close()
        ray.init(address=address, runtime_env=_carried_code(plugins), **quiet)
    except (OSError, ValueError, OverflowError, AttributeError) as error:  # ports that are none, addresses of no text
        raise ConfigError(
            f"address: expected that of a running Ray cluster (host:port, ray://host:port or auto), got {address!r}:"
            f" {error}"
        ) from error


def _require_devices(placement: Placement) -> None:
    """On a private cluster nothing more will come, so there is no point in waiting for it."""
    for name, each in (("GPU", placement.gpus), ("TPU", placement.tpus)):
        wanted, there = each * placement.num_workers, ray.cluster_resources().get(name, 0)
        if wanted > there:
            raise ConfigError(
                f"placement: expected room for {wanted:g} {name}s, this machine has {there:g};"
                f" ask for fewer, or give the address of a Ray cluster"
            )


def worker_options(placement: Placement, plugins: PluginRefs | None = None) -> dict[str, Any]:
    """Options of a worker's actor. Ray restarts nothing by itself: retries are the pool's, in one place."""
    tpus = slice_hosts(placement.tpu_slice)[1] if placement.tpu_slice else placement.tpus
    return {
        "num_cpus": placement.cpus,
        "num_gpus": placement.gpus,
        "resources": {"TPU": tpus} if tpus else {},
        "max_restarts": 0,
        "max_task_retries": 0,
        "runtime_env": _runtime_env(placement, plugins or PluginRefs()),
    }


def worker_environment(placement: Placement) -> dict[str, str]:
    """Environment variables of a worker's process; JAX reads them before it opens a device."""
    platforms = "cuda,cpu" if placement.gpus else "tpu,cpu" if placement.tpus or placement.tpu_slice else "cpu"
    cache = Path("~/.cache/rollout-sampling/jax").expanduser()
    defaults = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        "HF_HUB_OFFLINE": "1",
    }
    memory = {}
    if 0 < placement.gpus < 1:  # whatever the driver has for itself; XLA refuses to be told under both names
        memory = {
            "XLA_CLIENT_MEM_FRACTION": f"{GPU_MEMORY * placement.gpus:.4g}",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "",
        }
    return {
        **memory,
        **(HOST_ENVIRONMENT if placement.tpu_slice else {}),
        **{name: os.environ.get(name, value) for name, value in defaults.items()},
        "JAX_PLATFORMS": platforms,
        # XLA sizes its CPU thread pool by NPROC, and by the machine where it is not set. With one thread sums
        # are not cut into blocks and have other bits.
        "NPROC": str(placement.threads),
    }


def match_worker(placement: Placement) -> None:
    """Gives this process the environment of a worker's: the same threads, devices and cache of compiled programs.

    JAX may have been imported, but must not have opened a device yet: it would keep the threads that it has.
    """
    import jax

    environment = worker_environment(placement)
    os.environ.update(environment)
    for name, value in environment.items():
        if name.startswith("JAX_"):  # read when JAX was imported
            jax.config.update(name.lower(), float(value) if name.endswith("_SECS") else value)


def _runtime_env(placement: Placement, plugins: PluginRefs) -> dict[str, Any]:
    """On this machine workers find code that is not installed by the path on which it lies."""
    environment = worker_environment(placement)
    ours = [] if _installed(_SOURCE_ROOT) else [_SOURCE_ROOT]
    code = [*ours, *(place.parent for place in _plugin_code(plugins).values())]
    if code and all(_runs_here(node) for node in ray.nodes()):
        paths = [*map(str, dict.fromkeys(code)), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return {"env_vars": environment}


def _carried_code(plugins: PluginRefs) -> dict[str, Any]:
    """To the hosts of a cluster Ray carries the packages of a checkout, a few hundred kilobytes, once per job; and the
    packages or files of plugins.

    Where the packages are installed, every host is expected to have the same.
    """
    ours = [] if _installed(_SOURCE_ROOT) else [_SOURCE_ROOT / name for name in _WORKER_PACKAGES]
    code = [str(place) for place in (*ours, *_plugin_code(plugins).values())]
    return {"py_modules": code} if code else {}


def _plugin_code(plugins: PluginRefs) -> dict[str, Path]:
    """Packages and modules of plugins that lie outside the installed ones, by name: folders, and files."""
    places = {}
    for name in plugins.top_modules():
        if name == "__main__":  # what a script or a notebook defines travels by itself
            continue
        try:
            spec = importlib.util.find_spec(name)
        except ValueError:  # a module that was made and not found
            continue
        folders = list(spec.submodule_search_locations or ()) if spec else []
        origin = folders[0] if folders else spec.origin if spec and spec.has_location else None
        if origin and not _installed(Path(origin).resolve().parent):
            places[name] = Path(origin).resolve()
    return places


def _installed(folder: Path) -> bool:
    """Whether a folder is one of those into which packages are installed."""
    places = {sysconfig.get_paths()["purelib"], site.getusersitepackages(), *site.getsitepackages()}
    return any(Path(place).resolve() == folder for place in places)


def _runs_here(node: dict[str, Any]) -> bool:
    return node["NodeManagerAddress"] == ray.util.get_node_ip_address()
