"""Tests rollout/tokenizer.py: one beginning of sequence, checked ids, no text of the prompt in a completion."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rollout.prompts import Prompt
from rollout.tokenizer import Tokenizer
from sampling.errors import PromptError

HI = [{"role": "user", "content": "hi"}]


def words_tokenizer(*, adds_bos, template):
    """The vocabulary of case B061: <s> is 1, [USER] is 10, hi is 11."""
    vocab = {"<unk>": 0, "<s>": 1, "[USER]": 10, "hi": 11, **{f"w{i}": i for i in range(2, 10)}}
    backend = Backend(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")
    fast.add_special_tokens({"additional_special_tokens": ["[USER]"]})
    fast.chat_template = template
    return Tokenizer(fast)


def byte_tokenizer():
    """One token a byte, ids in the order of the bytes' ByteLevel letters, and <s> at 256."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>"))


BYTES = byte_tokenizer()


def ids_of_bytes(data):
    """Token ids whose bytes are `data`, also where they are no whole code points."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letter_of = {byte: chr(byte) for byte in printable}
    letter_of |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in letter_of)}
    return np.array([letters.index(letter_of[byte]) for byte in data], np.int32)


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("writes_bos", [True, False])
def test_b061_there_is_never_a_second_bos(adds_bos, writes_bos):
    template = ("<s> " if writes_bos else "") + "[USER] {{ messages[0]['content'] }}"
    tokenizer = words_tokenizer(adds_bos=adds_bos, template=template)
    expects_bos = adds_bos or writes_bos
    assert tokenizer.encode_messages(HI) == [1] * expects_bos + [10, 11]
    assert tokenizer.encode_text("hi") == [1] * adds_bos + [11]
    assert tokenizer.encode_text("<s> hi") == [1, 11], "a text that brings its own keeps just that one"


def test_the_template_opens_the_answer():
    template = "[USER] {{ messages[0]['content'] }}{% if add_generation_prompt %} w5{% endif %}"
    assert words_tokenizer(adds_bos=False, template=template).encode_messages(HI) == [10, 11, 5]


def test_each_kind_of_prompt_gets_int32_tokens():
    tokenizer = words_tokenizer(adds_bos=True, template="[USER] {{ messages[0]['content'] }}")
    for prompt, expected in (
        (Prompt("a", text="hi hi"), [1, 11, 11]),
        (Prompt("b", messages=tuple(HI)), [1, 10, 11]),
        (Prompt("c", tokens=(11, 0)), [11, 0]),
    ):
        tokens = tokenizer.tokenize(prompt).prompt_tokens
        assert tokens.dtype == np.int32 and tokens.tolist() == expected


@pytest.mark.parametrize("token", [-1, 12, 2**40])
def test_a_token_outside_the_vocabulary_is_named_with_position_and_range(token):
    tokenizer = words_tokenizer(adds_bos=True, template=None)
    assert len(tokenizer) == 12
    with pytest.raises(PromptError, match=rf"f, line 9: prompt 'p': prompt_tokens\[1\]: .* in \[0, 12\), got {token}"):
        tokenizer.tokenize(Prompt("p", tokens=(11, token), where="f, line 9"))


def test_a_text_without_tokens_is_refused():
    with pytest.raises(PromptError, match="prompt 'p': expected at least one token, got none"):
        words_tokenizer(adds_bos=False, template=None).tokenize(Prompt("p", text=" "))


def test_messages_need_a_template_that_takes_them():
    with pytest.raises(PromptError, match=r"prompt 'p': messages: the tokenizer has no chat template; use 'prompt'"):
        words_tokenizer(adds_bos=True, template=None).tokenize(Prompt("p", messages=tuple(HI)))
    strict = words_tokenizer(adds_bos=True, template="{{ raise_exception('only users') }}")
    with pytest.raises(PromptError, match="prompt 'p': messages: the chat template refused them: only users"):
        strict.tokenize(Prompt("p", messages=tuple(HI)))


def test_special_tokens_can_be_shown_or_skipped():
    tokenizer = words_tokenizer(adds_bos=True, template=None)
    assert tokenizer.decode([1, 11]) == "hi"
    assert tokenizer.decode([1, 11], skip_special=False) == "<s> hi"


def test_b029_a_code_point_split_at_the_border_leaks_no_prompt_text():
    prompt, drawn = ids_of_bytes(bytes.fromhex("686920f09f")), ids_of_bytes(b"\x8d\x95!")
    assert BYTES.completion_text(prompt, drawn) == "🍕!"
    assert "hi " + BYTES.completion_text(prompt, drawn) == BYTES.decode(np.concatenate([prompt, drawn])) == "hi 🍕!"
    for count in range(4):
        assert "hi" not in BYTES.completion_text(prompt, drawn[:count])


def test_a_replacement_character_of_the_prompt_itself_stays_in_the_prompt():
    prompt = ids_of_bytes("hi \N{REPLACEMENT CHARACTER}".encode())
    assert BYTES.completion_text(prompt, ids_of_bytes(b"abc")) == "abc"
    assert BYTES.completion_text(prompt, ids_of_bytes(b"")) == ""


@given(st.binary(min_size=1, max_size=12), st.binary(max_size=12))
def test_a_completion_begins_where_the_settled_text_of_its_prompt_ends(before, after):
    prompt, drawn = ids_of_bytes(before), ids_of_bytes(after)
    whole = BYTES.decode(np.concatenate([prompt, drawn]))
    text = BYTES.completion_text(prompt, drawn)
    assert whole.endswith(text)
    unsettled = "\N{REPLACEMENT CHARACTER}"  # stands for bytes whose code point is not complete, or never will be
    assert whole.removesuffix(text).rstrip(unsettled) == BYTES.decode(prompt).rstrip(unsettled)


def test_b028_text_ends_before_the_stop_string():
    prompt, drawn = ids_of_bytes(b"say "), ids_of_bytes(b"fooEND")
    assert BYTES.text_before_stop(prompt, drawn, ["END"]) == "foo"
    assert BYTES.text_before_stop(prompt, drawn, ["OEND", "END", "oEND"]) == "fo"
    assert BYTES.text_before_stop(prompt, ids_of_bytes(b"fooEN"), ["END"]) == "fooEN"
