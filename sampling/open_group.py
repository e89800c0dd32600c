"""OpenGroup: a request under way in an engine, from its samples that wait to its completions that are done."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from sampling.decode import Admission, TokenRecord
from sampling.grammar import Followed, Matcher, SteppedGrammar
from sampling.params import SamplingParams
from sampling.policy import Policy
from sampling.scoring import Scored
from sampling.state import NO_TOKEN
from sampling.types import Completion, Geometry, Group, Request, StopReason


@dataclass(frozen=True)
class Sample:
    """One completion that a request asks for: which, the tokens it begins with, and its key."""

    index: int
    given: np.ndarray
    key: np.ndarray


@dataclass
class OpenGroup:
    """A request under way.

    Attributes:
        request: what was asked.
        params: its parameters as they take effect.
        limit: total length at which a row's budget ends.
        submitted: when it came, by time.monotonic().
        automaton: its grammar over the tokenizer's ids.
        pending: samples that nobody has begun.
        finished: completions by sample index.
    """

    request: Request
    params: SamplingParams
    limit: int
    submitted: float
    automaton: Followed | None
    pending: deque[Sample]
    finished: dict[int, Completion] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Request, params: SamplingParams, cache_len: int, automaton: Followed | None = None) -> Self:
        """A request that has just come."""
        samples = zip(request.sample_indices, request.given, request.keys, strict=True)
        ends = [size for size in (params.max_length, cache_len) if size]
        limit = min(request.prompt_tokens.size + params.max_new_tokens, *ends)
        pending = deque(Sample(*sample) for sample in samples)
        return cls(request, params, limit, time.monotonic(), automaton, pending)

    @property
    def stepped(self) -> SteppedGrammar | None:
        """Its grammar, if that is stepped on the host."""
        return self.automaton if isinstance(self.automaton, SteppedGrammar) else None

    @property
    def budget(self) -> int:
        """Tokens that a row of it may have beyond the prompt."""
        return self.limit - self.request.prompt_tokens.size

    def admission(self, entering: Mapping[int, Sample], geometry: Geometry, policy: Policy) -> Admission:
        """What the program of that name needs to fill slots with samples.

        Args:
            entering: samples by slot.
            geometry: of the engine.
            policy: of the group, lowered.
        """
        slots = np.zeros(geometry.slots, np.int32)
        slots[: len(entering)] = list(entering)
        prompt_len = self.request.prompt_tokens.size
        prompt = np.zeros(geometry.cache_len, np.int32)
        prompt[:prompt_len] = self.request.prompt_tokens
        buffer = np.tile(prompt, (geometry.slots, 1))
        given = np.full(geometry.slots, prompt_len, np.int32)
        keys = np.zeros((geometry.slots, 2), np.uint32)
        for slot, sample in entering.items():
            given[slot] += sample.given.size
            buffer[slot, prompt_len : given[slot]] = sample.given
            keys[slot] = sample.key
        return Admission(
            slots=slots,
            count=np.int32(len(entering)),
            prompt=prompt,
            buffer=buffer,
            prompt_len=np.int32(prompt_len),
            limit=np.int32(self.limit),
            given=given,
            keys=keys,
            policy=policy,
        )

    def finish(
        self,
        sample: Sample,
        tokens: np.ndarray,
        record: TokenRecord,
        versions: np.ndarray,
        *,
        stop_code: int,
        ended_at: int | None,
        begun: float,
    ) -> bool:
        """Takes one sample's result; True if it was the last one.

        Args:
            tokens, versions: int32 [completion_len].
            record: leaves NumPy [completion_len, ...].
            stop_code: StopReason.code.
            ended_at: see Completion.
            begun: when the first token was due, by time.monotonic().
        """
        support: Any = np.sort(record.support, axis=-1)
        self.finished[sample.index] = Completion(
            prompt_id=self.request.prompt_id,
            sample_index=sample.index,
            prompt_tokens=self.request.prompt_tokens,
            completion_tokens=tokens,
            given_len=sample.given.size,
            behaviour_logprobs=np.asarray(record.behaviour_logprobs),
            model_logprobs=np.asarray(record.model_logprobs),
            log_kept_mass=np.asarray(record.log_kept_mass),
            entropy=np.asarray(record.entropy),
            policy_versions=versions,
            forced=np.flatnonzero(record.forced).astype(np.int32),
            support_sizes=np.asarray(np.sum(support != NO_TOKEN, axis=-1, dtype=np.int32)),
            support_ids=support[support != NO_TOKEN],
            ended_at=ended_at,
            key=sample.key,
            params=self.params,
            stop_reason=StopReason.from_code(stop_code),
            wait_s=begun - self.submitted,
            decode_s=time.monotonic() - begun,
            left_grammar_at=self._left_grammar_at(tokens) if sample.given.size else None,
        )
        return len(self.finished) == len(self.request.sample_indices)

    def finish_scored(self, sample: Sample, scored: Scored, version: int, begun: float) -> bool:
        """Takes what forward passes told of one sample; True if it was the last one. Arguments as in `finish`."""
        early = np.flatnonzero(scored.stop[:-1])
        return self.finish(
            sample,
            sample.given,
            scored.record,
            np.full(sample.given.size, version, np.int32),
            stop_code=int(scored.stop[-1]) or StopReason.LENGTH.code,
            ended_at=int(early[0]) if early.size else None,
            begun=begun,
        )

    def _left_grammar_at(self, tokens: np.ndarray) -> int | None:
        params = self.params
        if self.automaton is None:
            return None
        return self.automaton.left_at(tokens.tolist(), params.eos_token_ids, params.stop_token_ids)

    def closed(self) -> Group:
        """The group, once all its samples are finished."""
        return Group(self.request.prompt_id, tuple(self.finished[index] for index in self.request.sample_indices))


@dataclass(frozen=True)
class Resident:
    """The row that holds a slot.

    Attributes:
        group, sample: whose.
        admitted: when it came, by time.monotonic().
        matcher: where it stands in its grammar, if that is stepped on the host.
    """

    group: OpenGroup
    sample: Sample
    admitted: float
    matcher: Matcher | None

    @classmethod
    def of(cls, group: OpenGroup, sample: Sample) -> Self:
        """A row that has just come."""
        matcher = group.stepped.matcher() if group.stepped else None
        return cls(group, sample, time.monotonic(), matcher)
