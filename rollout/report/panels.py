"""Which figures a run has: those of its metrics, or those of its records. What was not measured has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

import numpy as np

from rollout.report.chart import Band, Bars, Chart, Line, Mark, Stack
from rollout.report.metrics import Metrics
from rollout.report.tally import PlaceMeans, Tally

LEARNING, POLICY, MACHINE, OTHER = "Learning", "Policy", "Machine", "Other metrics"
DISTRIBUTIONS, PLACES = "Distributions", "Along the completion"

_MAX_BINS = 40
_MIN_SAMPLES = 5
"""Samples that a mean over samples needs, at the far end of a run's longest completions."""
_WIDE = 100.0
"""Largest over smallest number from which on a logarithmic scale is the better one."""


@dataclass(frozen=True)
class _Panel:
    """A figure of metrics: columns with the names they have in it; `band` and `stacked` say how they are drawn."""

    name: str
    section: str
    title: str
    unit: str
    lines: tuple[tuple[str, str], ...] = ()
    band: tuple[str, str, str] | None = None
    stacked: tuple[tuple[str, str], ...] = ()
    log: bool = False
    span: tuple[float, ...] = ()
    reference: float | None = None

    @property
    def columns(self) -> list[str]:
        return [*(name for name, _ in self.lines), *(self.band or ())[:2], *(name for name, _ in self.stacked)]


_PANELS = (
    _Panel("reward", LEARNING, "Reward", "", (("reward_mean", "mean"), ("eval_reward_mean", "evaluation"))),
    _Panel(
        "accuracy", LEARNING, "Accuracy", "share, held-out prompts", (("eval_accuracy", "evaluation"),), span=(0, 1)
    ),
    _Panel(
        "lengths",
        LEARNING,
        "Completion length",
        "tokens",
        (("length_mean", "mean"), ("length_max", "longest"), ("eval_length_mean", "evaluation")),
        span=(0,),
    ),
    _Panel(
        "shares",
        LEARNING,
        "Cut off; without variance",
        "share",
        (("truncated_share", "completions cut off"), ("zero_variance_share", "groups of equal reward")),
        span=(0, 1),
    ),
    _Panel("reward_std", LEARNING, "Spread of reward", "standard deviation", (("reward_std", "reward"),), span=(0,)),
    _Panel("loss", LEARNING, "Loss", "", (("loss", "loss"),)),
    _Panel("kl", POLICY, "KL", "nats per token", (("kl", "KL"),), span=(0,)),
    _Panel("entropy", POLICY, "Entropy", "nats per token", (("entropy", "entropy"),), span=(0,)),
    _Panel(
        "ratios",
        POLICY,
        "Importance ratio",
        "new over old probability",
        (("ratio_p50", "median"),),
        band=("ratio_p01", "ratio_p99", "1 % to 99 %"),
        reference=1.0,
    ),
    _Panel("clip_fraction", POLICY, "Clipped tokens", "share", (("clip_fraction", "clipped"),), span=(0,)),
    _Panel("ess", POLICY, "Effective sample size", "", (("ess", "ESS"),), span=(0,)),
    _Panel("grad_norm", POLICY, "Gradient norm", "", (("grad_norm", "norm"),)),
    _Panel(
        "mismatch",
        POLICY,
        "Log-prob mismatch",
        "nats, recorded against rescored",
        (("mismatch_p999", "99.9 %"), ("mismatch_max", "largest")),
        log=True,
    ),
    _Panel(
        "lag", POLICY, "Policy lag", "versions", (("policy_lag_mean", "mean"), ("policy_lag_max", "largest")), span=(0,)
    ),
    _Panel("throughput", MACHINE, "Throughput", "tokens/s", (("tokens_per_s", "generated"),), span=(0,)),
    _Panel(
        "seconds",
        MACHINE,
        "Time of a step",
        "seconds",
        (("step_s", "whole step"),),
        stacked=(("generate_s", "generate"), ("learn_s", "learn")),
        span=(0,),
    ),
    _Panel("tokens", MACHINE, "Tokens of a step", "tokens", (("tokens", "tokens"),), span=(0,)),
    _Panel("occupancy", MACHINE, "Slot occupancy", "share of slots that decode", (("occupancy", "busy"),), span=(0, 1)),
)


def training_charts(metrics: Metrics) -> tuple[list[Chart], list[str]]:
    """The figures of a training job, and the names of metrics that they would have shown, had they been measured.

    Numbers that no figure knows get one of their own, at the end.
    """
    charts, absent = [], []
    for panel in _PANELS:
        absent += [name for name in panel.columns if name not in metrics.columns]
        marks = _marks(panel, metrics)
        if marks:
            log = panel.log or (panel.name == "grad_norm" and _is_wide(metrics.measured("grad_norm")))
            charts.append(
                Chart(
                    panel.name, panel.section, panel.title, panel.unit, marks,
                    log=log, span=panel.span, reference=panel.reference,
                )
            )  # fmt: skip
    shown = {name for panel in _PANELS for name in panel.columns}
    known = shown | {f"initial_{name}" for name in shown}
    for name, column in metrics.columns.items():
        if name not in known:
            line = Line(metrics.steps, column, name, dots=bool(np.isnan(column).mean() > 0.5))
            charts.append(Chart(f"other-{quote(name, safe='')}", OTHER, name, "", (line,)))
    return charts, absent


def sampling_charts(tally: Tally) -> list[Chart]:
    """The figures of a sampling run."""
    charts = []
    if tally.rewards:
        edges = bin_edges(tally.rewards)
        counts = np.histogram(tally.rewards, edges)[0]
        charts.append(
            Chart("reward", DISTRIBUTIONS, "Reward", "samples", (Bars(edges, (counts,), ("samples",)),), "reward")
        )
    if tally.lengths:
        edges = bin_edges([length for lengths in tally.lengths.values() for length in lengths])
        reasons = sorted(tally.lengths, key=lambda reason: -len(tally.lengths[reason]))
        parts = tuple(np.histogram(tally.lengths[reason], edges)[0] for reason in reasons)
        bars = Bars(edges, parts, tuple(str(reason) for reason in reasons))
        charts.append(Chart("lengths", DISTRIBUTIONS, "Completion length", "samples", (bars,), "tokens"))
    least = min(_MIN_SAMPLES, max(tally.samples - tally.failed, 1))
    by_place: Sequence[tuple[str, str, str, PlaceMeans, tuple[float, ...]]] = (
        ("logprobs", "Behaviour log-prob", "nats, mean over samples", tally.logprobs, (0,)),
        ("entropy", "Entropy", "nats, mean over samples", tally.entropy, (0,)),
        ("kept-mass", "Kept mass", "share, mean over samples", tally.kept, (0, 1)),
    )
    for name, title, unit, places, span in by_place:
        means = places.means(least)
        if np.isfinite(means).any():
            line = Line(np.arange(means.size), means, "mean")
            charts.append(Chart(name, PLACES, title, unit, (line,), "place in the completion", span=span))
    return charts


def _marks(panel: _Panel, metrics: Metrics) -> tuple[Mark, ...]:
    steps, columns = metrics.steps, metrics.columns
    marks: list[Mark] = []
    for name, label in panel.lines:
        if name.startswith("eval_"):
            at, values = metrics.evaluations(name)
            if values.size:
                marks.append(Line(at, values, label, dots=True))
        elif name in columns:
            marks.append(Line(steps, columns[name], label, extreme=name.endswith("_max")))
    if panel.band and all(name in columns for name in panel.band[:2]):
        low, high, label = panel.band
        marks.append(Band(steps, columns[low], columns[high], label))
    if stacked := [(name, label) for name, label in panel.stacked if name in columns]:
        names, labels = zip(*stacked, strict=True)
        marks.append(Stack(steps, tuple(columns[name] for name in names), labels))
    return tuple(marks)


def _is_wide(values: np.ndarray) -> bool:
    positive = values[values > 0]
    return bool(positive.size) and positive.max() > _WIDE * positive.min()


def bin_edges(values: Sequence[float]) -> np.ndarray:
    """Edges of bins of equal width; whole numbers stand in the middle of theirs."""
    low, high = min(values), max(values)
    if all(float(value).is_integer() for value in values):
        width = max(1, int(np.ceil((high - low + 1) / _MAX_BINS)))
        return np.arange(low - 0.5, high + width + 0.5, width)
    return np.linspace(low, high, _MAX_BINS + 1) if low < high else np.array([low - 0.5, low + 0.5])
