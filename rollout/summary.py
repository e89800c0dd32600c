"""RunSummary: what a finished run tells the person who started it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sampling.types import StopReason


@dataclass(frozen=True)
class Example:
    """One completion to show: its prompt's id, its text and its reward."""

    prompt_id: str
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
        already_finished: nothing was left to do.
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
    already_finished: bool = False

    def render(self, console: Console) -> None:
        """Prints the examples, then one line per figure, then the files."""
        for example in self.examples:
            reward = "no reward" if example.reward is None else f"reward {example.reward:.2f}"
            console.print(f"[bold]{escape(example.prompt_id)}[/bold]  [dim]{reward}[/dim]")
            console.print(example.text.strip(), markup=False, highlight=False)
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
