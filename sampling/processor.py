"""The processor, as far as compiled code depends on it."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path


def instruction_set() -> str:
    """Names it: machine type and, where the system tells, a digest of the processor's feature flags."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    flags = next(
        (line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features"))),
        [],
    )
    digest = hashlib.sha256(" ".join(sorted(flags)).encode()).hexdigest()[:8]
    return f"{platform.machine()}-{digest}"
