"""sampling/stop_strings.py: the text that a match leaves depends on the text alone, however it is cut into tokens."""

import itertools

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling import StepState
from sampling.stop_strings import StopStrings, encode_stop_strings, find_stop
from sampling.vocabulary import Vocabulary
from tests.sampling.test_stop_strings import PATTERN_LEN, STRINGS, check, reference


def cut(text, places):
    """Bytes cut into pieces at some places, which may repeat."""
    return [text[a:b] for a, b in itertools.pairwise([0, *sorted(places), len(text)])]


def test_end_in_every_split_of_its_text():
    """Case B028: 'fooEND bar', cut into tokens in each of 512 ways."""
    text = b"fooEND bar"
    pieces = [text[a:b] for a, b in itertools.combinations(range(len(text) + 1), 2)]
    vocabulary = Vocabulary.from_pieces(pieces)
    places = [cuts for n in range(len(text)) for cuts in itertools.combinations(range(1, len(text)), n)]
    rows = [[pieces.index(piece) for piece in cut(text, cuts)] for cuts in places]
    assert len(rows) == 512

    table = encode_stop_strings("END", STRINGS, PATTERN_LEN)
    rule = StopStrings(*table, vocabulary)
    stopped_at = [0] * len(rows)
    for count in range(1, len(text) + 1):
        prefixes = [row[:count] for row in rows]
        state = StepState.from_histories([[]] * len(rows), prefixes, len(text), vocab_size=len(pieces))
        found = check(rule, state, jnp.int32([row[-1] for row in prefixes])).tolist()
        for i, now in enumerate(found):
            stopped_at[i] = stopped_at[i] or now * len(prefixes[i])

    for row, count in zip(rows, stopped_at, strict=True):
        assert len(vocabulary.text_bytes(row[: count - 1])) < len(b"fooEND") <= len(vocabulary.text_bytes(row[:count]))
        match = find_stop(vocabulary, [], row[:count], ["END"])
        assert (match.string, match.start, match.end) == ("END", 3, 6)
        assert (match.excluded, match.included) == ("foo", "fooEND")


def test_a_prompt_that_ends_inside_a_code_point_gives_it_to_the_completion():
    """Case B029."""
    vocabulary = Vocabulary.from_pieces([b"hi \xf0\x9f", b"\x8d", b"\x95", b"!"])
    match = find_stop(vocabulary, [0], [1, 2, 3], "!")
    assert (match.excluded, match.included) == ("🍕", "🍕!")
    split = Vocabulary.from_pieces([b"hi ", b"\xf0", b"\x9f", b"\x8d", b"\x95!"])
    assert find_stop(split, [0, 1, 2, 3], [4], "!").excluded == "🍕"
    match = find_stop(vocabulary, [0], [1, 2], ["🍕"])
    assert (match.start, match.end, match.excluded, match.included) == (-2, 2, "", "🍕")


def test_a_match_that_begins_in_the_prompt_leaves_no_text():
    vocabulary = Vocabulary.from_pieces([b"fooE", b"ND bar"])
    match = find_stop(vocabulary, [0] * 50, np.int32([1]), ["END"])
    assert (match.string, match.start, match.end) == ("END", -1, 2)
    assert (match.excluded, match.included) == ("", "ND")


def test_the_match_completed_first_wins_and_of_those_the_longest():
    vocabulary = Vocabulary.from_pieces([b"the END of it"])
    for strings in itertools.permutations(["ND", "END", "of", " END of"]):
        assert find_stop(vocabulary, [], [0], strings).string == "END"
    assert find_stop(vocabulary, [], [0], ["t", "e E"]).included == "t"
    assert find_stop(vocabulary, [0], [0], ["tt"]).included == "t"


def test_no_match_where_the_row_did_not_stop():
    vocabulary = Vocabulary.from_pieces([b"END", b"x", b""])
    assert find_stop(vocabulary, [], [0, 1], ["END"]) is None
    assert find_stop(vocabulary, [0], [], ["END"]) is None
    assert find_stop(vocabulary, [0], [2], ["END"]) is None
    assert find_stop(vocabulary, [], [0], []) is None


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abé", min_size=1, max_size=10),
    strings=st.lists(st.text("abé", min_size=1, max_size=3), min_size=1, max_size=3),
    data=st.data(),
)
def test_the_text_does_not_depend_on_the_split(text, strings, data):
    whole = text.encode()
    prompt_len = data.draw(st.integers(0, len(whole)))

    def read(pieces):
        """Tokens until the rule fires, and what is left; pieces have bytes, so none is passed over."""
        vocabulary = Vocabulary.from_pieces([whole[:prompt_len] or b"-", *pieces])
        ids = [0] if prompt_len else []
        for count in range(1, len(pieces) + 1):
            drawn = list(range(1, count + 1))
            match = find_stop(vocabulary, ids, drawn, strings)
            assert (match is not None) == reference([whole[:prompt_len] or b"-", *pieces], [*ids, *drawn], strings)
            if match:
                return match
        return None

    completion = whole[prompt_len:]
    places = data.draw(st.sets(st.integers(1, max(len(completion) - 1, 1)), max_size=6))
    pieces = [piece for piece in cut(completion, places) if piece]
    assert read(pieces) == read([bytes([byte]) for byte in completion])
