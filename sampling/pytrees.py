"""Dataclasses that cross jit together with their class: the base of transforms and of stopping rules."""

from __future__ import annotations

import dataclasses
from typing import Any, Self, dataclass_transform

import jax
from flax import struct


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, struct.field))
class Node:
    """A frozen dataclass whose fields are pytree children; those of `struct.field(pytree_node=False)` are static.

    It is used as `flax.struct.PyTreeNode` is. The difference: JAX 0.10.2 compares the structures of registered
    dataclasses by their fields alone, not by their class, so that now and then jit ran the program compiled for
    `TopP(0.5)` on `MinP(0.5)`. Nodes registered with functions of their own, as here, are told apart.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(_frozen(cls))
        children = [field.name for field in fields if field.metadata.get("pytree_node", True)]
        static = [field.name for field in fields if field.name not in children]

        def flatten(node: Any) -> tuple[list[Any], tuple[Any, ...]]:
            return [getattr(node, name) for name in children], tuple(getattr(node, name) for name in static)

        def flatten_with_keys(node: Any) -> tuple[list[Any], tuple[Any, ...]]:
            values, static_values = flatten(node)
            return list(zip(map(jax.tree_util.GetAttrKey, children), values, strict=True)), static_values

        def unflatten(static_values: tuple[Any, ...], values: Any) -> Any:
            return cls(**dict(zip([*children, *static], [*values, *static_values], strict=True)))

        jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)

    def replace(self, **changes: Any) -> Self:
        """A copy with other values in some fields."""
        return type(self)(**{**vars(self), **changes})


def _frozen(cls: type) -> Any:
    return dataclasses.dataclass(frozen=True)(cls)
