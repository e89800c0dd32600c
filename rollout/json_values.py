"""Plain JSON values: the only kind of data that a caller may attach to prompts and records."""

from __future__ import annotations

import json
import math
from typing import Any

from sampling.errors import ServiceError

_MAX_DIGITS = 4000
"""Python itself reads and writes whole numbers of up to 4300 digits."""

_TOO_LARGE = 10**_MAX_DIGITS


MAX_DEPTH = 100
"""Levels of lists and objects within each other; every reader of JSON and msgpack can follow so far."""


def require_json(value: Any, where: str, error: type[ServiceError], depth: int = 0) -> None:
    """Refuses what would not come back equal from JSON: tuples, NaN, keys that are no strings, objects.

    Args:
        where: the value's own name, so that the message can point into it (`metadata.source[3]`).
        error: the class to raise.
        depth: levels around the value.
    """
    if value is None or isinstance(value, bool):
        return
    if depth > MAX_DEPTH:
        raise error(f"{where}: expected at most {MAX_DEPTH} levels of lists and objects, got more; flatten it")
    if isinstance(value, int):
        if abs(value) >= _TOO_LARGE:
            raise error(f"{where}: expected at most {_MAX_DIGITS} digits, got a larger number; store it as text")
        return
    if isinstance(value, str):
        if not is_utf8(value):
            raise error(f"{where}: expected text that UTF-8 can hold, got a lone surrogate in {value!r}")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise error(f"{where}: expected a finite number, got {value!r}; store it as text or leave it out")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            require_json(item, f"{where}[{index}]", error, depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise error(f"{where}: expected text as keys, got {key!r}")
            require_json(key, f"{where}, a key", error)
            require_json(item, f"{where}.{key}", error, depth + 1)
    else:
        raise error(
            f"{where}: expected a plain JSON value (null, true, number, text, list, object),"
            f" got {type(value).__name__}; convert it first"
        )


def shown(value: Any, width: int = 200) -> str:
    """A value as it may stand in a message: its repr, its middle left out where that is long."""
    text = repr(value)
    half = width // 2
    return text if len(text) <= width else f"{text[:half]} ... {text[-half:]} ({len(text)} characters)"


def is_utf8(text: str) -> bool:
    """Whether the text can be written as UTF-8; lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def canonical_json(value: Any) -> str:
    """One text per value: sorted keys, no spaces, plain ASCII. Equal values give equal text on every machine."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
