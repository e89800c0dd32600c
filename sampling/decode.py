"""The compiled programs of an engine: prefill a prompt, admit its samples to slots, decode all slots.

A prompt of P tokens is prefilled up to its last token but one; the last token is the input of the first decode step.
So every token of every row is drawn by one program, in one place, and a token that is given (a replay, a branch)
passes through the same program as a token that is drawn.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from sampling.draw import Distribution, draw, log_kept_mass
from sampling.grammar.tables import GrammarTables
from sampling.keys import uniforms
from sampling.lanes import Lanes, read_lanes
from sampling.models import KVCache, Transformer
from sampling.policy import Policy
from sampling.state import NO_TOKEN, StepState
from sampling.transforms import FILTER
from sampling.types import StopReason
from sampling.vocabulary import Vocabulary


class TokenRecord(struct.PyTreeNode):
    """What is recorded of a token besides its id; see Completion. Leaves are [rows] for one step.

    Attributes:
        behaviour_logprobs, model_logprobs, log_kept_mass, entropy: float32, nats.
        forced: bool, a stage of the policy forced the token; it was not drawn.
        support: int32 [rows, places], ids of the final support in any order, NO_TOKEN after them and everywhere where
            it is not recorded. There are no places unless a policy has asked for it.
    """

    behaviour_logprobs: jax.Array
    model_logprobs: jax.Array
    log_kept_mass: jax.Array
    entropy: jax.Array
    forced: jax.Array
    support: jax.Array


class EngineState(struct.PyTreeNode):
    """All slots of an engine.

    Attributes:
        rows: the slots' tokens, lengths and keys, as transforms see them.
        policy: leaves [slots, ...].
        cache: keys and values of the slots.
        given: int32 [slots]; a place of the buffer before this index holds its token already, drawn or not.
        stop: int32 [slots], StopReason.code of a finished row, 0 before.
        overrun: int32 [slots], the length at which a rule would have ended a row that had tokens given beyond; else 0.
        record: leaves [slots, cache_len, ...], at the place of the token in the buffer.
        policy_versions: int32 [slots, cache_len].
    """

    rows: StepState
    policy: Policy
    cache: KVCache
    given: jax.Array
    stop: jax.Array
    overrun: jax.Array
    record: TokenRecord
    policy_versions: jax.Array

    def only(self, slots: jax.Array) -> EngineState:
        """Some slots, beside the cache of all; slots int32 [n], each once."""
        few = jax.tree.map(lambda leaf: leaf[slots], self.replace(cache=None))
        return few.replace(cache=self.cache)

    def updated(self, slots: jax.Array, few: EngineState) -> EngineState:
        """All slots, with what has become of those that `only` has taken."""
        rest, new = self.replace(cache=None), few.replace(cache=None)
        return jax.tree.map(lambda leaf, new: leaf.at[slots].set(new), rest, new).replace(cache=few.cache)


class Admission(struct.PyTreeNode):
    """Samples of one prompt that enter slots together. Arrays are indexed by slot; other slots' entries are unused.

    Attributes:
        slots: int32 [slots], the slots to fill, in its first `count` places.
        count: int32 [].
        prompt: int32 [cache_len], the prompt and then anything.
        buffer: int32 [slots, cache_len], prompt and given tokens.
        prompt_len: int32 [].
        limit: int32 [], total length at which the budget of new tokens ends.
        given: int32 [slots].
        keys: uint32 [slots, 2].
        policy: leaves without a rows axis, the same for all samples.
    """

    slots: Any
    count: Any
    prompt: Any
    buffer: Any
    prompt_len: Any
    limit: Any
    given: Any
    keys: Any
    policy: Policy


def prefill(
    model: Transformer,
    lane_len: int,
    params: dict,
    staging: KVCache,
    prompts: jax.Array,
    lanes: Lanes,
    fresh: jax.Array,
) -> KVCache:
    """Reads stretches of some prompts into the staging cache.

    Args:
        prompts: int32 [rows, cache_len].
        fresh: bool [rows], rows whose prompt begins here: their old content is wiped, so that nothing of an earlier
            one (not even a NaN under a zero weight) can reach the new one.
    """
    return read_lanes(model, params, staging.wiped(fresh), prompts, lanes, lane_len)[1]


def admit(state: EngineState, staging: KVCache, staged_row: jax.Array, admission: Admission) -> EngineState:
    """Fills slots with samples of the prompt in row `staged_row` (int32 []) of the staging cache."""
    slots = admission.given.shape[0]
    listed = jnp.where(jnp.arange(slots) < admission.count, admission.slots, slots)
    entering = jnp.zeros(slots, bool).at[listed].set(True, mode="drop")

    def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
        mask = entering.reshape((slots,) + (1,) * (old.ndim - 1))
        return jnp.where(mask, new, old)

    rows = state.rows
    prompt_len = jnp.full(slots, admission.prompt_len)
    prompt = jnp.where(jnp.arange(rows.capacity) < admission.prompt_len, admission.prompt, rows.vocab_size)
    in_prompt = jnp.zeros(rows.vocab_size, bool).at[prompt].set(True, mode="drop")
    return state.replace(
        rows=rows.replace(
            buffer=chosen(admission.buffer, rows.buffer),
            prompt_len=chosen(prompt_len, rows.prompt_len),
            length=chosen(prompt_len, rows.length),
            active=rows.active | entering,
            keys=chosen(admission.keys, rows.keys),
            limit=chosen(jnp.full(slots, admission.limit), rows.limit),
            in_prompt=chosen(jnp.broadcast_to(in_prompt[None, :], rows.in_prompt.shape), rows.in_prompt),
            counts=chosen(jnp.zeros_like(rows.counts), rows.counts),
            automaton=chosen(jnp.full(slots, admission.policy.grammar.start), rows.automaton),
        ),
        policy=jax.tree.map(
            lambda one, all_: chosen(jnp.broadcast_to(one, all_.shape), all_),
            admission.policy,
            state.policy,
        ),
        cache=state.cache.fill(staging, staged_row, admission.slots, admission.count),
        given=chosen(admission.given, state.given),
        stop=jnp.where(entering, 0, state.stop),
        overrun=jnp.where(entering, 0, state.overrun),
    )


def decode(
    model: Transformer,
    tokenizer_len: int,
    params: dict,
    state: EngineState,
    vocabulary: Vocabulary,
    grammars: GrammarTables,
    version: jax.Array,
    max_steps: jax.Array,
    min_active: jax.Array,
    slots: jax.Array | None = None,
) -> tuple[EngineState, jax.Array, jax.Array]:
    """Draws tokens for active slots until `max_steps` are done or fewer than `min_active` rows still run.

    Args:
        vocabulary: the tokens' bytes, for stop strings.
        grammars: the tables of all rows' grammars.
        version: int32 [], of the weights; written beside every token.
        max_steps, min_active: int32 [].
        slots: int32 [width], the slots that decode, each once; others stay as they are. None: all.
    Returns:
        The state; the steps done; and the row-steps among them that advanced an active row.
    """

    def going(carry: tuple[EngineState, jax.Array, jax.Array]) -> jax.Array:
        state, steps, _ = carry
        return (steps < max_steps) & (jnp.sum(state.rows.active) >= min_active)

    def body(
        carry: tuple[EngineState, jax.Array, jax.Array],
    ) -> tuple[EngineState, jax.Array, jax.Array]:
        state, steps, busy = carry
        busy = busy + jnp.sum(state.rows.active, dtype=jnp.int32)
        state = decode_step(model, tokenizer_len, params, state, vocabulary, grammars, version, slots)
        return state, steps + 1, busy

    zero = jnp.zeros((), jnp.int32)
    begin = state if slots is None else state.only(slots)
    grammars = grammars if slots is None else grammars.of_rows(slots)
    end, steps, busy = jax.lax.while_loop(going, body, (begin, zero, zero))
    return end if slots is None else state.updated(slots, end), steps, busy


def decode_step(
    model: Transformer,
    tokenizer_len: int,
    params: dict,
    state: EngineState,
    vocabulary: Vocabulary,
    grammars: GrammarTables,
    version: jax.Array,
    cache_rows: jax.Array | None = None,
) -> EngineState:
    """One token for every active row i, whose cache is row `cache_rows[i]`: forward, chain, draw, record, stop."""
    rows, policy = state.rows, state.policy.bound(vocabulary, grammars)
    index = jnp.arange(rows.buffer.shape[0], dtype=jnp.int32)
    logits, cache = next_logits(model, params, state, cache_rows)

    is_given = rows.length < state.given
    given = jnp.where(is_given, rows.buffer[index, jnp.minimum(rows.length, rows.capacity - 1)], NO_TOKEN)
    choice = choose(policy, rows, logits, given, tokenizer_len)

    committed = rows.active & choice.defined
    place = jnp.where(committed, rows.length, rows.capacity)

    def recorded(stored: jax.Array, new: jax.Array) -> jax.Array:
        return stored.at[index, place].set(new, mode="drop")

    after = policy.commit(rows.replace(active=committed), choice.tokens)
    stop = policy.stop_codes(rows, after, choice.tokens)
    more_given = after.length < state.given
    overruns = rows.active & more_given & (stop != 0) & (state.overrun == 0)
    stop = jnp.where(more_given, 0, stop)
    stop = jnp.where((stop == 0) & (after.length >= rows.capacity), StopReason.CACHE_FULL.code, stop)
    undefined = jnp.where(choice.dead_end, StopReason.CONSTRAINT_DEAD_END.code, StopReason.UNDEFINED_DISTRIBUTION.code)
    stop = jnp.where(choice.defined, stop, undefined)
    return state.replace(
        rows=after.replace(active=committed & (stop == 0)),
        cache=cache,
        stop=jnp.where(rows.active, stop, state.stop),
        overrun=jnp.where(overruns, after.length, state.overrun),
        record=jax.tree.map(recorded, state.record, choice.record),
        policy_versions=recorded(state.policy_versions, jnp.full_like(choice.tokens, version)),
    )


def next_logits(
    model: Transformer, params: dict, state: EngineState, cache_rows: jax.Array | None = None
) -> tuple[jax.Array, KVCache]:
    """Scores float32 [rows, vocab] of every active row's next token, and the cache with its last one."""
    rows = state.rows
    index = jnp.arange(rows.buffer.shape[0], dtype=jnp.int32)
    last = rows.buffer[index, jnp.maximum(rows.length - 1, 0)]
    positions = jnp.where(rows.active, rows.length - 1, -1)
    forward: Any = partial(model.apply, {"params": params})
    hidden, cache = forward(last[:, None], positions[:, None], state.cache, cache_rows)
    return forward(hidden[:, 0], method="logits"), cache


class Choice(struct.PyTreeNode):
    """What a step takes for each row, and the record of it.

    Attributes:
        tokens: int32 [rows].
        defined: bool [rows], False where there was nothing to take.
        dead_end: bool [rows], where that is because the row's grammar and the rest of its policy allow no token.
    """

    tokens: jax.Array
    defined: jax.Array
    dead_end: jax.Array
    record: TokenRecord


def choose(policy: Policy, rows: StepState, logits: jax.Array, given: jax.Array, tokenizer_len: int) -> Choice:
    """Runs the chain and draws, or takes the given token; either way the record is of the token taken.

    Args:
        logits: float32 [rows, vocab], the model's.
        given: int32 [rows], NO_TOKEN where the token is to be drawn.
        tokenizer_len: ids from here on are removed.
    """
    model = Distribution.of(logits)
    uniform = uniforms(rows.keys, rows.step)

    left = policy.grammar.has_left(rows)  # no token has a chance there, and none can be drawn

    def taken(behaviour: Distribution, kept: jax.Array, forced: jax.Array, support: jax.Array) -> Choice:
        tokens = jnp.where(given == NO_TOKEN, draw(behaviour, uniform), given)
        stranded = left & (given == NO_TOKEN)
        emptied = (behaviour.masses.total == 0) & ~policy.grammar.is_neutral()
        return Choice(
            tokens=tokens,
            defined=behaviour.masses.defined & ~stranded,
            dead_end=stranded | emptied,
            record=TokenRecord(
                behaviour_logprobs=jnp.where(left, FILTER, behaviour.logprobs(tokens)),
                model_logprobs=model.logprobs(tokens),
                log_kept_mass=kept,
                entropy=behaviour.entropy(),
                forced=forced,
                support=support,
            ),
        )

    # A row that no stage touches is drawn from the model's own distribution, whatever its batch mates ask for; so a
    # batch of such rows never looks at its scores twice.
    untouched = policy.neutral(rows) & (tokenizer_len >= logits.shape[-1])
    nowhere = jnp.zeros_like(untouched)
    from_model = taken(model, nowhere.astype(jnp.float32), nowhere, policy.support.nothing(rows))

    def through_chain() -> Choice:
        scores = policy.scores(rows, without_padded_ids(logits, tokenizer_len))
        kept, support = log_kept_mass(scores, model), policy.support.of(rows, scores)
        from_chain = taken(Distribution.of(scores), kept, policy.forced(rows), support)

        def chosen(ours: jax.Array, theirs: jax.Array) -> jax.Array:
            return jnp.where(untouched.reshape(untouched.shape + (1,) * (ours.ndim - 1)), ours, theirs)

        return jax.tree.map(chosen, from_model, from_chain)

    return jax.lax.cond(jnp.all(untouched), lambda: from_model, through_chain)


def without_padded_ids(logits: jax.Array, tokenizer_len: int) -> jax.Array:
    """Removes the ids past the tokenizer's length, with which some checkpoints pad their head."""
    if tokenizer_len >= logits.shape[-1]:
        return logits
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    return jnp.where(ids[None, :] < tokenizer_len, logits, FILTER)
