"""A model cut among devices: on_four_devices.py in a process of its own, since devices are counted when JAX starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOUR = "--xla_force_host_platform_device_count=4"


@pytest.mark.slow
def test_a_model_on_four_devices():
    checks = Path(__file__).with_name("on_four_devices.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(checks)]
    found = subprocess.run(
        command,
        env={**os.environ, "XLA_FLAGS": FOUR},
        cwd=checks.parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert found.returncode == 0, found.stdout[-4000:]
