"""GroupSampler: prompts in, groups of trajectories out, in the order of the prompts.

The one path from prompts to records: jobs (rollout/driver.py) and the Python surface (rollout/service.py) differ in
where the prompts come from and where the groups go.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors import GroupFailure, GroupResult, Outcome, WorkerPool
from rollout.branches import Branch
from rollout.canary import Canary
from rollout.json_values import shown
from rollout.prompts import Prompt
from rollout.rewards import Reward, judge
from rollout.tokenizer import Tokenizer
from rollout.trajectory import Trajectory
from sampling.errors import ConfigError, PromptError
from sampling.fingerprint import fingerprint_digest
from sampling.keys import row_key
from sampling.params import SamplingParams
from sampling.types import Completion, Request, StopReason

WINDOW_ROUNDS = 8
"""Samples dispatched ahead of the oldest unfinished prompt, as a multiple of all slots: what reordering may hold."""

TrajectoryGroup = tuple[Trajectory, ...]
"""All samples of one prompt, by sample index."""


class GroupSampler:
    """Samples prompts on a pool of workers.

    Args:
        pool: an entered pool.
        tokenizer: of the pool's checkpoint.
        params: how to sample; a prompt may replace single parameters.
        seed: the run's seed; with prompt id and sample index it determines every draw.
        reward: scores each completion; None scores nothing.
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
        reward: Reward | None = None,
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
        self._reward = reward
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
        for outcome in self._pool.run(self._requests(prompts, window), on_wait):
            if self._canary and self._canary.settle(outcome):
                continue
            prompt = window.prompt(outcome.request)
            records = self._records(prompt, outcome)
            if self._canary:
                self._canary.watch(outcome.request, records)
            window.close(prompt, records)
            yield from window.leaving()
        yield from window.leaving()

    def branch(self, branches: Iterable[Branch]) -> Iterator[TrajectoryGroup]:
        """The groups that continue recorded trajectories, in the order of the branches."""
        line: deque[tuple[Request, Prompt]] = deque()
        groups: dict[int, TrajectoryGroup] = {}

        def requests() -> Iterator[Request]:
            for branch in branches:
                line.append((branch.request(), branch.prompt))
                yield line[-1][0]

        for outcome in self._pool.run(requests()):
            prompt = next(prompt for request, prompt in line if request is outcome.request)
            groups[id(outcome.request)] = self._records(prompt, outcome)
            while line and id(line[0][0]) in groups:
                yield groups.pop(id(line.popleft()[0]))

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
            score=judge(self._reward, prompt, text) if self._reward else None,
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
