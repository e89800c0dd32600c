"""SamplingParams: what a user asks for, under the field's usual names, checked on the host.

`sampling.policy.lower` turns it into the Policy pytree that the compiled programs read. It is the only way in,
for drawing and for rescoring alike, and the only form in which a policy is recorded.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sampling import param_checks as checks
from sampling.errors import ConfigError
from sampling.grammar import Grammar, GrammarKind
from sampling.param_checks import BANNED, ORDERS


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
        suppress_control_tokens: never draw the tokenizer's special tokens, but for those that another parameter asks
            for: ids that end the row, allowed or forced ones, and those of markers.
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
    Thinking (docs/policies.md):
        thinking_budget: force `thinking_end` after this many tokens behind `thinking_start`, at least 0; None is off.
        thinking_start, thinking_end: the markers, each a list of token ids, or a text that is encoded by itself.
    Grammar, one at most (docs/grammars.md):
        regex: the completion's text matches this pattern of Python's `re` from end to end; None is off.
        json_schema: it is JSON that this schema accepts: a mapping, or JSON text; None is off.
        choices: it is one of these texts; empty is off.
        lark: these rules of a context-free grammar derive it; None is off. Needs grammar_mode "host".
        grammar_mode: "table" follows a grammar within the compiled programs; "host" by a matcher on the host, for lark
            and for json_schema of any depth: one token at a time, for all rows of the engine.
        grammar_library: name and version of what follows it on the host; no other one does. Empty takes the one that is
            installed, and records hold it.
        grammar_end: "done" ends the row once nothing may follow, "accepted" as soon as its text is complete, "eos" not
            at all: it goes on until it draws an end-of-sequence id.
    Plugins (docs/plugins.md):
        plugins: {name: {parameter: value}} of the plugins, of those that the engine was made with, that the row uses.
    Scores:
        remove_invalid_values: repair NaN and infinities instead of ending the row as undefined.
        renormalize: scores leave the filters as log-probabilities.
    Sampling:
        n: completions per prompt, at least 1.
        seed: replaces the run's seed for this prompt.
        order: name of the order in which the stages apply.
    Records:
        record_support: keep with each token the ids that it was drawn among, if they are at most this many; 0 is off.
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
    suppress_control_tokens: bool = False
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
    thinking_budget: int | None = None
    thinking_start: Any = ()
    thinking_end: Any = ()
    regex: str | None = None
    json_schema: Any = None
    choices: Any = ()
    lark: str | None = None
    grammar_mode: str = "table"
    grammar_library: str = ""
    grammar_end: str = "done"
    plugins: Any = ()
    remove_invalid_values: bool = False
    renormalize: bool = False
    n: int = 1
    seed: int | None = None
    order: str = "transformers"
    record_support: int = 0

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

    @property
    def grammar(self) -> Grammar | None:
        """What the completion's text has to be; None if it may be anything."""
        if self.regex is not None:
            return Grammar(GrammarKind.REGEX, self.regex)
        if self.json_schema is not None:
            return Grammar(GrammarKind.JSON_SCHEMA, self.json_schema, stepped=self.grammar_mode == "host")
        if self.lark is not None:
            return Grammar(GrammarKind.LARK, self.lark, stepped=True)
        if self.choices:
            return Grammar(GrammarKind.CHOICES, json.dumps(self.choices, ensure_ascii=False))
        return None

    def token_ids(self) -> dict[str, tuple[int, ...]]:
        """Every token id that a parameter names, by the parameter."""
        words = [word for word in self.bad_words if not isinstance(word, str)]
        return {
            "logit_bias": tuple(token for token, _ in self.logit_bias),
            "sequence_bias": tuple(token for ids, _ in self.sequence_bias for token in ids),
            "bad_words": tuple(token for ids in words for token in ids),
            "forced_bos": () if self.forced_bos is None else (self.forced_bos,),
            **{name: getattr(self, name) for name, check in _CHECKS.items() if check is checks.token_ids},
            "forced_eos": self.forced_eos,
            "thinking_start": _known_ids(self.thinking_start),
            "thinking_end": _known_ids(self.thinking_end),
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
        self.check(changes)
        return dataclasses.replace(self, **changes)

    @staticmethod
    def check(values: Mapping[str, Any]) -> None:
        """Refuses what no parameters could hold, whatever the rest of them is.

        Raises:
            ConfigError: a name is no field, or a value is out of range.
        """
        for name, value in values.items():
            if name not in _CHECKS:
                near = difflib.get_close_matches(name, _CHECKS, n=2, cutoff=0.5)
                hint = f"did you mean {' or '.join(near)}? " if near else ""
                raise ConfigError(f"sampling.{name}: no such parameter; {hint}known are {', '.join(_CHECKS)}")
            _CHECKS[name](f"sampling.{name}", value)

    def to_dict(self) -> dict[str, Any]:
        """Every parameter as plain values, with the version of the order; `from_dict` reads it back."""
        values = {name: _plain(getattr(self, name)) for name in _CHECKS}
        plugins = {name: dict(settings) for name, settings in self.plugins}
        return {**values, "plugins": plugins, "order_version": ORDERS[self.order]}

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


_ANY = checks.real(lambda v: True, "a finite number; 0 is off")
_CUTOFF = checks.real(lambda v: 0 <= v < 1, "a number in [0, 1); 0 is off")
_MASS = checks.real(lambda v: 0 < v <= 1, "a number in (0, 1]; 1 is off")

_CHECKS: dict[str, checks.Check] = {
    "temperature": checks.real(lambda v: v == 0 or v >= checks.FLOAT32_RANGE[0], "a finite number >= 0 (0 is greedy)"),
    "top_k": checks.top_k,
    "top_p": _MASS,
    "min_p": checks.real(lambda v: 0 <= v <= 1, "a number in [0, 1]; 0 is off"),
    "typical_p": _MASS,
    "epsilon_cutoff": _CUTOFF,
    "eta_cutoff": _CUTOFF,
    "top_h": checks.real(lambda v: 0 < v <= 1, "None (off) or a number in (0, 1]", optional=True),
    "repetition_penalty": checks.penalty,
    "prompt_repetition_penalty": checks.penalty,
    "frequency_penalty": _ANY,
    "presence_penalty": _ANY,
    "no_repeat_ngram_size": checks.whole(0, "0 (off) or at least 1"),
    "prompt_no_repeat_ngram_size": checks.whole(0, "0 (off) or at least 1"),
    "logit_bias": checks.logit_bias,
    "sequence_bias": checks.sequence_bias,
    "bad_words": checks.bad_words,
    "allowed_token_ids": checks.token_ids,
    "suppress_tokens": checks.token_ids,
    "begin_suppress_tokens": checks.token_ids,
    "suppress_control_tokens": checks.flag,
    "max_new_tokens": checks.whole(1, "at least 1"),
    "max_length": checks.whole(1, "None (off) or at least 1", optional=True),
    "min_new_tokens": checks.whole(0, "at least 0"),
    "min_length": checks.whole(0, "at least 0"),
    "stop": checks.stop_strings,
    "stop_token_ids": checks.token_ids,
    "eos_token_ids": checks.token_ids,
    "ignore_eos": checks.flag,
    "forced_bos": checks.whole(0, "None (off) or a token id", optional=True),
    "forced_eos": lambda name, value: checks.token_ids(name, (value,) if isinstance(value, int) else value),
    "exponential_decay_length_penalty": checks.decay,
    "thinking_budget": checks.whole(0, "None (off) or at least 0", optional=True),
    "thinking_start": checks.marker,
    "thinking_end": checks.marker,
    "regex": checks.regex,
    "json_schema": checks.json_schema,
    "choices": checks.choices,
    "lark": checks.lark,
    "grammar_mode": checks.grammar_mode,
    "grammar_library": checks.grammar_library,
    "grammar_end": checks.grammar_end,
    "plugins": checks.plugins,
    "remove_invalid_values": checks.flag,
    "renormalize": checks.flag,
    "n": checks.whole(1, "at least 1"),
    "seed": checks.whole(0, "None or in 0 .. 2^64 - 1", optional=True, most=2**64 - 1),
    "order": checks.order,
    "record_support": checks.whole(0, "0 (off) to 1024 ids", most=1024),
}


def _refuse_contradictions(params: SamplingParams) -> None:
    """Raises ConfigError where two parameters cannot both hold."""

    def refuse(first: str, second: str, why: str) -> None:
        raise ConfigError(
            f"sampling.{first} = {checks.short(getattr(params, first))} contradicts sampling.{second} ="
            f" {checks.short(getattr(params, second))}: {why}"
        )

    if params.min_new_tokens > params.max_new_tokens:
        refuse("min_new_tokens", "max_new_tokens", "the minimum is above the maximum")
    if params.max_length is not None and params.min_length > params.max_length:
        refuse("min_length", "max_length", "the minimum is above the maximum")
    known = ("regex", "json_schema", "choices", "lark")
    grammars = [name for name in known if getattr(params, name) not in (None, ())]
    if len(grammars) > 1:
        refuse(grammars[0], grammars[1], "a row follows one grammar; write both into one")
    if params.lark is not None and params.grammar_mode != "host":
        refuse(
            "lark", "grammar_mode", "no table follows a context-free grammar; set grammar_mode to 'host', a slower way"
        )
    for name in grammars:
        if name in ("regex", "choices") and params.grammar_mode == "host":
            refuse("grammar_mode", name, "tables follow it, and faster; leave grammar_mode out")
    if params.grammar_library and not (params.grammar and params.grammar.stepped):
        refuse("grammar_library", "grammar_mode", "no grammar is followed on the host; leave grammar_library out")
    _refuse_markers(params, refuse)
    for name in ("forced_bos", "forced_eos", "thinking_budget"):
        if params.grammar and getattr(params, name) not in (None, ()):
            refuse(name, grammars[0], "a token is forced or follows a grammar, not both")
    if params.grammar and params.grammar_end == "eos" and params.ignore_eos:
        refuse("grammar_end", "ignore_eos", "the row waits for an end-of-sequence id and ignores them")
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


def _refuse_markers(params: SamplingParams, refuse: Callable[[str, str, str], None]) -> None:
    """Raises ConfigError for a budget whose markers are missing or could never do their work."""
    if params.thinking_budget is None:
        return
    for name in ("thinking_start", "thinking_end"):
        if not getattr(params, name):
            refuse("thinking_budget", name, "thinking has a beginning and an end")
    start, end = _known_ids(params.thinking_start), _known_ids(params.thinking_end)
    if end and any(start[i : i + len(end)] == end for i in range(len(start))):
        refuse("thinking_start", "thinking_end", "what begins to think would end it")
    for name in ("eos_token_ids", "stop_token_ids"):
        if set(end) & set(getattr(params, name)):
            refuse("thinking_end", name, f"token {min(set(end) & set(getattr(params, name)))} would end the row")


def _known_ids(marker: Any) -> tuple[int, ...]:
    """The ids of a marker; none while it is a text."""
    return () if isinstance(marker, str) else marker


def _plain(value: Any) -> Any:
    """A value as JSON and msgpack know it."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return "-inf" if value == BANNED else value
