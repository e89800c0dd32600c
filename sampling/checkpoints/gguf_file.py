"""A GGUF file: its metadata, and its tensors under Transformers' names.

The header is parsed here rather than with gguf.GGUFReader, which takes two seconds for a vocabulary
of fifty thousand tokens and reads past the end of a truncated file; dequantisation is the gguf
package's.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

from sampling.errors import CheckpointError

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
"""Storage types that can be read."""

ROPE_DIVISORS = "rope_freqs.weight"
"""A table, not a parameter: divides the rotary frequencies. It belongs to the model's
configuration."""

_VERSIONS = (2, 3)
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class _Stored:
    """Where one tensor lies: its name in the file, storage type, shape (as torch states it) and
    byte offset."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class GGUFFile:
    """One GGUF file; see TensorFiles.

    Attributes:
        metadata: every key of the header, as plain values; arrays are lists.
        shapes: every parameter tensor by Transformers' name.
    Raises:
        CheckpointError: the file is no GGUF file, is truncated, or a tensor has an unsupported
            storage type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb") as file:
            try:
                header = _Header(file, path)
                stored = header.tensors()
            except ValueError as error:  # an unknown type code, or text that is no UTF-8
                raise CheckpointError(f"{path}: damaged GGUF header: {error}; copy it again") from error
        self.metadata = header.metadata
        for tensor in stored:
            if tensor.kind.name not in SUPPORTED_TYPES:
                raise CheckpointError(
                    f"{path}: tensor {tensor.name} is stored as {tensor.kind.name}; supported are"
                    f" {', '.join(SUPPORTED_TYPES)}"
                )
        self._stored = {_transformers_name(tensor.name): tensor for tensor in stored}
        self.shapes = {name: t.shape for name, t in self._stored.items() if name != ROPE_DIVISORS}

    def read(self, name: str) -> np.ndarray:
        tensor = self._stored[name]
        array = self._dequantise(tensor)
        # Llama's converter interleaves each head's two halves, for a rotary embedding of neighbouring pairs.
        if self.metadata.get("general.architecture") == "llama":
            if name.endswith("self_attn.q_proj.weight"):
                return _split_pairs(array, self._heads("head_count"))
            if name.endswith("self_attn.k_proj.weight"):
                return _split_pairs(array, self._heads("head_count_kv"))
        return array

    def where(self, name: str) -> str:
        return f"{self.path}: tensor {self._stored[name].name}"

    @property
    def rope_divisors(self) -> tuple[float, ...]:
        """The rotary frequencies' divisors; empty where the file has none."""
        if ROPE_DIVISORS not in self._stored:
            return ()
        return tuple(self._dequantise(self._stored[ROPE_DIVISORS]).tolist())

    @property
    def tokens(self) -> list[str]:
        """The vocabulary, without the entries at its end that only pad it to the embedding's size."""
        tokens = self.metadata.get("tokenizer.ggml.tokens", [])
        kinds = self.metadata.get("tokenizer.ggml.token_type", [])
        known = len(tokens)
        while 0 < known <= len(kinds) and kinds[known - 1] == gguf.TokenType.UNUSED:
            known -= 1
        return tokens[:known]

    def _heads(self, key: str) -> int:
        heads = self.metadata.get(f"llama.attention.{key}", self.metadata["llama.attention.head_count"])
        return int(heads)

    def _dequantise(self, tensor: _Stored) -> np.ndarray:
        raw = np.memmap(self.path, np.uint8, "r", offset=tensor.offset, shape=(tensor.num_bytes,))
        values = gguf.dequantize(raw.reshape(*tensor.shape[:-1], -1), tensor.kind)
        return values.reshape(tensor.shape)


class _Header:
    """Reads the header front to back; every read is checked against the end of the file."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self._size = path.stat().st_size
        if self._bytes(4) != b"GGUF":
            raise CheckpointError(f"{path}: expected a GGUF file, but it does not start with 'GGUF'")
        version = self._number("I")
        if version not in _VERSIONS:
            raise CheckpointError(f"{path}: GGUF version {version} is not supported; supported are 2 and 3")
        self._num_tensors = self._number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(self._number("Q")):
            key = self._string()
            self.metadata[key] = self._value(GGUFValueType(self._number("I")))

    def tensors(self) -> list[_Stored]:
        entries = []
        for _ in range(self._num_tensors):
            name = self._string()
            # GGUF counts dimensions from the fastest one.
            shape = tuple(self._number("Q") for _ in range(self._number("I")))[::-1]
            entries.append((name, GGMLQuantizationType(self._number("I")), shape, self._number("Q")))
        alignment = self.metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        start = -(-self._file.tell() // alignment) * alignment
        stored = []
        for name, kind, shape, offset in entries:
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            num_bytes = math.prod(shape) // block * block_bytes
            if start + offset + num_bytes > self._size:
                raise self._truncated(f"tensor {name} ends at byte {start + offset + num_bytes}")
            stored.append(_Stored(name, kind, shape, start + offset, num_bytes))
        return stored

    def _value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind != GGUFValueType.ARRAY:
            return self._number(_SCALARS[kind])
        item, count = GGUFValueType(self._number("I")), self._number("Q")
        if item in _SCALARS:
            code = _SCALARS[item]
            return list(struct.unpack(f"<{count}{code}", self._bytes(count * struct.calcsize(f"<{code}"))))
        return [self._value(item) for _ in range(count)]

    def _string(self) -> str:
        return self._bytes(self._number("Q")).decode("utf-8")

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}")))[0]

    def _bytes(self, count: int) -> bytes:
        data = self._file.read(count) if count <= self._size else b""
        if len(data) != count:
            raise self._truncated(f"its header wants {count} more bytes at byte {self._file.tell()}")
        return data

    def _truncated(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: the GGUF file is truncated: {what}, the file has {self._size} bytes; copy it again"
        )


def _transformers_name(name: str) -> str:
    """Transformers' name of a GGUF tensor; a name without a counterpart stays, and the loader
    refuses it."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    return _TOP_NAMES.get(name, name)


def _split_pairs(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows (0, h, 1, h+1, ...) of each head back to (0, 1, ..., h, h+1, ...), h half a head."""
    paired = array.reshape(heads, -1, 2, *array.shape[1:])
    return paired.swapaxes(1, 2).reshape(array.shape)
