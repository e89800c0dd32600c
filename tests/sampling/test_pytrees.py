"""sampling/pytrees.py"""

import dataclasses

import jax
import numpy as np
import pytest
from flax import struct

from sampling.pytrees import Node
from sampling.stopping import EndOfSequence, MaxLength, MaxNewTokens, StopTokens


class Halved(Node):
    value: float
    kind: str = struct.field(pytree_node=False, default="plain")

    def __call__(self):
        return self.value / 2


class Doubled(Node):
    value: float
    kind: str = struct.field(pytree_node=False, default="plain")

    def __call__(self):
        return self.value * 2


def test_the_class_is_part_of_the_structure():
    """Structures that compare equal share compiled programs: a cache keyed by them would then run either for both."""
    structures = [
        jax.tree.structure(node)
        for node in (Halved(1.0), Doubled(1.0), EndOfSequence([2]), StopTokens([2]), MaxLength(1), MaxNewTokens(1))
    ]
    for i, one in enumerate(structures):
        assert [one == other for other in structures] == [i == j for j in range(len(structures))]
        assert jax.tree.structure((0,)) != one


def test_each_class_has_a_program_of_its_own():
    jitted = jax.jit(lambda node: node())
    for _ in range(3):
        assert jitted(Halved(np.float32(3.0))) == 1.5
        assert jitted(Doubled(np.float32(3.0))) == 6.0


def test_static_fields_are_structure_and_the_others_leaves():
    node = Halved(3.0, kind="other")
    assert jax.tree.leaves(node) == [3.0]
    assert jax.tree.structure(node) != jax.tree.structure(Halved(3.0))
    assert jax.tree.map(lambda leaf: leaf + 1, node) == Halved(4.0, "other")
    ((path, leaf),) = jax.tree_util.tree_leaves_with_path(node)
    assert (jax.tree_util.keystr(path), leaf) == (".value", 3.0)


def test_a_node_is_a_frozen_dataclass():
    node = Halved(3.0)
    assert node.replace(value=4.0) == Halved(4.0)
    assert repr(node).endswith("Halved(value=3.0, kind='plain')")
    with pytest.raises(dataclasses.FrozenInstanceError):
        node.value = 5.0
