"""Grammar: what a row's text has to be, as the user wrote it."""

from __future__ import annotations

import enum
import hashlib
import json
from dataclasses import dataclass

from sampling.errors import ConfigError
from sampling.grammar.byte_automaton import ByteAutomaton
from sampling.grammar.json_schema import json_schema_node
from sampling.grammar.nodes import Node, either, literal
from sampling.grammar.regex import regex_node
from sampling.param_checks import short

GRAMMAR_VERSION = 1
"""Rises with every change that lets a grammar mean another language."""


class GrammarKind(enum.StrEnum):
    """The ways to write a grammar, named by the parameters that take them."""

    REGEX = "regex"
    """A pattern in the syntax of Python's `re`, to be matched from end to end."""
    JSON_SCHEMA = "json_schema"
    """A JSON schema as JSON text."""
    CHOICES = "choices"
    """A JSON list of texts, one of which is written."""
    LARK = "lark"
    """A context-free grammar in the syntax of llguidance, which is close to Lark's."""


@dataclass(frozen=True)
class Grammar:
    """A grammar in text form. Equal grammars have equal digests on every machine.

    Attributes:
        kind: how to read the source.
        source: the pattern, the schema, the choices or the rules.
        stepped: followed by a matcher on the host (sampling.grammar.stepped) instead of by tables.
    """

    kind: GrammarKind
    source: str
    stepped: bool = False

    def digest(self) -> str:
        """SHA-256, in hex, of a grammar for tables and of the version of what it means."""
        return hashlib.sha256(f"{GRAMMAR_VERSION}\n{self.kind}\n{self.source}".encode()).hexdigest()

    def byte_automaton(self, where: str = "") -> ByteAutomaton:
        """Its language.

        Args:
            where: begins the message of an error; by default the parameter's name.
        Raises:
            ConfigError: the source is malformed or uses what is not supported, or it allows no text at all.
        """
        where = where or f"sampling.{self.kind}"
        try:
            automaton = ByteAutomaton.of(self._node(where))
        except ConfigError as error:
            message = str(error)
            raise ConfigError(message if message.startswith(where) else f"{where}: {message}") from error
        if automaton.is_empty:
            raise ConfigError(f"{where}: expected a grammar that allows some text, got {short(self.source)}")
        return automaton

    def _node(self, where: str) -> Node:
        match self.kind:
            case GrammarKind.REGEX:
                return regex_node(self.source, where)
            case GrammarKind.JSON_SCHEMA:
                return json_schema_node(json.loads(self.source), where)
            case GrammarKind.CHOICES:
                return either(*map(literal, json.loads(self.source)))
            case GrammarKind.LARK:
                raise ConfigError(f"{where}: no table can follow a context-free grammar; set grammar_mode to 'host'")
