"""What a file of tensors offers the loader, whatever its format: names, shapes and one array at a
time.

Names and shapes are those of Transformers' models; a GGUF file is presented under the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np


class TensorFiles(Protocol):
    """The tensors of one checkpoint, read lazily."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor that is stored, by Transformers' name."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor, dequantised where the file is quantised; float32, float16 or bfloat16."""
        ...

    def where(self, name: str) -> str:
        """The file that holds the tensor, and its name there, for messages."""
        ...
