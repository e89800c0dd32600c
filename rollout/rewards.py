"""Rewards: a scorer maps (prompt, completion text) to a number, and a scorer that fails is data, never a crash."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rollout.prompts import Prompt
from rollout.tasks import Task
from sampling.errors import ConfigError, PromptError


class Reward(Protocol):
    """Scores one completion. May raise: `judge` turns that into a recorded failure."""

    def __call__(self, prompt: Prompt, text: str) -> float:
        """The reward, a finite number.

        Args:
            prompt: what was asked, with the metadata that the scorer needs.
            text: the completion without special tokens.
        """
        ...


@dataclass(frozen=True)
class Score:
    """What a scorer had to say: a value, or an error in words, or (no scorer asked) neither."""

    value: float | None = None
    error: str | None = None


def judge(reward: Reward, prompt: Prompt, text: str) -> Score:
    """Runs the scorer. An exception, a NaN or an infinity becomes `Score.error` with the cause in words."""
    try:
        value = float(reward(prompt, text))
    except Exception as error:  # a scorer is foreign code: whatever it raises belongs into the record
        words = f"{type(error).__name__}: {error}"
        return Score(error=words.encode(errors="backslashreplace").decode())  # lone surrogates cannot be written
    if not math.isfinite(value):
        return Score(error=f"expected a finite reward, got {value!r}")
    return Score(value)


class ReasoningGymReward:
    """Scores with the task's own `score_answer`, on the answer found in the text by `extract_answer`.

    The prompt must come from the reasoning_gym source, whose metadata names the task.
    """

    def __call__(self, prompt: Prompt, text: str) -> float:
        """The task's score, in [0, 1] for most tasks; an exact answer gives 1.

        Raises:
            PromptError: the prompt carries no reasoning_gym task.
        """
        return Task.from_metadata(prompt.metadata).score(extract_answer(text))


ANSWER_KEY = "answer"
"""Where a prompt's metadata holds the text that `ExactMatchReward` expects."""


class ExactMatchReward:
    """1 where the completion, without space around it, is the prompt's `metadata.answer`, and 0 elsewhere."""

    def __call__(self, prompt: Prompt, text: str) -> float:
        """0 or 1.

        Raises:
            PromptError: the prompt's metadata has no answer.
        """
        answer = prompt.metadata.get(ANSWER_KEY)
        if not isinstance(answer, str):
            raise PromptError(f"{prompt.place}: metadata.{ANSWER_KEY}: expected text, got {answer!r}")
        return float(text.strip() == answer.strip())


_MINUS_SIGN = "\N{MINUS SIGN}"
_TAGGED = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)
_NUMBER = re.compile(
    rf"""
    (?<![\w.])                                  # not within a word or a longer number
    (?: (?<![\w)]) (?<![\d)]\ ) [-{_MINUS_SIGN}] )?  # a sign, unless an operand stands before it
    (?: \d{{1,3}} (?:,\d{{3}})+ | \d+ )          # digits, with or without thousands separators
    (?: \.\d+ )?
    """,
    re.VERBOSE,
)


def extract_answer(text: str) -> str | None:
    """The answer within a completion, or None if there is none.

    In this order: the content of the last `<answer>...</answer>`; what follows an `<answer>` that was cut off;
    the last number, since small models close with a sentence such as "so 3 + 4 = 7."; the last line with text.
    A sign counts as part of the number unless an operand stands before it ("9 - 4" ends with 4, "= -4" with -4).

    >>> extract_answer("3 + 4 is <answer> 7 </answer>, I think.")
    '7'
    >>> extract_answer("The sum is 1,204.")
    '1204'
    """
    tagged = _TAGGED.findall(text)
    if tagged:
        return tagged[-1].strip() or None
    numbers = _NUMBER.findall(text)
    if numbers:
        return numbers[-1].replace(",", "").replace(_MINUS_SIGN, "-")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


_REWARDS: dict[str, Callable[[], Reward] | None] = {
    "none": None,
    "reasoning_gym": ReasoningGymReward,
    "exact_match": ExactMatchReward,
}


def reward_from_config(name: str) -> Reward | None:
    """The scorer of a config's `reward`; None for "none".

    Raises:
        ConfigError: no scorer has this name.
    """
    if name not in _REWARDS:
        raise ConfigError(f"reward: expected one of {', '.join(_REWARDS)}, got {name!r}")
    build = _REWARDS[name]
    return build and build()
