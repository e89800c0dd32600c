"""Tensors of a Transformers directory: one .safetensors file, or several named by an index."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import safetensors

from sampling.checkpoints.inspection import read_json
from sampling.errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_READABLE = ("F32", "F16", "BF16")


class SafetensorsFiles:
    """The tensors of all .safetensors files in `directory`; see TensorFiles.

    Raises:
        CheckpointError: there is no such file, one is truncated, or a shard of the index is
            missing.
    """

    def __init__(self, directory: Path) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, Path] = {}
        for path in _shards(directory):
            with _open(path) as file:
                for name in sorted(file.keys()):
                    if name in self._file_of:
                        raise CheckpointError(f"{path}: tensor {name} is also in {self._file_of[name].name}")
                    part = file.get_slice(name)
                    if part.get_dtype() not in _READABLE:
                        raise CheckpointError(
                            f"{path}: tensor {name} is stored as {part.get_dtype()}; supported are"
                            f" {', '.join(_READABLE)}"
                        )
                    self.shapes[name] = tuple(part.get_shape())
                    self._file_of[name] = path

    def read(self, name: str) -> np.ndarray:
        with _open(self._file_of[name]) as file:
            return file.get_tensor(name)

    def where(self, name: str) -> str:
        return f"{self._file_of[name]}: tensor {name}"


def _shards(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if not index.is_file():
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(
                f"{directory}: expected model.safetensors or {_INDEX}, found neither;"
                " save the model with save_pretrained(..., safe_serialization=True)"
            )
        return paths
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise CheckpointError(f"{index}: weight_map: expected a file name for each tensor, got {str(files)[:200]}")
    names = sorted(set(files.values()))
    for name in names:
        if not (directory / name).is_file():
            raise CheckpointError(f"{directory / name}: named by {_INDEX}, but missing; copy all {len(names)} shards")
    return [directory / name for name in names]


def _open(path: Path) -> safetensors.safe_open:
    try:
        path.open("rb").close()  # the library calls whatever it cannot open missing
        return safetensors.safe_open(path, framework="numpy")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise CheckpointError(
            f"{path}: not a complete safetensors file ({error}), {path.stat().st_size} bytes; copy it again"
        ) from error
