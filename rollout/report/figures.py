"""Draws charts with matplotlib: each as a PNG by itself, and as an SVG that takes its colours from the page."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from rollout.report.chart import Band, Bars, Chart, Line, Stack

INK, MUTED, RULE = "#1f2328", "#68717c", "#e4e7eb"
SERIES = ("#2368b5", "#cf5f22", "#2f8757", "#8458ad", "#9a7410", "#4d7c8a")
"""Colours of the first mark, the second and so on; the page knows each by another value in the dark."""

THEME = {INK: "--ink", MUTED: "--muted", RULE: "--rule"} | {
    colour: f"--series-{index}" for index, colour in enumerate(SERIES)
}
"""Which variable of the page's style stands behind each colour."""

_SIZE = (4.2, 2.55)  # inches
_DPI = 200
_LINE_HEIGHT = 0.075
"""Of small type, as a share of the height of the axes."""
_SMOOTH_FROM = 60
"""Points beyond which a line is shown as a moving mean over the pale line itself."""
_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "text.parse_math": False,  # names of metrics are no formulas
    "svg.fonttype": "none",  # text stays text: small, and in the page's own type
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "axes.linewidth": 0.7,
    "xtick.major.width": 0.7,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "legend.handlelength": 1.3,
    "legend.columnspacing": 1.2,
    "legend.labelcolor": INK,
}


@dataclass(frozen=True)
class Drawing:
    """A chart, drawn: `png` is a file by itself; `svg` an element for a page that sets the variables of THEME."""

    chart: Chart
    png: bytes
    svg: str


def draw(chart: Chart) -> Drawing:
    """Draws one chart."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=_SIZE, layout="constrained")
        _fill(figure.subplots(), chart)
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=_DPI, facecolor="white", metadata={"Software": None})
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": chart.name}):
        return Drawing(chart, png.getvalue(), _svg(figure, chart))


def overview(charts: list[Chart]) -> bytes:
    """The given charts as one PNG."""
    columns = min(3, len(charts))
    rows = -(-len(charts) // columns)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_SIZE[0] * columns, _SIZE[1] * rows), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for ax, chart in zip(axes, charts, strict=False):
            _fill(ax, chart)
        for ax in axes[len(charts) :]:
            ax.set_axis_off()
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=_DPI * 3 // 4, facecolor="white", metadata={"Software": None})
    return png.getvalue()


def moving_mean(y: np.ndarray, width: int) -> np.ndarray:
    """Mean over the measured of `width` neighbours (odd), [points]; at both ends over fewer; NaN without any."""
    window, measured = np.ones(width), np.isfinite(y)
    counts = np.convolve(measured, window, "same")
    return np.where(counts > 0, np.convolve(np.where(measured, y, 0), window, "same") / np.maximum(counts, 1), np.nan)


def _fill(ax: Axes, chart: Chart) -> None:
    labels, smoothed = 0, 0
    ends: list[tuple[float, str]] = []
    colours = iter(SERIES * 2)
    ax.set_title(chart.title, loc="left", fontsize=9.5, fontweight="bold", pad=18)
    ax.set_title(chart.unit, loc="right", fontsize=7.5, color=MUTED, pad=18)
    if chart.reference is not None:
        ax.axhline(chart.reference, color=MUTED, linewidth=0.8, linestyle=(0, (3, 3)))
    for mark in chart.marks:
        match mark:
            case Line():
                colour = next(colours)
                width, last = _line(ax, mark, colour)
                smoothed = max(smoothed, width)
                ends.append((last, colour))
                labels += 1
            case Band():
                ax.fill_between(mark.x, mark.low, mark.high, color=SERIES[0], alpha=0.22, linewidth=0, label=mark.label)
                labels += 1
            case Stack():
                parts = [np.nan_to_num(part) for part in mark.parts]
                shades = [next(colours) for _ in parts]
                ax.stackplot(mark.x, *parts, labels=mark.labels, colors=shades, alpha=0.45, linewidth=0)
                labels += len(parts)
            case Bars():
                below = np.zeros(mark.edges.size - 1)
                centres, widths = (mark.edges[1:] + mark.edges[:-1]) / 2, np.diff(mark.edges)
                for part, label in zip(mark.parts, mark.labels, strict=True):
                    ax.bar(centres, part, widths * 0.86, bottom=below, color=next(colours), linewidth=0, label=label)
                    below = below + part
                labels += len(mark.parts)
    _scale(ax, chart)
    _write_ends(ax, ends)
    if labels > 1:
        ax.legend(loc="lower left", bbox_to_anchor=(-0.015, 0.985), ncols=4, borderaxespad=0.1)
    ax.set_xlabel(f"{chart.xlabel} (bold: mean over {smoothed})" if smoothed else chart.xlabel, fontsize=7.5)


def _line(ax: Axes, line: Line, colour: str) -> tuple[int, float]:
    """Draws a line; returns the points of its moving mean, 0 without one, and the last number drawn."""
    measured = np.isfinite(line.y)
    x, y = line.x[measured], line.y[measured]
    if line.dots:
        ax.plot(x, y, color=colour, linewidth=1.3, marker="o", markersize=3.5, label=line.label)
    elif x.size <= _SMOOTH_FROM:
        ax.plot(line.x, line.y, color=colour, linewidth=1.3, marker="o", markersize=2.2, label=line.label)
    elif line.extreme:
        ax.plot(line.x, line.y, color=colour, linewidth=0.8, label=line.label)
    else:
        width = line.x.size // 20 | 1
        smooth = moving_mean(line.y, width)
        ax.plot(line.x, line.y, color=colour, linewidth=0.7, alpha=0.35)
        ax.plot(line.x, smooth, color=colour, linewidth=1.7, label=line.label)
        return width, smooth[measured][-1]
    return 0, y[-1]


def _scale(ax: Axes, chart: Chart) -> None:
    edges = next((mark.edges for mark in chart.marks if isinstance(mark, Bars)), None)
    ax.margins(x=0.015)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=edges is None or np.diff(edges)[0] >= 1))
    if chart.log and any((mark.y > 0).any() for mark in chart.marks if isinstance(mark, Line)):
        ax.set_yscale("log", nonpositive="mask")
        low, high = ax.get_ylim()
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.yaxis.set_minor_locator(NullLocator())
    else:
        low, high = ax.get_ylim()
        ax.set_ylim(min(low, *chart.span) if chart.span else low, max(high, *chart.span) if chart.span else high)
        ax.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        ax.ticklabel_format(axis="y", useOffset=False)


def _write_ends(ax: Axes, ends: list[tuple[float, str]]) -> None:
    """Writes the last number of each line beside it, but none upon another: the lines before have precedence."""
    taken: list[float] = []
    for last, colour in ends:
        height = ax.transAxes.inverted().transform(ax.transData.transform((0, last)))[1]
        if all(abs(height - other) > _LINE_HEIGHT for other in taken):
            taken.append(height)
            ax.annotate(
                f"{last:,.0f}" if abs(last) >= 1000 else f"{last:.3g}",
                (1, last),
                xycoords=("axes fraction", "data"),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=7.5,
                color=colour,
                annotation_clip=False,
            )


def _svg(figure: Figure, chart: Chart) -> str:
    text = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    svg = text.getvalue()[text.getvalue().index("<svg") :]
    for colour, variable in THEME.items():
        svg = svg.replace(colour, f"var({variable})")
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # it would hold for the whole page
    # Names of parts would not be unique in a page; those of clips and markers are, and are referred to.
    svg = re.sub(r' id="(?:figure|axes|text|patch|line2d|matplotlib|xtick|ytick)[^"]*"', "", svg)
    return re.sub(r'^<svg[^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', svg, count=1)
