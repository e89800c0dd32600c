"""What a plugin has to keep to, checked before anything is drawn: by tracing it, and by comparing rows."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sampling.errors import ConfigError
from sampling.plugins.loading import Plugin, Plugins
from sampling.plugins.refs import PluginKind
from sampling.state import StepState

ROWS = 4
"""Rows of the states that plugins are tried on; two parts of which are compared."""

CAPACITY = 12
"""Tokens that such a row can hold."""

_ON_THE_HOST = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_CALLBACK = re.compile(r"\b(pure_callback|io_callback|debug_callback|debug_print)\[")
_COMPILED = (
    "tokens are drawn in one compiled loop on the device, in which a rule is a pure function of arrays: nothing of it"
    " runs on the host between two tokens. Write it with jax.numpy (jnp.where in place of if), and find what it has to"
    " remember in the state: state.history(), state.counts, state.step"
)


def require_contract(plugins: Plugins, vocab_size: int) -> None:
    """Traces every plugin once, without a device, on a small state over a vocabulary.

    Raises:
        ConfigError: one fails, returns another shape or dtype than it has to, works on the host, changes the state that
            it is shown, or is another program the second time. The message names the plugin and the cause.
    """
    for plugin in plugins:
        _require_traceable(plugin, vocab_size)


def require_rows_apart(plugins: Plugins, vocab_size: int) -> None:
    """Runs every plugin on two small batches that share rows: a row's result may depend on nothing but the row.

    Raises:
        ConfigError: it depends on the rows beside it, or on its place among them.
    """
    for plugin in plugins:
        _require_rows_apart(plugin, vocab_size)


def _label(plugin: Plugin) -> str:
    return f"plugins.{plugin.kind} {plugin.name}"


def _require_traceable(plugin: Plugin, vocab_size: int) -> None:
    label, transform = _label(plugin), plugin.kind is PluginKind.TRANSFORM
    state = jax.eval_shape(lambda: StepState.empty(ROWS, CAPACITY, vocab_size))
    array = (
        jax.ShapeDtypeStruct((ROWS, vocab_size), jnp.float32) if transform else jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    )
    values = {name: jax.ShapeDtypeStruct((ROWS,), leaf.dtype) for name, leaf in plugin.leaves({}).items()}

    def traced() -> tuple[Any, Any]:
        def once(values: Any, state: StepState, array: jax.Array) -> Any:  # anew each time: JAX remembers functions
            shown = dict(vars(state))
            made = plugin.made(values)
            result = made(state, array)
            changed = [name for name, leaf in vars(state).items() if leaf is not shown.get(name)]
            if changed:
                raise ConfigError(
                    f"{label}: it changes state.{changed[0]}; tokens and what is counted of them are not its to change,"
                    " it returns its result alone"
                )
            says: Any = getattr(made, "is_neutral", None) if transform else None
            return result, says() if says else np.bool_(False)

        try:
            return jax.make_jaxpr(once, return_shape=True)(values, state, array)
        except ConfigError:
            raise
        except _ON_THE_HOST as error:
            raise ConfigError(f"{label}: it asks for values on the host: {_first_line(error)}; {_COMPILED}") from error
        except Exception as error:  # foreign code, which raises what it likes
            raise ConfigError(f"{label}: it cannot be called: {type(error).__name__}: {_first_line(error)}") from error

    program, (result, neutral) = traced()
    if transform:
        _require_shape(result, (ROWS, vocab_size), jnp.float32, f"{label}: expected scores", "as it was given")
        if getattr(neutral, "shape", None) == ():
            neutral = jax.ShapeDtypeStruct((ROWS,), neutral.dtype)
        _require_shape(neutral, (ROWS,), bool, f"{label}: is_neutral: expected", "or of no axis")
    else:
        _require_shape(result, (ROWS,), bool, f"{label}: expected", "which rows end")
    if (callback := _CALLBACK.search(str(program))) or program.effects:
        what = callback[1] if callback else ", ".join(map(str, program.effects))
        raise ConfigError(f"{label}: it works on the host or has side effects ({what}); {_COMPILED}")
    again, _ = traced()
    if _text(program) != _text(again) or not _equal(program.consts, again.consts):
        raise ConfigError(
            f"{label}: it is another program the second time, so it keeps state, or draws, on the host; {_COMPILED}."
            " Randomness of a row comes from state.keys"
        )


def _require_shape(got: Any, shape: tuple[int, ...], dtype: Any, what: str, why: str) -> None:
    wanted = f"{np.dtype(dtype)} {list(shape)}"
    if not isinstance(got, jax.ShapeDtypeStruct):
        raise ConfigError(f"{what} {wanted}, {why}; got {type(got).__name__}")
    if got.shape != shape or got.dtype != np.dtype(dtype):
        raise ConfigError(f"{what} {wanted}, {why}; got {got.dtype} {list(got.shape)}")


def _require_rows_apart(plugin: Plugin, vocab_size: int) -> None:
    label, transform = _label(plugin), plugin.kind is PluginKind.TRANSFORM
    random = np.random.default_rng(0)
    histories = random.integers(0, vocab_size, (ROWS + 2, CAPACITY - 1))
    scores = random.normal(0, 3, (ROWS + 2, vocab_size)).astype(np.float32)
    keys = random.integers(0, 2**32, (ROWS + 2, 2), np.uint32)
    lengths = [(1, 0), (3, 2), (2, 7), (4, 4), (1, 5), (5, 1)]
    leaves = {name: np.full(ROWS, leaf) for name, leaf in plugin.leaves({}).items()}

    @jax.jit
    def run(values: Any, state: StepState, array: jax.Array) -> jax.Array:
        return plugin.made(values)(state, array)

    def of(rows: list[int]) -> np.ndarray:
        prompts = [histories[row, : lengths[row][0]].tolist() for row in rows]
        drawn = [histories[row, lengths[row][0] : sum(lengths[row])].tolist() for row in rows]
        state = StepState.from_histories(prompts, drawn, CAPACITY, vocab_size=vocab_size)
        state = state.replace(keys=jnp.asarray(keys[rows]))
        last = np.array([history[-1] for history in (p + d for p, d in zip(prompts, drawn, strict=True))], np.int32)
        return np.asarray(run(leaves, state, jnp.asarray(scores[rows] if transform else last)))

    here, there = of([0, 1, 2, 3]), of([4, 0, 5, 2])
    for ours, theirs in ((0, there[1]), (2, there[3]), (0, of([0] * ROWS)[2]), (2, of([2] * ROWS)[0])):
        if not np.array_equal(here[ours], theirs, equal_nan=transform):
            raise ConfigError(
                f"{label}: a row's result depends on the rows beside it, or on its place among them; each row has to be"
                " worked on by itself, or else no row could be drawn again"
            )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def _text(program: Any) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", str(program))


def _equal(some: Any, others: Any) -> bool:
    return len(some) == len(others) and all(np.array_equal(a, b) for a, b in zip(some, others, strict=True))
