"""How the parameters of the Transformer are assembled from a checkpoint's tensors.

One list of leaves, each with the stored tensors it is made of, serves checking, loading and error
messages. Projections are [out, in], as torch keeps them; ours are fused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sampling.models import ModelConfig

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Leaf:
    """One parameter of the Transformer.

    Attributes:
        path: keys of the nested params dict.
        shape: of the parameter.
        sources: stored tensors it is made of, in the order in which `fuse` expects them.
        source_shapes: the shape that each of them must have.
        fuse: "copy" takes the single source as it is; "gate_up" and "qkv" fuse.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    source_shapes: tuple[tuple[int, ...], ...]
    fuse: Literal["copy", "gate_up", "qkv"] = "copy"

    def write(self, place: int, tensor: np.ndarray, out: np.ndarray) -> None:
        """Writes source number `place` into its part of `out` [*shape], converting the dtype on the
        way."""
        if self.fuse == "qkv":
            self._write_heads(place, tensor, out)
        elif self.fuse == "gate_up":
            out[place] = tensor
        else:
            out[...] = tensor

    def _write_heads(self, place: int, tensor: np.ndarray, out: np.ndarray) -> None:
        """Query heads are stored by key/value head first: head h reads key/value head h //
        q_per_kv."""
        kv_heads, slots, head_dim, *width = out.shape
        group = slots - 2
        heads = tensor.reshape(kv_heads, -1, head_dim, *width)
        out[:, slice(0, group) if place == 0 else slice(group + place - 1, group + place)] = heads


def layout(config: ModelConfig) -> Iterator[Leaf]:
    """Every parameter of a Transformer of this configuration."""
    vocab = (config.vocab_size, config.width)
    yield Leaf(("embedding",), vocab, (EMBEDDING,), (vocab,))
    for index in range(config.layers):
        yield from _layer(config, (f"layers_{index}",), f"model.layers.{index}")
    yield _norm(("final_norm",), "model.norm", config.width)
    if not config.tied_head:
        yield Leaf(("head",), vocab, (HEAD,), (vocab,))


def _layer(config: ModelConfig, path: tuple[str, ...], prefix: str) -> Iterator[Leaf]:
    width, ffn, head_dim = config.width, config.ffn, config.head_dim
    q_size, kv_size = config.heads * head_dim, config.kv_heads * head_dim
    fused = (config.kv_heads, config.q_per_kv + 2, head_dim)
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = tuple(f"{attention}.{name}_proj" for name in "qkv")
    gate_up = (f"{mlp}.gate_proj", f"{mlp}.up_proj")

    yield _norm((*path, "attention_norm"), f"{prefix}.input_layernorm", width)
    yield Leaf(
        (*path, "attention", "qkv_kernel"),
        (*fused, width),
        tuple(f"{name}.weight" for name in qkv),
        ((q_size, width), (kv_size, width), (kv_size, width)),
        "qkv",
    )
    if config.qkv_bias:
        biases = tuple(f"{name}.bias" for name in qkv)
        yield Leaf(
            (*path, "attention", "qkv_bias"),
            fused,
            biases,
            ((q_size,), (kv_size,), (kv_size,)),
            "qkv",
        )
    if config.qk_norm:
        yield _norm((*path, "attention", "q_norm"), f"{attention}.q_norm", head_dim)
        yield _norm((*path, "attention", "k_norm"), f"{attention}.k_norm", head_dim)
    yield from _projection((*path, "attention", "o"), f"{attention}.o_proj", q_size, width, config.o_bias)

    yield _norm((*path, "feed_forward_norm"), f"{prefix}.post_attention_layernorm", width)
    yield Leaf(
        (*path, "feed_forward", "gate_up_kernel"),
        (2, ffn, width),
        tuple(f"{name}.weight" for name in gate_up),
        ((ffn, width), (ffn, width)),
        "gate_up",
    )
    if config.mlp_bias:
        biases = tuple(f"{name}.bias" for name in gate_up)
        yield Leaf((*path, "feed_forward", "gate_up_bias"), (2, ffn), biases, ((ffn,), (ffn,)), "gate_up")
    yield from _projection((*path, "feed_forward", "down"), f"{mlp}.down_proj", ffn, width, config.mlp_bias)


def _norm(path: tuple[str, ...], source: str, size: int) -> Leaf:
    return Leaf((*path, "scale"), (size,), (f"{source}.weight",), ((size,),))


def _projection(path: tuple[str, ...], source: str, size_in: int, size_out: int, bias: bool) -> Iterator[Leaf]:
    *parent, name = path
    shape = (size_out, size_in)
    yield Leaf((*parent, f"{name}_kernel"), shape, (f"{source}.weight",), (shape,))
    if bias:
        yield Leaf((*parent, f"{name}_bias"), (size_out,), (f"{source}.bias",), ((size_out,),))
