"""train_run: prompts to workers, trajectories to the learner, weights back to the workers.

One loop serves both ways of training. Prompts of a step may be drawn once the weights are at most `max_policy_lag`
steps behind it. With 0 the workers wait for the learner; with more they draw the next batches meanwhile, and rows
under way go on with newer weights as these are published.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from actors import Chaos, WorkerPool
from rollout.atomic import before_writes
from rollout.driver import worker_pool
from rollout.groups import GroupSampler, TrajectoryGroup
from rollout.json_values import shown
from rollout.learning.batch_line import Batch, BatchLine, endless
from rollout.learning.batches import TrainBatch, require_learnable
from rollout.learning.checkpointing import Checkpoints
from rollout.learning.folder import TrainFolder, in_words
from rollout.learning.learner import Learner
from rollout.learning.run_metrics import Clock, TrainSummary, evaluation_figures, step_line
from rollout.learning.step_metrics import StepMetrics
from rollout.learning.train_config import TrainConfig
from rollout.progress import ProgressReporter
from rollout.prompts import Prompt
from rollout.reward_pool import RewardPool, reward_pool
from rollout.rewards import Reward, require_scorable, reward_from_config
from rollout.sources import read_prompts
from rollout.tokenizer import Tokenizer
from rollout.trajectory import Trajectory
from sampling.checkpoints import inspect_checkpoint, load_checkpoint, load_tokenizer
from sampling.errors import PromptError
from sampling.plugins import Plugins, load_plugins
from sampling.plugins.contract import require_contract

EVALUATION = "evaluation/"
"""Begins the ids of held-out prompts, so that they and prompts of training never share a key."""

WAIT_S = 0.2
"""Longest wait for the learner before it is asked whether the run is to end."""


def train_run(
    config: TrainConfig,
    out_dir: str | Path,
    *,
    address: str | None = None,
    progress: ProgressReporter | None = None,
    accept_changes: bool = False,
    chaos: Chaos | Sequence[str] = (),
) -> TrainSummary:
    """Trains in a folder, or continues from the newest checkpoint there.

    Without a policy lag, equal configs give equal metrics and weights to the bit, times apart, interrupted or not.

    Args:
        out_dir: a new folder, or that of the same run.
        address: of a running Ray cluster; None starts Ray on this machine.
        progress: where to show how far the run is.
        accept_changes: continue with the config's values where they differ from the folder's, and record that.
        chaos: what is to go wrong on the way (docs/chaos.md).
    Raises:
        ConfigError, PromptError, CheckpointError: the input has to change.
        WorkerError: all workers were lost. A later start continues from the newest checkpoint.
    """
    progress = progress or ProgressReporter(quiet=True)
    chaos = Chaos.of(chaos)
    plugins = load_plugins(config.plugins)
    config = config.model_copy(update={"plugins": plugins.refs})  # with their versions, for the folder to keep
    with (
        before_writes(chaos.before_write),
        TrainFolder.open(out_dir, config, accept_changes=accept_changes) as folder,
    ):
        reward = reward_from_config(config.reward)
        info = inspect_checkpoint(config.model.checkpoint)
        require_contract(plugins, info.config.vocab_size)
        tokenizer = Tokenizer(load_tokenizer(info))
        _require_trainable(config, tokenizer, reward, plugins)
        learner = Learner(
            load_checkpoint(config.model.checkpoint),  # which the learner copies, and nobody keeps
            config.learner,
            config.algorithm,
            longest=config.geometry.cache_len,
            longest_completion=min(config.sampling.max_new_tokens, config.geometry.cache_len),
        )
        progress.message(f"a step of learning holds {learner.memory_plan}")
        checkpoints = Checkpoints(folder.checkpoints, config.train.keep_checkpoints)
        notes: dict[str, Any] = {}
        if checkpoints.steps:
            restored = checkpoints.restore(learner.state)
            learner.restore(restored.state)
            notes = restored.notes
            progress.message(f"continuing after step {restored.step}")
        told = folder.rewind(learner.steps)
        unevaluated = None if told == learner.steps else notes.get("line")
        if learner.steps >= config.train.steps and unevaluated is None:
            return TrainSummary.from_folder(folder.path)
        if changes := folder.adopt(learner.steps):
            progress.message(f"from step {learner.steps} on: {in_words(changes)}")
        progress.message(f"starting {config.workers.count} worker(s) with {info.name}")
        with (
            reward_pool(reward, config.reward_timeout_s, config.reward_workers) as rewards,
            worker_pool(config, address, chaos) as pool,
            ThreadPoolExecutor(1, "learner") as thread,
        ):
            progress.message(f"a worker holds {pool.description.memory}")
            loop = _Loop(config, folder, pool, tokenizer, rewards, learner, checkpoints, thread, progress)
            loop.run(notes.get("cursor", 0), unevaluated)
        return TrainSummary.from_folder(folder.path)


@dataclasses.dataclass
class _Learning:
    """A step under way in the learner's thread."""

    batch: Batch
    result: Future[tuple[StepMetrics, dict[str, Any] | None, float]]


class _Loop:
    def __init__(
        self,
        config: TrainConfig,
        folder: TrainFolder,
        pool: WorkerPool,
        tokenizer: Tokenizer,
        rewards: RewardPool | None,
        learner: Learner,
        checkpoints: Checkpoints,
        thread: ThreadPoolExecutor,
        progress: ProgressReporter,
    ) -> None:
        self._config, self._folder, self._pool, self._progress = config, folder, pool, progress
        self._learner, self._checkpoints, self._thread = learner, checkpoints, thread
        self._sampler = GroupSampler(pool, tokenizer, config.sampling, seed=config.seed, rewards=rewards)
        self._learnt = learner.steps
        self._learning: _Learning | None = None
        self._pending: dict[str, Any] | None = None  # the line of a step whose evaluation is not in yet
        self._evaluated: list[TrajectoryGroup] = []
        self._evaluating = 0
        self._initial: dict[str, Any] = {}  # what the weights were worth before the first step
        self._clock = Clock(lambda: pool.stats().engines, config.geometry.slots)

    def run(self, cursor: int, unevaluated: dict[str, Any] | None) -> None:
        """Until the last step is learnt, and evaluated if that is due.

        Args:
            cursor: prompts that the steps so far have taken.
            unevaluated: the line of the last step, if its evaluation was broken off.
        """
        prompts = endless(lambda: read_prompts(self._config.prompts), self._config.sampling.n, cursor)
        self._line = BatchLine(self._config.train, prompts, cursor, self._learnt)
        self._pending = unevaluated
        if unevaluated is not None and not self._is_evaluated(self._learnt):  # not any more
            self._folder.add_metrics(unevaluated)
            self._pending = None
        if self._learner.version:
            self._pool.publish(self._learner.params(), self._learner.version)
        for group in self._sampler.sample(self._prompts(), on_wait=self._advance):
            if group[0].prompt_id.startswith(EVALUATION):
                self._evaluated.append(group)
                self._evaluating -= 1
            else:
                self._line.add(group)
            self._advance()
        assert self._learnt == self._config.train.steps

    def _prompts(self) -> Iterator[Prompt | None]:
        last, lag = self._config.train.steps, self._config.train.max_policy_lag
        first = self._learnt
        for step in range(first, last + 1):
            # The weights that a run continues with were evaluated, unless that was broken off.
            evaluated = self._is_evaluated(step) and (step != first or step == 0 or self._pending is not None)
            yield from self._held_until(step if evaluated or step == last else step - lag)
            if evaluated:
                yield from self._evaluation(step)
            if step < last:
                self._line.begin()
                while prompt := self._line.next_prompt():
                    yield prompt

    def _held_until(self, learnt: int) -> Iterator[Prompt | None]:
        """Nothing but replacements of dropped groups until so many steps are learnt."""
        while self._learnt < learnt:
            self._advance()
            if prompt := self._line.next_prompt():
                yield prompt
            elif self._line.outstanding or self._evaluating:
                yield None
            elif self._learning:
                self._wait()

    def _wait(self) -> None:
        """Until the learner is done, while the workers have nothing to do."""
        assert self._learning is not None
        while not wait([self._learning.result], WAIT_S).done:
            self._progress.check()

    def _is_evaluated(self, step: int) -> bool:
        """Whether the weights after so many steps are evaluated."""
        evaluation, last = self._config.evaluation, self._config.train.steps
        return evaluation is not None and (step % evaluation.every == 0 or step == last)

    def _evaluation(self, step: int) -> Iterator[Prompt | None]:
        """The held-out prompts, and then nothing until all have come back."""
        assert self._config.evaluation is not None
        params = self._config.evaluation_sampling.to_dict()
        del params["order_version"]
        for prompt in read_prompts(self._config.evaluation.prompts):
            self._evaluating += 1
            yield dataclasses.replace(
                prompt, id=f"{EVALUATION}{prompt.id}", n=None, sampling=params, first_sample=step * params["n"]
            )
        while self._evaluating:
            yield None
        rows = [row for group in self._evaluated for row in group]
        self._evaluated = []
        self._folder.add_evaluation(step, rows)
        figures = evaluation_figures(rows)
        self._progress.message(f"after {step} steps: accuracy {figures['eval_accuracy']:.3f} of {len(rows)} samples")
        if step == 0:
            self._initial = {f"initial_{name}": value for name, value in figures.items()}
        if self._pending is not None:
            self._folder.add_metrics(self._pending | figures)
            self._pending = None

    def _advance(self) -> None:
        """Ends a step that is learnt, and begins the next one whose batch is whole."""
        self._progress.check()
        if self._learning and self._learning.result.done():
            learning, self._learning = self._learning, None
            self._finish(learning)
        if self._learning is None and (batch := self._line.take()):
            self._folder.add_step(batch.step, batch.drawn)
            self._tell_missing(batch)
            self._clock.whole(batch.step)
            rows = [row for group in batch.groups for row in group]
            self._learning = _Learning(batch, self._thread.submit(self._learn, rows))

    def _tell_missing(self, batch: Batch) -> None:
        """Says that samples were not scored, which their records say one by one."""
        errors = [row.reward_error for row in batch.drawn if row.reward_error is not None]
        if errors:
            count = f"{len(errors)} of {len(batch.drawn)} samples not scored"
            self._progress.message(f"step {batch.step}: {count}, the first: {shown(errors[0])}")

    def _learn(self, rows: list[Trajectory]) -> tuple[StepMetrics, dict[str, Any] | None, float]:
        """In the learner's thread: metrics, new weights if there are any, and seconds."""
        began, version = time.monotonic(), self._learner.version
        metrics = self._learner.step(TrainBatch.of(rows, self._config.rules))
        changed = self._learner.version != version
        return metrics, self._learner.params(np.float32) if changed else None, time.monotonic() - began

    def _finish(self, learning: _Learning) -> None:
        metrics, params, learn_s = learning.result.result()
        if params is not None:
            self._pool.publish(params, self._learner.version)
        self._learnt += 1
        line = step_line(learning.batch, metrics, self._clock, learn_s)
        if learning.batch.step == 0:
            line |= self._initial
        self._pool.tell(
            policy_lag=line["policy_lag_max"], mismatch_p999=line["mismatch_p999"], mismatch_max=line["mismatch_max"]
        )
        self._progress.message(_line_in_words(line))
        evaluated = self._is_evaluated(self._learnt)
        if evaluated:
            self._pending = line
        else:  # before the checkpoint: what lies beyond one is drawn again, what it lacks would be lost
            self._folder.add_metrics(line)
        train = self._config.train
        if self._learnt % train.save_every == 0 or self._learnt == train.steps:
            notes = {"cursor": self._line.cursor_of(self._learnt), "line": self._pending}
            self._checkpoints.save(self._learnt, self._learner.state, notes)


def _require_trainable(config: TrainConfig, tokenizer: Tokenizer, reward: Reward | None, plugins: Plugins) -> None:
    """Reads all prompts once, so that a bad one costs seconds before the run and not hours into it."""
    for prompt in read_prompts(config.prompts):
        params = prompt.params(config.sampling)
        require_learnable(params, f"{prompt.place}: ", config.rules)
        plugins.resolved(params, f"{prompt.place}: sampling")
        if params.n != config.sampling.n:
            raise PromptError(
                f"{prompt.place}: n: expected {config.sampling.n}, sampling.n of the run, got {params.n}; groups of one"
                " training have one size"
            )
        _require_room(prompt, tokenizer, config.geometry.cache_len)
        require_scorable(reward, prompt)
    if config.evaluation:
        plugins.resolved(config.evaluation_sampling, "evaluation.sampling")
        for prompt in read_prompts(config.evaluation.prompts):
            _require_room(prompt, tokenizer, config.geometry.cache_len)
            require_scorable(reward, prompt)


def _require_room(prompt: Prompt, tokenizer: Tokenizer, cache_len: int) -> None:
    tokens = tokenizer.tokenize(prompt).prompt_tokens
    assert tokens is not None
    if tokens.size >= cache_len:
        raise PromptError(
            f"{prompt.place}: {tokens.size} tokens leave no room in a cache of {cache_len}; shorten the prompt or raise"
            " geometry.cache_len"
        )


def _line_in_words(line: dict[str, Any]) -> str:
    def figure(name: str, digits: int = 3) -> str:
        return "-" if line[name] is None else f"{line[name]:.{digits}f}"

    return (
        f"step {line['step']}: reward {figure('reward_mean')}, loss {figure('loss', 4)}, lag {line['policy_lag_max']},"
        f" length {figure('length_mean', 1)}, {line['tokens_per_s']:.0f} tokens/s, {line['step_s']:.1f} s"
    )
