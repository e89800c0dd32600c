"""RunSummary: what a finished run tells the person who started it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rollout.canary import CanaryReport
from rollout.json_values import shown
from rollout.manifest import MANIFEST_NAME, read_manifest
from rollout.shards import SHARDS_NAME, read_trajectories
from rollout.store import CONFIG_NAME
from rollout.tasks import TASK_KEY
from sampling.types import StopReason


@dataclass(frozen=True)
class Example:
    """One completion to show.

    Attributes:
        prompt_id: its prompt.
        question: what was asked, where the prompt's metadata tells; else "".
        text: the completion.
        reward: its score, if it has one.
    """

    prompt_id: str
    question: str
    text: str
    reward: float | None


@dataclass(frozen=True)
class RunSummary:
    """Figures of a run. Counts cover the whole folder; speeds cover this start of the run.

    Attributes:
        prompts: prompts with all samples on disk.
        trajectories: samples on disk, failed ones included.
        failed: samples that gave no usable completion.
        tokens: completion tokens on disk.
        mean_reward: over samples that have a reward; None if there is none.
        reward_errors: samples whose scorer failed.
        mean_behaviour_logprob: nats per token, over all tokens; None without tokens.
        mean_model_logprob: the same of the untouched model.
        stop_reasons: samples per reason.
        wall_s: seconds that this start took, loading included.
        tokens_per_s: completion tokens drawn by this start, per second of sampling.
        programs_compiled: programs that the workers compiled, or took from the disk cache, in this start.
        files: what was written.
        examples: a few completions.
        failures: of the first prompts with failed samples, which sample failed first and why.
        reward_failures: the same of samples whose scorer failed.
        already_finished: nothing was left to do.
        canary: what was verified while this start sampled; None if nothing was to be.
    """

    prompts: int
    trajectories: int
    failed: int
    tokens: int
    mean_reward: float | None
    reward_errors: int
    mean_behaviour_logprob: float | None
    mean_model_logprob: float | None
    stop_reasons: Mapping[StopReason, int]
    wall_s: float
    tokens_per_s: float
    programs_compiled: int
    files: tuple[Path, ...]
    examples: tuple[Example, ...] = field(default=())
    failures: tuple[str, ...] = ()
    reward_failures: tuple[str, ...] = ()
    already_finished: bool = False
    canary: CanaryReport | None = None

    @classmethod
    def from_folder(
        cls,
        path: Path,
        *,
        wall_s: float = 0.0,
        tokens_per_s: float = 0.0,
        programs_compiled: int = 0,
        already_finished: bool = False,
        num_examples: int = 4,
        canary: CanaryReport | None = None,
    ) -> Self:
        """Reads the run folder once and sums up; the first sample of the first prompts serves as example.

        Raises:
            ConfigError: the folder holds no run.
            RecordError: a file of it is damaged.
        """
        rewards: list[float] = []
        ends: Counter[StopReason] = Counter()
        examples: list[Example] = []
        failures: dict[str, str] = {}
        reward_failures: dict[str, str] = {}
        behaviour = model = 0.0
        reward_errors = 0
        for row in read_trajectories(path):
            ends[row.stop_reason] += 1
            behaviour += row.behaviour_logprob
            model += float(np.nansum(row.model_logprobs, dtype=np.float64))
            reward_errors += row.reward_error is not None
            if row.reward is not None:
                rewards.append(row.reward)
            place = f"prompt {shown(row.prompt_id)}, sample {row.sample_index}"
            if row.failed and len(failures) < num_examples:
                failures.setdefault(row.prompt_id, f"{place}: {row.failure}")
            if row.reward_error is not None and len(reward_failures) < num_examples:
                reward_failures.setdefault(row.prompt_id, f"{place}: {row.reward_error}")
            if len(examples) < num_examples and row.prompt_id not in {e.prompt_id for e in examples}:
                question = row.metadata.get(TASK_KEY, {}).get("question", "")
                examples.append(Example(row.prompt_id, question, row.text, row.reward))
        manifest = read_manifest(path)
        shards = tuple(path / SHARDS_NAME / shard.file for shard in manifest.shards)
        return cls(
            prompts=manifest.groups,
            trajectories=manifest.rows,
            failed=manifest.failed,
            tokens=manifest.tokens,
            mean_reward=math.fsum(rewards) / len(rewards) if rewards else None,
            reward_errors=reward_errors,
            mean_behaviour_logprob=behaviour / manifest.tokens if manifest.tokens else None,
            mean_model_logprob=model / manifest.tokens if manifest.tokens else None,
            stop_reasons=dict(ends.most_common()),
            wall_s=wall_s,
            tokens_per_s=tokens_per_s,
            programs_compiled=programs_compiled,
            files=(*shards, path / MANIFEST_NAME, path / CONFIG_NAME),
            examples=tuple(examples),
            failures=tuple(failures.values()),
            reward_failures=tuple(reward_failures.values()),
            already_finished=already_finished,
            canary=canary,
        )

    def render(self, console: Console) -> None:
        """Prints the examples, then one line per figure, then the files."""
        for example in self.examples:
            reward = "no reward" if example.reward is None else f"reward {example.reward:.2f}"
            console.print(f"[bold]{escape(example.prompt_id)}[/bold]  [dim]{reward}[/dim]", highlight=False)
            if example.question:
                console.print(f"> {example.question}", markup=False, highlight=False)
            console.print(example.text.strip() or "(no text)", markup=False, highlight=False)
            console.print()
        table = Table.grid(padding=(0, 2))
        for name, figure in self._figures():
            table.add_row(name, escape(figure))
        console.print(table)
        for path in self.files:
            console.print(f"  {path}", markup=False, highlight=False, soft_wrap=True)

    def _figures(self) -> list[tuple[str, str]]:
        ends = ", ".join(f"{reason} {count}" for reason, count in self.stop_reasons.items())
        figures = [
            ("prompts", f"{self.prompts}"),
            ("trajectories", f"{self.trajectories} ({self.failed} failed)"),
            ("ended by", ends or "-"),
            ("mean reward", _number(self.mean_reward, "", 3) + self._reward_note()),
            ("mean behaviour log-prob", _number(self.mean_behaviour_logprob, " nats/token", 4)),
            ("mean model log-prob", _number(self.mean_model_logprob, " nats/token", 4)),
            ("tokens", f"{self.tokens:,}"),
        ]
        if self.already_finished:
            return [*figures, ("state", "finished before; nothing was left to do")]
        if self.canary:
            figures.append(("verified", f"{self.canary.samples} samples drawn again, {len(self.canary.faults)} faults"))
            figures.append(("forward scores", self.canary.distances))
        return [
            *figures,
            ("tokens/s", f"{self.tokens_per_s:,.1f}"),
            ("wall time", f"{self.wall_s:.1f} s"),
            ("programs compiled", f"{self.programs_compiled}"),
        ]

    def _reward_note(self) -> str:
        return f" ({self.reward_errors} not scored, see reward_error)" if self.reward_errors else ""


def _number(value: float | None, unit: str, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"
