"""GroupSampler: prompts in, groups of trajectories out, in the order of the prompts.

The one path from prompts to records: jobs (rollout/driver.py) and the Python surface (rollout/service.py) differ in
where the prompts come from and where the groups go.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors import GroupFailure, GroupResult, Outcome, WorkerPool
from rollout.branches import Branch
from rollout.canary import Canary
from rollout.json_values import shown
from rollout.prompts import Prompt
from rollout.reward_pool import RewardPool
from rollout.rewards import Score
from rollout.tokenizer import Tokenizer
from rollout.trajectory import Trajectory
from sampling.errors import ConfigError, PromptError, RunError
from sampling.fingerprint import fingerprint_digest
from sampling.keys import row_key
from sampling.params import SamplingParams
from sampling.types import Completion, Request, StopReason

WINDOW_ROUNDS = 8
"""Samples dispatched ahead of the oldest unfinished prompt, as a multiple of all slots: what reordering may hold."""

WAIT_S = 0.2
"""Longest wait for a score before the caller is asked whether the run is to end."""

TrajectoryGroup = tuple[Trajectory, ...]
"""All samples of one prompt, by sample index."""


class GroupSampler:
    """Samples prompts on a pool of workers.

    Args:
        pool: an entered pool.
        tokenizer: of the pool's checkpoint.
        params: how to sample; a prompt may replace single parameters.
        seed: the run's seed; with prompt id and sample index it determines every draw.
        rewards: score the completions, while others are drawn; None scores nothing.
        run_id: goes into every record.
        canary: asks for a share of the groups once more, and compares; None compares nothing.
    Raises:
        ConfigError: the parameters are of another kind, or the seed is out of range.
    """

    def __init__(
        self,
        pool: WorkerPool,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        seed: int = 0,
        rewards: RewardPool | None = None,
        run_id: str = "",
        canary: Canary | None = None,
    ) -> None:
        if not isinstance(params, SamplingParams):
            raise ConfigError(f"params: expected SamplingParams(...), got {shown(params)}")
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
            raise ConfigError(f"seed: expected a whole number in 0 .. 2^64 - 1, got {shown(seed)}")
        self._pool = pool
        self._tokenizer = tokenizer
        self._params = params
        self._seed = seed
        self._rewards = rewards
        self._canary = canary
        self._window_rows = WINDOW_ROUNDS * pool.slots
        self._run_id = run_id

    def sample(
        self, prompts: Iterable[Prompt | None], on_wait: Callable[[], None] | None = None
    ) -> Iterator[TrajectoryGroup]:
        """The prompts' groups, in their order. Prompts are pulled as workers and the reordering window have room.

        A prompt that cannot be used, and one that workers were lost with too often, gives failed trajectories.

        Args:
            prompts: may hold back: a None means "nothing now, ask again after a group".
            on_wait: see `WorkerPool.run`.
        """
        window = _Window()
        for groups in self._rounds(self._requests(prompts, window), window.prompt, on_wait):
            for request, records in groups or ():
                window.close(window.prompt(request), records)
            leaving = list(window.leaving())
            if groups is None and not leaving:
                raise RunError("the source of prompts holds back although no group is to come")
            yield from leaving
        yield from window.leaving()

    def branch(self, branches: Iterable[Branch]) -> Iterator[TrajectoryGroup]:
        """The groups that continue recorded trajectories, in the order of the branches."""
        line: deque[tuple[Request, Prompt]] = deque()
        done: dict[int, TrajectoryGroup] = {}

        def requests() -> Iterator[Request | None]:
            for branch in branches:
                while len(line) >= self._window_rows:
                    yield None
                line.append((branch.request(), branch.prompt))
                yield line[-1][0]

        def prompt_of(request: Request) -> Prompt:
            return next(prompt for candidate, prompt in line if candidate is request)

        for groups in self._rounds(requests(), prompt_of):
            done |= {id(request): records for request, records in groups or ()}
            while line and id(line[0][0]) in done:
                yield done.pop(id(line.popleft()[0]))

    def _rounds(
        self,
        requests: Iterable[Request | None],
        prompt_of: Callable[[Request], Prompt],
        on_wait: Callable[[], None] | None = None,
    ) -> Iterator[list[tuple[Request, TrajectoryGroup]] | None]:
        """Requests with their records, as these are drawn and scored; see `WorkerPool.rounds`."""
        scoring: list[_Scoring] = []
        try:
            for outcomes in self._pool.rounds(requests, on_wait):
                scoring += [
                    self._recorded(prompt_of(outcome.request), outcome)
                    for outcome in outcomes or ()
                    if not (self._canary and self._canary.settle(outcome))
                ]
                stuck = outcomes is None
                yield None if stuck and not scoring else _scored(scoring, WAIT_S if stuck else 0)
            while scoring:
                if on_wait:
                    on_wait()
                yield _scored(scoring, WAIT_S)
        finally:
            for group in scoring:  # nobody waits for them any more
                if group.scores:
                    group.scores.cancel()

    def _recorded(self, prompt: Prompt, outcome: Outcome) -> _Scoring:
        """An outcome as records, given to the canary and to the scorers."""
        records = self._records(prompt, outcome)
        if self._canary:
            self._canary.watch(outcome.request, records)
        scores = None
        if self._rewards and isinstance(outcome, GroupResult):
            scores = self._rewards.score(prompt, [record.text for record in records])
        return _Scoring(outcome.request, records, scores)

    def _requests(self, prompts: Iterable[Prompt | None], window: _Window) -> Iterator[Request | None]:
        for prompt in prompts:
            if prompt is None:
                yield None
                continue
            while window.rows >= self._window_rows:
                yield from self._checks() or [None]
            yield from self._checks()
            params = prompt.params(self._params)
            window.open(prompt, rows=params.n)
            try:
                tokens = self._tokenizer.tokenize(prompt).prompt_tokens
                assert tokens is not None
                yield Request(prompt.id, tokens, params, self._seed, prompt.sample_indices(params))
            except PromptError as error:
                window.close(prompt, self._unread(prompt, params, f"PromptError: {error}"))
        while self._canary and (window.rows or self._canary.waiting):
            yield from self._checks() or [None]

    def _checks(self) -> list[Request]:
        return list(self._canary.requests()) if self._canary else []

    def _records(self, prompt: Prompt, outcome: Outcome) -> TrajectoryGroup:
        match outcome:
            case GroupResult(_, group, worker):
                return tuple(self._record(prompt, completion, worker) for completion in group.completions)
            case GroupFailure(request, error_type, message, attempts, worker):
                tried = f" (after {attempts} attempts)" if attempts > 1 else ""
                failure = f"{error_type}: {message}{tried}"
                return self._failed(prompt, request, failure, worker)

    @property
    def _origin(self) -> dict[str, Any]:
        """What records say of the run, and of the weights in service."""
        described = self._pool.description
        return {
            "run_id": self._run_id,
            "weights_digest": described.weights_digest,
            "numerics_fingerprint": fingerprint_digest(described.fingerprint),
        }

    def _record(self, prompt: Prompt, completion: Completion, worker: str) -> Trajectory:
        tokens = completion.prompt_tokens, completion.completion_tokens
        if completion.stop_reason is StopReason.STOP_STRING:
            text = self._tokenizer.text_before_stop(*tokens, completion.params.stop)
        else:
            text = self._tokenizer.completion_text(*tokens)
        origin = self._origin
        if completion.policy_versions.size:
            origin |= {"weights_digest": self._pool.weights_digest(int(completion.policy_versions[-1]))}
        return Trajectory.from_completion(
            completion,
            text=text,
            worker=worker,
            metadata=dict(prompt.metadata),
            **origin,
        )

    def _failed(self, prompt: Prompt, request: Request, failure: str, worker: str) -> TrajectoryGroup:
        keyed = zip(request.sample_indices, request.keys, strict=True)
        made = self._origin | {"worker": worker, "metadata": dict(prompt.metadata), "params": request.params}
        return tuple(
            Trajectory.from_failure(failure, prompt.id, index, request.prompt_tokens, key, **made)
            for index, key in keyed
        )

    def _unread(self, prompt: Prompt, params: SamplingParams, failure: str) -> TrajectoryGroup:
        """The samples of a prompt of which no request could be made."""
        made = self._origin | {"metadata": dict(prompt.metadata), "params": params}
        seed = self._seed if params.seed is None else params.seed
        nothing = np.zeros(0, np.int32)
        keyed = [(index, row_key(seed, prompt.id, index)) for index in prompt.sample_indices(params)]
        return tuple(Trajectory.from_failure(failure, prompt.id, index, nothing, key, **made) for index, key in keyed)


@dataclass(frozen=True, eq=False)
class _Scoring:
    """A group that was drawn, and its scores under way; None if there will be none."""

    request: Request
    records: TrajectoryGroup
    scores: Future[tuple[Score, ...]] | None

    def finished(self) -> TrajectoryGroup:
        """The group with its scores."""
        if self.scores is None:
            return self.records
        return tuple(
            dataclasses.replace(record, reward=score.value, reward_error=score.error)
            for record, score in zip(self.records, self.scores.result(), strict=True)
        )


def _scored(scoring: list[_Scoring], timeout_s: float) -> list[tuple[Request, TrajectoryGroup]]:
    """Takes out the groups whose scores are there; waits so long for the first of them."""
    if timeout_s and all(group.scores for group in scoring):
        wait([group.scores for group in scoring if group.scores], timeout_s, FIRST_COMPLETED)
    done = [group for group in scoring if group.scores is None or group.scores.done()]
    scoring[:] = [group for group in scoring if group not in done]
    return [(group.request, group.finished()) for group in done]


@dataclass
class _Place:
    """A prompt in line: its samples, and its group once that is there."""

    prompt: Prompt
    rows: int
    group: TrajectoryGroup | None = None


class _Window:
    """Puts groups back into the order of their prompts. Groups leave as soon as all before them have left."""

    def __init__(self) -> None:
        self.rows = 0
        self._line: OrderedDict[tuple[str, int], _Place] = OrderedDict()
        self._leaving: deque[TrajectoryGroup] = deque()

    def open(self, prompt: Prompt, rows: int) -> None:
        """Takes a prompt into the line.

        Raises:
            PromptError: a prompt of this name is in the line.
        """
        if prompt.name in self._line:
            raise PromptError(f"{prompt.place}: its id is taken already; ids must be unique within a run")
        self._line[prompt.name] = _Place(prompt, rows)
        self.rows += rows

    def prompt(self, request: Request) -> Prompt:
        """The prompt in line that a request was made of."""
        return self._line[request.prompt_id, request.sample_indices[0]].prompt

    def close(self, prompt: Prompt, group: TrajectoryGroup) -> None:
        """Puts a prompt's group into its place."""
        self._line[prompt.name].group = group
        while self._line and (first := next(iter(self._line.values()))).group is not None:
            self._leaving.append(first.group)
            self.rows -= first.rows
            del self._line[first.prompt.name]

    def leaving(self) -> Iterator[TrajectoryGroup]:
        """Groups whose turn has come; each comes out once."""
        while self._leaving:
            yield self._leaving.popleft()
