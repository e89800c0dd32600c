"""The one door between text and tokens. Nothing else in the service encodes or decodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.prompts import Prompt
from sampling.errors import PromptError
from sampling.stop_strings import find_stop
from sampling.vocabulary import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTEXT_LEN = 8
"""Prompt tokens decoded before a completion: a code point has at most four bytes, hence at most four tokens."""


class Tokenizer:
    """A Transformers tokenizer behind the few questions that the service asks.

    A text begins with at most one beginning-of-sequence token, and with exactly one if the tokenizer adds it to
    plain text or the chat template writes it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer  # its annotations cover batches and strings at once
        self._bos: int | None = self._tokenizer.bos_token_id
        self._adds_bos = self._bos is not None and self._adds(self._bos)

    def __len__(self) -> int:
        """Vocabulary size, added tokens included; every usable id lies in [0, len)."""
        return len(self._tokenizer)

    def tokenize(self, prompt: Prompt) -> Prompt:
        """The prompt with its `prompt_tokens`, int32 [prompt_len].

        Raises:
            PromptError: it has no tokens, an id lies outside the vocabulary, or the chat template refuses it.
        """
        if prompt.tokens is not None:
            ids: Sequence[int] = prompt.tokens
        elif prompt.messages is not None:
            try:
                ids = self.encode_messages(prompt.messages)
            except PromptError as error:
                raise PromptError(f"{prompt.place}: messages: {error}") from error
            except Exception as error:  # templates are foreign code and raise what they like
                raise PromptError(f"{prompt.place}: messages: the chat template refused them: {error}") from error
        else:
            ids = self.encode_text(prompt.text or "")
        if not ids:
            raise PromptError(f"{prompt.place}: expected at least one token, got none; give it some text")
        for position, token in enumerate(ids):
            if not 0 <= token < len(self):
                raise PromptError(
                    f"{prompt.place}: prompt_tokens[{position}]: expected a token id in [0, {len(self)}), got {token};"
                    " were the ids made with another tokenizer?"
                )
        return dataclasses.replace(prompt, prompt_tokens=np.asarray(ids, np.int32))

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text, with the tokenizer's own beginning of sequence and no end."""
        return self._with_bos(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a chat, rendered by the chat template up to where the assistant's answer begins.

        Raises:
            PromptError: the tokenizer has no chat template.
        """
        if not self._tokenizer.chat_template:
            raise PromptError("the tokenizer has no chat template; use 'prompt' or 'prompt_tokens' instead")
        rendered = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
        return self._with_bos(self._tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int] | np.ndarray, *, skip_special: bool = True) -> str:
        """Text of ids, for people. Bytes that form no code point show as U+FFFD."""
        ids = np.asarray(tokens, np.int64).tolist()
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)

    def completion_text(self, prompt_tokens: np.ndarray, completion_tokens: np.ndarray) -> str:
        """Text of a completion, special tokens skipped, as it reads after its prompt.

        A code point whose bytes begin in the prompt belongs to the completion; no other text of the prompt is in it.
        """
        context = np.asarray(prompt_tokens)[-_CONTEXT_LEN:]
        before = self.decode(context)
        both = self.decode(np.concatenate([context, np.asarray(completion_tokens, context.dtype)]))
        shared = next(
            (i for i, (a, b) in enumerate(zip(before, both, strict=False)) if a != b),
            min(len(before), len(both)),
        )
        return both[max(shared, len(before.rstrip("\N{REPLACEMENT CHARACTER}"))) :]

    def text_before_stop(self, prompt_tokens: np.ndarray, completion_tokens: np.ndarray, stop: Sequence[str]) -> str:
        """Text of a completion that a stop string ended, without that string and what its last token adds after it."""
        match = find_stop(self._vocabulary, prompt_tokens, completion_tokens, stop)
        return match.excluded if match else self.completion_text(prompt_tokens, completion_tokens)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.from_tokenizer(self._tokenizer)

    def _adds(self, bos: int) -> bool:
        return self._tokenizer("a")["input_ids"][:1] == [bos] and self._tokenizer("a", add_special_tokens=False)[
            "input_ids"
        ][:1] != [bos]

    def _with_bos(self, ids: list[int]) -> list[int]:
        if self._bos is None or not self._adds_bos or ids[:1] == [self._bos]:
            return list(ids)
        return [self._bos, *ids]
