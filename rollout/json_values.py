"""Plain JSON values: the only kind of data that a caller may attach to prompts and records."""

from __future__ import annotations

import json
import math
from typing import Any

from sampling.errors import ServiceError


def require_json(value: Any, where: str, error: type[ServiceError]) -> None:
    """Refuses what would not come back equal from JSON: tuples, NaN, keys that are no strings, objects.

    Args:
        where: the value's own name, so that the message can point into it (`metadata.source[3]`).
        error: the class to raise.
    """
    if value is None or isinstance(value, (bool, int)):
        return
    if isinstance(value, str):
        if not is_utf8(value):
            raise error(f"{where}: expected text that UTF-8 can hold, got a lone surrogate in {value!r}")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise error(f"{where}: expected a finite number, got {value!r}; store it as text or leave it out")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            require_json(item, f"{where}[{index}]", error)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise error(f"{where}: expected text as keys, got {key!r}")
            require_json(key, f"{where}, a key", error)
            require_json(item, f"{where}.{key}", error)
    else:
        raise error(
            f"{where}: expected a plain JSON value (null, true, number, text, list, object),"
            f" got {type(value).__name__}; convert it first"
        )


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
