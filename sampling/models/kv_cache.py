"""KVCache: the keys and values of every slot's tokens, one array per layer, in blocks of positions."""

from __future__ import annotations

from typing import Self

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from sampling.models.config import ModelConfig

CPU_BLOCK = 64
"""Positions of a block on a CPU, where attention reads no more blocks than are filled. Other devices, which would wait
for the host between two blocks, read the whole cache as one."""


@struct.dataclass
class KVCache:
    """Keys and values of all layers. The key of the token at position p lies in block p // block_len.

    Blocks are the leading axis, so that attention can read those that are filled and leave the rest. Within a block,
    keys lie with their positions side by side, as the products with queries read them.

    What lies beyond a row's last position is left over from earlier tokens; no query ever sees it, since a key is
    visible only up to the query's own position. A slot is therefore free without being cleared.

    Attributes:
        keys: per layer, [blocks, rows, kv_heads, head_dim, block_len], rotated already.
        values: per layer, [blocks, rows, kv_heads, block_len, head_dim].
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        rows: int,
        cache_len: int,
        dtype: DTypeLike = jnp.float32,
        block_len: int | None = None,
    ) -> Self:
        """A cache of zeros for `rows` rows of at least `cache_len` tokens each.

        Args:
            block_len: positions of a block; by default what suits the device.
        """
        block_len = block_len or min(CPU_BLOCK if jax.default_backend() == "cpu" else cache_len, cache_len)
        shape = (-(-cache_len // block_len), rows, config.kv_heads)
        layers = range(config.layers)
        return cls(
            keys=tuple(jnp.zeros((*shape, config.head_dim, block_len), dtype) for _ in layers),
            values=tuple(jnp.zeros((*shape, block_len, config.head_dim), dtype) for _ in layers),
        )

    @property
    def rows(self) -> int:
        return self.keys[0].shape[1]

    @property
    def block_len(self) -> int:
        return self.keys[0].shape[4]

    @property
    def cache_len(self) -> int:
        return self.keys[0].shape[0] * self.block_len

    def wiped(self, rows: jax.Array) -> KVCache:
        """This cache with zeros in some rows; `rows` bool [rows]."""

        def one(layer: jax.Array) -> jax.Array:
            return jnp.where(rows[None, :, None, None, None], jnp.zeros((), layer.dtype), layer)

        return jax.tree.map(one, self)

    def fill(self, source: KVCache, row: jax.Array, slots: jax.Array, count: jax.Array) -> KVCache:
        """This cache with `row` of another one copied, whole, to some slots.

        Args:
            source: a cache of the same layers and length.
            row: int32 [], which of its rows.
            slots: int32 [n], of which the first `count` (int32 []) are filled; those must be rows of this cache.
        """

        def copied(i: jax.Array, cache: KVCache) -> KVCache:
            def one(layer: jax.Array, new: jax.Array) -> jax.Array:
                content = jax.lax.dynamic_index_in_dim(new, row, axis=1)
                return jax.lax.dynamic_update_index_in_dim(layer, content, slots[i], axis=1)

            return jax.tree.map(one, cache, source)

        return jax.lax.fori_loop(jnp.int32(0), count, copied, self)

    def fork(self, source: jax.Array, target: jax.Array, count: jax.Array) -> KVCache:
        """This cache with one row's first positions in another row too, and nothing behind them there.

        Args:
            source, target: int32 [], rows.
            count: int32 [], positions to copy; 0 wipes the target.
        """

        def one(layer: jax.Array, places: jax.Array) -> jax.Array:
            content = jax.lax.dynamic_index_in_dim(layer, source, axis=1, keepdims=False)
            kept = jnp.where(places < count, content, jnp.zeros((), layer.dtype))
            return jax.lax.dynamic_update_index_in_dim(layer, kept, target, axis=1)

        places = jnp.arange(self.cache_len, dtype=jnp.int32).reshape(-1, 1, self.block_len, 1)
        return KVCache(
            keys=tuple(one(layer, places.swapaxes(2, 3)) for layer in self.keys),
            values=tuple(one(layer, places) for layer in self.values),
        )

    def write(
        self, layer: int, rows: jax.Array, positions: jax.Array, keys: jax.Array, values: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """One layer's keys and values with new tokens written at their positions.

        Args:
            layer: which layer.
            rows: int32 [n], the cache's row of each row of tokens.
            positions: int32 [n, chunk]; -1 (padding) and positions past the end are dropped, never moved.
            keys, values: [n, chunk, kv_heads, head_dim].
        Returns:
            The layer's keys and values, shaped as they are stored.
        """
        index = _drop_outside(positions, self.cache_len)
        block, place = index // self.block_len, index % self.block_len
        row = rows[:, None]
        stored = self.keys[layer], self.values[layer]
        return (
            stored[0].at[block, row, :, :, place].set(keys.astype(stored[0].dtype), mode="drop"),
            stored[1].at[block, row, :, place, :].set(values.astype(stored[1].dtype), mode="drop"),
        )


def _drop_outside(index: jax.Array, size: int) -> jax.Array:
    """Moves negative indices past the end: JAX would count them from the back, even with mode="drop"."""
    return jnp.where(index < 0, size, index)
