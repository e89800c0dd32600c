"""What a plugin has to keep to, checked before anything is drawn: by tracing it, and by comparing rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sampling.errors import ConfigError
from sampling.plugins.loading import Plugin, Plugins, load_plugins
from sampling.plugins.refs import PluginKind, PluginRefs
from sampling.plugins.stages import PluginRule, PluginStage
from sampling.state import StepState
from sampling.transforms.base import apply
from sampling.widths import compiler_options

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


def checked_plugins(refs: PluginRefs, vocab_size: int, widths: Sequence[int]) -> Plugins:
    """Loads plugins and holds them to all of the contract; arguments and errors as those of the steps."""
    plugins = load_plugins(refs)
    require_contract(plugins, vocab_size)
    require_rows_apart(plugins, vocab_size, widths)
    return plugins


def require_contract(plugins: Plugins, vocab_size: int) -> None:
    """Traces every plugin once, without a device, on a small state over a vocabulary.

    Raises:
        ConfigError: one fails, returns another shape or dtype than it has to, works on the host, changes the state that
            it is shown, or is another program the second time. The message names the plugin and the cause.
    """
    for plugin in plugins:
        _require_traceable(plugin, vocab_size)


def require_rows_apart(plugins: Plugins, vocab_size: int, widths: Sequence[int] = ()) -> None:
    """Runs every plugin on batches that share rows: a row's result may depend on nothing but the row.

    Args:
        widths: numbers of rows that there are programs for, among which a row's bits may not differ either.
    Raises:
        ConfigError: it depends on the rows beside it, on its place among them, or on how many there are.
    """
    for plugin in plugins:
        for sizes in ((ROWS,), widths):
            _require_rows_apart(plugin, vocab_size, sizes)


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


def _require_rows_apart(plugin: Plugin, vocab_size: int, sizes: Sequence[int]) -> None:
    transform = plugin.kind is PluginKind.TRANSFORM
    random = np.random.default_rng(0)
    lengths = [(1, 0), (3, 2), (2, 7), (4, 4), (1, 5), (5, 1)]
    histories = random.integers(0, vocab_size, (len(lengths), CAPACITY - 1))
    scores = random.normal(0, 3, (len(lengths), vocab_size)).astype(np.float32)
    keys = random.integers(0, 2**32, (len(lengths), 2), np.uint32)
    leaves = [_other_values(plugin, row) for row in range(len(lengths))]

    @partial(jax.jit, compiler_options=dict(compiler_options()))
    def run(values: Any, state: StepState, array: jax.Array) -> jax.Array:
        on = jnp.ones(array.shape[0], bool)
        if transform:
            return apply(PluginStage(on, values, plugin), state, array)
        return PluginRule(on, values, plugin)(state, array)

    def of(rows: np.ndarray) -> np.ndarray:
        prompts = [histories[row, : lengths[row][0]].tolist() for row in rows]
        drawn = [histories[row, lengths[row][0] : sum(lengths[row])].tolist() for row in rows]
        state = StepState.from_histories(prompts, drawn, CAPACITY, vocab_size=vocab_size)
        last = np.array([(prompt + tokens)[-1] for prompt, tokens in zip(prompts, drawn, strict=True)], np.int32)
        values = {name: np.stack([leaves[row][name] for row in rows]) for name, _ in plugin.defaults}
        array = jnp.asarray(scores[rows] if transform else last)
        return np.asarray(run(values, state.replace(keys=jnp.asarray(keys[rows])), array))

    seen: dict[int, np.ndarray] = {}
    for size in sizes:
        places = np.arange(size)
        forwards, backwards = (places + 1) % len(lengths), (-places - 1) % len(lengths)
        for rows in (forwards, backwards, 0 * places, 0 * places + 2):  # the last two: one row alone
            for row, result in zip(rows.tolist(), of(rows), strict=True):
                if not np.array_equal(seen.setdefault(row, result), result, equal_nan=transform):
                    raise ConfigError(
                        f"{_label(plugin)}: a row's result depends on the rows beside it, on its place among them, or"
                        " on how many there are; each row has to be worked on by itself, or else no row could be drawn"
                        " again"
                    )


def _other_values(plugin: Plugin, row: int) -> dict[str, Any]:
    """Numbers for a row that are not another row's, where the plugin takes them; else the defaults."""
    others = {
        name: default != (row % 2 == 1) if isinstance(default, bool) else default + row
        for name, default in plugin.defaults
    }
    try:
        plugin.settings(others, "")
    except ConfigError:
        others = {}
    return plugin.leaves(others)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def _text(program: Any) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", str(program))


def _equal(some: Any, others: Any) -> bool:
    return len(some) == len(others) and all(np.array_equal(a, b) for a, b in zip(some, others, strict=True))
