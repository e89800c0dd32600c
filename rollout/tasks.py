"""Verifiable tasks of reasoning-gym, kept as recipes: (dataset, config, seed, size, index) instead of the entry.

Entries hold tuples and integer keys that JSON would change, and some of the scorers mark such an entry wrong.
A recipe stays small and gives the entry back exactly; question and answer travel beside it, for people, and so
that another release of reasoning-gym cannot silently score against another question.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from rollout.json_values import canonical_json
from sampling.errors import ConfigError, PromptError

TASK_KEY = "reasoning_gym"
"""Where a prompt's metadata holds its task."""


@dataclass(frozen=True)
class Task:
    """One entry of a reasoning-gym dataset.

    Attributes:
        dataset: registered name, such as "chain_sum".
        config: the dataset's own parameters, as canonical JSON.
        seed: seed of the dataset.
        size: entries in the dataset.
        index: which of them this is.
        question: the task in words.
        answer: the expected answer, or None where the scorer knows how to check any answer.
    """

    dataset: str
    config: str
    seed: int
    size: int
    index: int
    question: str
    answer: str | None

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Self:
        """The task that `to_metadata` wrote.

        Raises:
            PromptError: the metadata holds no task.
        """
        try:
            return cls(**metadata[TASK_KEY])
        except (KeyError, TypeError) as error:
            raise PromptError(
                f"metadata.{TASK_KEY}: expected a task with {', '.join(cls.__dataclass_fields__)},"
                f" got metadata {dict(metadata)!r}; the scorer works on prompts of the reasoning_gym source"
            ) from error

    def to_metadata(self) -> dict[str, Any]:
        """Plain JSON values from which `from_metadata` makes the same task."""
        return {TASK_KEY: dataclasses.asdict(self)}

    def score(self, answer: str | None) -> float:
        """The dataset's score of an answer; 1 for a right one, None is scored as no answer.

        Raises:
            PromptError: the installed reasoning-gym makes another entry from this recipe.
        """
        dataset = _dataset(self.dataset, self.config, self.seed, self.size)
        entry = dataset[self.index]
        if entry["question"] != self.question:
            raise PromptError(
                f"{self.dataset}-{self.index}: expected question {self.question!r}, the installed reasoning-gym"
                f" makes {entry['question']!r}; install the release that made the prompts"
            )
        return float(dataset.score_answer(answer, entry))


def read_tasks(dataset: str, size: int, seed: int, config: Mapping[str, Any]) -> Iterator[Task]:
    """The entries of a dataset in order, made one at a time.

    Raises:
        ConfigError: reasoning-gym is not installed, has no such dataset, or refuses its parameters.
    """
    recipe = canonical_json(dict(config))
    entries = _dataset(dataset, recipe, seed, size)
    for index in range(size):
        entry = entries[index]
        answer = entry["answer"]
        yield Task(
            dataset,
            recipe,
            seed,
            size,
            index,
            entry["question"],
            None if answer is None else str(answer),
        )


def load_tasks() -> None:
    """Imports reasoning-gym, which takes a second.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ConfigError(
            "reasoning_gym: the package is not installed; try pip install 'rollout-sampling[tasks]'"
        ) from error


@functools.lru_cache(maxsize=32)
def _dataset(name: str, config: str, seed: int, size: int) -> Any:
    load_tasks()
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(sorted(DATASETS))}"
        raise ConfigError(f"prompts.tasks: reasoning_gym has no dataset {name!r}; {hint}")
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **json.loads(config))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"prompts.tasks: {name} refuses its config {config}: {error}") from error
