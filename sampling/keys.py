"""Randomness as data: one key per row, one uniform per draw, from global names alone.

A row's key comes from (seed, prompt id, sample index) and a draw's uniform from (row key, draw index). Slot, batch,
worker and arrival order never enter. docs/keys.md is the specification, with test vectors; this file is its
implementation, and it runs unchanged on NumPy arrays (host) and JAX arrays (device).

Source: Threefry-2x32 with 20 rounds, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PROMPT_HIGH, PROMPT_LOW, SAMPLE, DRAW = 1, 2, 3, 4
"""Domains: the first counter word of each derivation, so that no two kinds of number can meet."""

UNIFORM_BITS = 24
"""Bits of a uniform: the finest grid on [0, 1) whose every point is a float32."""

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry2x32(key: Any, counter: Any) -> Any:
    """The Threefry-2x32 block function.

    Args:
        key: uint32 [..., 2].
        counter: uint32 [..., 2].
    Returns:
        uint32 [..., 2].
    """
    k0, k1 = key[..., 0], key[..., 1]
    schedule = (k0, k1, k0 ^ k1 ^ np.uint32(_PARITY))
    x0, x1 = counter[..., 0] + k0, counter[..., 1] + k1
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            x0 = x0 + x1
            x1 = (x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))
            x1 = x1 ^ x0
        x0 = x0 + schedule[(block + 1) % 3]
        x1 = x1 + schedule[(block + 2) % 3] + np.uint32(block + 1)
    xp: Any = jnp if isinstance(x0, jax.Array) else np
    return xp.stack([x0, x1], axis=-1)


def row_key(seed: int, prompt_id: str, sample_index: int) -> np.ndarray:
    """The key of one row.

    Args:
        seed: the run's seed, 0 .. 2^64 - 1.
        prompt_id: any string; its SHA-256 is the key material.
        sample_index: which sample of the prompt, 0 .. 2^32 - 1.
    Returns:
        uint32 [2].
    """
    digest = hashlib.sha256(prompt_id.encode("utf-8")).digest()
    high, low = int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:8], "big")
    # One row, not a scalar: NumPy warns of a wrap-around in scalars, and wrapping around is the point.
    key = np.array([[seed >> 32, seed & 0xFFFFFFFF]], np.uint32)
    for domain, value in ((PROMPT_HIGH, high), (PROMPT_LOW, low), (SAMPLE, sample_index)):
        key = threefry2x32(key, np.array([[domain, value]], np.uint32))
    return key[0]


def uniforms(keys: jax.Array, draw_index: jax.Array) -> jax.Array:
    """The uniform of one draw per row.

    Args:
        keys: uint32 [rows, 2], the rows' keys.
        draw_index: int32 [rows], how many tokens each row has drawn before.
    Returns:
        float32 [rows], multiples of 2^-24 in [0, 1).
    """
    index = draw_index.astype(jnp.uint32)
    counter = jnp.stack([jnp.full_like(index, DRAW), index], axis=-1)
    bits = threefry2x32(keys, counter)[..., 0] >> np.uint32(32 - UNIFORM_BITS)
    return bits.astype(jnp.float32) * np.float32(2.0**-UNIFORM_BITS)
