"""SamplingParams: what a user asks for, under the field's usual names, checked on the host.

`sampling.policy.lower` turns it into the Policy pytree that the compiled programs read. It is the only way in,
for drawing and for rescoring alike, and the only form in which a policy is recorded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sampling.errors import ConfigError

ORDERS = {"transformers": 1, "reference": 1, "vllm": 1}
"""Named orders of the chain, with the version of each; both are recorded with every completion."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample a prompt's completions. Defaults draw from the model itself.

    Attributes:
        temperature: divides the scores; 0 means greedy.
        top_k: keep the k best tokens (ties with the k-th stay); None, 0 and -1 all mean off.
        top_p: keep the smallest set of tokens that holds this probability mass, in (0, 1]; 1 is off.
        min_p: drop tokens less likely than min_p times the best one, in [0, 1]; 0 is off.
        max_new_tokens: end after this many tokens, at least 1.
        eos_token_ids: ids that end the completion besides those that the checkpoint names.
        ignore_eos: go on after end-of-sequence tokens.
        n: completions per prompt, at least 1.
        seed: replaces the run's seed for this prompt.
        order: name of the order in which the stages apply.
    Raises:
        ConfigError: a value is out of range; the message names the field, the value and the range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 256
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    seed: int | None = None
    order: str = "transformers"

    def __post_init__(self) -> None:
        self._real("temperature", lambda v: v >= 0, "a finite number >= 0 (0 is greedy)")
        self._whole("top_k", lambda v: v >= -1, "None, -1 or 0 (off), or at least 1", optional=True)
        object.__setattr__(self, "top_k", None if self.top_k in (-1, 0) else self.top_k)
        self._real("top_p", lambda v: 0 < v <= 1, "a number in (0, 1]; 1 is off")
        self._real("min_p", lambda v: 0 <= v <= 1, "a number in [0, 1]; 0 is off")
        self._whole("max_new_tokens", lambda v: v >= 1, "at least 1")
        self._whole("n", lambda v: v >= 1, "at least 1")
        self._whole("seed", lambda v: 0 <= v < 2**64, "in 0 .. 2^64 - 1", optional=True)
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"sampling.ignore_eos: expected true or false, got {self.ignore_eos!r}")
        ids = tuple(self.eos_token_ids)
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise ConfigError(f"sampling.eos_token_ids: expected token ids >= 0, got {self.eos_token_ids!r}")
        object.__setattr__(self, "eos_token_ids", tuple(sorted(set(ids))))
        if self.order not in ORDERS:
            raise ConfigError(f"sampling.order: expected one of {', '.join(ORDERS)}, got {self.order!r}")

    def _real(self, name: str, valid: Any, expected: str) -> None:
        value = getattr(self, name)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if isinstance(value, (bool, str)) or not math.isfinite(number) or not valid(number):
            raise ConfigError(f"sampling.{name}: expected {expected}, got {value!r}")
        object.__setattr__(self, name, number)

    def _whole(self, name: str, valid: Any, expected: str, optional: bool = False) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        try:
            number = value.__index__()
        except AttributeError:
            number = None
        if isinstance(value, bool) or number is None or not valid(number):
            raise ConfigError(f"sampling.{name}: expected a whole number, {expected}, got {value!r}")
        object.__setattr__(self, name, number)

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed.

        Raises:
            ConfigError: a name is no field, or a value is out of range.
        """
        known = [f.name for f in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise ConfigError(f"sampling.{name}: no such parameter; known are {', '.join(known)}")
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Every parameter as plain values, with the version of the order; `from_dict` reads it back."""
        values = dataclasses.asdict(self)
        values["eos_token_ids"] = list(self.eos_token_ids)
        return {**values, "order_version": ORDERS[self.order]}

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
