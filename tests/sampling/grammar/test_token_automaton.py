"""sampling/grammar/token_automaton.py: tokens are judged by their bytes, and the tables say what the bytes say."""

import itertools
import json
import re

import numpy as np
import pytest

from sampling.errors import ConfigError
from sampling.grammar import NO_STATE, Grammar, GrammarKind, TokenAutomaton, token_automaton
from sampling.vocabulary import Vocabulary, control_tokens
from tests.grammar_samples import PERSON, REGEXES
from tests.tiny_models import SPECIAL_TOKENS, TOKENIZER_LEN, byte_tokenizer

PIECES = ["", "{", '{"', '"', 'a"', '":', ": 1", "1", "}", "1}", '{"a":1}', "a", "\xe9"]
"""Tokens of several JSON signs, one without text, and one of two bytes."""


def regex(pattern):
    return Grammar(GrammarKind.REGEX, pattern).byte_automaton()


def tokens_of(pattern, pieces, control=()):
    return TokenAutomaton.of(regex(pattern), Vocabulary.from_pieces(pieces), control)


def test_case_b044_characters_split_over_tokens():
    pieces = [bytes.fromhex("e286"), b"\x91", b"\x94", b"a", b""]
    found = tokens_of("[←-↓]+", pieces)
    state, after = found.states([0]), found.states([0, 1])
    assert found.allowed(0).tolist() == [0] and not found.accepting[0]
    assert found.allowed(state[1]).tolist() == [1] and not found.accepting[state[1]]
    assert found.allowed(after[2]).tolist() == [0] and found.accepting[after[2]]  # and EOS
    for size in range(7):
        for ids in itertools.product(range(4), repeat=size):
            text = b"".join(pieces[i] for i in ids)
            last = found.states(ids)[-1]
            decoded = text.decode(errors="replace")
            assert (last != NO_STATE and bool(found.accepting[last])) == bool(re.fullmatch("[←-↓]+", decoded)), ids


def test_tokens_do_what_their_bytes_do():
    pieces = [piece.encode() for piece in PIECES]
    text = Grammar(
        GrammarKind.JSON_SCHEMA,
        json.dumps({"type": "object", "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 11}}}),
    ).byte_automaton()
    found = TokenAutomaton.of(text, Vocabulary.from_pieces(pieces))
    accepted = set()
    for size in range(6):
        for ids in itertools.product(range(len(pieces)), repeat=size):
            last = found.states(ids)[-1]
            if last != NO_STATE and found.accepting[last]:
                accepted.add(ids)
            expected = 0 not in ids and text.accepts(b"".join(pieces[i] for i in ids))
            assert (ids in accepted) == expected, ids
    assert {(10,), (2, 4, 6, 8), (2, 4, 6, 9)} <= accepted and (2, 4, 6, 7, 9) not in accepted
    assert min(map(len, accepted)) == found.shortest == 1


def test_every_state_is_on_a_way_to_acceptance():
    # "ab" could be begun with the token "a", but there is no token for its end: "a" would be a trap.
    found = tokens_of("ab|c", [b"a", b"c"])
    assert found.allowed(0).tolist() == [1]
    with pytest.raises(ConfigError, match="cannot spell"):
        tokens_of("ab", [b"a", b"c"])


def test_control_tokens_stand_for_no_text():
    tokenizer = byte_tokenizer()
    control = control_tokens(tokenizer)
    assert {tokenizer.convert_ids_to_tokens(i) for i in control} == set(SPECIAL_TOKENS)
    assert control_tokens(tokenizer.backend_tokenizer) == control
    vocabulary = Vocabulary.from_tokenizer(tokenizer, TOKENIZER_LEN + 5)
    found = TokenAutomaton.of(regex("(?s).*"), vocabulary, control)
    allowed = set(found.allowed(0).tolist())
    assert not allowed & {*control, *range(TOKENIZER_LEN, TOKENIZER_LEN + 5)}
    assert len(allowed) > 128
    assert (found.token_class[list(control)] == 0).all() and (found.next_state[:, 0] == NO_STATE).all()


def test_equal_columns_share_a_class():
    vocabulary = Vocabulary.from_tokenizer(byte_tokenizer())
    found = TokenAutomaton.of(regex("[a-z]+"), vocabulary)
    assert found.num_classes == 2
    for pattern in REGEXES.values():
        table = TokenAutomaton.of(regex(pattern), vocabulary).next_state
        assert len(np.unique(table, axis=1).T) == table.shape[1]


@pytest.mark.parametrize(
    ("pattern", "shortest", "longest"),
    [("a|aaa", 1, 3), ("a{3,5}", 3, 5), ("a+", 1, None), ("(ab)*", 0, None), ("", 0, 0), ("b{2}a?", 2, 3)],
)
def test_lengths_in_tokens(pattern, shortest, longest):
    found = tokens_of(pattern, [b"a", b"b"])
    assert (found.shortest, found.longest) == (shortest, longest)


def test_states_say_whether_anything_may_follow():
    found = tokens_of("a|ab", [b"a", b"b"])
    states = found.states([0, 1])
    assert found.goes_on[states].tolist() == [True, True, False]
    assert found.accepting[states].tolist() == [False, True, True]
    assert found.states([1, 0])[1:] == [NO_STATE, NO_STATE]


def test_tables_beyond_the_bound_are_refused_with_their_size(monkeypatch):
    monkeypatch.setattr(token_automaton, "MOST_BYTES", 2**16)
    text = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON)).byte_automaton()
    pieces = [bytes([i]) for i in range(256)] + [bytes([a, b]) for a in range(32, 127) for b in range(32, 127)]
    with pytest.raises(
        ConfigError, match=r"at most 0.0625 MiB, got .* classes of tokens in \d+ states; lower the bounds"
    ):
        TokenAutomaton.of(text, Vocabulary.from_pieces(pieces))
