"""Trajectory: one sample of one prompt, with everything a learner needs to trust, replay and rescore it."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from rollout.json_values import is_utf8, require_json
from rollout.rewards import Score
from sampling.errors import RecordError
from sampling.params import SamplingParams
from sampling.types import Completion, StopReason

SCHEMA_VERSION = 3
"""Version of the fields below, on the wire and on disk."""

LOGPROB_DEFINITION = (
    "v2: float32 nats; behaviour_logprobs[t] is the log of the probability with which token t was drawn, after every"
    " transform, filter, mask and renormalisation (greedy: 0.0); model_logprobs[t] is the untouched model's at"
    " temperature 1; log_kept_mass[t] is the log of the model's probability mass on the final support; entropy[t] is"
    " that of the distribution which token t was drawn from"
)
"""What the columns in nats mean. Recorded with every file; a change of meaning changes the version."""

MAX_ROUNDING_NATS = 1e-4
"""How far above 0 float32 rounding may carry a log-probability; anything more is a fault of the writer."""


class Status(enum.StrEnum):
    """Whether a row gave a usable completion."""

    COMPLETED = "completed"
    FAILED = "failed"


FAILED_REASONS = frozenset({StopReason.UNDEFINED_DISTRIBUTION, StopReason.CONSTRAINT_DEAD_END, StopReason.ABORTED})
"""Stop reasons that leave no usable completion: the row is recorded as failed, with the tokens drawn so far."""


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One finished or failed sample. Immutable, checked on construction, equal when equal to the bit.

    Per-token arrays have one entry per drawn token, the stop token included.

    Attributes:
        run_id: the run that drew it.
        prompt_id: the prompt's id within the run.
        group_id: names the group of samples that share the prompt.
        sample_index: which sample of the prompt, from 0.
        prompt_tokens: int32 [prompt_len].
        completion_tokens: int32 [completion_len].
        given_len: how many of them, from the first on, were given and not drawn; 0 except in branches.
        behaviour_logprobs: float32 [completion_len], nats; see LOGPROB_DEFINITION. A given token that the policy
            removes has -inf; one that was drawn never.
        model_logprobs: float32 [completion_len], nats; -inf and NaN (not measured) may occur.
        log_kept_mass: float32 [completion_len], nats; NaN where not measured.
        entropy: float32 [completion_len], nats; NaN where not measured.
        policy_versions: int32 [completion_len]: version of the weights that drew each token.
        support_sizes: int32 [completion_len], ids recorded of each token's support; 0 where it is not recorded.
        support_ids: int32 [sum of support_sizes], those ids, token after token, each token's in ascending order.
        policy: `SamplingParams.to_dict()` of the row's effective parameters.
        key: uint32 [2]: the row's key, from (seed, prompt id, sample index).
        stop_reason: why the row ended.
        status: completed or failed.
        failure: what went wrong; text for a failed row, None otherwise.
        reward: the score, or None if there is none.
        reward_error: why the scorer gave no reward, or None.
        weights_digest: digest of the weights that drew the row, the last of them if its tokens have several versions.
        numerics_fingerprint: digest of what the bits depend on besides the weights (see the run's manifest).
        wait_s: seconds between submission and the first decode step.
        decode_s: seconds between the first decode step and the end.
        worker: name of the worker that drew it.
        text: the completion for people; never re-encode it for training.
        metadata: the prompt's own metadata, plain JSON values.
        forced: int32, ascending, the places of tokens that the policy forced (the end of thinking, say). They were not
            drawn, so nothing is to be learnt from them; usually there are none.
    Raises:
        RecordError: a field breaks the record's invariants; the message names prompt, sample and field.
    """

    run_id: str
    prompt_id: str
    group_id: str
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
    policy: dict[str, Any]
    key: np.ndarray
    stop_reason: StopReason
    status: Status
    failure: str | None
    reward: float | None
    reward_error: str | None
    weights_digest: str
    numerics_fingerprint: str
    wait_s: float
    decode_s: float
    worker: str
    text: str
    metadata: dict[str, Any] = field(default_factory=dict)
    forced: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    @classmethod
    def from_completion(
        cls,
        completion: Completion,
        *,
        run_id: str,
        weights_digest: str,
        numerics_fingerprint: str,
        text: str = "",
        worker: str = "",
        score: Score | None = None,
        metadata: dict[str, Any] | None = None,
        group_id: str | None = None,
    ) -> Self:
        """The record of a completion; one that ended for a reason in FAILED_REASONS becomes a failed record."""
        failed = completion.stop_reason in FAILED_REASONS
        score = score or Score()
        return cls(
            run_id=run_id,
            prompt_id=completion.prompt_id,
            group_id=completion.prompt_id if group_id is None else group_id,
            sample_index=completion.sample_index,
            prompt_tokens=completion.prompt_tokens,
            completion_tokens=completion.completion_tokens,
            given_len=completion.given_len,
            behaviour_logprobs=completion.behaviour_logprobs,
            model_logprobs=completion.model_logprobs,
            log_kept_mass=completion.log_kept_mass,
            entropy=completion.entropy,
            policy_versions=completion.policy_versions,
            forced=completion.forced,
            support_sizes=completion.support_sizes,
            support_ids=completion.support_ids,
            policy=completion.params.to_dict(),
            key=completion.key,
            stop_reason=completion.stop_reason,
            status=Status.FAILED if failed else Status.COMPLETED,
            failure=f"the row ended with {completion.stop_reason}" if failed else None,
            reward=score.value,
            reward_error=score.error,
            weights_digest=weights_digest,
            numerics_fingerprint=numerics_fingerprint,
            wait_s=completion.wait_s,
            decode_s=completion.decode_s,
            worker=worker,
            text=text,
            metadata=metadata or {},
        )

    @classmethod
    def from_failure(
        cls,
        failure: str,
        prompt_id: str,
        sample_index: int,
        prompt_tokens: np.ndarray,
        key: np.ndarray,
        *,
        params: SamplingParams,
        run_id: str,
        weights_digest: str,
        numerics_fingerprint: str,
        worker: str = "",
        metadata: dict[str, Any] | None = None,
        group_id: str | None = None,
    ) -> Self:
        """The record of a sample that was never drawn: no tokens, stop reason `aborted`, and the reason in words."""
        no_ids, no_nats = np.zeros(0, np.int32), np.zeros(0, np.float32)
        completion = Completion(
            prompt_id, sample_index, prompt_tokens, no_ids, 0, no_nats, no_nats, no_nats, no_nats,
            no_ids, no_ids, no_ids, None, key, params, StopReason.ABORTED, wait_s=0.0, decode_s=0.0,
        )  # fmt: skip
        record = cls.from_completion(
            completion,
            run_id=run_id,
            weights_digest=weights_digest,
            numerics_fingerprint=numerics_fingerprint,
            worker=worker,
            metadata=metadata,
            group_id=group_id,
        )
        return dataclasses.replace(record, failure=failure)

    @property
    def completion_len(self) -> int:
        """Tokens drawn."""
        return self.completion_tokens.size

    @functools.cached_property
    def drawn(self) -> np.ndarray:
        """bool [completion_len]: tokens that were drawn, neither given nor forced."""
        return drawn_places(self.completion_len, self.given_len, self.forced)

    @property
    def behaviour_logprob(self) -> float:
        """Log of the probability of the whole completion under the drawing law, nats, summed in float64."""
        return float(self.behaviour_logprobs.sum(dtype=np.float64))

    def support(self, place: int) -> np.ndarray:
        """Ids among which the token at `place` of the completion was drawn: int32, ascending; empty if not recorded."""
        end = int(self.support_sizes[: place + 1].sum())
        return self.support_ids[end - int(self.support_sizes[place]) : end]

    @property
    def failed(self) -> bool:
        """Whether the row gave no usable completion."""
        return self.status is Status.FAILED

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trajectory):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self))

    def __post_init__(self) -> None:
        for name, (dtype, length) in self._array_shapes().items():
            object.__setattr__(self, name, self._array(name, dtype, length))
        for name in _TEXT_FIELDS:
            value = getattr(self, name)
            if not isinstance(value, str) or not is_utf8(value):
                raise self._refusal(name, "text", value)
        for name in ("failure", "reward_error"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value and is_utf8(value)):
                raise self._refusal(name, "text or None", value)
        for name in ("wait_s", "decode_s"):
            value = getattr(self, name)
            if not isinstance(value, float) or not value >= 0 or math.isinf(value):
                raise self._refusal(name, "seconds >= 0 as a float", value)
        for name in ("policy", "metadata"):
            value = getattr(self, name)
            if not isinstance(value, dict):
                raise self._refusal(name, "a dict", value)
            require_json(value, f"{self._place}: {name}", RecordError)
        for name, most in (("sample_index", math.inf), ("given_len", self.completion_len)):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= most:
                expected = "a whole number >= 0" if most == math.inf else f"a whole number in 0 .. {most}"
                raise self._refusal(name, expected, value)
        within = (self.forced >= 0) & (self.forced < self.completion_len)
        if not within.all() or np.any(np.diff(self.forced) <= 0):
            raise self._refusal("forced", f"ascending places in 0 .. {self.completion_len - 1}", self.forced)
        self._check_nats()
        self._check_support()
        self._check_outcome()

    def _array_shapes(self) -> dict[str, tuple[type[np.generic], int | None]]:
        drawn = len(self.completion_tokens) if np.ndim(self.completion_tokens) == 1 else None
        return {
            "prompt_tokens": (np.int32, None),
            "completion_tokens": (np.int32, None),
            "behaviour_logprobs": (np.float32, drawn),
            "model_logprobs": (np.float32, drawn),
            "log_kept_mass": (np.float32, drawn),
            "entropy": (np.float32, drawn),
            "policy_versions": (np.int32, drawn),
            "support_sizes": (np.int32, drawn),
            "support_ids": (np.int32, None),
            "forced": (np.int32, None),
            "key": (np.uint32, 2),
        }

    def _array(self, name: str, dtype: type[np.generic], length: int | None) -> np.ndarray:
        value = getattr(self, name)
        expected = f"{np.dtype(dtype)} [{'any length' if length is None else length}]"
        if not isinstance(value, np.ndarray):
            raise self._refusal(name, expected, value)
        if value.dtype != dtype or value.ndim != 1 or length not in (None, value.size):
            hint = "; every drawn token needs its own entry, none may be padded or dropped"
            raise self._refusal(name, expected, f"{value.dtype} {list(value.shape)}", hint)
        frozen = np.ascontiguousarray(value).view()
        frozen.flags.writeable = False
        return frozen

    def _check_nats(self) -> None:
        limit = np.float32(MAX_ROUNDING_NATS)
        given = np.arange(self.completion_len) < self.given_len
        lawful = np.isfinite(self.behaviour_logprobs) | (given & np.isneginf(self.behaviour_logprobs))
        for name, valid, expected in (
            ("behaviour_logprobs", lawful, "finite and"),
            ("model_logprobs", True, "NaN or"),
            ("log_kept_mass", True, "NaN or"),
        ):
            values = getattr(self, name)
            bad = np.flatnonzero(~(valid & ~(values > limit)))
            if bad.size:
                raise self._refusal(f"{name}[{bad[0]}]", f"a log-probability, {expected} <= 0", values[bad[0]])
        bad = np.flatnonzero((self.entropy < -limit) | np.isinf(self.entropy))
        if bad.size:
            raise self._refusal(f"entropy[{bad[0]}]", "NaN or nats, finite and >= 0", self.entropy[bad[0]])

    def _check_support(self) -> None:
        sizes = self.support_sizes
        if sizes.size and sizes.min() < 0:
            raise self._refusal("support_sizes", "numbers >= 0", sizes.min())
        if (total := sizes.sum()) != self.support_ids.size:
            raise self._refusal("support_ids", f"int32 [{total}], the sum of support_sizes", self.support_ids.size)
        given = np.arange(self.completion_len) < self.given_len
        for place in np.flatnonzero(sizes):
            ids = self.support(int(place))
            if (self.completion_tokens[place] not in ids and not given[place]) or np.any(np.diff(ids) <= 0):
                raise self._refusal(f"support of token {place}", "ascending ids, the token's own among them", ids)

    def _check_outcome(self) -> None:
        try:
            object.__setattr__(self, "stop_reason", StopReason(self.stop_reason))
            object.__setattr__(self, "status", Status(self.status))
        except ValueError as error:
            raise RecordError(f"{self._place}: {error}; was it written by a newer release?") from error
        if self.failed != (self.stop_reason in FAILED_REASONS):
            raise self._refusal("status", f"one that fits stop reason {self.stop_reason}", str(self.status))
        if self.failed != (self.failure is not None):
            raise self._refusal("failure", "text for a failed row and None for a completed one", self.failure)
        if self.reward is not None:
            if not isinstance(self.reward, float) or not math.isfinite(self.reward):
                raise self._refusal("reward", "a finite float or None", self.reward)
            if self.reward_error is not None:
                raise self._refusal("reward_error", "None beside a reward", self.reward_error)

    @property
    def _place(self) -> str:
        return f"trajectory of prompt {self.prompt_id!r}, sample {self.sample_index!r}"

    def _refusal(self, name: str, expected: str, got: object, hint: str = "") -> RecordError:
        shown = got if isinstance(got, str) else repr(got)
        return RecordError(f"{self._place}: {name}: expected {expected}, got {shown[:200]}{hint}")


_TEXT_FIELDS = (
    "run_id",
    "prompt_id",
    "group_id",
    "weights_digest",
    "numerics_fingerprint",
    "worker",
    "text",
)


def drawn_places(completion_len: int, given_len: int, forced: np.ndarray) -> np.ndarray:
    """bool [completion_len]: the tokens of a completion that were drawn, neither given nor forced."""
    drawn = np.arange(completion_len) >= given_len
    drawn[forced] = False
    return drawn


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, np.ndarray):
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()
    return ours == theirs
