"""Tests rollout/prompts.py: one row becomes one prompt, or an error that says where and why."""

import numpy as np
import pytest

from rollout.prompts import Prompt
from sampling.errors import PromptError
from sampling.params import SamplingParams


def test_each_kind_of_row_is_read():
    text = Prompt.from_row({"id": "a", "prompt": "hi", "n": 2, "metadata": {"k": [1]}}, 0, "f")
    assert (text.id, text.text, text.messages, text.tokens, text.n, text.metadata) == (
        "a", "hi", None, None, 2, {"k": [1]},
    )  # fmt: skip
    chat = Prompt.from_row({"messages": [{"role": "user", "content": "hi"}]}, 4, "f")
    assert (chat.id, chat.messages) == ("4", ({"role": "user", "content": "hi"},))
    ids = Prompt.from_row({"prompt_tokens": [0, 7], "id": 12}, 0, "f")
    assert (ids.id, ids.tokens) == ("12", (0, 7))


@pytest.mark.parametrize("tokens", [[1, 2], (1, 2), np.array([1, 2], np.int32), [np.int64(1), 2]])
def test_token_ids_come_in_any_sequence(tokens):
    """So that the tokens of a record can be sampled on from."""
    prompt = Prompt("a", tokens=tokens)
    assert prompt == Prompt.from_row({"id": "a", "prompt_tokens": tokens}, 0, "f") == Prompt("a", tokens=(1, 2))
    assert [type(token) for token in prompt.tokens] == [int, int]


@pytest.mark.parametrize("given", [5, None, ""])
def test_an_id_is_text(given):
    with pytest.raises(PromptError, match=f"id: expected text that is not empty, got {given!r}"):
        Prompt(given, "hi")


def test_a_long_id_does_not_fill_the_screen():
    with pytest.raises(PromptError) as caught:
        Prompt("x" * 100_000)
    assert len(str(caught.value)) < 400


def test_null_means_absent():
    assert Prompt.from_row({"prompt": "hi", "messages": None, "n": None, "id": None}, 3, "f") == Prompt("3", "hi")


def test_own_parameters_are_judged_together_with_the_runs():
    run = SamplingParams(thinking_start=[5], thinking_end=[6], max_new_tokens=900)
    for own in ({"thinking_budget": 3}, {"min_new_tokens": 800}):
        prompt = Prompt.from_row({"prompt": "hi", "sampling": own}, 0, "f")
        assert prompt.params(run) == run.replace(**own)
        with pytest.raises(PromptError, match="contradicts"):
            prompt.params(SamplingParams())


def test_own_parameters_replace_the_runs():
    prompt = Prompt.from_row({"prompt": "hi", "n": 5, "sampling": {"temperature": 0, "top_k": 3}}, 0, "f")
    base = SamplingParams(top_p=0.5, n=2, temperature=0.7)
    assert prompt.params(base) == SamplingParams(top_p=0.5, n=5, temperature=0.0, top_k=3)
    assert Prompt("p", "hi").params(base) == base


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "expected exactly one of prompt, messages, prompt_tokens, got none of them"),
        ({"prompt": "a", "prompt_tokens": [1]}, "expected exactly one of .*, got prompt and prompt_tokens"),
        ({"prompt": ""}, "prompt: empty; a model needs at least one token"),
        ({"messages": []}, "messages: empty"),
        ({"prompt_tokens": []}, "prompt_tokens: empty"),
        ({"prompt": 3}, "prompt: expected text, got 3"),
        ({"prompt": "\ud800"}, r"prompt: expected text that UTF-8 can hold, got a lone surrogate in '\\ud800'"),
        ({"prompt": "a", "id": "b\ud800"}, r"id: expected text that UTF-8 can hold, got a lone surrogate"),
        ({"prompt": "a", "id": [1]}, r"id: expected text or a whole number, got \[1\]"),
        ({"prompt_tokens": "12"}, "prompt_tokens: expected a list, got '12'"),
        ({"prompt_tokens": 12}, "prompt_tokens: expected a list, got 12"),
        ({"prompt_tokens": np.array([1.0])}, r"prompt_tokens\[0\]: expected a token id, got 1.0"),
        ({"prompt_tokens": np.array([[1]])}, r"prompt_tokens\[0\]: expected a token id, got \[1\]"),
        ({"prompt": "a", "n": 65_537}, "sampling.n: expected at most 65536, got 65537; give the prompt several times"),
        ({"prompt": "a", "n": 10**30}, "sampling.n: expected a.*, got 10{30}"),
        ({"prompt": "a", "sampling": {1: 2}}, "sampling: expected text as keys, got 1"),
        ({"prompt": "a", "sampling": [1]}, r"sampling: expected an object, got \[1\]"),
        (b"ab", "expected an object with id, prompt, .*, got b'ab'"),
        (None, "expected an object with id, prompt, .*, got None"),
        ({"messages": "hi"}, "messages: expected a list, got 'hi'"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\]: expected an object with 'role' and 'content'"),
        ({"prompt_tokens": [1, "2"]}, r"prompt_tokens\[1\]: expected a token id, got '2'"),
        ({"prompt_tokens": [True]}, r"prompt_tokens\[0\]: expected a token id, got True"),
        ({"prompt": "a", "id": 1.5}, "id: expected text or a whole number, got 1.5"),
        ({"prompt": "a", "id": ""}, "id: expected text that is not empty"),
        ({"prompt": "a", "answer": 1}, "unknown field 'answer'; known are id, prompt, .* under 'metadata'"),
        ({"prompt": "a", "metadata": [1]}, r"metadata: expected an object, got \[1\]"),
        ({"prompt": "a", "metadata": {"x": float("nan")}}, "metadata.x: expected a finite number"),
        ({"prompt": "a", "n": 0}, "sampling.n: expected a whole number, at least 1, got 0"),
        ({"prompt": "a", "n": 2, "sampling": {"n": 3}}, "n is given twice"),
        ({"prompt": "a", "sampling": {"top_p": 0}}, r"sampling.top_p: expected a number in \(0, 1\]"),
        ({"prompt": "a", "sampling": {"temperature": -1}}, "sampling.temperature: expected a finite number >= 0"),
        ({"prompt": "a", "sampling": {"top_q": 1}}, "sampling.top_q: no such parameter"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused_with_its_place(row, message):
    with pytest.raises(PromptError, match=f"prompts.jsonl, line 3: .*{message}|prompts.jsonl, line 3: {message}"):
        Prompt.from_row(row, 2, "prompts.jsonl, line 3")


@pytest.mark.parametrize("first", [-1, True, 1.0, 2**31])
def test_a_first_sample_that_is_none_is_refused(first):
    with pytest.raises(PromptError, match="prompt 'a': first_sample: expected a whole number in 0"):
        Prompt("a", "hi", first_sample=first)
