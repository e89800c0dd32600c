"""write_report: from a run's folder to its page and its figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from rollout.atomic import write_atomically
from rollout.report.browser import browse, longest_shown
from rollout.report.chart import Chart
from rollout.report.figures import Drawing, draw, overview
from rollout.report.metrics import Metrics
from rollout.report.page import Tile, View, render_page
from rollout.report.panels import sampling_charts, training_charts
from rollout.report.reading import RunRecord, Shown, read_run
from rollout.report.tally import Tally
from sampling.checkpoints import inspect_checkpoint, load_backend
from sampling.errors import CheckpointError
from sampling.vocabulary import vocabulary_pieces

PAGE_NAME = "index.html"
OVERVIEW_NAME = "overview.png"

_ENDS = 20
"""One part in so many of the steps, at either end, is what a first and a last number are averaged over."""
_MOST_ENDS = 10
_IN_OVERVIEW = ("reward", "accuracy", "lengths", "kl", "entropy", "mismatch", "lag", "throughput", "occupancy")


@dataclass(frozen=True)
class Report:
    """What was written.

    Attributes:
        page: the HTML file.
        figures: the PNG files.
        faults: what is wrong with the run's folder; the page tells it too.
    """

    page: Path
    figures: tuple[Path, ...]
    faults: tuple[str, ...]


def write_report(folder: str | Path, out: str | Path | None = None) -> Report:
    """Writes the page of a training job or a sampling run, finished or not, and a PNG of each figure.

    Args:
        folder: of the run; nothing but `out` is written to.
        out: where to; by default the folder's own `report`.
    Raises:
        ConfigError: the folder holds neither kind of run.
        RunError: nothing that could be shown has been written to it yet, or the report cannot be written.
        RecordError: its metrics or its manifest are damaged. A damaged file of records is passed over and named.
    """
    folder = Path(folder)
    out = folder / "report" if out is None else Path(out)
    run = read_run(folder)
    if run.metrics is not None:
        charts, absent = training_charts(run.metrics)
        if absent:
            run.notes.append(f"Not measured, so not shown: {', '.join(absent)}.")
        for name, count in run.metrics.not_finite.items():
            run.notes.append(f"{name} is NaN or infinite at {count} step(s); its line has a gap there.")
        subtitle, tiles = f"training, as of step {run.metrics.steps[-1]}", _training_tiles(run.metrics)
    else:
        assert run.tally is not None
        charts, subtitle, tiles = sampling_charts(run.tally), "sampling run", _sampling_tiles(run.tally)
    drawings = [draw(chart) for chart in charts]
    views = _views(run)
    page = render_page(
        title=folder.resolve().name,
        subtitle=f"{subtitle}, {run.as_of:%Y-%m-%d %H:%M} UTC",
        tiles=tiles,
        drawings=drawings,
        views=views,
        notes=run.notes,
        faults=run.faults,
        config=yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True),
    )
    return Report(*_write(out, page, drawings), tuple(run.faults))


def _write(out: Path, page: str, drawings: Sequence[Drawing]) -> tuple[Path, tuple[Path, ...]]:
    out.mkdir(parents=True, exist_ok=True)
    pictures = {f"{drawing.chart.name}.png": drawing.png for drawing in drawings}
    if charts := _for_overview([drawing.chart for drawing in drawings]):
        pictures[OVERVIEW_NAME] = overview(charts)
    for name, content in pictures.items():
        write_atomically(out / name, lambda file, content=content: file.write(content))
    write_atomically(out / PAGE_NAME, lambda file: file.write(page.encode()))
    return out / PAGE_NAME, tuple(out / name for name in pictures)


def _for_overview(charts: Sequence[Chart]) -> list[Chart]:
    named = {chart.name: chart for chart in charts}
    return [named[name] for name in _IN_OVERVIEW if name in named]


def _views(run: RunRecord) -> list[View]:
    """The browsers of completions, within the budget of tokens that they share."""
    bytes_of = _spelling(run)
    every: list[Shown] = [*run.groups, *run.compared]
    lengths = [row.completion_len for shown in every for row in shown.samples]
    longest = longest_shown(lengths)
    if longest < max(lengths, default=0):
        run.notes.append(f"Of completions with more than {longest} tokens the beginning and the end are shown.")
    return [
        View("Samples", browse(run.groups, bytes_of, longest)),
        View("Evaluations", browse(run.compared, bytes_of, longest)),
    ]


def _spelling(run: RunRecord) -> Callable[[int], bytes]:
    """The bytes of each id by the run's tokenizer; where that cannot be had, the ids themselves stand for them."""
    model = run.config.get("model")
    checkpoint = model.get("checkpoint") if isinstance(model, dict) else None
    try:
        pieces = vocabulary_pieces(load_backend(inspect_checkpoint(str(checkpoint))))
    except CheckpointError as error:
        run.notes.append(f"The run's tokenizer cannot be read, so ids stand in place of texts: {error}.")
        return lambda token: f"[{token}]".encode()
    return lambda token: pieces[token] if token < len(pieces) else b""


def _training_tiles(metrics: Metrics) -> list[Tile]:
    tiles = []
    if (rewards := metrics.measured("reward_mean")).size:
        tiles.append(_first_to_last("reward", rewards, ends=max(1, min(_MOST_ENDS, rewards.size // _ENDS))))
    if (accuracy := metrics.evaluations("eval_accuracy")[1]).size:
        tile = _first_to_last("accuracy, held out", accuracy, ends=1, percent=True)
        tiles.append(Tile(tile.name, tile.value, f"{accuracy.size} evaluation(s), best {accuracy.max():.1%}"))
    tiles.append(Tile("steps", f"{metrics.steps.size:,}", f"up to step {metrics.steps[-1]:,}"))
    if (tokens := metrics.measured("tokens")).size:
        tiles.append(Tile("tokens", _count(tokens.sum()), "completions alone"))
    if (seconds := metrics.measured("step_s")).size:
        tiles.append(Tile("time in steps", _duration(seconds.sum()), f"median {np.median(seconds):.3g} s a step"))
    if (speed := metrics.measured("tokens_per_s")).size:
        tiles.append(Tile("throughput", f"{np.median(speed):,.0f}", "tokens/s, median"))
    if (lag := metrics.measured("policy_lag_max")).size:
        tiles.append(Tile("largest policy lag", f"{lag.max():g}", "versions"))
    if (mismatch := metrics.measured("mismatch_p999")).size:
        tiles.append(Tile("mismatch", f"{np.median(mismatch):.1e}", "nats, 99.9 % of a step, median"))
    return tiles


def _sampling_tiles(tally: Tally) -> list[Tile]:
    tiles = [Tile("samples", f"{tally.samples:,}", f"{tally.failed:,} failed")]
    if tally.rewards:
        tiles.append(Tile("mean reward", f"{np.mean(tally.rewards):.3f}", f"{len(tally.rewards):,} scored"))
    tiles.append(Tile("tokens", _count(tally.tokens), "completions alone"))
    if lengths := [length for group in tally.lengths.values() for length in group]:
        tiles.append(Tile("mean length", f"{np.mean(lengths):,.1f}", f"tokens, longest {max(lengths):,}"))
    if tally.wall_s is not None:
        tiles.append(Tile("wall time", _duration(tally.wall_s), "from the first start to the end"))
    return tiles


def _first_to_last(name: str, values: np.ndarray, ends: int, percent: bool = False) -> Tile:
    first, last = values[:ends].mean(), values[-ends:].mean()
    value = f"{first:.1%} → {last:.1%}" if percent else f"{first:.3f} → {last:.3f}"
    return Tile(
        name, value, f"means of the first {ends} and the last {ends} steps" if ends > 1 else "first and last step"
    )


def _count(number: float) -> str:
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{number / (1e3 if suffix == 'k' else size):,.3g} {suffix}"
    return f"{number:,.0f}"


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{hours:.1f} h" if hours >= 2 else f"{minutes:.1f} min" if minutes >= 2 else f"{seconds:.1f} s"
