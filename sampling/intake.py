"""Intake: what an engine takes in. A request is checked once, before it waits; nothing later has to ask again."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from sampling.checkpoints import CheckpointInfo, load_backend
from sampling.errors import CheckpointError, ConfigError, PromptError
from sampling.grammar import Followed, GrammarCache, SteppedGrammars, installed_library
from sampling.grammar.demands import refuse_contradictions
from sampling.params import SamplingParams
from sampling.plugins import Plugins
from sampling.policy import resolved
from sampling.types import Request
from sampling.vocabulary import Vocabulary, control_tokens

log = logging.getLogger(__name__)


def require_positions(info: CheckpointInfo, cache_len: int) -> None:
    """Refuses a cache that is longer than the model's positions.

    Raises:
        ConfigError: it is.
    """
    if cache_len > info.config.max_position:
        raise ConfigError(
            f"geometry.cache_len: expected at most {info.config.max_position}, the positions that {info.name} was made"
            f" for, got {cache_len}"
        )


class Intake:
    """Checks requests against a checkpoint and a cache.

    Args:
        info: of the checkpoint. Without a tokenizer, policies that hold texts are refused.
        cache_len: tokens that a slot can hold.
        plugins: those that requests may name.
    """

    def __init__(self, info: CheckpointInfo, cache_len: int, plugins: Plugins) -> None:
        self._info, self._cache_len, self._plugins = info, cache_len, plugins
        self._tokenizer: Any = None
        self._grammars: GrammarCache | None = None
        self._stepped: SteppedGrammars | None = None
        self._control: tuple[int, ...] | None = None
        try:
            self._tokenizer = load_backend(info)
            self._control = control_tokens(self._tokenizer)
        except CheckpointError as error:
            log.warning("no tokenizer, so stop strings, bad words as text and grammars are refused: %s", error)

    def vocabulary(self) -> Vocabulary | None:
        """The tokens' bytes; None without a tokenizer."""
        return Vocabulary.from_tokenizer(self._tokenizer, self._info.config.vocab_size) if self._tokenizer else None

    def resolved(self, request: Request) -> SamplingParams:
        """The request's parameters as they take effect.

        Raises:
            PromptError: the prompt leaves no room in the cache, or holds an id that is no token.
            ConfigError: a parameter names an id that is no token, or a text where there is no tokenizer; or a grammar
                cannot be used, or contradicts another parameter; or a plugin is unknown, or of another version.
        """
        self._require_room(request)
        self._require_tokens(request)
        where, params = f"prompt {request.prompt_id!r}: sampling", request.params
        if self._tokenizer is None and params.stop:
            raise ConfigError(f"{where}.stop: {self._info.name} has no tokenizer; give stop_token_ids instead")
        params = resolved(params, self._info.eos_token_ids, self._tokenizer and self._encode, self._control)
        params = self._plugins.resolved(params, where)
        if params.max_length is not None and request.prompt_tokens.size >= params.max_length:
            raise ConfigError(
                f"{where}.max_length: expected more than the prompt's {request.prompt_tokens.size} tokens,"
                f" got {params.max_length}"
            )
        params.require_tokens(self._info.tokenizer_len, where)
        if (automaton := self.automaton(params, where)) is not None:
            refuse_contradictions(params, automaton, request.prompt_tokens.size, where)
        if params.grammar and params.grammar.stepped:
            params = params.replace(grammar_library=installed_library())
        return params

    def automaton(self, params: SamplingParams, where: str = "sampling") -> Followed | None:
        """The parameters' grammar over the checkpoint's tokens; None if they have none.

        Args:
            where: begins the message of an error.
        Raises:
            ConfigError: the grammar cannot be used, or there is no tokenizer.
        """
        if params.grammar is None:
            return None
        where = f"{where}.{params.grammar.kind}"
        if self._grammars is None:
            if (vocabulary := self.vocabulary()) is None or self._control is None:
                raise ConfigError(f"{where}: {self._info.name} has no tokenizer, and a grammar speaks of text")
            self._grammars = GrammarCache(vocabulary, self._control)
            self._stepped = SteppedGrammars(vocabulary, self._control)
        if params.grammar.stepped:
            assert self._stepped is not None
            return self._stepped.grammar(params.grammar, where, params.grammar_library)
        return self._grammars.automaton(params.grammar, where)

    def _require_room(self, request: Request) -> None:
        size, longest = request.prompt_tokens.size, max(given.size for given in request.given)
        if size >= self._cache_len:
            raise PromptError(
                f"prompt {request.prompt_id!r}: {size} tokens leave no room in a cache of {self._cache_len};"
                " shorten the prompt or raise geometry.cache_len"
            )
        if size + longest > self._cache_len:
            raise PromptError(
                f"prompt {request.prompt_id!r}: {size} tokens and {longest} given ones do not fit a cache of"
                f" {self._cache_len}; raise geometry.cache_len"
            )

    def _require_tokens(self, request: Request) -> None:
        known = self._info.tokenizer_len
        given = ((" of its given tokens", ids) for ids in request.given)
        for what, ids in (("", request.prompt_tokens), *given):
            outside = np.flatnonzero((ids < 0) | (ids >= known))
            if outside.size:
                raise PromptError(
                    f"prompt {request.prompt_id!r}: expected token ids in 0 .. {known - 1}, got"
                    f" {ids[outside[0]]} at position {outside[0]}{what}"
                )

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids
