"""MemoryPlan: what an engine will hold, known before anything is allocated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from sampling.errors import ConfigError
from sampling.models import KVCache, ModelConfig, ModelMesh, Transformer
from sampling.models.mesh import shapes
from sampling.scoring import BLOCK_TOKENS, PASS_TOKENS, ROWS
from sampling.types import Geometry

SCORE_ARRAYS = 8
"""Arrays of the size [rows, vocab] that a step holds at the same time, at most: scores between two stages, their
weights, the sorted heads and histograms of filters and penalties."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the device.

    Attributes:
        weights: of the model.
        cache: keys and values of the slots, of the prompts on their way to them, and of sequences being scored.
        state: tokens, counts and records of the slots.
        workspace: what a step needs besides, an estimate from above.
    """

    weights: int
    cache: int
    state: int
    workspace: int

    @classmethod
    def of(cls, config: ModelConfig, geometry: Geometry, dtype: DTypeLike, mesh: ModelMesh | None = None) -> Self:
        """The plan of an engine; on a mesh, of each of its devices."""
        model = Transformer(config, dtype=dtype)
        one = jnp.zeros((1, 1), jnp.int32)
        weights = jax.eval_shape(lambda: model.init(jax.random.key(0), one, one)["params"])
        rows = geometry.slots + geometry.prefill_rows + ROWS
        cache = jax.eval_shape(lambda: KVCache.empty(config, rows, geometry.cache_len, dtype))
        tokens = max(geometry.slots, geometry.prefill_chunk, PASS_TOKENS)
        scored = max(geometry.slots, BLOCK_TOKENS)
        itemsize = np.dtype(dtype).itemsize
        gathered = len(mesh.devices) if mesh else 0
        activations = tokens * ((8 + gathered) * config.width + 4 * config.ffn) * max(itemsize, 4)
        return cls(
            weights=_bytes(shapes(mesh, weights, weights=True)),
            cache=_bytes(shapes(mesh, cache)),
            state=geometry.slots * (config.vocab_size * 5 + geometry.cache_len * 28),
            workspace=SCORE_ARRAYS * scored * config.vocab_size * 4 + activations,
        )

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.state + self.workspace

    def __str__(self) -> str:
        return sum_in_words(dataclasses.asdict(self))


def require_memory(
    config: ModelConfig, geometry: Geometry, dtype: DTypeLike, available: int | None, mesh: ModelMesh | None = None
) -> MemoryPlan:
    """The plan of an engine that fits.

    Args:
        available: bytes that may be used; None if nobody knows, and then everything fits.
        mesh: the devices among which the model is cut.
    Raises:
        ConfigError: it does not fit; the message has the numbers, and a geometry that would.
    """
    plan = MemoryPlan.of(config, geometry, dtype, mesh)
    if available is None or plan.total <= available:
        return plan
    raise ConfigError(
        f"geometry: {geometry.slots} slots of {geometry.cache_len} tokens need {plan}, and"
        f" {size_in_words(available)} are available; {_what_fits(config, geometry, dtype, available, mesh)}"
    )


def available_bytes() -> int | None:
    """Memory that this process may still use on its first device; None if the system does not tell."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        stats: dict[str, Any] = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        return None if limit is None else limit - stats.get("bytes_in_use", 0)
    limits = [_memory_available(), *_cgroup_left()]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _memory_available() -> int | None:
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _cgroup_left() -> list[int]:
    """What a container's limit leaves, where there is one."""
    left = []
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        files = Path(limit), Path(used)
        texts = [file.read_text().strip() for file in files if file.is_file()]
        if len(texts) == 2 and all(text.isdigit() for text in texts):
            left.append(int(texts[0]) - int(texts[1]))
    return left


def _what_fits(
    config: ModelConfig, geometry: Geometry, dtype: DTypeLike, available: int, mesh: ModelMesh | None
) -> str:
    """The largest number of slots, and else the largest cache, with which it would fit."""

    def fits(slots: int, cache_len: int) -> bool:
        smaller = Geometry(slots, cache_len, geometry.prefill_rows, geometry.prefill_chunk)
        return MemoryPlan.of(config, smaller, dtype, mesh).total <= available

    slots = _largest(lambda slots: fits(slots, geometry.cache_len), geometry.slots)
    cache_len = _largest(lambda cache_len: fits(geometry.slots, cache_len), geometry.cache_len)
    offers = [f"geometry.slots={slots}"] if slots else []
    offers += [f"geometry.cache_len={cache_len}"] if cache_len else []
    return f"{' or '.join(offers)} would fit" if offers else "no geometry of this model would fit"


def _largest(fits: Any, most: int) -> int:
    """The largest number up to `most` that fits; 0 if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _bytes(tree: Any) -> int:
    """Of shapes; of those that are cut among devices, each device's part."""
    leaves = jax.tree.leaves(tree)
    parts = [leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape for leaf in leaves]
    return sum(math.prod(part) * leaf.dtype.itemsize for part, leaf in zip(parts, leaves, strict=True))


def sum_in_words(parts: Mapping[str, int]) -> str:
    """Bytes by what they are for, and all of them: "weights 0.50 GiB + cache 0.25 GiB = 0.75 GiB"."""
    return " + ".join(f"{name} {size_in_words(size)}" for name, size in parts.items()) + (
        f" = {size_in_words(sum(parts.values()))}"
    )


def size_in_words(size: int) -> str:
    """Bytes in a unit that suits them."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"
