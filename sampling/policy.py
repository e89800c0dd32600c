"""Policy: a chain of transforms and stopping rules as a pytree, one for a row or stacked over the rows of a batch.

`lower` is the only way from SamplingParams to a Policy. All policies of one capacity have the same stages, neutral
where a stage is off, so stacking is free and changing any number compiles nothing. The order in which a row's stages
apply is a number too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import ArrayLike

from sampling.capacity import Capacity
from sampling.errors import ConfigError
from sampling.grammar.tables import FREE, GrammarTables
from sampling.orders import ORDER_NAMES, STAGES
from sampling.param_checks import GRAMMAR_ENDS
from sampling.params import BANNED, SamplingParams
from sampling.plugins import PluginKind, PluginRule, PluginStage
from sampling.pytrees import Node
from sampling.state import NO_TOKEN, StepState
from sampling.stop_strings import StopStrings, encode_stop_strings
from sampling.stopping import EndOfSequence, GrammarDone, MaxLength, MaxNewTokens, StoppingRule, StopTokens
from sampling.support import RecordedSupport
from sampling.transforms import (
    AllowedTokens,
    BeginSuppressTokens,
    EpsilonCutoff,
    EtaCutoff,
    ExponentialDecayLengthPenalty,
    ForcedBOS,
    ForcedEOS,
    FrequencyPenalty,
    GrammarMask,
    Greedy,
    LogitBias,
    MinLength,
    MinNewTokens,
    MinP,
    NoRepeatNGram,
    PresencePenalty,
    PromptNoRepeatNGram,
    PromptRepetitionPenalty,
    RemoveInvalidValues,
    Renormalize,
    RepetitionPenalty,
    SequenceBias,
    SuppressTokens,
    Temperature,
    ThinkingBudget,
    TopH,
    TopK,
    TopP,
    Transform,
    Typical,
    apply_all,
    neutral_rows,
)
from sampling.vocabulary import Vocabulary


class Policy(Node):
    """How rows are drawn and when they end. Leaves are scalars or tables for one row, or [rows, ...] for a batch.

    Attributes:
        transforms: the stages by name, those of plugins included.
        stopping: the rules, the most telling first: where several end a row at once, the first gives the reason.
        order: int32, which of ORDER_NAMES the row's stages apply in.
        orders: the names of those that may occur (static).
        support: which supports are recorded.
        plugins: stages of plugins in order, each with the name of the stage before which it stands (static).
    """

    transforms: dict[str, Transform]
    stopping: tuple[StoppingRule, ...]
    order: ArrayLike = 0
    orders: tuple[str, ...] = struct.field(pytree_node=False, default=("transformers",))
    support: RecordedSupport = RecordedSupport()
    plugins: tuple[tuple[str, str], ...] = struct.field(pytree_node=False, default=())

    def stages(self, order: str) -> list[str]:
        """The names of the stages in one of the orders, first to last."""
        names: list[str] = list(STAGES[order])
        for name, before in self.plugins:
            names.insert(names.index(before), name)
        return names

    def scores(self, state: StepState, logits: jax.Array) -> jax.Array:
        """The scores that the draw reads: float32 [rows, vocab], a removed token at -inf."""
        for name in self.orders:
            chosen = jnp.broadcast_to(self.order, state.active.shape) == ORDER_NAMES.index(name)
            rows = state.replace(active=state.active & chosen)

            def in_order(logits: jax.Array, name: str = name, rows: StepState = rows) -> jax.Array:
                return apply_all([self.transforms[stage] for stage in self.stages(name)], rows, logits)

            if len(self.orders) == 1:
                return in_order(logits)
            logits = jax.lax.cond(jnp.any(rows.active), in_order, lambda logits: logits, logits)
        return logits

    def neutral(self, state: StepState) -> jax.Array:
        """bool [rows]: rows whose scores are the model's own, no stage changing anything and no support asked for."""
        return neutral_rows(self.transforms.values(), state) & ~(self.support.wanted() & state.active)

    def forced(self, state: StepState) -> jax.Array:
        """bool [rows]: active rows whose next token a stage forces, so that it is not drawn."""
        kinds = (ForcedBOS, ForcedEOS, ThinkingBudget)
        stages = [stage for stage in self.transforms.values() if isinstance(stage, kinds)]

        def any_forces() -> jax.Array:
            return functools.reduce(jnp.logical_or, [stage.forces(state) for stage in stages]) & state.active

        none = jnp.zeros_like(state.active)
        return jax.lax.cond(jnp.all(neutral_rows(stages, state)), lambda: none, any_forces)

    def stop_codes(self, before: StepState, after: StepState, tokens: jax.Array) -> jax.Array:
        """Why each row ends with the token just committed: StopReason.code, int32 [rows]; 0 if it goes on."""
        minima = [stage for stage in self.transforms.values() if isinstance(stage, (MinLength, MinNewTokens))]

        def held(state: StepState) -> jax.Array:
            return functools.reduce(jnp.logical_or, [stage.holds_back(state) for stage in minima], jnp.asarray(False))

        code = jnp.zeros(tokens.shape, jnp.int32)
        for rule in self.stopping:
            ends = rule(after, tokens)
            # Ids are held back through their scores; a string or a plugin is overlooked until it may end the row.
            # A text counts the token that completes it.
            if isinstance(rule, StopStrings | PluginRule):
                ends = ends & ~held(before)
            elif isinstance(rule, GrammarDone):
                ends = ends & (~held(after) | rule.must_end(after))
            code = jnp.where((code == 0) & ends, rule.reason.code, code)
        return code

    @property
    def grammar(self) -> GrammarMask:
        """The stage that holds rows to their grammars."""
        stage = self.transforms["grammar"]
        assert isinstance(stage, GrammarMask)
        return stage

    def commit(self, state: StepState, tokens: jax.Array) -> StepState:
        """The state with one more token in every active row, their automata advanced by it; tokens int32 [rows]."""
        after, tables = state.commit(tokens), self.grammar.tables
        if tables is None:
            return after
        return after.replace(automaton=jnp.where(state.active, tables.step(state.automaton, tokens), state.automaton))

    def bound(self, vocabulary: Vocabulary, tables: GrammarTables) -> Policy:
        """The policy with its rules bound to the bytes of the engine's tokens and to the tables of its grammars."""

        def bind(rule: StoppingRule) -> StoppingRule:
            match rule:
                case StopStrings():
                    return rule.replace(vocabulary=vocabulary)
                case GrammarDone():
                    return rule.replace(tables=tables)
            return rule

        mask = self.grammar.replace(tables=tables)
        return self.replace(transforms={**self.transforms, "grammar": mask}, stopping=tuple(map(bind, self.stopping)))


def lower(params: SamplingParams, capacity: Capacity | None = None, grammar_start: int = FREE) -> Policy:
    """The policy of one row, with NumPy leaves.

    Args:
        params: what the user asked for, as `resolved` leaves it: end-of-sequence ids joined, texts turned into ids.
        capacity: sizes of the tables; by default just what the parameters need.
        grammar_start: where the grammar of the parameters begins in the tables that the policy will be bound to.
    Raises:
        ConfigError: a table is too small, a bad word or a marker is still a text, or there is a grammar and no start,
            or the other way round; or a plugin that is none of the capacity's.
    """
    needed = Capacity.needed(params)
    capacity = capacity or Capacity().grown_for(needed)
    if capacity.grown_for(needed) != capacity:
        raise ConfigError(f"expected a capacity of at least {needed}, got {capacity}")
    for name in ("bad_words", "thinking_start", "thinking_end"):
        value = getattr(params, name)
        if isinstance(value, str) or any(isinstance(part, str) for part in value):
            raise ConfigError(f"sampling.{name}: expected token ids by now, got text: {value!r}")

    if (params.grammar is None) != (grammar_start == FREE):
        raise ConfigError(f"expected a place in the tables for the grammar {params.grammar}, got {grammar_start}")

    chosen = dict(capacity.plugins.resolved(params).plugins)
    ends = _ids(params.end_token_ids, 2 * capacity.end_ids)
    start, factor = params.exponential_decay_length_penalty or (0, 1.0)
    banned = [(word, BANNED) for word in params.bad_words if len(word) > 1 or word[0] not in params.eos_token_ids]
    stages: dict[str, Transform] = {
        "sequence_bias": _sequences(params.sequence_bias, capacity),
        "logit_bias": LogitBias(
            _ids([token for token, _ in params.logit_bias], capacity.biases),
            _filled([bias for _, bias in params.logit_bias], capacity.biases, 0.0, np.float32),
        ),
        "prompt_repetition_penalty": PromptRepetitionPenalty(np.float32(params.prompt_repetition_penalty)),
        "repetition_penalty": RepetitionPenalty(np.float32(params.repetition_penalty)),
        "frequency_penalty": FrequencyPenalty(np.float32(params.frequency_penalty)),
        "presence_penalty": PresencePenalty(np.float32(params.presence_penalty)),
        "no_repeat_ngram_size": NoRepeatNGram(np.int32(params.no_repeat_ngram_size)),
        "prompt_no_repeat_ngram_size": PromptNoRepeatNGram(np.int32(params.prompt_no_repeat_ngram_size)),
        "bad_words": _sequences(banned, capacity),
        "min_length": MinLength(np.int32(params.min_length), ends),
        "min_new_tokens": MinNewTokens(np.int32(params.min_new_tokens), ends),
        "forced_bos": ForcedBOS(np.int32(NO_TOKEN if params.forced_bos is None else params.forced_bos)),
        "forced_eos": ForcedEOS(_ids(params.forced_eos, capacity.end_ids), np.int32(0)),
        "remove_invalid_values": RemoveInvalidValues(np.bool_(params.remove_invalid_values)),
        "exponential_decay_length_penalty": ExponentialDecayLengthPenalty(
            np.int32(start), np.float32(factor), _ids(params.eos_token_ids, capacity.end_ids)
        ),
        "suppress_tokens": SuppressTokens(_ids(params.suppress_tokens, capacity.suppressed)),
        "begin_suppress_tokens": BeginSuppressTokens(
            _ids(params.begin_suppress_tokens, capacity.suppressed), np.int32(0)
        ),
        "allowed_token_ids": AllowedTokens(_ids(params.allowed_token_ids, capacity.allowed)),
        "thinking_budget": ThinkingBudget(
            np.int32(-1 if params.thinking_budget is None else params.thinking_budget),
            _ids(params.thinking_start, capacity.marker_len),
            _ids(params.thinking_end, capacity.marker_len),
        ),
        "grammar": GrammarMask(
            np.int32(grammar_start),
            _ids(params.eos_token_ids, capacity.end_ids),
            _ids(params.stop_token_ids, capacity.end_ids),
        ),
        "temperature": Temperature(np.float32(1.0 if params.greedy else params.temperature)),
        "top_h": TopH(np.float32(params.top_h or 0.0)),
        "top_k": TopK(np.int32(min(params.top_k or 0, np.iinfo(np.int32).max))),
        "top_p": TopP(np.float32(params.top_p)),
        "min_p": MinP(np.float32(params.min_p)),
        "typical_p": Typical(np.float32(params.typical_p)),
        "epsilon_cutoff": EpsilonCutoff(np.float32(params.epsilon_cutoff)),
        "eta_cutoff": EtaCutoff(np.float32(params.eta_cutoff)),
        "renormalize": Renormalize(np.bool_(params.renormalize)),
        "greedy": Greedy(np.bool_(params.greedy)),
    }
    added = capacity.plugins.of(PluginKind.TRANSFORM)
    for plugin in added:
        leaves = plugin.leaves(dict(chosen.get(plugin.name, ())))
        stages[plugin.name] = PluginStage(np.bool_(plugin.name in chosen), leaves, plugin)
    if params.greedy:  # what keeps the best token cannot matter
        for name, stage in stages.items():
            stages[name] = stage.off() if stage.argmax_invariant and name != "greedy" else stage
    stopping = (
        EndOfSequence(_ids(params.eos_token_ids, capacity.end_ids)),
        StopTokens(_ids(params.stop_token_ids, capacity.end_ids)),
        StopStrings(*encode_stop_strings(params.stop, capacity.stop_strings, capacity.stop_bytes)),
        GrammarDone(np.int32(GRAMMAR_ENDS.index(params.grammar_end))),
        *(
            PluginRule(np.bool_(plugin.name in chosen), plugin.leaves(dict(chosen.get(plugin.name, ()))), plugin)
            for plugin in capacity.plugins.of(PluginKind.RULE)
        ),
        MaxNewTokens(np.int32(params.max_new_tokens)),
        MaxLength(np.int32(params.max_length or np.iinfo(np.int32).max)),
    )
    return Policy(
        transforms=stages,
        stopping=stopping,
        order=np.int32(ORDER_NAMES.index(params.order)),
        orders=capacity.orders,
        support=RecordedSupport(np.int32(params.record_support), capacity.support),
        plugins=tuple((plugin.name, plugin.ref.before) for plugin in added),
    )


def stack(policies: Sequence[Policy]) -> Policy:
    """Policies of one capacity as one policy with a [rows] axis on every leaf.

    Raises:
        ConfigError: the policies do not have the same stages or sizes.
    """
    shapes = {str(jax.tree.map(np.shape, policy)) for policy in policies}
    if len({jax.tree.structure(policy) for policy in policies}) != 1 or len(shapes) != 1:
        raise ConfigError("expected policies of one capacity, got different stages or sizes; lower them with the same")
    return jax.tree.map(lambda *leaves: np.stack(leaves), *policies)


_ASKING = tuple(
    "eos_token_ids stop_token_ids allowed_token_ids forced_bos forced_eos thinking_start thinking_end".split()
)
"""Parameters that ask for the tokens that they name."""


def resolved(
    params: SamplingParams,
    eos_token_ids: Sequence[int] = (),
    encode: Callable[[str], Sequence[int]] | None = None,
    control: Sequence[int] | None = None,
) -> SamplingParams:
    """The parameters as they take effect, which is how records hold them.

    Args:
        eos_token_ids: end-of-sequence ids of the checkpoint, which join the request's own unless it ignores them.
        encode: text to token ids, without adding special tokens, for markers and bad words given as text; each of the
            latter stands for itself and for its form after a space.
        control: the tokenizer's special tokens, which join `suppress_tokens` if they are not to be drawn.
    Raises:
        ConfigError: there is a text and no `encode`, or no `control` where it is needed; or a marker's ids contradict
            another parameter.
    """

    def encoded(name: str, text: str) -> tuple[int, ...]:
        if encode is None:
            raise ConfigError(f"sampling.{name}: {text!r} is a text and there is no tokenizer; give its token ids")
        return tuple(encode(text))

    eos = () if params.ignore_eos else (*eos_token_ids, *params.eos_token_ids)
    words: list[tuple[int, ...]] = []
    for word in params.bad_words:
        if not isinstance(word, str):
            words.append(word)
        else:
            text = word.lstrip()
            words += [encoded("bad_words", text), encoded("bad_words", f" {text}")]
    markers = {name: getattr(params, name) for name in ("thinking_start", "thinking_end")}
    ids = {name: encoded(name, marker) if isinstance(marker, str) else marker for name, marker in markers.items()}
    params = params.replace(eos_token_ids=eos, bad_words=words, **ids)
    if not params.suppress_control_tokens:
        return params
    if control is None:
        raise ConfigError("sampling.suppress_control_tokens: there is no tokenizer to tell them; use suppress_tokens")
    named = params.token_ids()
    asked_for = {token for name in _ASKING for token in named[name]}
    return params.replace(suppress_tokens=(*params.suppress_tokens, *(set(control) - asked_for)))


def _ids(tokens: Sequence[int], places: int) -> np.ndarray:
    return _filled(list(tokens), places, NO_TOKEN, np.int32)


def _filled(values: list, places: int, filler: float, dtype: type) -> np.ndarray:
    return np.array([*values, *[filler] * (places - len(values))], dtype)


def _sequences(entries: Sequence[tuple[Sequence[int], float]], capacity: Capacity) -> SequenceBias:
    table = np.full((capacity.sequences, capacity.sequence_len), NO_TOKEN, np.int32)
    for place, (ids, _) in enumerate(entries):
        table[place, : len(ids)] = ids
    return SequenceBias(
        table,
        _filled([len(ids) for ids, _ in entries], capacity.sequences, 0, np.int32),
        _filled([bias for _, bias in entries], capacity.sequences, 0.0, np.float32),
    )
