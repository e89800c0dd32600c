"""Checks of single parameters: each takes a field's name and value, and returns the value in its one form.

Raises of every check: ConfigError, which names the field, what was expected and what came.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from sampling.errors import ConfigError

ORDERS = {"transformers": 1, "reference": 1, "vllm": 1}
"""Named orders of the chain (sampling.policy), with the version of each; both are recorded with every completion."""

GRAMMAR_ENDS = ("done", "accepted", "eos")
"""When a grammar ends a row by itself: once nothing may follow; as soon as the text is complete; never."""

GRAMMAR_MODES = ("table", "host")
"""How a grammar is followed: by tables within the compiled programs, or by a matcher on the host, token by token."""

FLOAT32_RANGE = (1e-37, 3e38)
"""Sizes of numbers that are neither 0 nor infinite in the compiled programs, which divide by some of them."""

BANNED = -math.inf
"""A bias that bans a token; in records and configuration files the text "-inf" means the same."""

short = reprlib.repr
"""A value for a message: a list of a hundred thousand token ids in it helps nobody."""

Check = Callable[[str, Any], Any]


def real(valid: Callable[[float], bool], expected: str, optional: bool = False) -> Check:
    def check(name: str, value: Any) -> float | None:
        if optional and value is None:
            return None
        number = _number(value)
        if not math.isfinite(number) or not valid(number):
            raise ConfigError(f"{name}: expected {expected}, got {short(value)}")
        if abs(number) > FLOAT32_RANGE[1]:
            raise ConfigError(f"{name}: expected a number that float32 can hold, got {short(value)}")
        return number

    return check


def whole(least: int, expected: str, optional: bool = False, most: int = 2**31 - 1) -> Check:
    def check(name: str, value: Any) -> int | None:
        if optional and value is None:
            return None
        number = value.__index__() if hasattr(value, "__index__") and not isinstance(value, bool) else None
        if number is None or not least <= number <= most:
            raise ConfigError(f"{name}: expected a whole number, {expected}, got {short(value)}")
        return number

    return check


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: expected true or false, got {short(value)}")
    return value


def top_k(name: str, value: Any) -> int | None:
    k = whole(-1, "None, -1 or 0 (off), or at least 1", optional=True, most=2**63)(name, value)
    return None if k in (-1, 0) else k


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
        raise ConfigError(f"{name}: expected a list of token ids, got {short(value)}")
    return tuple(sorted({_token(name, token) for token in value}))


def _token(name: str, value: Any) -> int:
    return whole(0, "a token id >= 0")(name, value)


def _sequence(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__") or not len(value):
        raise ConfigError(f"{name}: expected a list of at least one token id, got {short(value)}")
    return tuple(_token(name, token) for token in value)


def _bias(name: str, value: Any) -> float:
    number = BANNED if value == "-inf" else _number(value)
    if math.isnan(number) or number == math.inf:
        raise ConfigError(f"{name}: expected a number, or -inf to ban, got {short(value)}")
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
        raise ConfigError(f"{name}: expected a mapping, or a list of pairs, got {short(value)}")
    return pairs


def logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    entries = {}
    for token, bias in _pairs(name, value):
        token = _token(name, int(token) if isinstance(token, str) and token.isdecimal() else token)
        if token in entries:
            raise ConfigError(f"{name}: token id {token} is given more than once")
        entries[token] = _bias(f"{name}[{token}]", bias)
    return tuple(sorted(entries.items()))


def sequence_bias(name: str, value: Any) -> tuple[tuple[tuple[int, ...], float], ...]:
    pairs = [(_sequence(name, ids), _bias(name, bias)) for ids, bias in _pairs(name, value)]
    if len({ids for ids, _ in pairs}) != len(pairs):
        raise ConfigError(f"{name}: a sequence is given more than once in {short(value)}")
    return tuple(pairs)


def bad_words(name: str, value: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise ConfigError(f"{name}: expected a list of texts or of lists of token ids, got {short(value)}")
    words = [word if isinstance(word, str) else _sequence(name, word) for word in value]
    if any(isinstance(word, str) and not word.strip() for word in words):
        raise ConfigError(f"{name}: expected texts that hold more than white space, got {short(value)}")
    return tuple(dict.fromkeys(words))


def stop_strings(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not hasattr(texts, "__iter__") or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f"{name}: expected a text or a list of texts, none of them empty, got {short(value)}")
    return tuple(dict.fromkeys(texts))


def decay(name: str, value: Any) -> tuple[int, float] | None:
    if value is None:
        return None
    if isinstance(value, (str, Mapping)) or not hasattr(value, "__iter__") or len(value) != 2:
        raise ConfigError(f"{name}: expected a pair (start, factor), got {short(value)}")
    start, factor = value
    start = whole(0, "at least 0")(f"{name}[0]", start)
    return start, real(lambda v: v > 0, "a number > 0")(f"{name}[1]", factor)


def order(name: str, value: Any) -> str:
    if not isinstance(value, str) or value not in ORDERS:
        raise ConfigError(f"{name}: expected one of {', '.join(ORDERS)}, got {short(value)}")
    return value


def penalty(name: str, value: Any) -> float:
    return real(lambda v: v >= FLOAT32_RANGE[0], "a finite number > 0; 1 is off")(name, value)


def marker(name: str, value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str) and value:
        return value
    return () if isinstance(value, (list, tuple)) and not value else _sequence(name, value)


def grammar_end(name: str, value: Any) -> str:
    if value not in GRAMMAR_ENDS:
        raise ConfigError(f"{name}: expected one of {', '.join(GRAMMAR_ENDS)}, got {short(value)}")
    return value


def grammar_mode(name: str, value: Any) -> str:
    if value not in GRAMMAR_MODES:
        raise ConfigError(f"{name}: expected one of {', '.join(GRAMMAR_MODES)}, got {short(value)}")
    return value


def grammar_library(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name}: expected a name and a version, such as 'llguidance 1.9.1', got {short(value)}")
    return value


def lark(name: str, value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and value.strip()):
        raise ConfigError(f"{name}: expected the rules of a grammar, or None, got {short(value)}")
    return value


def regex(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{name}: expected a regular expression or None, got {short(value)}")
    return value


def json_schema(name: str, value: Any) -> str | None:
    """The schema as JSON text, its keys in the order in which they came."""
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        text = None if value is None else json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: expected a JSON schema, got {short(value)}: {error}") from error
    if value is not None and not isinstance(schema, Mapping):
        raise ConfigError(f"{name}: expected a JSON schema, a mapping with its type, got {short(value)}")
    return text


def plugins(name: str, value: Any) -> tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]:
    """What a row gives each plugin that it names: numbers by parameter, and the version where it is known."""
    entries: dict[str, tuple[tuple[str, Any], ...]] = {}
    for plugin, given in _pairs(name, value):
        if not isinstance(plugin, str):
            raise ConfigError(f"{name}: expected a plugin's name, got {short(plugin)}")
        settings = {}
        for parameter, setting in _pairs(f"{name}.{plugin}", {} if given is None else given):
            setting = setting.item() if hasattr(setting, "item") else setting
            known = isinstance(setting, str) if parameter == "version" else isinstance(setting, bool | int | float)
            if not isinstance(parameter, str) or not known or setting in (math.inf, -math.inf) or setting != setting:
                where = f"{name}.{plugin}.{parameter}"
                raise ConfigError(f"{where}: expected a finite number, true or false, got {short(setting)}")
            settings[parameter] = setting
        entries[plugin] = tuple(sorted(settings.items()))
    return tuple(sorted(entries.items()))


def choices(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not hasattr(texts, "__iter__") or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f"{name}: expected a list of texts, none of them empty, got {short(value)}")
    return tuple(dict.fromkeys(texts))
