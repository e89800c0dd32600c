"""Grammars that no table can follow: a matcher on the host reads each row's tokens and says what may come next.

The matchers are llguidance's. It is given the bytes of every token, so a token is judged as in the tables: by all of
its bytes, with any other way to cut a text into tokens allowed as well.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sampling.errors import ConfigError
from sampling.grammar.byte_automaton import NO_STATE
from sampling.grammar.grammar import Grammar, GrammarKind
from sampling.grammar.stepped_rules import require_known_rules
from sampling.grammar.stepped_schema import require_known_keywords
from sampling.grammar.tables import COMPLETE, FULL, OPEN
from sampling.grammar.token_automaton import TokenAutomaton
from sampling.vocabulary import Vocabulary

KEPT = 64
"""Grammars kept in memory; the one that was not asked for longest goes first."""

_JSON = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""At most one space after a comma or a colon, as the tables write JSON."""

_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
"""Without it, a text that must follow could be written by the tokens of one tokenisation alone. Stands behind the
grammar, so that lines keep their numbers in messages."""


LIBRARY = "llguidance"
"""The distribution that has the matchers."""


@functools.cache
def installed_library() -> str:
    """Name and version of the library that is installed, as records hold them."""
    return f"{LIBRARY} {importlib.metadata.version(LIBRARY)}"


class SteppedGrammars:
    """Grammars for one tokenizer, each read once.

    Args:
        vocabulary: the bytes of the tokenizer's tokens.
        control: ids that stand for no text.
    """

    def __init__(self, vocabulary: Vocabulary, control: Sequence[int] = ()) -> None:
        self._vocabulary, self._control = vocabulary, frozenset(control)
        self._tokenizer: Any = None
        self._kept: dict[Grammar, SteppedGrammar] = {}

    def grammar(self, grammar: Grammar, where: str = "", library: str = "") -> SteppedGrammar:
        """A grammar over the tokenizer's ids.

        Args:
            where: begins the message of an error; by default the parameter's name.
            library: name and version of what has to follow it; "" takes any.
        Raises:
            ConfigError: llguidance is not installed, or in another version; or the grammar is malformed, uses what is
                not supported, or allows no text.
        """
        where = where or f"sampling.{grammar.kind}"
        if self._tokenizer is None:
            self._tokenizer = _tokenizer(self._vocabulary, self._control, where)
        if library not in ("", here := installed_library()):
            raise ConfigError(
                f"{where}: expected to be followed by {library}, here is {here}; install the version that is asked for,"
                " the record's own if it is to be drawn again"
            )
        stepped = self._kept.pop(grammar, None) or SteppedGrammar(grammar, self._tokenizer, where)
        self._kept[grammar] = stepped
        while len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]
        return stepped


class SteppedGrammar:
    """A grammar over a tokenizer's ids, to be followed by a matcher for each row.

    Attributes:
        start: the state in which a row begins.
    """

    def __init__(self, grammar: Grammar, tokenizer: Any, where: str) -> None:
        from llguidance import LLMatcher

        rules = grammar.source
        if grammar.kind == GrammarKind.JSON_SCHEMA:
            schema = json.loads(grammar.source)
            require_known_keywords(schema, where)
            rules = f"start: %json {json.dumps({**schema, 'x-guidance': _JSON})}"
        else:
            require_known_rules(rules, where)
        self._vocab = tokenizer.vocab_size - 1
        self._inner = LLMatcher(tokenizer, rules + _OPTIONS, log_level=0)
        if self._inner.is_error():
            raise ConfigError(f"{where}: {_message(self._inner.get_error(), grammar)}")
        begun = self.matcher()
        if begun.error:
            raise ConfigError(f"{where}: expected a grammar that allows some text, got {begun.error}")
        self.start = begun.state

    def matcher(self) -> Matcher:
        """At the beginning of a text."""
        return Matcher(self._inner.deep_copy(), self._vocab)

    def walk(self, tokens: Iterable[int]) -> tuple[list[int], np.ndarray]:
        """The states before the first token and after each; and the masks before each token, uint32 [tokens, words]."""
        matcher, states, allowed = self.matcher(), [], []
        for token in tokens:
            states.append(matcher.state)
            allowed.append(matcher.allowed.copy())
            matcher.read([token])
        return [*states, matcher.state], np.array(allowed, np.uint32).reshape(-1, matcher.allowed.size)

    def left_at(self, tokens: Sequence[int] | np.ndarray, eos: Sequence[int], stop: Sequence[int]) -> int | None:
        """As `TokenAutomaton.left_at`."""
        matcher = self.matcher()
        for place, token in enumerate(tokens):
            ends = matcher.state in (COMPLETE, FULL) and (token in eos or token in stop)
            if ends and place + 1 < len(tokens):
                return place + 1
            matcher.read([token])
            if (token in eos or matcher.state == NO_STATE) and not ends:
                return place
        return None


Followed = TokenAutomaton | SteppedGrammar
"""A grammar over a tokenizer's ids, in one of the two modes."""


class Matcher:
    """Where one row stands in its grammar.

    Attributes:
        state: OPEN, COMPLETE or FULL of sampling.grammar.tables; NO_STATE once the tokens have left the grammar.
        allowed: uint32 [ceil(vocab / 32)], the ids that may follow, end-of-sequence ids aside.
        read_len: tokens read so far.
        error: why the matcher has given up, so that nothing may follow; empty otherwise.
    """

    def __init__(self, inner: Any, vocab: int) -> None:
        self._inner, self._vocab = inner, vocab
        self._mask = np.zeros(vocab // 32 + 1, np.uint32)  # one more id than the vocabulary, see _Tokens
        self.allowed = self._mask[: -(-vocab // 32)]
        self.read_len, self.error = 0, ""
        self._look()

    def read(self, tokens: Iterable[int]) -> None:
        """Goes on by some tokens."""
        for token in tokens:
            self.read_len += 1
            if self.state == NO_STATE:
                continue
            if not self._allows(int(token)):
                self.state = NO_STATE
                continue
            self._inner.consume_token(int(token))
            self._look()

    def _allows(self, token: int) -> bool:
        return bool(self.allowed[token >> 5] >> np.uint32(token & 31) & 1)

    def _look(self) -> None:
        self._mask[:] = 0
        if not self._inner.is_error():
            self._inner.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self._inner.is_error():
            self.error = self._inner.get_error().partition("\n")[0]
            self._mask[:] = 0
        self._mask[self._vocab >> 5] &= ~(np.uint32(1) << np.uint32(self._vocab & 31))
        goes_on = bool(self.allowed.any())
        self.state = OPEN if not self._inner.is_accepting() else COMPLETE if goes_on else FULL


class _Tokens:
    """A vocabulary as llguidance asks for it. An end-of-sequence id of its own follows the others, since a model may
    have several, or none."""

    def __init__(self, vocabulary: Vocabulary, control: frozenset[int]) -> None:
        flat, offsets = np.asarray(vocabulary.flat).tobytes(), np.asarray(vocabulary.offsets).tolist()
        pieces = (flat[first:end] for first, end in itertools.pairwise(offsets))
        texts = [b"" if index in control else piece for index, piece in enumerate(pieces)]
        self.tokens = [*texts, b"\xff<|end of text|>"]
        self.eos_token_id = len(texts)
        self.bos_token_id = None
        self.special_token_ids = [len(texts)]

    def __call__(self, text: str) -> list[int]:
        return []  # asked for where a text is forced, which is off


def _tokenizer(vocabulary: Vocabulary, control: frozenset[int], where: str) -> Any:
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError as error:
        raise ConfigError(
            f"{where}: grammar_mode 'host' needs the library llguidance: pip install 'rollout-sampling[grammars]'"
        ) from error
    return LLTokenizer(TokenizerWrapper(_Tokens(vocabulary, control)))


def _message(error: str, grammar: Grammar) -> str:
    """What llguidance says of a grammar, without its own insides and without the lines that were added here."""
    lines = error.split("\n<state>")[0].splitlines()
    if grammar.kind == GrammarKind.JSON_SCHEMA:
        return lines[0].rpartition("failed to compile JSON schema: ")[2]
    written = len(grammar.source.splitlines())
    numbers = [re.match(r"\s*(\d+) \|", line) for line in lines]
    return "\n".join(
        line for line, number in zip(lines, numbers, strict=True) if number is None or int(number[1]) <= written
    ).strip()
