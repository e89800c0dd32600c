"""Explanation: what there is to see of the step that drew one token, as plain values. sampling/explain.py makes it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from sampling.types import StopReason


@dataclass(frozen=True)
class Candidate:
    """One token at one point of the chain.

    Attributes:
        token: its id.
        text: its bytes as text, \\xNN for what is no whole character; "" where there is no tokenizer.
        score: -inf where it was removed.
        probability: softmax of the scores; NaN where they are no distribution.
    """

    token: int
    text: str
    score: float
    probability: float


@dataclass(frozen=True)
class Share(Candidate):
    """A token of the final distribution with its part of [0, 1), in ascending id: a uniform inside it draws the token.

    Attributes:
        low, high: the part is [low, high), summed in float64; the draw itself sums in float32.
    """

    low: float
    high: float


@dataclass(frozen=True)
class StageView:
    """The scores after one stage.

    Attributes:
        name: of the stage; "model" before the first.
        parameter: that it comes from; None for what comes from the model.
        value: of the parameter, plain; of the removal of padded ids, their first; else None.
        left: ids with a finite score.
        removed, restored: ids that lost their finite score in this stage, and that got one.
        best: the best ids, best first.
        token: the row's own token.
        token_rank: its place in that order, from 1; None where it is removed.
    """

    name: str
    parameter: str | None
    value: Any
    left: int
    removed: int
    restored: int
    best: tuple[Candidate, ...]
    token: Candidate
    token_rank: int | None


class Verdict(enum.StrEnum):
    """What a rule says of a token."""

    ENDS = "ends"
    """The row ends with it."""
    GOES_ON = "goes on"
    """The row goes on, as far as this rule is concerned."""
    HELD_BACK = "held back"
    """A minimum length keeps the row from ending with it."""
    MAY_END = "may end"
    """The minimum length is reached: the other rules decide."""


@dataclass(frozen=True)
class RuleView:
    """One rule that says when the row ends, around one token.

    Attributes:
        name: the parameter that it comes from, or "cache_len".
        value: the parameter as a plain value; of `stop`, one string.
        before, after: how far it has come: tokens counted, or the part of the stop string that the text ends with.
            None for rules without a memory.
        verdict: what it says of the token.
    """

    name: str
    value: Any
    before: int | str | None
    after: int | str | None
    verdict: Verdict


@dataclass(frozen=True)
class Explanation:
    """Why a token was drawn. Plain values alone.

    Attributes:
        place: of the token in the completion, from 0; also the index of its draw.
        prompt_len, completion_len: tokens of the row.
        context: text of the last few tokens before it.
        order: name of the row's order of stages.
        model: the model's own scores.
        stages: after every stage that is on, in the row's order.
        num_off: stages that are off.
        forced: a stage forced the token, so that it is not drawn.
        without_effect: parameters that are set although their stage is off, with their values: what keeps the best
            token cannot matter to a greedy row, say.
        support: ids left to draw from.
        entropy: of the final distribution, nats.
        log_kept_mass: log of the model's probability mass on the ids left, nats.
        candidates: the best of them, best first.
        key: the row's key.
        uniform: what was drawn with, in [0, 1).
        uniform_multiple: the same as a multiple of 2^-24.
        token: the row's own token in the final distribution.
        drawn: the token that the uniform draws here; None if the scores are no distribution.
        behaviour_logprob, model_logprob: of the row's own token, nats.
        rules: the rules that are set.
        stop_reason: why the row ends with its own token, or None if it goes on.
    """

    place: int
    prompt_len: int
    completion_len: int
    context: str
    order: str
    model: StageView
    stages: tuple[StageView, ...]
    num_off: int
    forced: bool
    without_effect: dict[str, Any]
    support: int
    entropy: float
    log_kept_mass: float
    candidates: tuple[Share, ...]
    key: tuple[int, int]
    uniform: float
    uniform_multiple: int
    token: Share
    drawn: Share | None
    behaviour_logprob: float
    model_logprob: float
    rules: tuple[RuleView, ...]
    stop_reason: StopReason | None

    @property
    def agrees(self) -> bool:
        """Whether the draw gives the row's own token again."""
        return self.drawn is not None and self.drawn.token == self.token.token
