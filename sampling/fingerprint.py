"""The numerics fingerprint: everything besides weights and requests that can change a bit of a result."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from importlib.metadata import version
from typing import Any

import jax

from sampling import native
from sampling.processor import instruction_set
from sampling.types import Geometry

NUMERICS_VERSION = 9
"""Rises with every change of the compiled programs that can change a bit."""


def numerics_fingerprint(geometry: Geometry, dtype: str, num_devices: int = 1) -> dict[str, Any]:
    """What results of this process depend on, as plain values. Equal fingerprints promise equal bits.

    Args:
        geometry: the engine's fixed shapes.
        dtype: of the model's matrix products.
        num_devices: among which the model is cut.
    """
    devices = jax.local_devices()
    facts: dict[str, Any] = {
        "numerics_version": NUMERICS_VERSION,
        "geometry": dataclasses.asdict(geometry),
        "dtype": dtype,
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "num_devices": num_devices,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    if facts["platform"] == "cpu":
        # XLA compiles for the processor at hand and divides work among a fixed number of threads.
        facts["cpu"] = instruction_set()
        facts["threads"] = int(os.environ.get("NPROC") or len(os.sched_getaffinity(0)))
        facts["native"] = native.registered() if (dtype, num_devices) == native.TAKES else ""
    return facts


def fingerprint_digest(facts: dict[str, Any]) -> str:
    """A short name for a fingerprint: 16 hex digits."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
