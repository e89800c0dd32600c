"""The decoder-only transformer. One forward serves prefill, decode, scoring and training.

Tokens carry their positions, and position -1 means padding. That one convention covers left, right
and no padding, chunks of a prompt, single decode steps and rows that have nothing to do in this
step.

Between the embedding and the final norm a token is a column: activations are [features, tokens], and kernels
[..., in], as checkpoints store them. A product of few tokens is a third faster that way on a CPU
(docs/adr/0012), and other devices choose their own layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from sampling import native
from sampling.models.attention import attend, attend_cached, visible_keys
from sampling.models.config import ModelConfig
from sampling.models.kv_cache import KVCache
from sampling.models.mesh import ModelMesh, times
from sampling.models.remat import rematerialised
from sampling.models.rope import apply_rope, rope_angles

_normal = nn.initializers.normal(stddev=0.02)


class Transformer(nn.Module):
    """A Llama-like transformer: RMS norms, rotary positions, grouped-query attention, gated SiLU.

    `apply({"params": params}, tokens, positions, cache)` gives the hidden states and the cache; the
    output head is apart, so that a caller pays for logits only at the positions it needs:
    `apply({"params": params}, hidden, method="logits")`.

    Attributes:
        config: the checkpoint's shape.
        dtype: of the parameters and of the matrix products. Norms, softmax and logits are float32
            in any case.
        remat: a gradient computes each layer again instead of keeping what is inside. No value
            changes, nor any parameter's name.
        mesh: the devices among which its parameters are cut; None: one device.
    """

    config: ModelConfig
    dtype: DTypeLike = jnp.float32
    remat: bool = False
    mesh: ModelMesh | None = None

    @property
    def matmul_precision(self) -> str:
        """For `jax.default_matmul_precision`: float32 means float32 on every backend."""
        return "highest" if self.dtype == jnp.float32 else "default"

    def setup(self) -> None:
        config = self.config
        self.embedding = self.param("embedding", _normal, (config.vocab_size, config.width), self.dtype)
        self.layers = [Layer(config, self.dtype, self.mesh) for _ in range(config.layers)]
        self.final_norm = RMSNorm(config.norm_eps, self.dtype)
        if not config.tied_head:
            self.head = self.param("head", _normal, (config.vocab_size, config.width), self.dtype)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: KVCache | None = None,
        cache_rows: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache | None]:
        """Hidden states after the final norm.

        Args:
            tokens: int32 [rows, chunk].
            positions: int32 [rows, chunk]: each token's place in its row. -1 marks padding: such a
                token is neither attended to nor written to the cache, and its hidden state means
                nothing.
            cache: where earlier tokens' keys and values are. None: the chunk is all there is.
            cache_rows: int32 [rows], the cache's row of each row of tokens; None: the same. Several
                rows of tokens may be stretches of one row of the cache, in any order.
        Returns:
            hidden [rows, chunk, width] in the model's dtype, and the cache with the new tokens
            written at their positions (those at or past its end are dropped; the caller must refuse
            them before).
        """
        config = self.config
        angles = rope_angles(config, positions)
        # Cast after the look-up, so that gradients of a float32 embedding add up in float32.
        x = jnp.asarray(self.embedding)[tokens.reshape(-1)].astype(self.dtype).T
        keys, values = [], []
        for index, layer in enumerate(self.layers):
            if self.remat and cache is None and not self.is_initializing():
                x = self._rematerialised(index)(x, layer.variables, positions, angles)
                continue
            x, new = layer(x, positions, angles, cache, cache_rows, index)
            keys.append(new[0])
            values.append(new[1])
        hidden = self.final_norm(x).T.reshape(*tokens.shape, config.width)
        return hidden, None if cache is None else KVCache(keys=tuple(keys), values=tuple(values))

    def _rematerialised(self, index: int) -> Callable[..., jax.Array]:
        """A layer without a cache, as a function of its input, its variables, positions and angles."""
        layer = Layer(self.config, self.dtype, self.mesh, parent=None)

        def call(x: jax.Array, variables: Any, positions: jax.Array, angles: Any) -> jax.Array:
            forward: Any = layer.apply
            return forward(variables, x, positions, angles, None, None, index)[0]

        return rematerialised(call)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Scores of the next token: hidden [..., width] to float32 [..., vocab]."""
        head = self.embedding if self.config.tied_head else self.head
        columns = hidden.reshape(-1, self.config.width).astype(self.dtype).T
        # The barrier keeps XLA from folding the last turn into the product, which takes a third longer then on a CPU.
        scores = jax.lax.optimization_barrier(times(head.astype(self.dtype), columns))
        if self.mesh is not None:
            scores = jax.lax.with_sharding_constraint(scores, self.mesh.whole)
        return scores.T.reshape(*hidden.shape[:-1], -1)


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    config: ModelConfig
    dtype: DTypeLike
    mesh: ModelMesh | None = None

    def setup(self) -> None:
        self.attention_norm = RMSNorm(self.config.norm_eps, self.dtype)
        self.attention = Attention(self.config, self.dtype, self.mesh)
        self.feed_forward_norm = RMSNorm(self.config.norm_eps, self.dtype)
        self.feed_forward = FeedForward(self.config, self.dtype, self.mesh)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        cache: KVCache | None,
        cache_rows: jax.Array | None,
        index: int,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        mixed, new = self.attention(self.attention_norm(x), positions, angles, cache, cache_rows, index)
        x = x + mixed
        return x + self.feed_forward(self.feed_forward_norm(x)), new


class Attention(nn.Module):
    """Grouped-query attention with one fused projection.

    The fused kernel is [width, kv_heads, q_per_kv + 2, head_dim]: each key/value head's queries,
    then its key, then its value. Cutting it along kv_heads therefore gives each device complete
    groups.
    """

    config: ModelConfig
    dtype: DTypeLike
    mesh: ModelMesh | None = None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        cache: KVCache | None,
        cache_rows: jax.Array | None,
        index: int,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        config = self.config
        window = config.sliding_windows[index]
        rows, chunk = positions.shape
        group = config.q_per_kv
        shape = (config.kv_heads, group + 2, config.head_dim)
        qkv = _project(self, "qkv", x, (*shape, config.width), config.qkv_bias)
        queries_and_key, value = qkv[:, : group + 1], qkv[:, group + 1]
        if config.qk_norm:
            query = RMSNorm(config.norm_eps, self.dtype, name="q_norm")(queries_and_key[:, :group])
            key = RMSNorm(config.norm_eps, self.dtype, name="k_norm")(queries_and_key[:, group:])
            queries_and_key = jnp.concatenate([query, key], axis=1)
        turned = apply_rope(queries_and_key, *angles)
        turned = turned.transpose(3, 0, 1, 2).reshape(rows, chunk, config.kv_heads, group + 1, config.head_dim)
        value = value.transpose(2, 0, 1).reshape(rows, chunk, config.kv_heads, config.head_dim)
        query, key = turned[:, :, :, :group], turned[:, :, :, group]
        if cache is None:
            keys, values = key.swapaxes(1, 2), value.swapaxes(1, 2)
            mixed = attend(query, keys, values, visible_keys(positions, positions, window))
        else:
            own = jnp.arange(rows, dtype=jnp.int32) if cache_rows is None else cache_rows
            keys, values = cache.write(index, own, positions, key, value)
            if self.mesh is None and native.serves(query, keys):
                mixed = native.attend(query, keys, values, positions, window, own)
            else:
                mixed = attend_cached(query, keys, values, positions, window, cache_rows)
        mixed = mixed.reshape(rows * chunk, config.heads * config.head_dim).T
        kernel = (config.width, config.heads * config.head_dim)
        return _project(self, "o", mixed.astype(self.dtype), kernel, config.o_bias), (keys, values)


class FeedForward(nn.Module):
    """Gated SiLU with gate and up fused into one kernel [width, 2, ffn]."""

    config: ModelConfig
    dtype: DTypeLike
    mesh: ModelMesh | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        fused = _project(self, "gate_up", x, (2, config.ffn, config.width), config.mlp_bias)
        # On one device two halves of the plain product, as it comes; on a mesh each half has its part on every device.
        gate, up = fused if self.mesh else jnp.split(fused.reshape(2 * config.ffn, -1), 2)
        return _project(self, "down", nn.silu(gate) * up, (config.width, config.ffn), config.mlp_bias)


class RMSNorm(nn.Module):
    """Divides by the root mean square over the features, the last axis but one, and scales, in float32."""

    eps: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-2],), self.dtype)
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-2, keepdims=True) + self.eps)
        scale = scale.astype(jnp.float32).reshape((1,) * (x.ndim - 2) + (-1, 1))
        return (normed * scale).astype(self.dtype)


def _project(module: Any, name: str, x: jax.Array, shape: tuple[int, ...], bias: bool) -> jax.Array:
    """The kernel `name` [..., in] times x [in, tokens]: [..., tokens]."""
    kernel = module.param(f"{name}_kernel", _normal, shape, module.dtype).astype(module.dtype)
    if module.mesh is None:  # as a plain matrix, which a CPU multiplies 3 % faster
        out = times(kernel.reshape(-1, shape[-1]), x).reshape(*shape[:-1], -1)
    else:
        out = module.mesh.product(f"{name}_kernel", kernel, x)
    out = out.astype(module.dtype)
    if bias:
        stored = module.param(f"{name}_bias", nn.initializers.zeros, shape[:-1], module.dtype)
        out = out + stored.astype(module.dtype)[..., None]
    return out
