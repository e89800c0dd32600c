"""The native code, compiled on the machine that runs it by the machine's own C++ compiler, once, and kept on disk."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

import jax

from sampling.processor import instruction_set

log = logging.getLogger(__name__)

FOLDER = Path("~/.cache/rollout-sampling/native")
"""Where compiled code lies; the environment variable ROLLOUT_NATIVE_CACHE names another place."""

SOURCE = Path(__file__).with_name("attention.cc")

FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",  # a product and a sum become one instruction, as in XLA's own code
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
)

_LIMIT_S = 120.0


class Unavailable(Exception):
    """There is no native code here; says why."""


@functools.cache
def registered() -> str:
    """The name under which XLA knows the code; empty where there is none, and XLA's own operations do its work.

    It names the source, the compiler and the flags: equal names promise equal bits on equal processors. The environment
    variable ROLLOUT_NATIVE=off does without, for hosts that have to agree with one that has no compiler.
    """
    if jax.default_backend() != "cpu":
        return ""
    try:
        path = _compiled()
        target = f"rollout_{path.stem.replace('-', '_')}"
        handler = ctypes.CDLL(str(path)).DecodeAttention
    except (Unavailable, OSError, AttributeError) as error:
        log.info("no native attention, which takes longer: %s", error)
        return ""
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu")
    return target


def _compiled() -> Path:
    """The library, compiled unless it is there already."""
    if os.environ.get("ROLLOUT_NATIVE", "").lower() in ("off", "0", "no", "false"):
        raise Unavailable("ROLLOUT_NATIVE is off")
    compiler = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise Unavailable("no C++ compiler was found; install g++ or clang++, or name one in CXX")
    command = [compiler, *FLAGS, f"-I{jax.ffi.include_dir()}"]
    made_of = (SOURCE.read_bytes(), *FLAGS, _run([compiler, "--version"]), version("jaxlib"), instruction_set())
    digest = hashlib.sha256(repr(made_of).encode()).hexdigest()[:12]
    folder = Path(os.environ.get("ROLLOUT_NATIVE_CACHE") or FOLDER).expanduser()
    path = folder / f"attention-{digest}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            made = Path(own) / path.name
            _run([*command, str(SOURCE), "-o", str(made)])
            made.replace(path)  # whole or not at all, whoever else compiles it at the same time
    return path


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise Unavailable(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    return done.stdout
