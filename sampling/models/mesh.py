"""ModelMesh: one model on several devices, each of which holds its part of every layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sampling.errors import ConfigError
from sampling.models.config import ModelConfig
from sampling.models.kv_cache import KVCache

_AXIS = "model"

_CUT = {
    "qkv_kernel": 0,
    "qkv_bias": 0,
    "o_kernel": 1,
    "gate_up_kernel": 1,
    "gate_up_bias": 1,
    "down_kernel": 1,
    "embedding": 0,
    "head": 0,
}
"""The axis along which a parameter is cut: key/value heads with their queries, hidden features, ids of the vocabulary.
All others are on every device."""


@dataclass(frozen=True)
class ModelMesh:
    """Devices that share a model: tensor parallelism (Megatron-LM, Shoeybi et al. 2019).

    A device computes its heads and its hidden features; after attention and after the feed-forward the devices' parts
    are added up. Rows are not cut, so nothing about a row depends on another one here either.

    Attributes:
        devices: of JAX, at least two.
    """

    devices: tuple[Any, ...]

    @classmethod
    def of(cls, config: ModelConfig, devices: Sequence[Any]) -> Self | None:
        """The mesh of these devices; None for a single one, which needs none.

        Raises:
            ConfigError: the model cannot be cut into so many equal parts.
        """
        count = len(devices)
        for name in ("kv_heads", "ffn"):
            if getattr(config, name) % count:
                raise ConfigError(
                    f"devices: a model with {config.kv_heads} key/value heads and {config.ffn} hidden features cannot"
                    f" be cut into {count} equal parts; give the worker a number of devices that divides both"
                )
        return cls(tuple(devices)) if count > 1 else None

    @functools.cached_property
    def whole(self) -> NamedSharding:
        """On every device."""
        return self._cut(None)

    def of_weights(self, params: Mapping[str, Any]) -> Any:
        """Where the parameters of a Transformer lie."""

        def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
            axis = _CUT.get(path[-1].key)
            return self.whole if axis is None or leaf.shape[axis] % len(self.devices) else self._cut(axis)

        return jax.tree_util.tree_map_with_path(place, params)

    def of_state(self, tree: Any) -> Any:
        """Where the leaves of anything else lie: a cache's heads where their keys are computed, the rest everywhere."""

        def place(node: Any) -> Any:
            here = self._cut(2) if isinstance(node, KVCache) else self.whole
            return jax.tree.map(lambda _: here, node)

        return jax.tree.map(place, tree, is_leaf=lambda node: isinstance(node, KVCache))

    def product(self, name: str, kernel: jax.Array, columns: jax.Array) -> jax.Array:
        """The parameter `name` [..., in] times columns [in, tokens], as float32 [..., tokens].

        Where both are cut along `in`, each device adds up all parts in one order. Summed on their way, by an
        all-reduce, they would be in an order that may depend on the place in the array, and so on the row.
        """
        if _CUT[name] < kernel.ndim - 1:
            return times(kernel, columns)

        def added(kernel: jax.Array, columns: jax.Array) -> jax.Array:
            parts = jax.lax.all_gather(times(kernel, columns), _AXIS)
            return functools.reduce(jnp.add, parts)

        places = PartitionSpec(None, _AXIS), PartitionSpec(_AXIS)
        everywhere = jax.shard_map(added, mesh=self._mesh, in_specs=places, out_specs=PartitionSpec(), check_vma=False)
        return everywhere(kernel, columns)

    def _cut(self, axis: int | None) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, _AXIS))

    @functools.cached_property
    def _mesh(self) -> jax.sharding.Mesh:
        return jax.sharding.Mesh(np.array(self.devices), (_AXIS,))


def times(matrix: jax.Array, columns: jax.Array) -> jax.Array:
    """A matrix [..., in] times columns [in, tokens], as float32 [..., tokens].

    Its leading axes are kept apart, since any of them may be cut among devices.
    """
    contracted = (((matrix.ndim - 1,), (0,)), ((), ()))
    return jax.lax.dot_general(matrix, columns, contracted, preferred_element_type=jnp.float32)


def placed(mesh: ModelMesh | None, tree: Any) -> Any:
    """Arrays where they belong; those that are not weights."""
    return jax.device_put(tree, mesh and mesh.of_state(tree))


def made(mesh: ModelMesh | None, make: Callable[[], Any]) -> Any:
    """What `make` makes, each part of it where it belongs from the beginning."""
    if mesh is None:
        return make()
    return jax.jit(make, out_shardings=mesh.of_state(jax.eval_shape(make)))()


def shapes(mesh: ModelMesh | None, tree: Any, weights: bool = False) -> Any:
    """Shapes and dtypes of a tree's leaves, and where they lie."""
    if mesh is None:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
    places = mesh.of_weights(tree) if weights else mesh.of_state(tree)
    return jax.tree.map(lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree, places)
