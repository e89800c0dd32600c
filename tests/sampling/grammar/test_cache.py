"""sampling/grammar/cache.py: compiled once for a grammar and a tokenizer; files are data and may be damaged."""

import numpy as np
import pytest

from sampling.errors import ConfigError
from sampling.grammar import Grammar, GrammarCache, GrammarKind
from sampling.vocabulary import Vocabulary

LETTERS = Vocabulary.from_pieces([b"a", b"b", b"ab"])
GRAMMAR = Grammar(GrammarKind.REGEX, "(ab)+")


def tables(automaton):
    text = automaton.text
    arrays = (automaton.token_class, automaton.next_state, automaton.accepting)
    return [array.tolist() for array in (*arrays, text.byte_class, text.next_state, text.accepting)]


@pytest.fixture
def compiled(monkeypatch):
    """The grammars that are compiled during the test."""
    seen, original = [], Grammar.byte_automaton
    monkeypatch.setattr(Grammar, "byte_automaton", lambda self, where="": seen.append(self) or original(self, where))
    return seen


def test_memory_then_disk(tmp_path, compiled):
    cache = GrammarCache(LETTERS, folder=tmp_path)
    first = cache.automaton(GRAMMAR)
    assert cache.automaton(Grammar(GrammarKind.REGEX, "(ab)+")) is first
    again = GrammarCache(LETTERS, folder=tmp_path).automaton(GRAMMAR)
    assert tables(again) == tables(first) and len(compiled) == 1
    assert not list(tmp_path.glob("*.tmp"))


def test_another_tokenizer_or_grammar_is_another_file(tmp_path):
    cache, other = GrammarCache(LETTERS, folder=tmp_path), Vocabulary.from_pieces([b"b", b"a", b"ab"])
    paths = {cache.path(GRAMMAR), cache.path(Grammar(GrammarKind.CHOICES, "(ab)+"))}
    paths |= {GrammarCache(other, folder=tmp_path).path(GRAMMAR), GrammarCache(LETTERS, [1], tmp_path).path(GRAMMAR)}
    assert len(paths) == 4


@pytest.mark.parametrize("damage", [b"", b"no zip file", None])
def test_a_damaged_file_is_made_anew(tmp_path, compiled, caplog, damage):
    cache = GrammarCache(LETTERS, folder=tmp_path)
    first, path = cache.automaton(GRAMMAR), cache.path(GRAMMAR)
    path.write_bytes(path.read_bytes()[:200] if damage is None else damage)
    assert tables(GrammarCache(LETTERS, folder=tmp_path).automaton(GRAMMAR)) == tables(first)
    assert len(compiled) == 2 and "compiled again" in caplog.text


def test_nothing_pickled_is_read(tmp_path, compiled):
    cache = GrammarCache(LETTERS, folder=tmp_path)
    names = "byte_class text_next text_accepting token_class next_state accepting".split()
    with cache.path(GRAMMAR).open("wb") as file:
        np.savez(file, **{name: np.array([print], object) for name in names})
    assert cache.automaton(GRAMMAR).num_states == 3 and compiled == [GRAMMAR]


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert GrammarCache(LETTERS, folder=tmp_path / "file" / "below").automaton(GRAMMAR).accepting.any()
    assert "cannot be kept" in caplog.text


def test_errors_name_the_parameter(tmp_path):
    cache = GrammarCache(LETTERS, folder=tmp_path)
    with pytest.raises(ConfigError, match=r"^sampling\.regex: expected a grammar that the tokenizer"):
        cache.automaton(Grammar(GrammarKind.REGEX, "c"))
    with pytest.raises(ConfigError, match=r"^prompt 'x': sampling\.regex: a reference to a group"):
        cache.automaton(Grammar(GrammarKind.REGEX, r"(a)\1"), "prompt 'x': sampling.regex")
