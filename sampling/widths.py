"""Widths: decode programs of fewer slots, for the last rows of a batch, and the check that a row's bits stay the same.

A step of few rows takes less time, on a CPU, in a program of few slots. XLA's own products for CPUs add up a column
alike whatever the number of columns from 8 on (docs/adr/0013); no document promises it, so each engine looks.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sampling.decode import EngineState

log = logging.getLogger(__name__)

NARROW = (8, 32)
"""Slots of the decode programs that may serve fewer rows than all, on CPUs."""

_CHECKED_STEPS = 3


def decode_widths(slots: int) -> tuple[int, ...]:
    """Numbers of slots that there are decode programs for, the widest last."""
    return (*(width for width in NARROW if width < slots and compiler_options()), slots)


@functools.cache
def compiler_options() -> Mapping[str, str | bool]:
    """What decode programs are compiled with.

    On CPUs no YNNPACK: its products, as fast as XLA's own for all slots, add up a column in an order that depends on
    how many columns there are. Empty on other devices, and where XLA knows no such option.
    """
    options: dict[str, str | bool] = {"xla_cpu_experimental_ynn_fusion_type": ""}
    if jax.default_backend() != "cpu":
        return {}
    try:
        jax.jit(jnp.negative).lower(0.0).compile(options)
    except jax.errors.JaxRuntimeError:
        return {}
    return options


def agreeing(
    programs: Mapping[int, Callable[..., Any]],
    empty: Callable[[], EngineState],
    params: Any,
    *others: Any,
) -> dict[int, Callable[..., Any]]:
    """The decode programs, less the narrow ones that give some row other bits than the widest does, on this machine.

    Args:
        programs: by their number of slots.
        empty: makes a state without rows; one is held at a time.
        params, others: their arguments before and after the state.
    """
    widest = max(programs)

    def drawn(width: int, slots: np.ndarray) -> list[np.ndarray]:
        """What is recorded of a few steps of these slots, and their tokens."""
        some = () if width == widest else (slots,)
        steps = np.int32(_CHECKED_STEPS), np.int32(1)
        state, _, _ = programs[width](params, _rows(empty(), slots), *others, np.int32(0), *steps, *some)
        return [np.asarray(leaf)[slots] for leaf in jax.tree.leaves((state.rows.buffer, state.record))]

    agreeing = {widest: programs[widest]}
    for width in sorted(programs)[:-1]:
        slots = np.arange(width, dtype=np.int32) * widest // width
        pairs = zip(drawn(width, slots), drawn(widest, slots), strict=True)
        if all(np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f") for ours, theirs in pairs):
            agreeing[width] = programs[width]
        else:
            log.warning("rows have other bits in a program of %d slots here; it is not used", width)
    return agreeing


def _rows(state: EngineState, slots: np.ndarray) -> EngineState:
    """Rows of some tokens in these slots."""
    rows = state.rows
    rng = np.random.default_rng(0)
    count, capacity = rows.buffer.shape
    active = np.zeros(count, bool)
    active[slots] = True
    length = 1 + np.arange(count, dtype=np.int32) % max(1, capacity - _CHECKED_STEPS)
    return state.replace(
        rows=rows.replace(
            buffer=rng.integers(0, rows.vocab_size, (count, capacity), dtype=np.int32),
            prompt_len=length,
            length=length,
            limit=np.full(count, capacity, np.int32),
            active=active,
            keys=rng.integers(0, 2**32, (count, 2), dtype=np.uint32),
        )
    )
