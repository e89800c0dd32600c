"""Rewards: a scorer maps (prompt, completion text) to a number, and a scorer that fails is data, never a crash.

Here is what scorers are and how a config names one; they run in processes of their own (rollout/reward_pool.py).
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rollout.json_values import shown
from rollout.prompts import Prompt
from rollout.tasks import Task, load_tasks
from sampling.errors import ConfigError, PromptError
from sampling.references import referenced


class Reward(Protocol):
    """Scores one completion, in a process of its own. Whatever else it does becomes a recorded failure: it may raise,
    hang, or take its process with it.
    """

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

    def __init__(self) -> None:
        load_tasks()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()  # made anew where it is unpickled, so that no score waits for the tasks to be loaded

    def __call__(self, prompt: Prompt, text: str) -> float:
        """The task's score, in [0, 1] for most tasks; an exact answer gives 1.

        Raises:
            PromptError: as `expected`.
        """
        return self.expected(prompt).score(extract_answer(text))

    def expected(self, prompt: Prompt) -> Task:
        """What the prompt's metadata says.

        Raises:
            PromptError: it names no task.
        """
        return Task.from_metadata(prompt.metadata)


ANSWER_KEY = "answer"
"""Where a prompt's metadata holds the text that `ExactMatchReward` expects."""


class ExactMatchReward:
    """1 where the completion, without space around it, is the prompt's `metadata.answer`, and 0 elsewhere."""

    def __call__(self, prompt: Prompt, text: str) -> float:
        """0 or 1.

        Raises:
            PromptError: as `expected`.
        """
        return float(text.strip() == self.expected(prompt).strip())

    def expected(self, prompt: Prompt) -> str:
        """What the prompt's metadata says.

        Raises:
            PromptError: it has no answer.
        """
        answer = prompt.metadata.get(ANSWER_KEY)
        if not isinstance(answer, str):
            raise PromptError(f"metadata.{ANSWER_KEY}: expected text, got {answer!r}")
        return answer


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


NO_REWARD = "none"

REWARD_TIMEOUT_S = 10.0
"""Seconds that one score may take, unless a config says otherwise."""

_BUILT_IN: dict[str, Callable[[], Reward]] = {"reasoning_gym": ReasoningGymReward, "exact_match": ExactMatchReward}
_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def require_reward_name(name: str) -> str:
    """A config's `reward`, its form checked; nothing is loaded.

    Raises:
        ConfigError: it is neither a name of ours nor a reference.
    """
    if name == NO_REWARD or name in _BUILT_IN or _REFERENCE.fullmatch(name):
        return name
    known = ", ".join((NO_REWARD, *_BUILT_IN))
    raise ConfigError(f"reward: expected one of {known}, or package.module:name of your own, got {shown(name)}")


def reward_from_config(name: str) -> Reward | None:
    """The scorer of a config's `reward`; None for "none".

    A reference's module is looked for where Python looks, and then in the current folder.

    Raises:
        ConfigError: no scorer has this name, or what is there cannot score.
    """
    if require_reward_name(name) == NO_REWARD:
        return None
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    reward = referenced(name, f"reward: {name}")
    require_reward(reward, f"reward: {name}")
    return reward


def require_reward(reward: Any, place: str = "reward") -> None:
    """Checks that an object can be called as a scorer is, without calling it.

    Args:
        place: begins the message.
    Raises:
        ConfigError: it cannot.
    """
    expected = f"{place}: expected a function of (prompt, text)"
    if inspect.isclass(reward):
        raise ConfigError(f"{expected}, got the class {reward.__name__}; name an object of it")
    if not callable(reward):
        raise ConfigError(f"{expected}, got {shown(reward)}")
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
        raise ConfigError(f"{expected}, got one that is async; run its loop within a plain function")
    try:
        signature = inspect.signature(reward)
    except ValueError:  # some compiled functions do not tell
        return
    try:
        signature.bind(None, "")
    except TypeError as error:
        raise ConfigError(f"{expected}, got one of {signature}: {error}") from error


def require_scorable(reward: Reward | None, prompt: Prompt) -> None:
    """Raises PromptError for a prompt without what a scorer of ours needs to know of it."""
    if not isinstance(reward, ReasoningGymReward | ExactMatchReward):
        return
    try:
        reward.expected(prompt)
    except PromptError as error:
        raise PromptError(f"{prompt.place}: {error}") from error
