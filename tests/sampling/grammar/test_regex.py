"""sampling/grammar/regex.py and byte_automaton.py against Python's re, text by text."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling.errors import ConfigError
from sampling.grammar import Grammar, GrammarKind
from sampling.grammar.byte_automaton import ByteAutomaton
from sampling.grammar.nodes import Both
from sampling.grammar.regex import regex_node
from tests.grammar_samples import REGEXES

PATTERNS = [
    *REGEXES.values(),
    "a|ab",
    "(a|ab)(c|bcd)?",
    "a*?",
    "^ab$",
    r"\Aab\Z",
    ".",
    "[^a]",
    r"\d",
    "(?s).",
    "a{2,3}|b+",
    "(ab|a)(bc|c)?",
    r"\w{1,2}",
    "x?(a*)*b",
    r"[a-c\d]*",
    "(?:a|)b",
    "a{0}",
    r"\s",
    r"[\W\d]",
    r"[^\w\n]",
    "(?x) a b # c",
    "(?a)\\w",
    "^a|b$",
    "(^a|b)c",
    "a(|b$)",
    "",
    "(?P<name>a)b",
    "(?s:.)a",
]
LETTERS = "abcdx1 \n-+←↑↓↔é日本語\U0001f355\U0001f356ü"


def automaton(pattern):
    return Grammar(GrammarKind.REGEX, pattern).byte_automaton()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_short_text_is_judged_as_re_judges_it(pattern):
    found, expected = automaton(pattern), re.compile(pattern)
    for size in range(4):
        for letters in itertools.product(LETTERS, repeat=size):
            text = "".join(letters)
            assert found.accepts(text.encode()) == bool(expected.fullmatch(text)), text


@pytest.mark.parametrize("pattern", [*REGEXES.values(), r"\w{3}\W", r"(\d\s|[^x]{2})+"])
def test_what_matches_is_accepted(pattern):
    found = automaton(pattern)

    @settings(max_examples=40)
    @given(st.from_regex(pattern, fullmatch=True, alphabet=st.characters(exclude_categories=["Cs"])))
    def check(text):
        assert found.accepts(text.encode())

    check()


@pytest.mark.parametrize("pattern", ["b", "^b", "b$", "^b$", "^", "$", "^a|c$", "(a|^c)d", "a.c"])
def test_search_finds_a_match_anywhere(pattern):
    found, expected = ByteAutomaton.of(regex_node(pattern, "test", search=True)), re.compile(pattern)
    for size in range(5):
        for letters in itertools.product("abcdé", repeat=size):
            text = "".join(letters)
            assert found.accepts(text.encode()) == bool(expected.search(text)), text


def test_broken_utf8_is_never_accepted():
    found = automaton("(?s).+")
    for text in (b"\xc3", b"\xa9", b"\xed\xa0\x80", b"\xc0\x80", b"\xf5\x80\x80\x80", b"\xe2\x86", b"a\xff"):
        assert not found.accepts(text)
    assert found.accepts("aé\U0010ffff".encode())


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        (r"(a)\1", "reference"),
        ("a(?=b)", "look-ahead"),
        ("(?<!a)b", "negative look"),
        (r"\bab", "word boundary"),
        ("a^b", "anchor"),
        ("(?i)a", "flag"),
        ("(?m)^a", "flag"),
        ("a++", "possessive"),
        ("(?>a)", "atomic"),
        ("(a)?(?(1)b|c)", "conditional"),
        ("[a-", "no valid regular expression"),
        ("(", "no valid regular expression"),
        ("\\ud800", "surrogate"),
    ],
)
def test_what_no_automaton_can_do_is_refused_by_name(pattern, named):
    with pytest.raises(ConfigError, match=rf"sampling\.regex: .*{named}"):
        automaton(pattern)


def test_a_language_without_texts_is_refused():
    with pytest.raises(ConfigError, match="some text"):
        automaton("[^\\s\\S]")


def test_too_many_states_are_refused_with_what_to_change():
    with pytest.raises(ConfigError, match="lower the bounds"):
        automaton("(é{1000}){1000}")


def test_differences_and_intersections():
    words, short = regex_node("[a-c]{1,3}", "test"), regex_node("a*|..", "test")
    both, rest = ByteAutomaton.of(Both(words, short)), ByteAutomaton.of(Both(words, short, excluded=True))
    for size in range(5):
        for letters in itertools.product("abcd", repeat=size):
            text = "".join(letters)
            word, fits = bool(re.fullmatch("[a-c]{1,3}", text)), bool(re.fullmatch("a*|..", text))
            assert both.accepts(text.encode()) == (word and fits)
            assert rest.accepts(text.encode()) == (word and not fits)


def test_choices_are_literal():
    found = Grammar(GrammarKind.CHOICES, '["yes", "yes (please)", "é"]').byte_automaton()
    assert [found.accepts(text.encode()) for text in ("yes", "yes (please)", "é", "yes please", "ye", "")] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]


def test_automata_are_minimal():
    assert automaton("(ab|cb)d|ebd").num_states == 4
    assert automaton("a{0,5}").num_states == 6
    assert automaton("(a*)*").num_states == 1
