"""explain: why one token of a row was drawn, seen from between the stages of the row's chain.

The row is read once more by the engine's own programs, which gives the model's scores as they were. Then the row's
transforms, its draw and its stopping rules are gone through, with the scores looked at after every stage. That is done
outside the engine's program, so log-probs may differ from the recorded ones in their last digit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sampling.capacity import Capacity
from sampling.decode import without_padded_ids
from sampling.draw import Distribution, draw, log_kept_mass
from sampling.engine import Engine
from sampling.errors import ConfigError
from sampling.explanation import Candidate, Explanation, RuleView, Share, StageView, Verdict
from sampling.grammar import NO_STATE, Followed, TokenAutomaton
from sampling.grammar.tables import FREE, OPEN, GrammarTables
from sampling.keys import UNIFORM_BITS, uniforms
from sampling.params import SamplingParams
from sampling.plugins import PluginRule
from sampling.policy import Policy, lower, stack
from sampling.state import StepState
from sampling.stop_strings import StopStrings, find_stop
from sampling.stopping import EndOfSequence, GrammarDone, MaxLength, MaxNewTokens, StoppingRule, StopTokens
from sampling.transforms import Transform, apply
from sampling.types import Request, StopReason
from sampling.vocabulary import Vocabulary

PADDED_IDS = "padded_ids"
"""Names the removal of the ids past the tokenizer's length, which comes before every chain."""

CONTEXT_LEN = 16
"""Tokens before the explained one whose text is shown."""


def explain(
    engine: Engine,
    prompt_tokens: Sequence[int] | np.ndarray,
    completion_tokens: Sequence[int] | np.ndarray,
    place: int,
    params: SamplingParams,
    key: Sequence[int] | np.ndarray,
    *,
    top: int = 5,
) -> Explanation:
    """Goes once more through the step that drew a token.

    Args:
        engine: with the weights, geometry and dtype that drew it. It must be idle, and is so again afterwards.
        prompt_tokens: int [prompt_len], at least one; completion_tokens: int [completion_len].
        place: of the token in the completion; negative counts from its end. The engine decodes as many steps.
        params: how it was drawn, as `resolved` leaves them and records hold them.
        key: the row's key, two 32-bit words.
        top: how many of the best tokens to show.
    Raises:
        ConfigError: there is no such place, the token is outside the model's vocabulary, or there are stop strings
            and no tokenizer; or a plugin is missing, or of another version.
        PromptError: a token before it is none of the tokenizer's, or there are more than the cache holds.
        RunError: the engine is not idle.
    """
    prompt, completion = np.asarray(prompt_tokens, np.int32), np.asarray(completion_tokens, np.int32)
    place = place_in(completion.size, place)
    info, vocabulary, cache_len = engine.info, engine.vocabulary, engine.geometry.cache_len
    vocab_size = info.config.vocab_size
    if params.stop and vocabulary is None:
        raise ConfigError(f"sampling.stop: {info.name} has no tokenizer to find strings with")
    if not 0 <= completion[place] < vocab_size:
        raise ConfigError(f"expected token ids in 0 .. {vocab_size - 1}, got {completion[place]}")

    logits = engine.next_scores(Request("explained", prompt, given=(completion[:place],)))[None, :]
    before = StepState.from_histories(
        [prompt.tolist()],
        [completion[:place].tolist()],
        capacity=cache_len,
        vocab_size=vocab_size,
        limit=min([prompt.size + params.max_new_tokens, cache_len, *filter(None, [params.max_length])]),
    ).replace(keys=jnp.asarray(key, jnp.uint32).reshape(1, 2))
    tables, states = _followed(engine.automaton(params), completion[: place + 1], vocab_size)
    params = engine.plugins.resolved(params)
    capacity = Capacity(plugins=engine.plugins).grown_for(Capacity.needed(params))
    policy = stack([lower(params, capacity, grammar_start=states[0])])
    policy = policy.bound(vocabulary or Vocabulary.from_pieces([b"?"]), tables)
    before = before.replace(automaton=jnp.full(1, states[-2], jnp.int32))
    lens = _Lens(vocabulary, int(completion[place]), top)

    scores = without_padded_ids(logits, info.tokenizer_len)
    padded = info.tokenizer_len < vocab_size
    stages = [lens.stage(PADDED_IDS, None, info.tokenizer_len, logits, scores)] if padded else []
    values, off = _values(params), jax.device_get(_are_off(policy.transforms))
    on = [name for name in policy.stages(params.order) if not off[name]]
    for name in on:
        earlier, scores = scores, _apply(policy.transforms[name], before, scores)
        parameter = _parameter(name, params)
        stages.append(lens.stage(name, parameter, values[parameter], earlier, scores))

    tokens = jnp.asarray(completion[place : place + 1])
    again = _draw(logits, scores, before, tokens)
    reason, rules = _stopping(params, policy, before, tokens, states[-1], vocabulary, cache_len)
    return Explanation(
        place=place,
        prompt_len=prompt.size,
        completion_len=completion.size,
        context=_text(vocabulary, np.concatenate([prompt, completion[:place]])[-CONTEXT_LEN:]),
        order=params.order,
        model=lens.stage("model", None, None, logits, logits),
        stages=tuple(stages),
        num_off=len(policy.transforms) - len(on),
        forced=bool(_forced(policy, before)[0]),
        without_effect=_without_effect(params, policy.stages(params.order), on),
        support=int(np.isfinite(scores).sum()),
        entropy=float(again.entropy[0]),
        log_kept_mass=float(again.log_kept_mass[0]),
        candidates=lens.shares(scores, _best(scores, top)),
        key=(int(before.keys[0, 0]), int(before.keys[0, 1])),
        uniform=float(again.uniform[0]),
        uniform_multiple=int(float(again.uniform[0]) * 2**UNIFORM_BITS),
        token=lens.shares(scores, completion[place : place + 1])[0],
        drawn=lens.shares(scores, again.tokens)[0] if again.defined[0] else None,
        behaviour_logprob=float(again.behaviour_logprobs[0]),
        model_logprob=float(again.model_logprobs[0]),
        rules=rules,
        stop_reason=reason,
    )


def _followed(automaton: Followed | None, tokens: np.ndarray, vocab: int) -> tuple[GrammarTables, list[int]]:
    """What a row's last token is judged by, and the states before each of its tokens and after the last."""
    tables = GrammarTables.of([automaton] if isinstance(automaton, TokenAutomaton) else [], vocab)
    if automaton is None:
        return tables, [FREE] * (tokens.size + 1)
    if isinstance(automaton, TokenAutomaton):
        return tables, [state if state == NO_STATE else state + 1 for state in automaton.states(tokens)]
    states, allowed = automaton.walk(tokens)
    return tables.replace(masks=allowed[-1:]), states


def place_in(completion_len: int, place: int) -> int:
    """A place of a completion, counted from 0.

    Args:
        place: negative counts from the end.
    Raises:
        ConfigError: there is no such place.
    """
    if not -completion_len <= place < completion_len:
        places = f"a place in 0 .. {completion_len - 1}, or -{completion_len} .. -1 from the end"
        raise ConfigError(f"token: expected {places if completion_len else 'a completion with tokens'}, got {place}")
    return place % completion_len


@dataclass(frozen=True)
class _Lens:
    """Reads scores, float32 [1, vocab], with an eye on one token."""

    vocabulary: Vocabulary | None
    token: int
    top: int

    def stage(self, name: str, parameter: str | None, value: Any, earlier: jax.Array, scores: jax.Array) -> StageView:
        """A stage by the scores before and after it."""
        had, has, row = np.isfinite(earlier)[0], np.isfinite(scores)[0], np.asarray(scores)[0]
        own = row[self.token]
        # Ties go to the lowest id, as in the greedy choice.
        ahead = np.sum(row > own) + np.sum(row[: self.token] == own)
        *best, token = self._candidates(scores, _probabilities(scores), [*_best(scores, self.top), self.token])
        return StageView(
            name=name,
            parameter=parameter,
            value=value,
            left=int(has.sum()),
            removed=int((had & ~has).sum()),
            restored=int((has & ~had).sum()),
            best=tuple(best),
            token=token,
            token_rank=int(ahead) + 1 if np.isfinite(own) else None,
        )

    def shares(self, scores: jax.Array, ids: Any) -> tuple[Share, ...]:
        """Tokens of the final distribution."""
        probabilities = _probabilities(scores)
        high = np.cumsum(probabilities)
        low = np.concatenate([[0.0], high[:-1]])
        return tuple(
            Share(**vars(one), low=float(low[one.token] / high[-1]), high=float(high[one.token] / high[-1]))
            for one in self._candidates(scores, probabilities, ids)
        )

    def _candidates(self, scores: jax.Array, probabilities: np.ndarray, ids: Any) -> list[Candidate]:
        row = np.asarray(scores)[0]
        return [
            Candidate(token, _text(self.vocabulary, [token]), float(row[token]), float(probabilities[token]))
            for token in np.asarray(ids).tolist()
        ]


@jax.jit
def _apply(transform: Transform, state: StepState, scores: jax.Array) -> jax.Array:
    return apply(transform, state, scores)


class _Drawn(NamedTuple):
    """One draw from final scores, each [rows]: see Distribution, `uniforms` and `log_kept_mass`."""

    uniform: jax.Array
    tokens: jax.Array
    defined: jax.Array
    entropy: jax.Array
    log_kept_mass: jax.Array
    behaviour_logprobs: jax.Array
    model_logprobs: jax.Array


@jax.jit
def _draw(logits: jax.Array, scores: jax.Array, state: StepState, tokens: jax.Array) -> _Drawn:
    """Draws from `scores`; the log-probs are those of `tokens`."""
    model, final = Distribution.of(logits), Distribution.of(scores)
    uniform = uniforms(state.keys, state.step)
    return _Drawn(
        uniform=uniform,
        tokens=draw(final, uniform),
        defined=final.masses.defined,
        entropy=final.entropy(),
        log_kept_mass=log_kept_mass(scores, model),
        behaviour_logprobs=final.logprobs(tokens),
        model_logprobs=model.logprobs(tokens),
    )


@jax.jit
def _forced(policy: Policy, state: StepState) -> jax.Array:
    return policy.forced(state)


@jax.jit
def _commit(policy: Policy, state: StepState, tokens: jax.Array) -> StepState:
    return policy.commit(state, tokens)


@jax.jit
def _stop_codes(policy: Policy, before: StepState, after: StepState, tokens: jax.Array) -> jax.Array:
    return policy.stop_codes(before, after, tokens)


@jax.jit
def _are_off(transforms: dict[str, Transform]) -> dict[str, jax.Array]:
    return {name: jnp.all(transform.is_neutral()) for name, transform in transforms.items()}


@jax.jit
def _softmax(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    final = Distribution.of(scores)
    return final.probabilities(), final.masses.defined


def _parameter(stage: str, params: SamplingParams) -> str:
    """The parameter that a stage comes from."""
    if stage == "grammar" and params.grammar:
        return params.grammar.kind
    return "temperature" if stage == "greedy" else stage


def _values(params: SamplingParams) -> dict[str, Any]:
    """Every parameter, and what each plugin was given, by name."""
    values = params.to_dict()
    return {**values, **values["plugins"]}


def _without_effect(params: SamplingParams, stages: list[str], on: list[str]) -> dict[str, Any]:
    values, defaults = _values(params), SamplingParams().to_dict()
    shown = [_parameter(stage, params) for stage in on]
    off = [name for name in stages if name in values and name not in shown]
    return {name: values[name] for name in off if values[name] != defaults.get(name)}


def _best(scores: jax.Array, top: int) -> np.ndarray:
    """Ids of the best finite scores, best first; of equal ones the lowest id first."""
    row = np.asarray(scores)[0]
    order = np.argsort(np.where(np.isfinite(row), -row, np.inf), kind="stable")[:top]
    return order[np.isfinite(row[order])]


def _probabilities(scores: jax.Array) -> np.ndarray:
    """float64 [vocab]; NaN where the scores are no distribution."""
    probabilities, defined = jax.device_get(_softmax(scores))
    return np.where(defined[0], probabilities[0].astype(np.float64), np.nan)


def _text(vocabulary: Vocabulary | None, tokens: Sequence[int] | np.ndarray) -> str:
    return "" if vocabulary is None else vocabulary.text_bytes(tokens).decode(errors="backslashreplace")


def _stopping(
    params: SamplingParams,
    policy: Policy,
    before: StepState,
    tokens: jax.Array,
    state: int,
    vocabulary: Vocabulary | None,
    cache_len: int,
) -> tuple[StopReason | None, tuple[RuleView, ...]]:
    """Why the row ends with a token, after which its grammar is in `state`; and what each rule that is set says."""
    after = _commit(policy, before, tokens).replace(automaton=jnp.full(1, state, jnp.int32))
    code = int(_stop_codes(policy, before, after, tokens)[0])
    total = int(before.total()[0])
    full = total + 1 >= cache_len
    code = StopReason.CACHE_FULL.code if full and code == 0 else code
    room = RuleView("cache_len", cache_len, total, total + 1, Verdict.ENDS if full else Verdict.GOES_ON)
    rules = (*_rules(params, policy, before, after, tokens, vocabulary), room)
    return StopReason.from_code(code) if code else None, rules


def _rules(
    params: SamplingParams,
    policy: Policy,
    before: StepState,
    after: StepState,
    tokens: jax.Array,
    vocabulary: Vocabulary | None,
) -> Iterator[RuleView]:
    step, total, held = int(before.step[0]), int(before.total()[0]), False
    for name, count in (("min_new_tokens", step), ("min_length", total)):
        if value := getattr(params, name):
            stage: Any = policy.transforms[name]
            holds = bool(stage.holds_back(before)[0])
            held = held or holds
            yield RuleView(name, value, count, count + 1, Verdict.HELD_BACK if holds else Verdict.MAY_END)

    def verdict(rule: StoppingRule) -> Verdict:
        return Verdict.ENDS if bool(rule(after, tokens)[0]) else Verdict.GOES_ON

    for rule in policy.stopping:
        match rule:
            case EndOfSequence() if params.eos_token_ids:
                yield RuleView("eos_token_ids", list(params.eos_token_ids), None, None, verdict(rule))
            case StopTokens() if params.stop_token_ids:
                yield RuleView("stop_token_ids", list(params.stop_token_ids), None, None, verdict(rule))
            case StopStrings() if params.stop and vocabulary is not None:
                history = np.asarray(after.buffer[0, : total + 1])
                yield from _stop_strings(params.stop, history, held, vocabulary)
            case GrammarDone() if params.grammar:
                was, will_be = _state_in_words(rule, before), _state_in_words(rule, after)
                yield RuleView(params.grammar.kind, params.grammar_end, was, will_be, verdict(rule))
            case PluginRule() if rule.plugin.name in dict(params.plugins):
                says = verdict(rule)
                says = Verdict.HELD_BACK if held and says is Verdict.ENDS else says
                yield RuleView(rule.plugin.name, _values(params)[rule.plugin.name], None, None, says)
            case MaxNewTokens():
                yield RuleView("max_new_tokens", params.max_new_tokens, step, step + 1, verdict(rule))
            case MaxLength() if params.max_length:
                yield RuleView("max_length", params.max_length, total, total + 1, verdict(rule))


def _state_in_words(rule: GrammarDone, row: StepState) -> str:
    """The state of a row's automaton, numbered from 0, and whether the text is complete there."""
    state = int(row.automaton[0])
    if state == NO_STATE or rule.tables is None:
        return "outside"
    if state <= OPEN:
        return "inside" if state == OPEN else "complete"
    return f"state {state - 1}{', complete' if bool(rule.tables.accepts(row.automaton)[0]) else ''}"


def _stop_strings(
    strings: Sequence[str], history: np.ndarray, held: bool, vocabulary: Vocabulary
) -> Iterator[RuleView]:
    """Each stop string around the last token of a history."""

    def begun(string: str, tokens: np.ndarray) -> str:
        """The longest beginning of the string that the text ends with."""
        text, pattern = vocabulary.text_bytes(tokens[-len(string.encode()) :]), string.encode()
        longest = max(size for size in range(len(pattern) + 1) if text.endswith(pattern[:size]))
        return pattern[:longest].decode(errors="backslashreplace")

    for string in strings:
        complete = find_stop(vocabulary, history[:-1], history[-1:], string) is not None
        verdict = (Verdict.HELD_BACK if held else Verdict.ENDS) if complete else Verdict.GOES_ON
        after = string if complete else begun(string, history)
        yield RuleView("stop", string, begun(string, history[:-1]), after, verdict)
