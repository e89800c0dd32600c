"""Grammars: regular expressions, JSON schemas and lists of choices as tables over a tokenizer's ids.

`Grammar` -> nodes -> `ByteAutomaton` -> `TokenAutomaton`, kept by `GrammarCache`; or `Grammar` -> `SteppedGrammar` ->
a `Matcher` for each row, on the host.
"""

from sampling.grammar.byte_automaton import NO_STATE, ByteAutomaton
from sampling.grammar.cache import GrammarCache
from sampling.grammar.grammar import Grammar, GrammarKind
from sampling.grammar.stepped import Followed, Matcher, SteppedGrammar, SteppedGrammars, installed_library
from sampling.grammar.token_automaton import TokenAutomaton

__all__ = [
    "NO_STATE",
    "ByteAutomaton",
    "Followed",
    "Grammar",
    "GrammarCache",
    "GrammarKind",
    "Matcher",
    "SteppedGrammar",
    "SteppedGrammars",
    "TokenAutomaton",
    "installed_library",
]
