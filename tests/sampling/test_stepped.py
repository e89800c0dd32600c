"""Matchers on the host, without a model: what they allow is what may follow, judged by the bytes of every token."""

import re
import sys

import numpy as np
import pytest

from sampling.errors import ConfigError
from sampling.grammar import NO_STATE, Grammar, GrammarKind, SteppedGrammars
from sampling.grammar.tables import COMPLETE, FULL, OPEN
from sampling.vocabulary import Vocabulary, control_tokens
from tests.tiny_models import byte_tokenizer
from tests.tiny_tokenizers import byte_fallback_tokenizer

BRACKETS = 'start: "(" start ")" | "é"'

ODD = Vocabulary.from_pieces(
    [*(bytes([byte]) for byte in range(256)), b"((", b"))", b"\xc3", b"\xa9)", b"(\xc3", b"(", b"", b"\xa9", b")))"]
)
"""Tokens of several characters, of parts of characters, without text, and several of the same bytes. 257 has a sibling
that stands for no text: see CONTROL."""

CONTROL = (257,)


def may_begin(text):
    """Whether a text of BRACKETS begins with these bytes."""
    found = re.fullmatch(rb"(\(*)(?:\xc3(?:\xa9(\)*))?)?", text)
    return found is not None and len(found[2] or b"") <= len(found[1])


def is_whole(text):
    found = re.fullmatch(rb"(\(*)\xc3\xa9(\)*)", text)
    return found is not None and len(found[1]) == len(found[2])


def ids_of(allowed, vocab):
    return set(np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little")[:vocab]).tolist())


@pytest.mark.parametrize(
    ("vocabulary", "control"),
    [
        (ODD, CONTROL),
        (Vocabulary.from_tokenizer(byte_tokenizer(), 288), control_tokens(byte_tokenizer())),
        (Vocabulary.from_tokenizer(byte_fallback_tokenizer()), control_tokens(byte_fallback_tokenizer())),
    ],
    ids=["odd", "byte-level, 288 ids", "byte fallback"],
)
def test_what_is_allowed_is_what_may_follow(vocabulary, control):
    grammar = SteppedGrammars(vocabulary, control).grammar(Grammar(GrammarKind.LARK, BRACKETS, True))
    pieces = [vocabulary.text_bytes([token]) for token in range(vocabulary.size)]
    rng = np.random.default_rng(0)
    for _ in range(20):
        matcher, text, tokens = grammar.matcher(), b"", []
        while True:
            found = ids_of(matcher.allowed, vocabulary.size)
            texts = {token for token, piece in enumerate(pieces) if piece and token not in control}
            assert found == {token for token in texts if may_begin(text + pieces[token])}
            assert matcher.state == (FULL if is_whole(text) and not found else COMPLETE if is_whole(text) else OPEN)
            if not found or len(tokens) > 12:
                break
            tokens.append(int(rng.choice(sorted(found))))
            matcher.read(tokens[-1:])
            text += pieces[tokens[-1]]
        assert grammar.left_at(tokens, (), ()) is None
        outside = min(set(range(vocabulary.size)) - ids_of(matcher.allowed, vocabulary.size))
        matcher.read([outside])
        assert matcher.state == NO_STATE and grammar.left_at([*tokens, outside], (), ()) == len(tokens)


def test_text_that_must_follow_may_be_cut_in_any_way():
    grammar = SteppedGrammars(ODD, CONTROL).grammar(Grammar(GrammarKind.LARK, 'start: "((((é"', True))
    assert ids_of(grammar.matcher().allowed, ODD.size) == {ord("("), 256, 261}


@pytest.mark.parametrize("missing", ["llguidance"])
def test_a_missing_library_is_named(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=r"sampling.lark: .*llguidance: pip install 'rollout-sampling\[grammars\]'"):
        SteppedGrammars(ODD).grammar(Grammar(GrammarKind.LARK, BRACKETS, True))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ('start: x "b"\nx [temperature=0.5]: /a/', "line 2: the attribute 'temperature' of a rule is not supported"),
        ('start: x "b"\nx[suffix="]", max_tokens=5]: /a/', "line 2: the attribute 'max_tokens'"),
        ('start: x "b"\nx[stop="c"]: /a/', "line 2: the attribute 'stop'"),
        ('start: "a"\n | %json\n {"items": [{"typ": 1}]}', r"line 2: %json: at #/items/0: the keyword 'typ' .* 'type'"),
        ('start: %json{"$defs": {"a": {"not": {}}}}', r"line 1: %json: at #/\$defs/a: the keyword 'not'"),
        ('start: %json {"$ref": "#/enum/0", "enum": [{"typ": 1}]}', "at #: .ref: there is no schema at '#/enum/0'"),
        ('start: %json {"x-guidance": {"lenient": true}}', "line 1: 'lenient' of x-guidance is not supported"),
        ('start: %json {"x-guidance": {"spaces": 1}}', "unknown field `spaces`"),
        ("start: %json {'a': 1}", "line 1: expected JSON behind %json"),
        ('%llguidance {"no_forcing": false}\nstart: "a"', "line 1: the option 'no_forcing' of %llguidance"),
    ],
)
def test_what_would_be_passed_over_is_refused(rules, message):
    with pytest.raises(ConfigError, match=f"^sampling.lark: .*{message}"):
        SteppedGrammars(ODD).grammar(Grammar(GrammarKind.LARK, rules, True))


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ('start: "%json {}" /%json "/ // %json { stop=\n # temperature=', b'%json {}%json "'),
        ('start: ["a" stop] "stop=" /[^"]=/\nstop: "c"', b"acstop=x="),
        ('start: x "b"\nx[lazy]: /a*c/', b"aacb"),
        ('start: %json {"$ref": "#/$defs/a~1b", "$defs": {"a/b": true}} "!"', b"[1 , 2]!"),
        ('start: %json {"x-guidance": {"whitespace_flexible": false}, "type": "array"}', b"[1,2]"),
    ],
)
def test_what_only_looks_like_it_is_taken(rules, text):
    grammar = SteppedGrammars(ODD).grammar(Grammar(GrammarKind.LARK, rules, True))
    assert grammar.left_at(list(text), (), ()) is None and grammar.walk(list(text))[0][-1] in (COMPLETE, FULL)


def test_json_is_written_with_at_most_one_space():
    grammar = SteppedGrammars(ODD).grammar(Grammar(GrammarKind.JSON_SCHEMA, "{}", True))
    for text, left in (
        ('{"a": [1, {"é":null}]}', None),
        ('{"a":  1}', 6),
        ('{ "a"', 1),
        (' {"a"', 0),
        ("[[[[[[1]]]]]]", None),
        ("[1,]", 3),
        ('"\\u0001é', None),
        ('"\n', 1),
    ):
        assert grammar.left_at(list(text.encode()), (), ()) == left, text
