"""The report of `rollout explain` as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollout.explain import TokenReport, named, quoted
from rollout.json_values import shown
from sampling.explanation import Candidate, Explanation, StageView

WIDTH = 100
"""Columns that the tables take at most."""

MIN_WIDTH = 70
"""Columns that they take at least, however narrow the terminal."""

_FIGURES_WIDTH = 38
"""Columns of the stages' figures; the rest is for their names and best scores."""

_C = TypeVar("_C", bound=Candidate)


def render(report: TokenReport, console: Console) -> None:
    """Prints the report."""
    found, width = report.explanation, max(MIN_WIDTH, min(console.width, WIDTH))

    def show(*parts: Table | Text | str) -> None:
        for part in parts:
            text = Text(part, no_wrap=True, overflow="ellipsis") if isinstance(part, str) else part
            console.print(text, width=width)

    show(
        f"prompt {shown(report.prompt_id)}, sample {report.sample_index}",
        f"token  {found.place} of 0 .. {found.completion_len - 1}: {named(found.token)}",
        Text("after  ").append(_end_of(quoted(found.context), width - 7)),
        "",
        "The model's scores",
        _model(found),
        "",
        f"Stages in the order {found.order!r}, {found.num_off} more are off; score and rank of {named(found.token)}",
        _stages(found, width),
    )
    for name, value in found.without_effect.items():
        show(f"set, but without effect on this row: {name} {_value(value)}")
    show(
        "",
        f"Drawn from {found.support:,} ids; entropy {found.entropy:.4f} nats",
        _shares(report),
        f"uniform {found.uniform:.8f} = {found.uniform_multiple} / 2^24,"
        f" draw {found.place} of key {found.key[0]:08x} {found.key[1]:08x}",
        "",
        _logprobs(report),
        "",
        "The end of the row",
        _rules(found),
        f"with this token the row {f'ends: {found.stop_reason}' if found.stop_reason else 'goes on'}",
        "",
    )
    if report.recorded.given:
        show("This token was given and not drawn.")
    elif found.forced and not report.faults:
        show("This token was forced and not drawn.")
    elif found.agrees and not report.faults:
        show("Drawn again, it is the recorded token.")
    for lines, style in ((report.warnings, "yellow"), (report.faults, "bold red")):
        for line in lines:
            console.print(Text(line, style=style), soft_wrap=True)


def _model(found: Explanation) -> Table:
    table = _table("id>", "text", "score>", "probability>")
    for candidate in _with_own(found.model.best, found.model.token):
        table.add_row(*_token(candidate), _score(candidate.score), f"{candidate.probability:.6f}")
    return table


def _stages(found: Explanation, width: int) -> Table:
    table = _table("stage, then the best scores after it", "left>", "removed>", "score>", "rank>")
    room = width - _FIGURES_WIDTH
    table.columns[0].width = room
    before: list[str] = []
    for stage in (found.model, *found.stages):
        name = Text(_label(stage))
        name.truncate(room, overflow="ellipsis")
        best = [f"{named(candidate)} {_score(candidate.score)}" for candidate in stage.best]
        if stage is not found.model:
            for line in _packed(best, room - 2) if best != before else ("the same",):
                name.append(f"\n  {line}", style="dim")
        before = best
        removed = f"{stage.removed:,}" + (f" +{stage.restored:,}" if stage.restored else "")
        rank = "-" if stage.token_rank is None else f"{stage.token_rank:,}"
        table.add_row(name, f"{stage.left:,}", removed, _score(stage.token.score), rank)
    return table


def _shares(report: TokenReport) -> Table:
    found, table = report.explanation, _table("id>", "text", "probability>", "from>", "to>", "")
    drawn = () if found.drawn is None else (found.drawn,)
    for share in _with_own(found.candidates, found.token, *drawn):
        notes = []
        if share.token == found.token.token and (report.recorded.given or not found.agrees):
            notes.append("given" if report.recorded.given else "in the record")
        if share in drawn:
            notes.append("drawn")
        figures = (f"{figure:.8f}" for figure in (share.probability, share.low, share.high))
        table.add_row(*_token(share), *figures, ", ".join(notes))
    return table


def _logprobs(report: TokenReport) -> Table:
    table = _table("nats", "recorded>", "computed again>", "difference>")
    for name, difference in report.differences().items():
        ours, theirs = getattr(report.explanation, name), getattr(report.recorded, name)
        table.add_row(name, f"{theirs:.6f}", f"{ours:.6f}", f"{difference:.1e}")
    return table


def _rules(found: Explanation) -> Table:
    table = _table("rule", "value", "before>", "after>", "says")
    for rule in found.rules:
        before, after = (
            "" if part is None else quoted(part) if isinstance(part, str) else f"{part:,}"
            for part in (rule.before, rule.after)
        )
        value = quoted(rule.value) if isinstance(rule.value, str) else _value(rule.value)
        table.add_row(rule.name, _cut(value, 30), _cut(before, 20), _cut(after, 20), str(rule.verdict))
    return table


def _table(*columns: str) -> Table:
    """A plain table; a column that ends with > is aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns:
        right = column.endswith(">")
        table.add_column(column.rstrip(">"), justify="right" if right else "left", no_wrap=True)
    return table


def _with_own(best: tuple[_C, ...], *own: _C) -> list[_C]:
    """The best tokens and those that must be seen, each once."""
    return list({candidate.token: candidate for candidate in (*best, *own)}.values())


def _token(candidate: Candidate) -> tuple[str, str]:
    return str(candidate.token), _cut(quoted(candidate.text), 24)


def _score(score: float) -> str:
    return f"{score:.3f}" if abs(score) < 1e6 else f"{score:.3g}"


def _label(stage: StageView) -> str:
    """A stage and its parameter, which mostly have one name."""
    names = stage.name if stage.parameter in (None, stage.name) else f"{stage.name}, {stage.parameter}"
    return names if stage.value is None else f"{names} {_value(stage.value)}"


def _value(value: Any) -> str:
    """A parameter's value, or all that a plugin was given."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _packed(words: list[str], width: int) -> Iterator[str]:
    """Words in lines of at most `width` columns, none broken."""
    line = ""
    for word in words:
        longer = f"{line}  {word}" if line else _cut(word, width)
        if cell_len(longer) > width:
            yield line
            line = _cut(word, width)
        else:
            line = longer
    if line:
        yield line


def _cut(text: str, width: int) -> str:
    """The beginning of a text that is too wide."""
    cut = Text(text)
    cut.truncate(width, overflow="ellipsis")
    return cut.plain


def _end_of(text: str, width: int) -> str:
    """The end of a text that is too wide."""
    while cell_len(text) > width:
        text = f"\N{HORIZONTAL ELLIPSIS}{text[2:]}"
    return text
