"""SamplingParams: what a user asks for, under the field's usual names, checked on the host.

`sampling.policy.lower` turns it into the Policy pytree that the compiled programs read. It is the only way in,
for drawing and for rescoring alike, and the only form in which a policy is recorded.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sampling.errors import ConfigError

ORDERS = {"transformers": 1, "reference": 1, "vllm": 1}
"""Named orders of the chain (sampling.policy), with the version of each; both are recorded with every completion."""

FLOAT32_RANGE = (1e-37, 3e38)
"""Sizes of numbers that are neither 0 nor infinite in the compiled programs, which divide by some of them."""

BANNED = -math.inf
"""A bias that bans a token; in records and configuration files the text "-inf" means the same."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample a prompt's completions. Defaults draw from the model itself.

    Filters:
        temperature: divides the scores; 0 means greedy.
        top_k: keep the k best tokens (ties with the k-th stay); None, 0 and -1 all mean off.
        top_p: keep the smallest set of tokens that holds this probability mass, in (0, 1]; 1 is off.
        min_p: drop tokens less likely than min_p times the best one, in [0, 1]; 0 is off.
        typical_p: keep the tokens of most typical surprise that hold this mass, in (0, 1]; 1 is off.
        epsilon_cutoff: drop tokens of probability below this, in [0, 1); 0 is off.
        eta_cutoff: the same with a threshold that follows the entropy, in [0, 1); 0 is off.
        top_h: keep the best tokens within this fraction of the head's entropy, in (0, 1]; None is off.
    Penalties and bans:
        repetition_penalty: > 0; weakens ids of prompt and completion; 1 is off.
        prompt_repetition_penalty: > 0; strengthens ids of the prompt; 1 is off.
        frequency_penalty: subtracted once per time an id was drawn; 0 is off.
        presence_penalty: subtracted once if an id was drawn; 0 is off.
        no_repeat_ngram_size: no n-gram of this size occurs twice; 0 is off.
        prompt_no_repeat_ngram_size: no n-gram of this size of the prompt is repeated; 0 is off.
        logit_bias: {token id: bias} added to the scores; -inf bans.
        sequence_bias: pairs (token ids, bias): added to the last id after the others; -inf bans.
        bad_words: texts or lists of token ids that must not occur; a text also covers its space-prefixed form.
        allowed_token_ids: nothing else may be drawn; empty allows all.
        suppress_tokens: ids that are never drawn.
        begin_suppress_tokens: ids that are not drawn first.
    Length and end:
        max_new_tokens: end after this many tokens, at least 1.
        max_length: end when prompt and completion hold this many tokens; None is off.
        min_new_tokens: no end-of-sequence id, stop id or stop string before this many tokens.
        min_length: the same, counting the prompt.
        stop: texts that end the completion as soon as its last token completes one.
        stop_token_ids: ids that end the completion.
        eos_token_ids: end-of-sequence ids besides those that the checkpoint names.
        ignore_eos: go on after end-of-sequence tokens.
        forced_bos: id forced after a prompt of one token; None is off.
        forced_eos: ids of which one is forced as the last token of the budget; empty is off.
        exponential_decay_length_penalty: (start, factor): after `start` tokens the end-of-sequence score grows.
    Scores:
        remove_invalid_values: repair NaN and infinities instead of ending the row as undefined.
        renormalize: scores leave the filters as log-probabilities.
    Sampling:
        n: completions per prompt, at least 1.
        seed: replaces the run's seed for this prompt.
        order: name of the order in which the stages apply.
    Raises:
        ConfigError: a value is out of range or two contradict; the message names field, value and range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    top_h: float | None = None
    repetition_penalty: float = 1.0
    prompt_repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    prompt_no_repeat_ngram_size: int = 0
    logit_bias: Any = ()
    sequence_bias: Any = ()
    bad_words: Any = ()
    allowed_token_ids: Any = ()
    suppress_tokens: Any = ()
    begin_suppress_tokens: Any = ()
    max_new_tokens: int = 256
    max_length: int | None = None
    min_new_tokens: int = 0
    min_length: int = 0
    stop: Any = ()
    stop_token_ids: Any = ()
    eos_token_ids: Any = ()
    ignore_eos: bool = False
    forced_bos: int | None = None
    forced_eos: Any = ()
    exponential_decay_length_penalty: Any = None
    remove_invalid_values: bool = False
    renormalize: bool = False
    n: int = 1
    seed: int | None = None
    order: str = "transformers"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = _CHECKS[field.name](f"sampling.{field.name}", getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        _refuse_contradictions(self)

    @property
    def greedy(self) -> bool:
        """The best token is taken instead of drawing."""
        return self.temperature == 0

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """All ids that end the completion."""
        return tuple(sorted({*self.eos_token_ids, *self.stop_token_ids}))

    def token_ids(self) -> dict[str, tuple[int, ...]]:
        """Every token id that a parameter names, by the parameter."""
        words = [word for word in self.bad_words if not isinstance(word, str)]
        return {
            "logit_bias": tuple(token for token, _ in self.logit_bias),
            "sequence_bias": tuple(token for ids, _ in self.sequence_bias for token in ids),
            "bad_words": tuple(token for ids in words for token in ids),
            "forced_bos": () if self.forced_bos is None else (self.forced_bos,),
            **{name: getattr(self, name) for name, check in _CHECKS.items() if check is _ids},
            "forced_eos": self.forced_eos,
        }

    def require_tokens(self, known: int, where: str) -> None:
        """Refuses ids that are no token of a model.

        Args:
            known: number of its tokens.
            where: begins the message.
        Raises:
            ConfigError: an id is `known` or more.
        """
        for name, tokens in self.token_ids().items():
            outside = [token for token in tokens if token >= known]
            if outside:
                raise ConfigError(f"{where}.{name}: expected token ids in 0 .. {known - 1}, got {outside[0]}")

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed.

        Raises:
            ConfigError: a name is no field, or a value is out of range.
        """
        for name in changes:
            if name not in _CHECKS:
                near = difflib.get_close_matches(name, _CHECKS, n=2, cutoff=0.5)
                hint = f"did you mean {' or '.join(near)}? " if near else ""
                raise ConfigError(f"sampling.{name}: no such parameter; {hint}known are {', '.join(_CHECKS)}")
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Every parameter as plain values, with the version of the order; `from_dict` reads it back."""
        return {**{name: _plain(getattr(self, name)) for name in _CHECKS}, "order_version": ORDERS[self.order]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Reads what `to_dict` wrote.

        Raises:
            ConfigError: a field is unknown or out of range, or the order has another version here.
        """
        rest = dict(values)
        version = rest.pop("order_version", None)
        params = cls().replace(**rest)
        if version is not None and version != ORDERS[params.order]:
            raise ConfigError(
                f"sampling.order: {params.order!r} is at version {ORDERS[params.order]} here, the record was made"
                f" with version {version}; use the release that wrote it"
            )
        return params


_short = reprlib.repr
"""A value for a message: a list of a hundred thousand token ids in it helps nobody."""

# ---- checks: each takes the field's name and value, and returns the value in its one form ----

_Check = Callable[[str, Any], Any]


def _real(valid: Callable[[float], bool], expected: str, optional: bool = False) -> _Check:
    def check(name: str, value: Any) -> float | None:
        if optional and value is None:
            return None
        number = _number(value)
        if not math.isfinite(number) or not valid(number):
            raise ConfigError(f"{name}: expected {expected}, got {_short(value)}")
        if abs(number) > FLOAT32_RANGE[1]:
            raise ConfigError(f"{name}: expected a number that float32 can hold, got {_short(value)}")
        return number

    return check


def _whole(least: int, expected: str, optional: bool = False, most: int = 2**31 - 1) -> _Check:
    def check(name: str, value: Any) -> int | None:
        if optional and value is None:
            return None
        number = value.__index__() if hasattr(value, "__index__") and not isinstance(value, bool) else None
        if number is None or not least <= number <= most:
            raise ConfigError(f"{name}: expected a whole number, {expected}, got {_short(value)}")
        return number

    return check


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: expected true or false, got {_short(value)}")
    return value


def _top_k(name: str, value: Any) -> int | None:
    k = _whole(-1, "None, -1 or 0 (off), or at least 1", optional=True, most=2**63)(name, value)
    return None if k in (-1, 0) else k


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
        raise ConfigError(f"{name}: expected a list of token ids, got {_short(value)}")
    return tuple(sorted({_token(name, token) for token in value}))


def _token(name: str, value: Any) -> int:
    return _whole(0, "a token id >= 0")(name, value)


def _sequence(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__") or not len(value):
        raise ConfigError(f"{name}: expected a list of at least one token id, got {_short(value)}")
    return tuple(_token(name, token) for token in value)


def _bias(name: str, value: Any) -> float:
    number = BANNED if value == "-inf" else _number(value)
    if math.isnan(number) or number == math.inf:
        raise ConfigError(f"{name}: expected a number, or -inf to ban, got {_short(value)}")
    return number


def _number(value: Any) -> float:
    """The value as a float, NaN if it is not a number."""
    if isinstance(value, (bool, str)):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _pairs(name: str, value: Any) -> list[tuple[Any, Any]]:
    pairs = list(value.items()) if isinstance(value, Mapping) else list(value) if hasattr(value, "__iter__") else None
    if pairs is None or isinstance(value, str) or any(isinstance(p, str) or len(p) != 2 for p in pairs):
        raise ConfigError(f"{name}: expected a mapping, or a list of pairs, got {_short(value)}")
    return pairs


def _logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    entries = {}
    for token, bias in _pairs(name, value):
        token = _token(name, int(token) if isinstance(token, str) and token.isdecimal() else token)
        if token in entries:
            raise ConfigError(f"{name}: token id {token} is given more than once")
        entries[token] = _bias(f"{name}[{token}]", bias)
    return tuple(sorted(entries.items()))


def _sequence_bias(name: str, value: Any) -> tuple[tuple[tuple[int, ...], float], ...]:
    pairs = [(_sequence(name, ids), _bias(name, bias)) for ids, bias in _pairs(name, value)]
    if len({ids for ids, _ in pairs}) != len(pairs):
        raise ConfigError(f"{name}: a sequence is given more than once in {_short(value)}")
    return tuple(pairs)


def _bad_words(name: str, value: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise ConfigError(f"{name}: expected a list of texts or of lists of token ids, got {_short(value)}")
    words = [word if isinstance(word, str) else _sequence(name, word) for word in value]
    if any(isinstance(word, str) and not word.strip() for word in words):
        raise ConfigError(f"{name}: expected texts that hold more than white space, got {_short(value)}")
    return tuple(dict.fromkeys(words))


def _stop(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not hasattr(texts, "__iter__") or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f"{name}: expected a text or a list of texts, none of them empty, got {_short(value)}")
    return tuple(dict.fromkeys(texts))


def _decay(name: str, value: Any) -> tuple[int, float] | None:
    if value is None:
        return None
    if isinstance(value, (str, Mapping)) or not hasattr(value, "__iter__") or len(value) != 2:
        raise ConfigError(f"{name}: expected a pair (start, factor), got {_short(value)}")
    start, factor = value
    start = _whole(0, "at least 0")(f"{name}[0]", start)
    return start, _real(lambda v: v > 0, "a number > 0")(f"{name}[1]", factor)


def _order(name: str, value: Any) -> str:
    if not isinstance(value, str) or value not in ORDERS:
        raise ConfigError(f"{name}: expected one of {', '.join(ORDERS)}, got {_short(value)}")
    return value


def _penalty(name: str, value: Any) -> float:
    return _real(lambda v: v >= FLOAT32_RANGE[0], "a finite number > 0; 1 is off")(name, value)


_ANY = _real(lambda v: True, "a finite number; 0 is off")
_CUTOFF = _real(lambda v: 0 <= v < 1, "a number in [0, 1); 0 is off")
_MASS = _real(lambda v: 0 < v <= 1, "a number in (0, 1]; 1 is off")

_CHECKS: dict[str, _Check] = {
    "temperature": _real(lambda v: v == 0 or v >= FLOAT32_RANGE[0], "a finite number >= 0 (0 is greedy)"),
    "top_k": _top_k,
    "top_p": _MASS,
    "min_p": _real(lambda v: 0 <= v <= 1, "a number in [0, 1]; 0 is off"),
    "typical_p": _MASS,
    "epsilon_cutoff": _CUTOFF,
    "eta_cutoff": _CUTOFF,
    "top_h": _real(lambda v: 0 < v <= 1, "None (off) or a number in (0, 1]", optional=True),
    "repetition_penalty": _penalty,
    "prompt_repetition_penalty": _penalty,
    "frequency_penalty": _ANY,
    "presence_penalty": _ANY,
    "no_repeat_ngram_size": _whole(0, "0 (off) or at least 1"),
    "prompt_no_repeat_ngram_size": _whole(0, "0 (off) or at least 1"),
    "logit_bias": _logit_bias,
    "sequence_bias": _sequence_bias,
    "bad_words": _bad_words,
    "allowed_token_ids": _ids,
    "suppress_tokens": _ids,
    "begin_suppress_tokens": _ids,
    "max_new_tokens": _whole(1, "at least 1"),
    "max_length": _whole(1, "None (off) or at least 1", optional=True),
    "min_new_tokens": _whole(0, "at least 0"),
    "min_length": _whole(0, "at least 0"),
    "stop": _stop,
    "stop_token_ids": _ids,
    "eos_token_ids": _ids,
    "ignore_eos": _flag,
    "forced_bos": _whole(0, "None (off) or a token id", optional=True),
    "forced_eos": lambda name, value: _ids(name, (value,) if isinstance(value, int) else value),
    "exponential_decay_length_penalty": _decay,
    "remove_invalid_values": _flag,
    "renormalize": _flag,
    "n": _whole(1, "at least 1"),
    "seed": _whole(0, "None or in 0 .. 2^64 - 1", optional=True, most=2**64 - 1),
    "order": _order,
}


def _refuse_contradictions(params: SamplingParams) -> None:
    """Raises ConfigError where two parameters cannot both hold."""

    def refuse(first: str, second: str, why: str) -> None:
        raise ConfigError(
            f"sampling.{first} = {_short(getattr(params, first))} contradicts sampling.{second} ="
            f" {_short(getattr(params, second))}: {why}"
        )

    if params.min_new_tokens > params.max_new_tokens:
        refuse("min_new_tokens", "max_new_tokens", "the minimum is above the maximum")
    if params.max_length is not None and params.min_length > params.max_length:
        refuse("min_length", "max_length", "the minimum is above the maximum")
    banned = {
        "suppress_tokens": set(params.suppress_tokens),
        "bad_words": {word[0] for word in params.bad_words if not isinstance(word, str) and len(word) == 1},
        "logit_bias": {token for token, bias in params.logit_bias if bias == BANNED},
    }
    wanted = {
        "stop_token_ids": set(params.stop_token_ids),
        "forced_eos": set(params.forced_eos),
        "forced_bos": {params.forced_bos} - {None},
    }
    for ban, tokens in banned.items():
        for want, needed in wanted.items():
            if needed & tokens:
                refuse(want, ban, f"token {min(needed & tokens)} is wanted and banned")
        if params.allowed_token_ids and set(params.allowed_token_ids) <= tokens:
            refuse("allowed_token_ids", ban, "every allowed token is banned")
    if params.allowed_token_ids:
        for want, needed in wanted.items():
            if not needed <= set(params.allowed_token_ids):
                missing = min(needed - set(params.allowed_token_ids))
                refuse(want, "allowed_token_ids", f"token {missing} is wanted and not allowed")


def _plain(value: Any) -> Any:
    """A value as JSON and msgpack know it."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return "-inf" if value == BANNED else value
