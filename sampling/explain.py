"""explain: why one token of a row was drawn, seen from between the stages of the row's chain.

One forward over the whole history, without a cache and without batch mates; then the transforms, the draw and the
stopping rules of the engine's own programs, with the scores looked at after every stage. Sums are ordered otherwise
than in the engine, so log-probs agree within rounding and not to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from sampling.checkpoints import Checkpoint
from sampling.decode import without_padded_ids
from sampling.draw import Distribution, draw, log_kept_mass
from sampling.engine import DTYPES
from sampling.errors import ConfigError
from sampling.explanation import Candidate, Explanation, RuleView, Share, StageView, Verdict
from sampling.keys import UNIFORM_BITS, uniforms
from sampling.models import Transformer
from sampling.params import SamplingParams
from sampling.policy import STAGES, Policy, lower, stack
from sampling.state import StepState
from sampling.stop_strings import StopStrings, find_stop
from sampling.stopping import EndOfSequence, MaxLength, MaxNewTokens, StoppingRule, StopTokens
from sampling.transforms import Transform, apply
from sampling.types import StopReason
from sampling.vocabulary import Vocabulary

PADDED_IDS = "padded_ids"
"""Names the removal of the ids past the tokenizer's length, which comes before every chain."""

CONTEXT_LEN = 16
"""Tokens before the explained one whose text is shown."""

_PADDED_LEN = 64
"""Histories are padded to multiples of this length, so that few programs compile."""


def explain(
    checkpoint: Checkpoint,
    prompt_tokens: Sequence[int] | np.ndarray,
    completion_tokens: Sequence[int] | np.ndarray,
    place: int,
    params: SamplingParams,
    key: Sequence[int] | np.ndarray,
    dtype: str = "float32",
    *,
    vocabulary: Vocabulary | None = None,
    cache_len: int | None = None,
    top: int = 5,
) -> Explanation:
    """Goes once more through the step that drew a token.

    Args:
        checkpoint: the weights that drew it.
        prompt_tokens: int [prompt_len], at least one; completion_tokens: int [completion_len].
        place: of the token in the completion; negative counts from its end.
        params: how it was drawn, as `resolved` leaves them and records hold them.
        key: the row's key, two 32-bit words.
        dtype: of the model's matrix products, "float32" or "bfloat16".
        vocabulary: the tokens' bytes, with NumPy leaves; None leaves texts empty.
        cache_len: tokens that the row's slot could hold; None if it set no limit.
        top: how many of the best tokens to show.
    Raises:
        ConfigError: there is no such place, an id is outside the model's vocabulary, the dtype is unknown, or there are
            stop strings and no vocabulary.
    """
    prompt, completion = np.asarray(prompt_tokens, np.int32), np.asarray(completion_tokens, np.int32)
    place = place_in(completion.size, place)
    info = checkpoint.info
    vocab_size = info.config.vocab_size
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if params.stop and vocabulary is None:
        raise ConfigError("stop strings: expected the vocabulary that they are to be found in, got none")
    if not 0 <= completion[place] < vocab_size:
        raise ConfigError(f"expected token ids in 0 .. {vocab_size - 1}, got {completion[place]}")

    ends = [size for size in (params.max_length, cache_len) if size]
    before = StepState.from_histories(
        [prompt.tolist()],
        [completion[:place].tolist()],
        capacity=cache_len or _padded(prompt.size + place + 1),
        vocab_size=vocab_size,
        limit=min([prompt.size + params.max_new_tokens, *ends]),
    ).replace(keys=jnp.asarray(key, jnp.uint32).reshape(1, 2))
    history = np.concatenate([prompt, completion[:place]])
    logits = _model_scores(checkpoint, history, DTYPES[dtype])
    policy = stack([lower(params)])
    lens = _Lens(vocabulary, int(completion[place]), top)

    scores = without_padded_ids(logits, info.tokenizer_len)
    padded = info.tokenizer_len < vocab_size
    stages = [lens.stage(PADDED_IDS, None, info.tokenizer_len, logits, scores)] if padded else []
    values, on = params.to_dict(), [name for name in STAGES[params.order] if not _is_off(policy.transforms[name])]
    for name in on:
        earlier, scores = scores, _apply(policy.transforms[name], before, scores)
        stages.append(lens.stage(name, _parameter(name), values[_parameter(name)], earlier, scores))

    model, final = Distribution.of(logits), Distribution.of(scores)
    uniform = uniforms(before.keys, before.step)
    tokens = jnp.asarray(completion[place : place + 1])
    reason, rules = _stopping(params, policy, before, tokens, vocabulary, cache_len)
    return Explanation(
        place=place,
        prompt_len=prompt.size,
        completion_len=completion.size,
        context=_text(vocabulary, history[-CONTEXT_LEN:]),
        order=params.order,
        model=lens.stage("model", None, None, logits, logits),
        stages=tuple(stages),
        num_off=len(policy.transforms) - len(on),
        without_effect=_without_effect(params, on),
        support=int(np.isfinite(scores).sum()),
        entropy=float(final.entropy()[0]),
        log_kept_mass=float(log_kept_mass(scores, model)[0]),
        candidates=lens.shares(scores, _best(scores, top)),
        key=(int(before.keys[0, 0]), int(before.keys[0, 1])),
        uniform=float(uniform[0]),
        uniform_multiple=int(uniform[0] * 2**UNIFORM_BITS),
        token=lens.shares(scores, completion[place : place + 1])[0],
        drawn=lens.shares(scores, draw(final, uniform))[0] if final.masses.defined[0] else None,
        behaviour_logprob=float(final.logprobs(tokens)[0]),
        model_logprob=float(model.logprobs(tokens)[0]),
        rules=rules,
        stop_reason=reason,
    )


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
        *best, token = self._candidates(scores, [*_best(scores, self.top), self.token])
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
        high = np.cumsum(_probabilities(scores))
        low = np.concatenate([[0.0], high[:-1]])
        return tuple(
            Share(**vars(candidate), low=float(low[token] / high[-1]), high=float(high[token] / high[-1]))
            for token, candidate in zip(np.asarray(ids).tolist(), self._candidates(scores, ids), strict=True)
        )

    def _candidates(self, scores: jax.Array, ids: Any) -> list[Candidate]:
        row, probabilities = np.asarray(scores)[0], _probabilities(scores)
        return [
            Candidate(token, _text(self.vocabulary, [token]), float(row[token]), float(probabilities[token]))
            for token in np.asarray(ids).tolist()
        ]


def _model_scores(checkpoint: Checkpoint, history: np.ndarray, dtype: DTypeLike) -> jax.Array:
    """The model's scores of the token after a history: float32 [1, vocab]."""
    padded = _padded(history.size)
    tokens, positions = np.zeros((1, padded), np.int32), np.full((1, padded), -1, np.int32)
    tokens[0, : history.size], positions[0, : history.size] = history, np.arange(history.size)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), checkpoint.params)
    # Float32 means float32 on every backend, as in the engine.
    with jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default"):
        return _forward(Transformer(checkpoint.info.config, dtype), params, tokens, positions, history.size - 1)


@partial(jax.jit, static_argnums=0)
def _forward(model: Transformer, params: Any, tokens: jax.Array, positions: jax.Array, last: jax.Array) -> jax.Array:
    forward: Any = partial(model.apply, {"params": params})
    hidden, _ = forward(tokens, positions)
    return forward(hidden[:, last], method="logits")


@jax.jit
def _apply(transform: Transform, state: StepState, scores: jax.Array) -> jax.Array:
    return apply(transform, state, scores)


@jax.jit
def _stop_codes(policy: Policy, before: StepState, after: StepState, tokens: jax.Array) -> jax.Array:
    return policy.stop_codes(before, after, tokens)


def _padded(length: int) -> int:
    return -(-length // _PADDED_LEN) * _PADDED_LEN


def _is_off(transform: Transform) -> bool:
    return bool(np.all(transform.is_neutral()))


def _parameter(stage: str) -> str:
    """The parameter that a stage comes from."""
    return "temperature" if stage == "greedy" else stage


def _without_effect(params: SamplingParams, on: list[str]) -> dict[str, Any]:
    values, defaults = params.to_dict(), SamplingParams().to_dict()
    off = [name for name in STAGES[params.order] if name in values and name not in map(_parameter, on)]
    return {name: values[name] for name in off if values[name] != defaults[name]}


def _best(scores: jax.Array, top: int) -> np.ndarray:
    """Ids of the best finite scores, best first; of equal ones the lowest id first."""
    row = np.asarray(scores)[0]
    order = np.argsort(np.where(np.isfinite(row), -row, np.inf), kind="stable")[:top]
    return order[np.isfinite(row[order])]


def _probabilities(scores: jax.Array) -> np.ndarray:
    """float64 [vocab]; NaN where the scores are no distribution."""
    distribution = Distribution.of(scores)
    probabilities = np.asarray(distribution.probabilities()[0], np.float64)
    return probabilities if distribution.masses.defined[0] else np.full_like(probabilities, np.nan)


def _text(vocabulary: Vocabulary | None, tokens: Sequence[int] | np.ndarray) -> str:
    return "" if vocabulary is None else vocabulary.text_bytes(tokens).decode(errors="backslashreplace")


def _stopping(
    params: SamplingParams,
    policy: Policy,
    before: StepState,
    tokens: jax.Array,
    vocabulary: Vocabulary | None,
    cache_len: int | None,
) -> tuple[StopReason | None, tuple[RuleView, ...]]:
    """Why the row ends with a token, and what each rule that is set says of it."""
    after = before.commit(tokens)
    policy = policy.bound(vocabulary or Vocabulary.from_pieces([b"?"]))
    code = int(_stop_codes(policy, before, after, tokens)[0])
    full = cache_len is not None and int(after.total()[0]) >= cache_len
    code = StopReason.CACHE_FULL.code if full and code == 0 else code
    rules = [*_rules(params, policy, before, after, tokens, vocabulary)]
    if cache_len is not None:
        total = int(before.total()[0])
        rules.append(RuleView("cache_len", cache_len, total, total + 1, Verdict.ENDS if full else Verdict.GOES_ON))
    return StopReason.from_code(code) if code else None, tuple(rules)


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
            case MaxNewTokens():
                yield RuleView("max_new_tokens", params.max_new_tokens, step, step + 1, verdict(rule))
            case MaxLength() if params.max_length:
                yield RuleView("max_length", params.max_length, total, total + 1, verdict(rule))


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
