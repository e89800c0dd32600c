"""load_checkpoint: the parameters of the Transformer, from files."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from sampling.checkpoints.gguf_file import GGUFFile
from sampling.checkpoints.inspection import CheckpointFormat, CheckpointInfo, inspect_checkpoint
from sampling.checkpoints.layout import EMBEDDING, HEAD, Leaf, layout
from sampling.checkpoints.safetensors_files import SafetensorsFiles
from sampling.checkpoints.tensors import TensorFiles
from sampling.errors import CheckpointError

_HARMLESS = ("rotary_emb.inv_freq",)
"""Endings of tensors that old files carry and that say nothing that the configuration does not."""


_ALIGNMENT = 64
"""Bytes of which the address of an array must be a multiple for XLA to use it as it lies."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        info: what it is.
        params: nested dict of read-only NumPy arrays for `Transformer(info.config)`; put them on a device
            before use.
    """

    info: CheckpointInfo
    params: dict[str, Any]


def load_checkpoint(
    reference: str | Path,
    dtype: DTypeLike = jnp.float32,
    progress: Callable[[int, int], None] | None = None,
) -> Checkpoint:
    """Reads a checkpoint's weights, one stored tensor at a time.

    Names and shapes of all tensors are checked before any is read.

    Args:
        reference: see inspect_checkpoint.
        dtype: of the parameters, which are read-only.
        progress: called with (bytes done, bytes in total) of the parameters, after each of them.
    Raises:
        CheckpointError: as inspect_checkpoint; or a tensor is missing, surplus or of another shape.
    """
    info = inspect_checkpoint(reference)
    files: TensorFiles
    files = GGUFFile(info.path) if info.format is CheckpointFormat.GGUF else SafetensorsFiles(info.path)
    leaves = list(layout(info.config))
    _check(info, leaves, files)
    item_bytes = np.dtype(dtype).itemsize
    total = sum(math.prod(leaf.shape) for leaf in leaves) * item_bytes
    params: dict[str, Any] = {}
    done = 0
    for leaf in leaves:
        array = _aligned(leaf.shape, np.dtype(dtype))
        for place, source in enumerate(leaf.sources):
            leaf.write(place, files.read(source), array)
        array.flags.writeable = False  # an engine shares it
        _insert(params, leaf.path, array)
        done += array.nbytes
        if progress is not None:
            progress(done, total)
    _check_tied_head(info, files, params)
    return Checkpoint(info, params)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array without values, where JAX can use it on a CPU as it lies: weights are in memory once, not twice."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)


def _check(info: CheckpointInfo, leaves: list[Leaf], files: TensorFiles) -> None:
    wanted = {}
    for leaf in leaves:
        for source, shape in zip(leaf.sources, leaf.source_shapes, strict=True):
            wanted[source] = shape
            name = "/".join(leaf.path)
            if source not in files.shapes:
                hint = (
                    "; the configuration says that the head is not tied to the embedding"
                    if source == HEAD
                    else "; is this file of another model or size?"
                )
                raise CheckpointError(
                    f"{info.path}: expected tensor {source} {list(shape)} for parameter {name}, found none{hint}"
                )
            if files.shapes[source] != shape:
                raise CheckpointError(
                    f"{files.where(source)}: expected shape {list(shape)} for parameter {name},"
                    f" got {list(files.shapes[source])}"
                )
    surplus = [name for name in files.shapes if name not in wanted and not _may_be_dropped(name, info)]
    if surplus:
        raise CheckpointError(
            f"{files.where(surplus[0])}: the model has no parameter for it"
            f" ({len(surplus)} such tensors: {', '.join(surplus[:5])}{', ...' if len(surplus) > 5 else ''})"
        )


def _may_be_dropped(name: str, info: CheckpointInfo) -> bool:
    return name.endswith(_HARMLESS) or (name == HEAD and info.config.tied_head)


def _check_tied_head(info: CheckpointInfo, files: TensorFiles, params: dict[str, Any]) -> None:
    if not info.config.tied_head or HEAD not in files.shapes:
        return
    embedding = params["embedding"]
    head = files.read(HEAD)
    if head.shape != embedding.shape or not np.array_equal(head.astype(embedding.dtype), embedding):
        warnings.warn(
            f"{files.where(HEAD)}: differs from {EMBEDDING}, but the configuration ties the two;"
            " the embedding is used for both",
            stacklevel=3,
        )


def _insert(params: dict[str, Any], path: tuple[str, ...], array: np.ndarray) -> None:
    for key in path[:-1]:
        params = params.setdefault(key, {})
    params[path[-1]] = array
