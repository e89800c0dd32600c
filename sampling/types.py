"""What crosses the border of the sampling layer: a request goes in, a group of completions comes out.

All are frozen dataclasses of NumPy arrays and plain values, so they travel between processes unchanged.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sampling.errors import ConfigError, PromptError
from sampling.keys import row_key
from sampling.params import SamplingParams


class StopReason(enum.StrEnum):
    """Every way in which a completion can end."""

    EOS = "eos"
    """The model drew an end-of-sequence token."""
    STOP_TOKEN = "stop_token"
    """The model drew one of the request's own stop tokens."""
    STOP_STRING = "stop_string"
    """The last token completed one of the request's stop strings."""
    LENGTH = "length"
    """The request's budget of new tokens, or its total length, is used up."""
    GRAMMAR_DONE = "grammar_done"
    """The grammar allows nothing more."""
    CACHE_FULL = "cache_full"
    """The slot's key/value cache has no room for another token."""
    UNDEFINED_DISTRIBUTION = "undefined_distribution"
    """The scores were NaN, +inf or all removed: there was nothing to draw from."""
    CONSTRAINT_DEAD_END = "constraint_dead_end"
    """The row's constraints together allow no token."""
    ABORTED = "aborted"
    """The caller withdrew the request."""
    PLUGIN = "plugin"
    """A stopping rule from outside ended it."""

    @property
    def code(self) -> int:
        """The reason as the compiled programs carry it; 0 is kept for a row that still runs."""
        return tuple(StopReason).index(self) + 1

    @classmethod
    def from_code(cls, code: int) -> StopReason:
        """The reason behind a code of the compiled programs."""
        return tuple(cls)[code - 1]


LANE_TOKENS = 8
"""Tokens of a lane (sampling/lanes.py). Shorter ones would make attention costlier, longer ones waste more at the ends
of prompts."""


@dataclass(frozen=True)
class Geometry:
    """The fixed shapes of one engine. Rows keep their bits only within one geometry, so it is recorded with them.

    Attributes:
        slots: rows that decode at the same time.
        cache_len: tokens that one slot can hold, prompt and completion together.
        prefill_rows: prompts that are read together, ahead of free slots.
        prefill_chunk: tokens that one prefill step reads, of all these prompts together; up to 8, or a multiple of it.
    """

    slots: int = 32
    cache_len: int = 512
    prefill_rows: int = 8
    prefill_chunk: int = 256

    def __post_init__(self) -> None:
        for name in ("slots", "cache_len", "prefill_rows", "prefill_chunk"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"geometry.{name}: expected a whole number of at least 1, got {value!r}")
        if self.prefill_chunk > LANE_TOKENS and self.prefill_chunk % LANE_TOKENS:
            near = -(-self.prefill_chunk // LANE_TOKENS) * LANE_TOKENS
            raise ConfigError(
                f"geometry.prefill_chunk: expected at most {LANE_TOKENS} or a multiple of it, got"
                f" {self.prefill_chunk}; try {near}"
            )


@dataclass(frozen=True)
class Request:
    """One prompt and the samples wanted of it. Its completions come back together, as a Group.

    Attributes:
        prompt_id: names the prompt within the run; key material for its draws.
        prompt_tokens: int32 [prompt_len], at least one token.
        params: how to sample, the same for every sample of the request.
        run_seed: key material; `params.seed` takes its place where it is set.
        sample_indices: which samples of the prompt to draw; by default 0 .. params.n - 1.
        given: for each sample the tokens that its completion begins with, int32 [given_len]; by default none. They are
            taken instead of drawn, by the same program, with the log-probs they have under `params`; no rule ends a row
            before its last given token. A recorded completion given whole is its replay, a part of it a branch.
        keys: for each sample the row's key, uint32 [2], in place of the one that follows from seed, prompt id and
            sample index; by default none.
        forward: nothing is drawn. The given tokens are the completions, and a forward pass over each whole sequence
            scores them: many times faster than a replay, and equal to it within rounding instead of to the bit.
    """

    prompt_id: str
    prompt_tokens: np.ndarray
    params: SamplingParams = field(default_factory=SamplingParams)
    run_seed: int = 0
    sample_indices: tuple[int, ...] = ()
    given: tuple[np.ndarray, ...] = ()
    keys: tuple[np.ndarray, ...] = ()
    forward: bool = False

    def __post_init__(self) -> None:
        tokens = self._tokens(self.prompt_tokens, "prompt tokens")
        if tokens.size == 0:
            raise PromptError(
                f"prompt {self.prompt_id!r}: expected at least one token, got none; a model continues from something"
            )
        object.__setattr__(self, "prompt_tokens", tokens)
        if not 0 <= self.run_seed < 2**64:
            raise ConfigError(f"prompt {self.prompt_id!r}: run_seed: expected 0 .. 2^64 - 1, got {self.run_seed}")
        indices = tuple(self.sample_indices) or tuple(range(self.params.n))
        if len(set(indices)) != len(indices) or min(indices) < 0:
            raise ConfigError(f"prompt {self.prompt_id!r}: sample indices must be distinct and >= 0, got {indices}")
        object.__setattr__(self, "sample_indices", indices)
        nothing = (np.zeros(0, np.int32),) * len(indices)
        given = tuple(self._tokens(part, "given tokens") for part in self.given) or nothing
        keys = tuple(self._key(key) for key in self.keys)
        keys = keys or tuple(row_key(self.seed, self.prompt_id, index) for index in indices)
        for name, values in (("given tokens", given), ("keys", keys)):
            if len(values) != len(indices):
                raise ConfigError(
                    f"prompt {self.prompt_id!r}: expected {name} for each of {len(indices)} samples, got {len(values)}"
                )
        if self.forward and not all(part.size for part in given):
            raise ConfigError(f"prompt {self.prompt_id!r}: forward: expected given tokens to score, got none")
        object.__setattr__(self, "given", given)
        object.__setattr__(self, "keys", keys)

    def _key(self, key: Any) -> np.ndarray:
        array = np.asarray(key)
        if array.shape != (2,) or array.dtype != np.uint32:
            raise ConfigError(
                f"prompt {self.prompt_id!r}: expected keys of uint32 [2], got {array.dtype} {list(array.shape)}"
            )
        return array

    def _tokens(self, tokens: Any, what: str) -> np.ndarray:
        array = np.asarray(tokens)
        if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
            raise PromptError(
                f"prompt {self.prompt_id!r}: expected {what} as a list of integers,"
                f" got {array.dtype} of shape {array.shape}"
            )
        return np.ascontiguousarray(array, dtype=np.int32)

    @property
    def seed(self) -> int:
        """The seed that the request's draws start from."""
        return self.run_seed if self.params.seed is None else self.params.seed


@dataclass(frozen=True)
class Completion:
    """One finished sample. Per-token arrays have one entry per drawn token, the stop token included.

    Attributes:
        prompt_id: the request's prompt id.
        sample_index: which sample of the prompt this is.
        prompt_tokens: int32 [prompt_len].
        completion_tokens: int32 [completion_len].
        given_len: how many of them, from the first on, were given and not drawn.
        behaviour_logprobs: float32 [completion_len], nats: log of the probability with which each token was
            drawn, after every transform, filter and renormalisation. Exactly 0.0 for greedy rows.
        model_logprobs: float32 [completion_len], nats: the untouched model's, at temperature 1.
        log_kept_mass: float32 [completion_len], nats: log of the model's probability mass on the final support.
        entropy: float32 [completion_len], nats: of the distribution that each token was drawn from.
        policy_versions: int32 [completion_len]: version of the weights that drew each token.
        support_sizes: int32 [completion_len]: how many ids of each token's support are recorded; 0 where the request
            asks for none, or the support holds more than it asks for.
        support_ids: int32 [sum of support_sizes]: those ids, token after token, each token's in ascending order.
        ended_at: place of the first given token with which the policy's rules would have ended the row although more
            were given; None if there is none.
        key: uint32 [2]: the row's key, from (seed, prompt id, sample index).
        params: the effective parameters of this row, end-of-sequence ids included.
        stop_reason: why it ended. Scored by forward passes, a completion that no rule ends has the reason `length`.
        wait_s: seconds between submission and the first decode step.
        decode_s: seconds between the first decode step and the end.
        forced: int32, ascending, the places of tokens that the policy forced; those were not drawn.
        left_grammar_at: place of the first given token that the grammar does not allow there; it and all after it have
            the behaviour log-prob -inf. None if there is none.
    """

    prompt_id: str
    sample_index: int
    prompt_tokens: np.ndarray
    completion_tokens: np.ndarray
    given_len: int
    behaviour_logprobs: np.ndarray
    model_logprobs: np.ndarray
    log_kept_mass: np.ndarray
    entropy: np.ndarray
    policy_versions: np.ndarray
    support_sizes: np.ndarray
    support_ids: np.ndarray
    ended_at: int | None
    key: np.ndarray
    params: SamplingParams
    stop_reason: StopReason
    wait_s: float
    decode_s: float
    forced: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    left_grammar_at: int | None = None


@dataclass(frozen=True)
class Group:
    """All completions of one request, in the order of its sample indices."""

    prompt_id: str
    completions: tuple[Completion, ...]
