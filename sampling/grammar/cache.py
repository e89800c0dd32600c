"""Compiled grammars, kept by (grammar, tokenizer): in memory for this process, on disk for the next one."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sampling.errors import ConfigError
from sampling.grammar.byte_automaton import ByteAutomaton
from sampling.grammar.grammar import Grammar
from sampling.grammar.token_automaton import TokenAutomaton
from sampling.vocabulary import Vocabulary

log = logging.getLogger(__name__)

TABLES_VERSION = 1
"""Rises with every change of what the files hold."""

FOLDER = Path("~/.cache/rollout-sampling/grammars")
"""Where the files lie; the environment variable ROLLOUT_GRAMMAR_CACHE names another place."""

KEPT = 64
"""Grammars kept in memory; the one that was not asked for longest goes first."""


class GrammarCache:
    """Compiles grammars for one tokenizer, each once.

    Args:
        vocabulary: the bytes of the tokenizer's tokens.
        control: ids that stand for no text.
        folder: where files are kept; by default FOLDER.
    """

    def __init__(self, vocabulary: Vocabulary, control: Sequence[int] = (), folder: Path | None = None) -> None:
        self._vocabulary, self._control = vocabulary, tuple(sorted(control))
        self._folder = folder or Path(os.environ.get("ROLLOUT_GRAMMAR_CACHE") or FOLDER).expanduser()
        self._tokenizer = hashlib.sha256(f"{vocabulary.digest()} {self._control}".encode()).hexdigest()
        self._kept: dict[Grammar, TokenAutomaton] = {}

    def automaton(self, grammar: Grammar, where: str = "") -> TokenAutomaton:
        """The grammar's tables for the tokenizer.

        Args:
            where: begins the message of an error; by default the parameter's name.
        Raises:
            ConfigError: the grammar cannot be used, or its tables are too large.
        """
        automaton = self._kept.pop(grammar, None) or self._read(grammar) or self._compile(grammar, where)
        self._kept[grammar] = automaton
        while len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]
        return automaton

    def path(self, grammar: Grammar) -> Path:
        """The file of a grammar's tables."""
        name = hashlib.sha256(f"{TABLES_VERSION} {self._tokenizer} {grammar.digest()}".encode()).hexdigest()
        return self._folder / f"{name}.npz"

    def _compile(self, grammar: Grammar, where: str) -> TokenAutomaton:
        text = grammar.byte_automaton(where)
        try:
            automaton = TokenAutomaton.of(text, self._vocabulary, self._control)
        except ConfigError as error:
            raise ConfigError(f"{where or f'sampling.{grammar.kind}'}: {error}") from error
        self._write(grammar, automaton)
        return automaton

    def _read(self, grammar: Grammar) -> TokenAutomaton | None:
        """The tables on disk; None if there are none that can be read, which are then made anew."""
        path = self.path(grammar)
        try:
            with np.load(path, allow_pickle=False) as arrays:
                text = ByteAutomaton(arrays["byte_class"], arrays["text_next"], arrays["text_accepting"])
                return TokenAutomaton(arrays["token_class"], arrays["next_state"], arrays["accepting"], text)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            log.warning("%s: compiled again, since the file cannot be read: %s", path, error)
            return None

    def _write(self, grammar: Grammar, automaton: TokenAutomaton) -> None:
        """Keeps the tables on disk. Where that fails, the next process compiles again, and the log says so."""
        path, text = self.path(grammar), automaton.text
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
                np.savez_compressed(
                    file,
                    byte_class=text.byte_class,
                    text_next=text.next_state,
                    text_accepting=text.accepting,
                    token_class=automaton.token_class,
                    next_state=automaton.next_state,
                    accepting=automaton.accepting,
                )
            Path(file.name).replace(path)
        except OSError as error:
            log.warning("%s: the compiled grammar cannot be kept: %s", path, error)
