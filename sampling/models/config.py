"""ModelConfig: the shape of a decoder-only transformer, as its checkpoint describes it.

Frozen and hashable, so that it can be a static argument of a compiled program. A setting that this model code does not
implement is refused by name; none is ever ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sampling.errors import CheckpointError

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MistralForCausalLM": "mistral",
}
"""Architecture names of config.json, and the family that each belongs to."""

MAX_LAYERS = 10_000
"""More is a damaged file rather than a model."""

# Settings that change what the model computes, with the only values under which this code computes the same.
_REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "partial_rotary_factor": (None, 1, 1.0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "quantization_config": (None,),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
}


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies of a long-context checkpoint differ from the plain geometric series.

    Attributes:
        kind: "linear" divides every frequency by `factor`; "llama3" divides the slow ones, keeps
            the fast ones and blends between; "table" divides frequency i by `divisors[i]`, as GGUF
            files state it.
        factor: the divisor of "linear" and "llama3".
        low_freq_factor, high_freq_factor: "llama3" blends where a wavelength lies between
            original_max_position / high_freq_factor and original_max_position / low_freq_factor
            tokens.
        original_max_position: context length, in tokens, before the extension.
        divisors: one per frequency, head_dim / 2 of them.
    """

    kind: Literal["linear", "llama3", "table"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0
    divisors: tuple[float, ...] = ()

    @classmethod
    def from_hf(cls, settings: Mapping[str, Any]) -> RopeScaling | None:
        """Reads `rope_scaling` or `rope_parameters`; None where the frequencies are the plain ones.

        Raises:
            CheckpointError: the type is not supported, or one of its settings is missing.
        """
        kind = settings.get("rope_type", settings.get("type", "default"))
        if kind in (None, "default"):
            return None
        if kind == "linear":
            return cls("linear", factor=_real(settings, "factor"))
        if kind == "llama3":
            return cls(
                "llama3",
                factor=_real(settings, "factor"),
                low_freq_factor=_real(settings, "low_freq_factor"),
                high_freq_factor=_real(settings, "high_freq_factor"),
                original_max_position=_whole(settings, "original_max_position_embeddings"),
            )
        raise CheckpointError(
            f"config.json: rope scaling of type {kind!r} is not supported; supported are default, linear, llama3"
        )


@dataclass(frozen=True)
class ModelConfig:
    """Everything that shapes the transformer's computation and its parameters.

    Attributes:
        family: "llama", "qwen2", "qwen3" or "mistral".
        vocab_size: rows of the embedding and columns of the logits, padding ids of the head
            included.
        width: size of the residual stream.
        layers, heads, kv_heads, head_dim, ffn: counts and sizes; heads is a multiple of kv_heads.
        norm_eps: added to the mean square inside every RMS norm.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how they are stretched; None if they are not.
        tied_head: the output head is the embedding.
        qkv_bias, o_bias, mlp_bias: which projections add a bias.
        qk_norm: queries and keys pass an RMS norm per head before the rotary embedding (Qwen3).
        sliding_windows: for each layer, how many keys a query sees, itself included; None sees all
            before it.
        max_position: the context length, in tokens, that the checkpoint was trained for.
    Raises:
        CheckpointError: the sizes contradict each other.
    """

    family: str
    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied_head: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    max_position: int

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "ffn"):
            if getattr(self, name) < 1:
                raise CheckpointError(f"model config: {name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise CheckpointError(
                f"model config: {self.heads} heads cannot share {self.kv_heads} key/value heads evenly"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"model config: head_dim must be even to be rotated, got {self.head_dim}")
        if len(self.sliding_windows) != self.layers:
            raise CheckpointError(f"model config: {len(self.sliding_windows)} sliding windows for {self.layers} layers")
        if any(window is not None and window < 1 for window in self.sliding_windows):
            raise CheckpointError(f"model config: a sliding window below 1 in {self.sliding_windows}")

    @property
    def q_per_kv(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @classmethod
    def from_hf(cls, settings: Mapping[str, Any]) -> ModelConfig:
        """Reads a parsed config.json, as Transformers 4 or Transformers 5 writes it.

        Raises:
            CheckpointError: the architecture or one of its settings is not supported, or a setting
                is missing.
        """
        family = _family(settings)
        for name, accepted in _REQUIRED_VALUES.items():
            if name in settings and settings[name] not in accepted:
                raise CheckpointError(
                    f"config.json: {name} = {settings[name]!r} is not supported; expected {accepted[0]!r}"
                )
        width, heads = _whole(settings, "hidden_size"), _whole(settings, "num_attention_heads")
        layers = _whole(settings, "num_hidden_layers", most=MAX_LAYERS)
        attention_bias = bool(settings.get("attention_bias", False))
        rope = _rope_settings(settings)
        return cls(
            family=family,
            vocab_size=_whole(settings, "vocab_size"),
            width=width,
            layers=layers,
            heads=heads,
            kv_heads=_kv_heads(settings, family, heads),
            head_dim=_optional_whole(settings, "head_dim") or _default_head_dim(family, width, heads),
            ffn=_whole(settings, "intermediate_size"),
            norm_eps=_real(settings, "rms_norm_eps"),
            rope_theta=_real({"rope_theta": 10000.0, **rope}, "rope_theta"),
            rope_scaling=RopeScaling.from_hf(rope),
            tied_head=bool(settings.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or attention_bias,
            o_bias=family != "qwen2" and attention_bias,
            mlp_bias=bool(settings.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            sliding_windows=_sliding_windows(settings, family, layers),
            max_position=_whole(settings, "max_position_embeddings"),
        )


def _whole(settings: Mapping[str, Any], name: str, least: int = 1, most: int = 2**31 - 1) -> int:
    value = settings.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise CheckpointError(f"config.json: {name}: expected a whole number in {least} .. {most}, got {value!r}")
    return value


def _optional_whole(settings: Mapping[str, Any], name: str) -> int | None:
    return None if settings.get(name) is None else _whole(settings, name)


def _real(settings: Mapping[str, Any], name: str) -> float:
    value = settings.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"config.json: {name}: expected a finite number, got {value!r}")
    return float(value)


def _family(settings: Mapping[str, Any]) -> str:
    names = settings.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"config.json: architectures: expected a list of names, got {names!r}")
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    if not names and settings.get("model_type") in [*FAMILIES.values()]:
        return settings["model_type"]
    came = ", ".join(names) or f"model_type {settings.get('model_type')!r}"
    raise CheckpointError(f"config.json: architecture {came} is not supported; supported are {', '.join(FAMILIES)}")


def _kv_heads(settings: Mapping[str, Any], family: str, heads: int) -> int:
    # The first Llama files predate grouped heads and leave the setting out.
    if family == "llama" and settings.get("num_key_value_heads") is None:
        return heads
    return _whole(settings, "num_key_value_heads")


def _default_head_dim(family: str, width: int, heads: int) -> int:
    return 128 if family == "qwen3" else width // heads


def _rope_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings in one mapping, wherever the writer put them."""
    nested = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if not isinstance(nested, Mapping):
        raise CheckpointError(f"config.json: rope_parameters: expected an object, got {nested!r}")
    if any(isinstance(value, Mapping) for value in nested.values()):
        raise CheckpointError("config.json: rope_parameters that differ between layer types are not supported")
    if nested.get("partial_rotary_factor", 1) != 1:
        raise CheckpointError(
            f"config.json: partial_rotary_factor = {nested['partial_rotary_factor']!r} is not supported; expected 1"
        )
    top = {"rope_theta": settings["rope_theta"]} if settings.get("rope_theta") is not None else {}
    return {**top, **nested}


def _sliding_windows(settings: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    if family == "mistral":
        return (_optional_whole(settings, "sliding_window"),) * layers
    window, kinds = settings.get("sliding_window"), settings.get("layer_types")
    if family == "llama" or not settings.get("use_sliding_window", False):
        window = None
    if window is not None:
        window = _whole(settings, "sliding_window")
    if kinds is None:
        first = 0 if window is None else _whole(settings, "max_window_layers", least=0)
        return tuple(None if window is None or i < first else window for i in range(layers))
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise CheckpointError(f"config.json: layer_types: expected a list of names, got {kinds!r}")
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise CheckpointError(
            f"config.json: layer_types {sorted(unknown)} are not supported; supported are full_attention,"
            " sliding_attention"
        )
    if "sliding_attention" in kinds and window is None:
        raise CheckpointError("config.json: layer_types has sliding_attention layers, but no sliding_window is set")
    return tuple(window if k == "sliding_attention" else None for k in kinds)
