"""Rotary position embedding: turns each pair (i, i + head_dim/2) of a head by an angle that grows
with position."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from sampling.models.config import ModelConfig, RopeScaling


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Angle per position of each pair: float32 [head_dim / 2], radians per token."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = np.float32(1) / np.power(np.float32(config.rope_theta), exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / np.float32(scaling.factor)
    if scaling.kind == "table":
        return frequencies / np.asarray(scaling.divisors, np.float32)
    return _llama3_frequencies(frequencies, scaling)


def rope_angles(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every pair's angle.

    Args:
        positions: int32 [rows, chunk]; padding (-1) gets some angle that nobody reads.
    Returns:
        Two float32 arrays [rows, chunk, head_dim / 2].
    """
    frequencies = jnp.asarray(rope_frequencies(config))
    angles = positions.astype(jnp.float32)[:, :, None] * frequencies[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns `x` [rows, chunk, kv_heads, group, head_dim], in float32; the result has the dtype of
    `x`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, None, :], sin[:, :, None, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _llama3_frequencies(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Source: `_compute_llama3_parameters` of Transformers."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    blend = (scaling.original_max_position / wavelengths - low) / (high - low)
    kept = np.clip(blend, 0, 1)
    return ((1 - kept) * frequencies / scaling.factor + kept * frequencies).astype(np.float32)
