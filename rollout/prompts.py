"""Prompt: what one group of samples continues, and how one row of a prompt file is read into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from rollout.json_values import require_json, shown
from sampling.errors import ConfigError, PromptError
from sampling.params import SamplingParams

ROW_FIELDS = ("id", "prompt", "messages", "prompt_tokens", "n", "sampling", "metadata")
"""Fields of a JSONL row or an inline prompt, and columns of a Parquet file."""

MAX_SAMPLES = 1 << 16
"""Samples of one prompt at most: a group is handed out, held and written as a whole."""

MAX_FIRST_SAMPLE = (1 << 31) - MAX_SAMPLES
"""First sample at most, so that every sample index is an int32."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a run, from exactly one of `text`, `messages` and `tokens`.

    Attributes:
        id: names the prompt within the run; key material for its draws.
        text: plain text to continue.
        messages: chat messages, each with a `role` and a `content`; the chat template renders them.
        tokens: token ids, used as they are; any sequence or array of whole numbers becomes a tuple.
        n: samples of this prompt; None takes the run's.
        first_sample: index of the first of them; samples of other indices are other draws of the same prompt, whenever
            they are asked for.
        sampling: parameters of this prompt that replace the run's.
        metadata: the caller's own plain JSON values, carried into every record.
        prompt_tokens: int32 [prompt_len], what the model reads; None until `Tokenizer.tokenize`.
        where: where the prompt came from ("prompts.jsonl, line 3"), for messages.
    Raises:
        PromptError: the prompt cannot be used; the message says where it came from and which field is wrong.
    """

    id: str
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    tokens: tuple[int, ...] | None = None
    n: int | None = None
    first_sample: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    prompt_tokens: np.ndarray | None = field(default=None, compare=False)
    where: str = field(default="", compare=False)

    @classmethod
    def from_row(cls, row: Mapping[str, Any], position: int, where: str) -> Self:
        """Reads a row with the fields of ROW_FIELDS; absent and null mean the same.

        Args:
            position: the row's number from 0; its text is the id of a row that has none.
            where: the row's place, for messages.
        """
        if not isinstance(row, Mapping):
            raise PromptError(f"{where}: expected an object with {', '.join(ROW_FIELDS)}, got {shown(row)}")
        unknown = [name for name in row if name not in ROW_FIELDS]
        if unknown:
            raise PromptError(
                f"{where}: unknown field {', '.join(map(repr, unknown))}; known are {', '.join(ROW_FIELDS)}."
                " Put your own values under 'metadata'"
            )
        given = {name: value for name, value in row.items() if value is not None}
        prompt_id = given.get("id", position)
        if isinstance(prompt_id, bool) or not isinstance(prompt_id, str | int):
            raise PromptError(f"{where}: id: expected text or a whole number, got {shown(prompt_id)}")
        return cls(
            id=str(prompt_id),
            text=given.get("prompt"),
            messages=given.get("messages"),
            tokens=given.get("prompt_tokens"),
            n=given.get("n"),
            sampling=given.get("sampling", {}),
            metadata=given.get("metadata", {}),
            where=where,
        )

    def params(self, base: SamplingParams) -> SamplingParams:
        """The run's parameters with this prompt's own in their place."""
        try:
            params = base.replace(**self._own())
        except ConfigError as error:
            raise PromptError(f"{self.place}: {error}") from error
        self._require_few(params.n)
        return params

    def _own(self) -> dict[str, Any]:
        return dict(self.sampling) if self.n is None else {**self.sampling, "n": self.n}

    def _require_few(self, samples: int) -> None:
        if samples > MAX_SAMPLES:
            raise PromptError(
                f"{self.place}: sampling.n: expected at most {MAX_SAMPLES}, got {samples};"
                " give the prompt several times, under ids of their own"
            )

    def sample_indices(self, params: SamplingParams) -> tuple[int, ...]:
        """Which samples are wanted, with the prompt's own parameters."""
        return tuple(range(self.first_sample, self.first_sample + params.n))

    @property
    def name(self) -> tuple[str, int]:
        """What is unique among the prompts under way: two of one id ask for other samples."""
        return self.id, self.first_sample

    @property
    def place(self) -> str:
        """The prompt's name in messages."""
        return f"{self.where}: prompt {shown(self.id)}" if self.where else f"prompt {shown(self.id)}"

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise PromptError(f"{self.place}: id: expected text that is not empty, got {shown(self.id)}")
        require_json(self.id, f"{self.place}: id", PromptError)
        first = self.first_sample
        if isinstance(first, bool) or not isinstance(first, int) or not 0 <= first <= MAX_FIRST_SAMPLE:
            raise PromptError(
                f"{self.place}: first_sample: expected a whole number in 0 .. {MAX_FIRST_SAMPLE}, got {shown(first)}"
            )
        for name, value in (("sampling", self.sampling), ("metadata", self.metadata)):
            if not isinstance(value, Mapping):
                raise PromptError(f"{self.place}: {name}: expected an object, got {shown(value)}")
        if self.messages is not None:
            object.__setattr__(self, "messages", tuple(self._listed("messages", self.messages)))
        if self.tokens is not None:
            object.__setattr__(self, "tokens", self._token_ids(self.tokens))
        sources = {"prompt": self.text, "messages": self.messages, "prompt_tokens": self.tokens}
        given = [name for name, value in sources.items() if value is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none of them"
            raise PromptError(f"{self.place}: expected exactly one of {', '.join(sources)}, got {got}")
        if sources[given[0]] in ("", ()):
            raise PromptError(f"{self.place}: {given[0]}: empty; a model needs at least one token to continue from")
        if self.text is not None and not isinstance(self.text, str):
            raise PromptError(f"{self.place}: prompt: expected text, got {shown(self.text)}")
        require_json(self.text, f"{self.place}: prompt", PromptError)
        for index, message in enumerate(self.messages or ()):
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise PromptError(
                    f"{self.place}: messages[{index}]: expected an object with 'role' and 'content',"
                    f" got {shown(message)}"
                )
            require_json(dict(message), f"{self.place}: messages[{index}]", PromptError)
        for name in self.sampling:
            require_json({name: None}, f"{self.place}: sampling", PromptError)
        if self.n is not None and "n" in self.sampling:
            raise PromptError(f"{self.place}: n is given twice, as 'n' and within 'sampling'; keep one")
        require_json(dict(self.metadata), f"{self.place}: metadata", PromptError)
        own = self._own()  # whether the run's parameters contradict them, only `params` can tell
        try:
            SamplingParams.check(own)
        except ConfigError as error:
            raise PromptError(f"{self.place}: {error}") from error
        self._require_few(own.get("n", 1))

    def _listed(self, name: str, value: Any) -> Sequence[Any]:
        """The items of a list, tuple or array."""
        items = value.tolist() if isinstance(value, np.ndarray) else value
        if isinstance(items, str | bytes) or not isinstance(items, Sequence):
            raise PromptError(f"{self.place}: {name}: expected a list, got {shown(value)}")
        return items

    def _token_ids(self, tokens: Any) -> tuple[int, ...]:
        ids = []
        for index, token in enumerate(self._listed("prompt_tokens", tokens)):
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise PromptError(f"{self.place}: prompt_tokens[{index}]: expected a token id, got {shown(token)}")
            ids.append(int(token))
        return tuple(ids)
