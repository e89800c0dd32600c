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
    """Cosine and sine by which `apply_rope` turns the features of a head.

    Args:
        positions: int32 [rows, chunk]; padding (-1) gets some angle that nobody reads.
    Returns:
        Two float32 arrays [head_dim, rows * chunk]. Both features of a pair have one angle; the sine of the first has
        its sign changed.
    """
    frequencies = jnp.asarray(rope_frequencies(config))
    angles = frequencies[:, None] * positions.astype(jnp.float32).reshape(1, -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([cos, cos]), jnp.concatenate([-sin, sin])


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns `x` [kv_heads, group, head_dim, tokens], in float32; the result has the dtype of `x`."""
    wide = x.astype(jnp.float32)
    partners = jnp.roll(wide, wide.shape[2] // 2, axis=2)
    turned = (wide * cos[None, None] + partners * sin[None, None]).astype(x.dtype)
    # Whoever wants another order of axes would otherwise have every number turned where it then lies, one at a time.
    return jax.lax.optimization_barrier(turned)


def _llama3_frequencies(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Source: `_compute_llama3_parameters` of Transformers."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    blend = (scaling.original_max_position / wavelengths - low) / (high - low)
    kept = np.clip(blend, 0, 1)
    return ((1 - kept) * frequencies / scaling.factor + kept * frequencies).astype(np.float32)
