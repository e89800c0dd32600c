"""ModelConfig from the metadata of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sampling.checkpoints.gguf_file import GGUFFile
from sampling.errors import CheckpointError
from sampling.models import ModelConfig, RopeScaling
from sampling.models.config import MAX_LAYERS

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Values of general.architecture that can be read. Mistral's files call themselves llama."""


def gguf_config(file: GGUFFile) -> ModelConfig:
    """The model configuration that a GGUF file describes.

    Raises:
        CheckpointError: the architecture or one of its settings is not supported, or a setting is
            missing.
    """
    family = file.metadata.get("general.architecture")
    if family not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: architecture {family!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )

    def real(key: str, default: float | None = None) -> Any:
        value = file.metadata.get(f"{family}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckpointError(f"{file.path}: {family}.{key}: expected a number, got {value!r}")
        return value

    def whole(key: str, default: int | None = None) -> int:
        value = real(key, default)
        if value != int(value) or not 1 <= value < 2**31:
            raise CheckpointError(f"{file.path}: {family}.{key}: expected a whole number above 0, got {value!r}")
        return int(value)

    for key in ("expert_count", "attention.sliding_window"):
        if file.metadata.get(f"{family}.{key}"):
            found = file.metadata[f"{family}.{key}"]
            raise CheckpointError(f"{file.path}: {family}.{key} = {found} is not supported; expected none")
    heads, width = whole("attention.head_count"), whole("embedding_length")
    layers = whole("block_count")
    if layers > MAX_LAYERS:
        raise CheckpointError(f"{file.path}: {family}.block_count: expected at most {MAX_LAYERS}, got {layers}")
    head_dim = whole("attention.key_length", width // heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if whole(key, head_dim) != head_dim:
            raise CheckpointError(
                f"{file.path}: {family}.{key} = {whole(key)} is not supported; expected head_dim = {head_dim}"
            )
    first = "model.layers.0"
    return ModelConfig(
        family=family,
        vocab_size=file.shapes.get("model.embed_tokens.weight", (0,))[0],
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=whole("attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn=whole("feed_forward_length"),
        norm_eps=float(real("attention.layer_norm_rms_epsilon")),
        rope_theta=float(real("rope.freq_base", 10000.0)),
        rope_scaling=_rope_scaling(file, family, head_dim, real),
        tied_head="lm_head.weight" not in file.shapes,
        qkv_bias=f"{first}.self_attn.q_proj.bias" in file.shapes,
        o_bias=f"{first}.self_attn.o_proj.bias" in file.shapes,
        mlp_bias=f"{first}.mlp.down_proj.bias" in file.shapes,
        qk_norm=f"{first}.self_attn.q_norm.weight" in file.shapes,
        sliding_windows=(None,) * layers,
        max_position=whole("context_length"),
    )


def _rope_scaling(file: GGUFFile, family: str, head_dim: int, real: Callable[[str], Any]) -> RopeScaling | None:
    divisors = file.rope_divisors
    if divisors:
        if len(divisors) != head_dim // 2:
            raise CheckpointError(
                f"{file.path}: rope_freqs.weight has {len(divisors)} entries; expected head_dim / 2 = {head_dim // 2}"
            )
        return RopeScaling("table", divisors=divisors)
    kind = file.metadata.get(f"{family}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return RopeScaling("linear", factor=float(real("rope.scaling.factor")))
    raise CheckpointError(
        f"{file.path}: {family}.rope.scaling.type = {kind!r} is not supported; supported are none, linear"
    )
