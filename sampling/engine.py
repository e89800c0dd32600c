"""Engine: a fixed set of slots that decode together, refilled as rows end.

Requests wait in a queue; a prompt is prefilled once and its samples are copied into free slots; all slots decode in
one compiled loop that comes back when the host has something to do. Which slot, beside whom and when changes no bit
of a row.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sampling.checkpoints import Checkpoint, CheckpointInfo
from sampling.decode import Admission, EngineState, admit, decode, prefill
from sampling.errors import ConfigError, PromptError
from sampling.fingerprint import numerics_fingerprint
from sampling.keys import row_key
from sampling.models import KVCache, Transformer
from sampling.params import SamplingParams
from sampling.policy import Policy, lower, resolved, stack
from sampling.state import StepState
from sampling.types import Completion, Geometry, Group, Request, StopReason

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}

DECODE_STEPS = 16
"""Decode steps of one call at most, so that the host can report and admit; no result depends on it."""


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Counts since the engine was made.

    Attributes:
        slots: slots in all; slots_busy: of them with a running row.
        waiting: requests not yet admitted in full.
        groups, completions, tokens: finished, and drawn in all.
        steps: decode steps; busy_row_steps: row-steps that advanced a row, out of steps * slots.
        prefill_tokens: prompt tokens read.
        programs_compiled: programs that the engine holds; it does not grow after the engine is made.
    """

    slots: int
    slots_busy: int
    waiting: int
    groups: int
    completions: int
    tokens: int
    steps: int
    busy_row_steps: int
    prefill_tokens: int
    programs_compiled: int


@dataclasses.dataclass
class _Open:
    """A request under way."""

    request: Request
    params: SamplingParams
    policy: Policy
    submitted: float
    pending: deque[int]
    finished: dict[int, Completion] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Resident:
    """The row that holds a slot."""

    group: _Open
    sample_index: int
    key: np.ndarray
    admitted: float


class Engine:
    """Samples completions of requests with one set of weights.

    Compiles its programs when it is made and none afterwards, whatever the prompts, policies or budgets.

    Args:
        checkpoint: weights and what is known of them.
        geometry: the fixed shapes.
        dtype: "float32" or "bfloat16", of the model's matrix products.
    Raises:
        ConfigError: an unknown dtype, or a cache longer than the model's positions.
    """

    def __init__(self, checkpoint: Checkpoint, geometry: Geometry | None = None, dtype: str = "float32"):
        geometry = geometry or Geometry()
        info = checkpoint.info
        if dtype not in DTYPES:
            raise ConfigError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
        if geometry.cache_len > info.config.max_position:
            raise ConfigError(
                f"geometry.cache_len: expected at most {info.config.max_position}, the positions that"
                f" {info.name} was made for, got {geometry.cache_len}"
            )
        self.geometry = geometry
        self.info = info
        self.policy_version = 0
        self.fingerprint = numerics_fingerprint(geometry, dtype)
        model = Transformer(info.config, dtype=DTYPES[dtype])
        self._params = jax.device_put(
            jax.tree.map(lambda leaf: np.asarray(leaf).astype(DTYPES[dtype]), checkpoint.params)
        )
        self._state = _empty_state(info, geometry, DTYPES[dtype])
        self._staging = KVCache.empty(info.config, geometry.prefill_rows, geometry.cache_len, DTYPES[dtype])
        self._programs = _compile(model, info, geometry, self._params, self._state, self._staging)
        self._waiting: deque[_Open] = deque()
        self._staged: dict[int, _Open] = {}
        self._free = list(range(geometry.slots))[::-1]
        self._resident: dict[int, _Resident] = {}
        self._counts = dict.fromkeys(
            ("groups", "completions", "tokens", "steps", "busy_row_steps", "prefill_tokens"), 0
        )

    def submit(self, request: Request) -> None:
        """Puts a request at the end of the queue.

        Raises:
            PromptError: the prompt leaves no room in the cache, or holds an id that is no token.
            ConfigError: an end-of-sequence id is no token, or there are too many of them.
        """
        tokens, known = request.prompt_tokens, self.info.tokenizer_len
        if tokens.size >= self.geometry.cache_len:
            raise PromptError(
                f"prompt {request.prompt_id!r}: {tokens.size} tokens leave no room in a cache of"
                f" {self.geometry.cache_len}; shorten the prompt or raise geometry.cache_len"
            )
        outside = np.flatnonzero((tokens < 0) | (tokens >= known))
        if outside.size:
            raise PromptError(
                f"prompt {request.prompt_id!r}: expected token ids in 0 .. {known - 1}, got"
                f" {tokens[outside[0]]} at position {outside[0]}"
            )
        params = resolved(request.params, self.info.eos_token_ids)
        if any(i >= known for i in params.eos_token_ids):
            raise ConfigError(
                f"prompt {request.prompt_id!r}: sampling.eos_token_ids: expected token ids in"
                f" 0 .. {known - 1}, got {params.eos_token_ids}"
            )
        policy = lower(params)
        self._waiting.append(_Open(request, params, policy, time.monotonic(), deque(request.sample_indices)))

    def generate(self, requests: Iterable[Request]) -> Iterator[Group]:
        """Submits requests and yields their groups as they finish, in no particular order."""
        for request in requests:
            self.submit(request)
        while not self.idle:
            yield from self.step()

    def step(self) -> list[Group]:
        """Admits what fits, decodes for a while, and returns the groups that finished."""
        while self._free and (self._staged or self._waiting):
            if not self._staged:
                self._prefill_waiting()
            self._admit_staged()
        if self._resident:
            self._decode()
        return self._collect()

    @property
    def idle(self) -> bool:
        """True if nothing waits and nothing runs."""
        return not (self._waiting or self._staged or self._resident)

    @property
    def waiting(self) -> int:
        """Requests that still have samples without a slot."""
        return len(self._waiting) + len(self._staged)

    def stats(self) -> EngineStats:
        """What has been done so far."""
        return EngineStats(
            slots=self.geometry.slots,
            slots_busy=len(self._resident),
            waiting=self.waiting,
            programs_compiled=len(dataclasses.fields(self._programs)),
            **self._counts,
        )

    def _prefill_waiting(self) -> None:
        """Moves as many waiting requests as there are staging rows into the staging cache."""
        rows, chunk = self.geometry.prefill_rows, self.geometry.prefill_chunk
        self._staged = {row: self._waiting.popleft() for row in range(min(rows, len(self._waiting)))}
        # The last prompt token is left to the first decode step.
        prefixes = {row: group.request.prompt_tokens[:-1] for row, group in self._staged.items()}
        longest = max(prefix.size for prefix in prefixes.values())
        for start in range(0, max(longest, 1), chunk):
            tokens = np.zeros((rows, chunk), np.int32)
            positions = np.full((rows, chunk), -1, np.int32)
            for row, prefix in prefixes.items():
                part = prefix[start : start + chunk]
                tokens[row, : part.size] = part
                positions[row, : part.size] = np.arange(start, start + part.size)
            fresh = np.full(rows, start == 0)
            self._staging = self._programs.prefill(self._params, self._staging, tokens, positions, fresh)
        self._counts["prefill_tokens"] += sum(prefix.size for prefix in prefixes.values())

    def _admit_staged(self) -> None:
        """Fills free slots with samples of one staged prompt."""
        row, group = next(iter(self._staged.items()))
        request = group.request
        slots, cache_len = self.geometry.slots, self.geometry.cache_len
        entering = np.zeros(slots, np.int32)
        buffer = np.zeros((slots, cache_len), np.int32)
        buffer[:, : request.prompt_tokens.size] = request.prompt_tokens
        keys = np.zeros((slots, 2), np.uint32)
        count = min(len(self._free), len(group.pending))
        for place in range(count):
            slot, sample_index = self._free.pop(), group.pending.popleft()
            entering[place] = slot
            keys[slot] = row_key(request.seed, request.prompt_id, sample_index)
            self._resident[slot] = _Resident(group, sample_index, keys[slot], time.monotonic())
        admission = Admission(
            slots=entering,
            count=np.int32(count),
            prompt=buffer[0],
            buffer=buffer,
            prompt_len=np.int32(request.prompt_tokens.size),
            limit=np.int32(min(request.prompt_tokens.size + group.params.max_new_tokens, cache_len)),
            given=np.full(slots, request.prompt_tokens.size, np.int32),
            keys=keys,
            policy=group.policy,
        )
        self._state = self._programs.admit(self._state, self._staging, np.int32(row), admission)
        if not group.pending:
            del self._staged[row]

    def _decode(self) -> None:
        # With work waiting, every freed slot is worth a stop; otherwise only the end of all rows is.
        min_active = len(self._resident) if self.waiting else 1
        self._state, steps, busy = self._programs.decode(
            self._params,
            self._state,
            np.int32(self.policy_version),
            np.int32(DECODE_STEPS),
            np.int32(min_active),
        )
        self._counts["steps"] += int(steps)
        self._counts["busy_row_steps"] += int(busy)

    def _collect(self) -> list[Group]:
        """Takes finished rows out of their slots and returns the groups that are complete with them."""
        stop = np.asarray(self._state.stop)
        ended = [slot for slot in self._resident if stop[slot] != 0]
        if not ended:
            return []
        state = self._state
        columns = jax.device_get(
            {
                "completion_tokens": state.rows.buffer,
                "behaviour_logprobs": state.behaviour_logprobs,
                "model_logprobs": state.model_logprobs,
                "log_kept_mass": state.log_kept_mass,
                "policy_versions": state.policy_versions,
            }
        )
        lengths = np.asarray(state.rows.length)
        groups = []
        for slot in ended:
            row = self._resident.pop(slot)
            self._free.append(slot)
            request = row.group.request
            drawn = slice(request.prompt_tokens.size, int(lengths[slot]))
            completion = Completion(
                prompt_id=request.prompt_id,
                sample_index=row.sample_index,
                prompt_tokens=request.prompt_tokens,
                **{name: column[slot, drawn].copy() for name, column in columns.items()},
                key=row.key,
                params=row.group.params,
                stop_reason=StopReason.from_code(int(stop[slot])),
                wait_s=row.admitted - row.group.submitted,
                decode_s=time.monotonic() - row.admitted,
            )
            self._counts["completions"] += 1
            self._counts["tokens"] += completion.completion_tokens.size
            row.group.finished[row.sample_index] = completion
            if len(row.group.finished) == len(request.sample_indices):
                self._counts["groups"] += 1
                ordered = tuple(row.group.finished[i] for i in request.sample_indices)
                groups.append(Group(request.prompt_id, ordered))
        return groups


@dataclasses.dataclass(frozen=True)
class _Programs:
    """The compiled programs: fixed shapes in, fixed shapes out, so none of them can recompile."""

    prefill: Callable[..., Any]
    admit: Callable[..., Any]
    decode: Callable[..., Any]


def _compile(
    model: Transformer,
    info: CheckpointInfo,
    geometry: Geometry,
    params: Any,
    state: EngineState,
    staging: KVCache,
) -> _Programs:
    """Compiles ahead of time. Float32 means float32 on every backend, hence the matmul precision."""
    policy = _shapes(lower(SamplingParams(), info.eos_token_ids))
    chunk = jax.ShapeDtypeStruct((geometry.prefill_rows, geometry.prefill_chunk), jnp.int32)
    fresh = jax.ShapeDtypeStruct((geometry.prefill_rows,), jnp.bool_)
    per_slot = jax.ShapeDtypeStruct((geometry.slots,), jnp.int32)
    one = jax.ShapeDtypeStruct((), jnp.int32)
    admission = Admission(
        slots=per_slot,
        count=one,
        prompt=jax.ShapeDtypeStruct((geometry.cache_len,), jnp.int32),
        buffer=_shapes(state.rows.buffer),
        prompt_len=one,
        limit=one,
        given=per_slot,
        keys=_shapes(state.rows.keys),
        policy=policy,
    )
    params, state, staging = _shapes(params), _shapes(state), _shapes(staging)

    def compiled(program: Callable[..., Any], donated: int, *shapes: Any) -> Callable[..., Any]:
        return jax.jit(program, donate_argnums=donated).lower(*shapes).compile()

    with jax.default_matmul_precision("highest" if model.dtype == jnp.float32 else "default"):
        return _Programs(
            prefill=compiled(partial(prefill, model), 1, params, staging, chunk, chunk, fresh),
            admit=compiled(admit, 0, state, staging, one, admission),
            decode=compiled(partial(decode, model, info.tokenizer_len), 1, params, state, one, one, one),
        )


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _empty_state(info: CheckpointInfo, geometry: Geometry, dtype: Any) -> EngineState:
    """Slots that hold nothing."""
    config, slots, cache_len = info.config, geometry.slots, geometry.cache_len
    neutral = lower(SamplingParams(), info.eos_token_ids)

    def column(dtype: Any) -> jax.Array:
        return jnp.zeros((slots, cache_len), dtype)

    return EngineState(
        rows=StepState.empty(slots, cache_len, config.vocab_size),
        policy=jax.device_put(stack([neutral] * slots)),
        cache=KVCache.empty(config, slots, cache_len, dtype),
        given=jnp.zeros(slots, jnp.int32),
        stop=jnp.zeros(slots, jnp.int32),
        behaviour_logprobs=column(jnp.float32),
        model_logprobs=column(jnp.float32),
        log_kept_mass=column(jnp.float32),
        policy_versions=column(jnp.int32),
    )
