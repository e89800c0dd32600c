"""sampling/transforms/ngrams.py"""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import EncoderNoRepeatNGramLogitsProcessor, NoRepeatNGramLogitsProcessor

from sampling.state import StepState
from sampling.transforms import NoRepeatNGram, PromptNoRepeatNGram
from tests.sampling.transforms.live import assert_equal, batches, each_row, jitted, many

sizes = st.integers(1, 5) | st.integers(1, 30)


@given(batches(), each_row(sizes))
@many
def test_no_repeat_ngram_equals_transformers(batch, values):
    assert_equal(batch.ours(NoRepeatNGram(np.int32(values))), batch.theirs(map(NoRepeatNGramLogitsProcessor, values)))


@given(batches(), each_row(sizes))
@many
def test_prompt_no_repeat_ngram_equals_transformers(batch, values):
    pairs = zip(values, batch.prompts, strict=True)
    theirs = batch.theirs(EncoderNoRepeatNGramLogitsProcessor(n, torch.tensor([prompt])) for n, prompt in pairs)
    assert_equal(batch.ours(PromptNoRepeatNGram(np.int32(values))), theirs)


def banned_by_loop(tokens, size):
    """The ids that would complete an n-gram which `tokens` already holds, in the plainest way."""
    suffix = tokens[len(tokens) - size + 1 :]
    grams = [tokens[i : i + size] for i in range(len(tokens) - size + 1)]
    return sorted({gram[-1] for gram in grams if gram[:-1] == suffix})


def test_the_suffix_is_that_of_the_tokens_not_of_the_buffer():
    """Case B013: after (4, 5) came 6; what fills the rest of the buffer does not count, at any length."""
    buffer = [4, 5, 6, 4, 5, 0, 0, 0]
    lengths = range(1, len(buffer) + 1)
    rows = StepState.from_histories([buffer[:n] for n in lengths], [[]] * 8, len(buffer), vocab_size=8)
    removed = np.isneginf(jitted(NoRepeatNGram(3), rows, np.zeros((8, 8), np.float32)))
    assert np.flatnonzero(removed[4]).tolist() == [6]
    assert [np.flatnonzero(row).tolist() for row in removed] == [banned_by_loop(buffer[:n], 3) for n in lengths]


def test_sizes_beyond_any_declared_maximum():
    """The search goes as far back as the largest size in the batch asks for: 20 repeated tokens and then another."""
    gram = list(range(20))
    rows = StepState.from_histories([gram + gram[:-1], [7, *gram[1:], *gram[:-1]]], [[]] * 2, vocab_size=20)
    removed = np.isneginf(jitted(NoRepeatNGram(20), rows, np.zeros((2, 20), np.float32)))
    assert [np.flatnonzero(row).tolist() for row in removed] == [[19], []]
