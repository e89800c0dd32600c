"""Weights that arrive while an engine runs: checked against those it was made with, and tried on a fixed text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from sampling.errors import CheckpointError, ConfigError
from sampling.models import Transformer

CANARY_LEN = 32
"""Tokens of the text that weights are tried on."""


@dataclass(frozen=True)
class StagedWeights:
    """Weights on the device that an engine has checked and can take over at once.

    Attributes:
        params: arrays of the engine's dtype.
        model, known: see `canary_logprobs`.
    """

    params: Any
    model: Transformer
    known: int

    def canary_logprobs(self) -> np.ndarray:
        """See the function of this name.

        Raises:
            CheckpointError: they are not finite.
        """
        logprobs = canary_logprobs(self.model, self.params, self.known)
        if not np.isfinite(logprobs).all():
            raise CheckpointError(
                f"weights: expected finite log-probs of the canary, got {logprobs[~np.isfinite(logprobs)][0]};"
                " are the values too large?"
            )
        return logprobs


@dataclass(frozen=True)
class WeightForm:
    """What an engine's weights look like: those it was made with, less their values.

    Attributes:
        leaves: shape and dtype of each, by its path.
        model: what they are for; it computes in the engine's dtype.
        known: ids of the tokenizer.
    """

    leaves: Mapping[str, jax.ShapeDtypeStruct]
    model: Transformer
    known: int

    @classmethod
    def of(cls, params: Mapping[str, Any], model: Transformer, known: int) -> Self:
        """The form of these weights."""
        shapes = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in _named(params).items()}
        return cls(shapes, model, known)

    def staged(self, params: Mapping[str, Any]) -> StagedWeights:
        """Checks weights and puts them on the device. It may share read-only arrays; others are copied.

        Args:
            params: nested dict of arrays, of the paths, shapes and dtypes of this form.
        Raises:
            CheckpointError: another tree, shape or dtype, or a value that is not finite; names the first such leaf.
        """
        self._require(params)
        return StagedWeights(self.on_device(params, copied=True), self.model, self.known)

    def on_device(self, params: Mapping[str, Any], copied: bool = False) -> Any:
        """Arrays of the engine's dtype.

        Args:
            copied: whether arrays that somebody may still write to are copied first.
        """

        def cast(leaf: Any) -> np.ndarray:
            array = np.asarray(leaf)
            return array.astype(self.model.dtype, copy=copied and array.flags.writeable)

        mesh = self.model.mesh
        return jax.device_put(jax.tree.map(cast, params), mesh and mesh.of_weights(params))

    def _require(self, params: Mapping[str, Any]) -> None:
        found = _named(params)
        for path, expected in self.leaves.items():
            if path not in found:
                raise CheckpointError(
                    f"weights: expected {_described(expected)} at {path}, found nothing; are they of another model?"
                )
        for path, leaf in found.items():
            if path not in self.leaves:
                raise CheckpointError(
                    f"weights: the model has no parameter {path}, got {_described(leaf)}; are they of another model?"
                )
        for path, expected in self.leaves.items():
            leaf = found[path]
            if _described(leaf) != _described(expected):
                raise CheckpointError(f"weights: {path}: expected {_described(expected)}, got {_described(leaf)}")
            if not (finite := np.isfinite(np.asarray(leaf))).all():
                place = [int(index) for index in np.argwhere(~finite)[0]]
                raise CheckpointError(
                    f"weights: {path}: expected finite values, got {np.asarray(leaf)[*place]} at {place}"
                    f" ({np.sum(~finite)} such values)"
                )


def require_version(version: object) -> None:
    """Refuses what cannot stand in an int32 column of versions.

    Raises:
        ConfigError: it is no whole number in 0 .. 2^31 - 1.
    """
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < 2**31:
        raise ConfigError(f"version: expected a whole number in 0 .. 2^31 - 1, got {version!r}")


def canary_tokens(known: int) -> np.ndarray:
    """The text that weights are tried on: int32 [CANARY_LEN], ids below `known`, the same every time."""
    return (np.arange(1, CANARY_LEN + 1, dtype=np.int64) * 7919 % known).astype(np.int32)


def canary_logprobs(model: Transformer, params: Any, known: int) -> np.ndarray:
    """What weights say of the canary's tokens: equal weights give equal values, on equal numerics equal bits.

    Compiles once for each model.

    Args:
        model, params: the weights, in the model's dtype or a wider one.
        known: ids of the tokenizer; the text has no others.
    Returns:
        float32 [CANARY_LEN - 1], nats: the model_logprobs of each token after the first.
    """
    with jax.default_matmul_precision(model.matmul_precision):
        return np.asarray(_logprobs(model, params, canary_tokens(known)))


@partial(jax.jit, static_argnums=0)
def _logprobs(model: Transformer, params: Any, tokens: jax.Array) -> jax.Array:
    positions = jnp.arange(CANARY_LEN, dtype=jnp.int32)
    forward: Any = partial(model.apply, {"params": params})
    hidden, _ = forward(tokens[None, :], positions[None, :])
    logprobs = jax.nn.log_softmax(forward(hidden[0, :-1], method="logits"), axis=-1)
    return jnp.take_along_axis(logprobs, tokens[1:, None], axis=-1)[:, 0]


def _named(params: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves by path, in the order of the paths."""
    if not isinstance(params, Mapping):
        raise CheckpointError(f"weights: expected a nested dict of arrays, got {type(params).__name__}")
    named: dict[str, Any] = {}
    for key in sorted(params, key=str):
        value = params[key]
        inner = _named(value) if isinstance(value, Mapping) else {"": value}
        named |= {f"{key}/{path}" if path else str(key): leaf for path, leaf in inner.items()}
    return named


def _described(leaf: Any) -> str:
    """Dtype and shape, or what else it is."""
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        return f"{np.dtype(leaf.dtype).name} {list(leaf.shape)}"
    return f"{type(leaf).__name__} that is no array"
