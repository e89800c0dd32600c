"""The compiled programs of one engine: fixed shapes in, fixed shapes out, so none can compile again unnoticed."""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sampling.capacity import Capacity
from sampling.decode import Admission, EngineState, TokenRecord, admit, decode, prefill
from sampling.grammar.tables import FREE, GrammarTables, no_masks
from sampling.lanes import Lanes, lane_shape
from sampling.models import KVCache, Transformer
from sampling.models.mesh import shapes
from sampling.params import SamplingParams
from sampling.policy import Policy, lower, stack
from sampling.state import NO_TOKEN, StepState
from sampling.types import Geometry
from sampling.vocabulary import Vocabulary
from sampling.widths import agreeing, compiler_options, decode_widths


@dataclasses.dataclass(frozen=True)
class Programs:
    """Executables; their arguments are those of the functions in sampling.decode, less the model's own.

    Attributes:
        prefill, admit: donate the cache or state that they return anew.
        decode: by the number of slots that take part, which is all of them or fewer; they donate the state.
        compiled: how many programs have been compiled so far, those for smaller capacities included.
    """

    prefill: Callable[..., Any]
    admit: Callable[..., Any]
    decode: Mapping[int, Callable[..., Any]]
    compiled: int

    def width_for(self, rows: int) -> int:
        """Slots of the smallest decode program that serves so many rows."""
        return min(width for width in self.decode if width >= rows)

    def width_below(self, width: int) -> int:
        """Slots of the next smaller one; 0 if there is none."""
        return max((narrower for narrower in self.decode if narrower < width), default=0)

    def checked(self, empty: Callable[[], EngineState], params: Any, *others: Any) -> Programs:
        """Less the narrow ones that this machine's products do not serve; arguments as `widths.agreeing` takes them."""
        return dataclasses.replace(self, decode=agreeing(self.decode, empty, params, *others))


def compile_programs(
    model: Transformer,
    tokenizer_len: int,
    geometry: Geometry,
    capacity: Capacity,
    params: Any,
    vocabulary: Vocabulary,
    earlier: Programs | None = None,
) -> Programs:
    """Compiles ahead of time, whatever does not depend on the capacity only once.

    Args:
        model, tokenizer_len: what the programs run.
        geometry, capacity: their shapes.
        params, vocabulary: arrays, or only their shapes.
        earlier: programs of the same engine for another capacity.
    """
    in_place = partial(shapes, model.mesh)
    params, vocabulary = in_place(params, weights=True), in_place(vocabulary)
    sizes = capacity.grammars, capacity.grammar_states, capacity.grammar_cells
    grammars = GrammarTables.empty(model.config.vocab_size, *sizes)
    if capacity.token_masks:
        grammars = grammars.replace(masks=no_masks(geometry.slots, model.config.vocab_size))
    grammars = in_place(grammars)
    state = in_place(jax.eval_shape(partial(empty_state, model, geometry, capacity)))
    staging = in_place(jax.eval_shape(partial(empty_staging, model, geometry)))
    num_lanes, lane_len = lane_shape(geometry.prefill_chunk)
    lanes = in_place(Lanes.over({}, num_lanes, lane_len))
    prompts = in_place(jax.ShapeDtypeStruct((geometry.prefill_rows, geometry.cache_len), jnp.int32))
    fresh = in_place(jax.ShapeDtypeStruct((geometry.prefill_rows,), jnp.bool_))
    one = in_place(jax.ShapeDtypeStruct((), jnp.int32))
    admission = Admission(
        slots=state.given,
        count=one,
        prompt=in_place(jax.ShapeDtypeStruct((geometry.cache_len,), jnp.int32)),
        buffer=state.rows.buffer,
        prompt_len=one,
        limit=one,
        given=state.given,
        keys=state.rows.keys,
        policy=in_place(lower(SamplingParams(), capacity)),
    )

    def compiled(
        program: Callable[..., Any],
        donated: int,
        *arguments: Any,
        counts: int = 0,
        options: Mapping[str, str | bool] | None = None,
    ) -> Callable[..., Any]:
        """A program that returns what it is donated, and so many numbers."""
        places = None
        if model.mesh is not None:
            own = model.mesh.of_state(arguments[donated])
            places = (own, *[model.mesh.whole] * counts) if counts else own
        lowered = jax.jit(program, donate_argnums=donated, out_shardings=places).lower(*arguments)
        return lowered.compile(dict(options or {}))

    def decoding(width: int) -> Callable[..., Any]:
        some = () if width == geometry.slots else (in_place(jax.ShapeDtypeStruct((width,), jnp.int32)),)
        program = partial(decode, model, tokenizer_len)
        arguments = params, state, vocabulary, grammars, one, one, one
        return compiled(program, 1, *arguments, *some, counts=2, options=compiler_options())

    widths = earlier.decode if earlier else decode_widths(geometry.slots)

    with jax.default_matmul_precision(model.matmul_precision):
        programs = Programs(
            prefill=earlier.prefill
            if earlier
            else compiled(partial(prefill, model, lane_len), 1, params, staging, prompts, lanes, fresh),
            admit=compiled(admit, 0, state, staging, one, admission),
            decode={width: decoding(width) for width in widths},
            compiled=earlier.compiled + 1 + len(widths) if earlier else 2 + len(widths),
        )
    _give_back_memory()
    return programs


def _give_back_memory() -> None:
    """Compiling leaves hundreds of MiB with the C library, which glibc gives back only when it is asked to."""
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: 0)(0)


def empty_staging(model: Transformer, geometry: Geometry) -> KVCache:
    """The cache into which prompts are prefilled."""
    return KVCache.empty(model.config, geometry.prefill_rows, geometry.cache_len, model.dtype)


def empty_state(model: Transformer, geometry: Geometry, capacity: Capacity) -> EngineState:
    """Slots that hold nothing."""
    slots, cache_len = geometry.slots, geometry.cache_len
    neutral = lower(SamplingParams(), capacity)

    def column(dtype: Any, *places: int) -> jax.Array:
        return jnp.zeros((slots, cache_len, *places), dtype)

    return EngineState(
        rows=StepState.empty(slots, cache_len, model.config.vocab_size),
        policy=jax.tree.map(jnp.asarray, stack([neutral] * slots)),
        cache=KVCache.empty(model.config, slots, cache_len, model.dtype),
        given=jnp.zeros(slots, jnp.int32),
        stop=jnp.zeros(slots, jnp.int32),
        overrun=jnp.zeros(slots, jnp.int32),
        record=TokenRecord(
            behaviour_logprobs=column(jnp.float32),
            model_logprobs=column(jnp.float32),
            log_kept_mass=column(jnp.float32),
            entropy=column(jnp.float32),
            forced=column(bool),
            support=column(jnp.int32, capacity.support),
        ),
        policy_versions=column(jnp.int32),
    )


def rearranged(
    state: EngineState, policies: Sequence[Policy], capacity: Capacity, moved: dict[int, int]
) -> EngineState:
    """The state with its rows' policies lowered anew, for another capacity or another order of the grammars.

    Args:
        policies: one for each slot.
        moved: new numbers of the grammars' states.
    """
    more = capacity.support - state.record.support.shape[-1]
    support = jnp.pad(state.record.support, ((0, 0), (0, 0), (0, more)), constant_values=NO_TOKEN)
    automaton = [moved.get(one, min(one, FREE)) for one in np.asarray(state.rows.automaton).tolist()]
    return state.replace(
        rows=state.rows.replace(automaton=jnp.asarray(automaton, jnp.int32)),
        policy=jax.device_put(stack(policies)),
        record=state.record.replace(support=support),
    )


def is_lost(tree: Any) -> bool:
    """True if a program that took over these arrays was interrupted before its result replaced them."""
    return any(leaf.is_deleted() for leaf in jax.tree.leaves(tree))
