"""Chart: what one figure shows, before anybody draws it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Line:
    """y over x, both [points]; NaN in y is a gap.

    `dots` marks every point and joins them: those of an evaluation are few. `extreme` is a largest value, of which no
    mean is taken.
    """

    x: np.ndarray
    y: np.ndarray
    label: str
    dots: bool = False
    extreme: bool = False


@dataclass(frozen=True, eq=False)
class Band:
    """What lies between two lines, [points] each."""

    x: np.ndarray
    low: np.ndarray
    high: np.ndarray
    label: str


@dataclass(frozen=True, eq=False)
class Stack:
    """Parts of a whole over x, [points] each, one on top of the other; NaN counts as nothing."""

    x: np.ndarray
    parts: tuple[np.ndarray, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Bars:
    """Counts [bins] between edges [bins + 1], one part on top of the other."""

    edges: np.ndarray
    parts: tuple[np.ndarray, ...]
    labels: tuple[str, ...]


Mark = Line | Band | Stack | Bars


@dataclass(frozen=True, eq=False)
class Chart:
    """One figure.

    Attributes:
        name: of its file, without suffix.
        section: heading that it stands under.
        title: what is shown.
        unit: of the numbers, in words; "" for pure numbers.
        marks: what is drawn, the first of them foremost in meaning.
        xlabel: what runs along.
        log: whether the numbers stand on a logarithmic scale, where all are positive or zero.
        span: range of the numbers that is always in view.
        reference: a number to compare with, drawn as a line.
    """

    name: str
    section: str
    title: str
    unit: str
    marks: tuple[Mark, ...]
    xlabel: str = "step"
    log: bool = False
    span: tuple[float, ...] = ()
    reference: float | None = None

    @property
    def description(self) -> str:
        """The figure in words, for those who cannot see it."""
        spans = []
        for mark in self.marks:
            if isinstance(mark, Line) and (measured := mark.y[np.isfinite(mark.y)]).size:
                spans.append(f"{mark.label} from {measured[0]:.4g} to {measured[-1]:.4g}")
        words = f"{self.title} by {self.xlabel}"
        return f"{words}: {', '.join(spans)}" if spans else words
