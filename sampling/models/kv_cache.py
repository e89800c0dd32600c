"""KVCache: the keys and values of every slot's tokens, one array per layer, indexed by position."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from sampling.models.config import ModelConfig


@struct.dataclass
class KVCache:
    """Keys and values of all layers. The key of the token at position p lies at index p.

    What lies beyond a row's last position is left over from earlier tokens; no query ever sees it,
    since a key is visible only up to the query's own position. A slot is therefore free without
    being cleared.

    Attributes:
        keys: per layer, [rows, kv_heads, cache_len, head_dim], rotated already.
        values: per layer, the same shape.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    @classmethod
    def empty(cls, config: ModelConfig, rows: int, cache_len: int, dtype: DTypeLike = jnp.float32) -> KVCache:
        """A cache of zeros for `rows` rows of up to `cache_len` tokens each."""
        shape = (rows, config.kv_heads, cache_len, config.head_dim)
        layers = range(config.layers)
        return cls(
            keys=tuple(jnp.zeros(shape, dtype) for _ in layers),
            values=tuple(jnp.zeros(shape, dtype) for _ in layers),
        )

    @property
    def rows(self) -> int:
        return self.keys[0].shape[0]

    @property
    def cache_len(self) -> int:
        return self.keys[0].shape[2]

    def fill(self, source: KVCache, row: jax.Array, slots: jax.Array, count: jax.Array) -> KVCache:
        """This cache with `row` of another one copied, whole, to some slots.

        Args:
            source: a cache of the same layers and length.
            row: int32 [], which of its rows.
            slots: int32 [n], of which the first `count` (int32 []) are filled; those must be rows of this cache.
        """

        def copied(i: jax.Array, cache: KVCache) -> KVCache:
            def one(layer: jax.Array, new: jax.Array) -> jax.Array:
                content = jax.lax.dynamic_index_in_dim(new, row)
                return jax.lax.dynamic_update_index_in_dim(layer, content, slots[i], axis=0)

            return jax.tree.map(one, cache, source)

        return jax.lax.fori_loop(jnp.int32(0), count, copied, self)

    def write(
        self, layer: int, positions: jax.Array, keys: jax.Array, values: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """One layer's keys and values with new tokens written at their positions.

        Args:
            layer: which layer.
            positions: int32 [rows, chunk]; -1 (padding) and positions past the end are dropped,
                never moved.
            keys, values: [rows, chunk, kv_heads, head_dim].
        Returns:
            The layer's keys and values, [rows, kv_heads, cache_len, head_dim].
        """
        index = _drop_outside(positions, self.cache_len)
        row = jnp.arange(self.rows, dtype=jnp.int32)[:, None]

        def written(stored: jax.Array, new: jax.Array) -> jax.Array:
            return stored.at[row, :, index].set(new.astype(stored.dtype), mode="drop")

        return written(self.keys[layer], keys), written(self.values[layer], values)


def _drop_outside(index: jax.Array, size: int) -> jax.Array:
    """Moves negative indices past the end: JAX would count them from the back, even with mode="drop"."""
    return jnp.where(index < 0, size, index)
