"""The page: one HTML file that holds everything it shows and asks nothing of any network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rollout.report.figures import Drawing


@dataclass(frozen=True)
class Tile:
    """One figure at the top of the page: its name, the number, and what belongs to it in small type."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class View:
    """A browser of completions: its name, and the groups as `browser.browse` gives them."""

    name: str
    groups: list[dict[str, Any]]


def render_page(
    *,
    title: str,
    subtitle: str,
    tiles: Sequence[Tile],
    drawings: Sequence[Drawing],
    views: Sequence[View],
    notes: Sequence[str],
    faults: Sequence[str],
    config: str,
) -> str:
    """The whole page. Whatever comes from a run is text in it, and stays text.

    Args:
        title, subtitle: the run, and what kind and state it is of.
        tiles: figures at the top.
        drawings: in order; those of one section stand together.
        views: browsers of completions; those without groups are left out.
        notes: what was left out.
        faults: what is wrong with the folder.
        config: the resolved configuration.
    """
    environment = Environment(
        loader=PackageLoader("rollout.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    script = _asset(environment, "page.js")
    shown = [{"name": view.name, "groups": view.groups} for view in views if view.groups]
    return environment.get_template("page.html").render(
        title=title,
        subtitle=subtitle,
        tiles=tiles,
        sections=[(name, [*of_it]) for name, of_it in groupby(drawings, key=lambda drawing: drawing.chart.section)],
        markup=Markup,
        views=[view["name"] for view in shown],
        data=Markup(embedded_json(shown)),
        notes=notes,
        faults=faults,
        config=config,
        style=Markup(_asset(environment, "page.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def embedded_json(value: Any) -> str:
    """JSON that may stand inside a script element: no character of it can end the element or open another."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _asset(environment: Environment, name: str) -> str:
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]
