"""Putting transforms and stopping rules together: plain functions as pytrees, chains, and rules joined by OR.

    chain(RepetitionPenalty(1.2), Temperature(0.7), my_function)    one LogitsTransform
    criterion(EndOfSequence([2]), MaxLength(512))                   one Stopping

Arrays that a built-in or a `jax.tree_util.Partial` holds cross jit as data: another number compiles nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from sampling.errors import ConfigError
from sampling.pytrees import Node
from sampling.state import StepState
from sampling.stopping import Stopping
from sampling.transforms import LogitsTransform, apply_all


class Chain(Node):
    """Transforms applied one after the other; a stage that is neutral on every active row is skipped."""

    transforms: tuple[LogitsTransform, ...]

    def __call__(self, state: StepState, logits: jax.Array) -> jax.Array:
        return apply_all(self.transforms, state, logits)


class AnyOf(Node):
    """Ends a row as soon as one of the rules does."""

    rules: tuple[Stopping, ...]

    def __call__(self, state: StepState, tokens: jax.Array) -> jax.Array:
        ends = jnp.zeros(tokens.shape, bool)
        for rule in self.rules:
            ends |= rule(state, tokens)
        return ends


def chain(*transforms: Any) -> Chain:
    """One transform that applies all of them in order: given one by one, or as one sequence.

    Raises:
        ConfigError: one of them cannot be called.
    """
    return Chain(components(transforms[0] if len(transforms) == 1 else transforms, "chain"))


def criterion(*stopping: Any) -> AnyOf:
    """One stopping rule that ends a row when any of them does: given one by one, or as one sequence.

    Raises:
        ConfigError: one of them cannot be called.
    """
    return AnyOf(components(stopping[0] if len(stopping) == 1 else stopping, "criterion"))


def components(values: Any, where: str) -> tuple[Callable[..., Any], ...]:
    """The callables in `values` (None, one callable or a sequence of them), each as a pytree.

    Args:
        where: names the argument or field in the error.
    Raises:
        ConfigError: something in `values` cannot be called, or is a class instead of a transform made from it.
    """
    if values is None:
        return ()
    if not isinstance(values, Sequence) or isinstance(values, str):
        return (_checked(values, where),)
    return tuple(_checked(value, f"{where}[{i}]") for i, value in enumerate(values))


def as_pytree(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A callable that can cross jit: a plain function becomes a Partial; one that is a pytree already stays.

    What a `functools.partial` binds becomes data, as in a Partial.
    """
    if isinstance(fn, functools.partial) and not isinstance(fn, Partial):
        return Partial(fn.func, *fn.args, **fn.keywords)
    return Partial(fn) if jax.tree_util.treedef_is_leaf(jax.tree.structure(fn)) else fn


def _checked(value: Any, where: str) -> Callable[..., Any]:
    if isinstance(value, type):
        raise ConfigError(f"{where}: expected an instance such as {value.__name__}(...), got the class itself")
    if not callable(value):
        raise ConfigError(f"{where}: expected a callable (state, array) -> array, got {value!r}")
    return as_pytree(value)
