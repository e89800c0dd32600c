"""Every parameter through the engine: one program for all policies, each row as if alone, growth, and ways to end."""

import dataclasses
import logging

import numpy as np
import pytest

from sampling import Engine, Geometry, Request, SamplingParams, StopReason, load_checkpoint
from sampling.capacity import Capacity
from sampling.errors import ConfigError
from sampling.params import ORDERS
from tests.sampling.test_engine import assert_same_bits, prompt, rows
from tests.tiny_models import EOS_ID, PAD_ID, TOKENIZER_LEN, tiny_llama

GEOMETRY = Geometry(slots=8, cache_len=48, prefill_chunk=8)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return load_checkpoint(tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def engine(checkpoint):
    return Engine(checkpoint, GEOMETRY, capacity=Capacity(orders=tuple(ORDERS)))


def random_policy(rng):
    """Every parameter with a chance of a quarter, and all orders."""

    def ids(most):
        return rng.choice(np.arange(4, TOKENIZER_LEN), rng.integers(1, most), replace=False).tolist()

    choices = {
        "temperature": lambda: float(rng.choice([0.0, 0.3, 0.7, 1.3])),
        "top_k": lambda: int(rng.integers(1, 100)),
        "top_p": lambda: float(rng.uniform(0.1, 1)),
        "min_p": lambda: float(rng.uniform(0, 0.3)),
        "typical_p": lambda: float(rng.uniform(0.2, 1)),
        "epsilon_cutoff": lambda: float(rng.uniform(0, 0.01)),
        "eta_cutoff": lambda: float(rng.uniform(0, 0.01)),
        "top_h": lambda: float(rng.uniform(0.2, 1)),
        "repetition_penalty": lambda: float(rng.uniform(0.8, 1.5)),
        "prompt_repetition_penalty": lambda: float(rng.uniform(0.8, 1.5)),
        "frequency_penalty": lambda: float(rng.uniform(-1, 2)),
        "presence_penalty": lambda: float(rng.uniform(-1, 2)),
        "no_repeat_ngram_size": lambda: int(rng.integers(1, 5)),
        "prompt_no_repeat_ngram_size": lambda: int(rng.integers(1, 4)),
        "logit_bias": lambda: {token: float(rng.normal()) for token in ids(20)},
        "sequence_bias": lambda: [(ids(4), float(rng.normal() * 3))],
        "bad_words": lambda: [ids(3), ids(4)],
        "suppress_tokens": lambda: ids(20),
        "begin_suppress_tokens": lambda: ids(20),
        "min_new_tokens": lambda: int(rng.integers(1, 6)),
        "min_length": lambda: int(rng.integers(1, 20)),
        "max_length": lambda: int(rng.integers(25, 40)),
        "stop": lambda: [chr(rng.integers(97, 123)), "the"],
        "exponential_decay_length_penalty": lambda: (int(rng.integers(0, 5)), float(rng.uniform(1, 1.5))),
        "renormalize": lambda: True,
        "remove_invalid_values": lambda: True,
    }
    chosen = {name: make() for name, make in choices.items() if rng.random() < 0.25}
    return SamplingParams(**chosen, max_new_tokens=int(rng.integers(6, 14)), order=str(rng.choice(list(ORDERS))))


def test_two_hundred_random_policies_share_one_program(engine, compilations):
    rng = np.random.default_rng(0)
    requests = [Request(f"p{i}", prompt(i), random_policy(rng), run_seed=3) for i in range(200)]
    list(engine.generate(requests[:8]))
    programs = engine.stats().programs_compiled
    compilations.clear()
    together = {}
    for start in range(0, 200, 8):
        together |= rows(engine.generate(requests[start : start + 8]))
    for request in requests:
        name = (request.prompt_id, 0)
        assert_same_bits(rows(engine.generate([request])), {name: together[name]})
    assert compilations == [] and engine.stats().programs_compiled == programs
    assert {row.stop_reason for row in together.values()} >= {StopReason.LENGTH, StopReason.STOP_STRING}


def test_growth_compiles_once_says_so_and_changes_no_row(checkpoint, caplog):
    engine = Engine(checkpoint, GEOMETRY)
    plain = Request("plain", prompt(1), SamplingParams(max_new_tokens=20, ignore_eos=True, top_p=0.9, n=3))
    before = rows(engine.generate([plain]))
    assert engine.stats().programs_compiled == 3
    engine.submit(plain)
    engine.step()  # under way while the engine grows
    large = SamplingParams(logit_bias={i: 0.5 for i in range(4, 104)}, order="vllm", max_new_tokens=5)
    with caplog.at_level(logging.WARNING):
        engine.submit(Request("large", prompt(2), large))
    assert engine.stats().programs_compiled == 5
    assert "compiling once more" in caplog.text and "biases=128" in caplog.text
    found = {}
    while not engine.idle:
        found |= rows(engine.step())
    assert_same_bits(before, {name: row for name, row in found.items() if name[0] == "plain"})
    engine.submit(Request("small", prompt(2), large.replace(logit_bias={4: 1.0})))
    assert engine.stats().programs_compiled == 5


@pytest.mark.parametrize("minimum", range(6))
def test_end_of_sequence_is_released_on_time(engine, minimum):
    """Case B032: with a large bias on EOS a row has exactly min_new_tokens + 1 tokens, whatever the prompt's length."""
    params = SamplingParams(min_new_tokens=minimum, max_new_tokens=20, logit_bias={EOS_ID: 50.0})
    found = rows(engine.generate([Request(f"p{n}", prompt(n, n), params) for n in (1, 6, 13)]))
    for row in found.values():
        assert len(row.completion_tokens) == minimum + 1
        assert row.stop_reason == StopReason.EOS and row.completion_tokens[-1] == EOS_ID


def test_a_stop_string_ends_the_row_where_its_bytes_are_complete(engine):
    free = SamplingParams(max_new_tokens=30, ignore_eos=True)
    row = rows(engine.generate([Request("p", prompt(1, 10), free)]))["p", 0]
    text = engine._vocabulary.text_bytes(row.completion_tokens).decode("utf-8", "replace")
    stop = next(text[i : i + 2] for i in range(4, len(text)) if text[i : i + 2].isascii())
    stopped = rows(engine.generate([Request("p", prompt(1, 10), free.replace(stop=stop))]))["p", 0]
    length = len(stopped.completion_tokens)
    assert stopped.stop_reason == StopReason.STOP_STRING
    np.testing.assert_array_equal(stopped.completion_tokens, row.completion_tokens[:length])
    found = engine._vocabulary.text_bytes(stopped.completion_tokens)
    assert stop.encode() in found
    assert stop.encode() not in engine._vocabulary.text_bytes(stopped.completion_tokens[:-1])

    held = free.replace(stop=stop, min_new_tokens=length + 3)
    longer = rows(engine.generate([Request("p", prompt(1, 10), held)]))["p", 0]
    assert len(longer.completion_tokens) > length


def test_stop_ids_end_with_their_own_reason(engine):
    free = SamplingParams(max_new_tokens=12, ignore_eos=True)
    row = rows(engine.generate([Request("p", prompt(1, 10), free)]))["p", 0]
    token = int(row.completion_tokens[4])
    stopped = rows(engine.generate([Request("p", prompt(1, 10), free.replace(stop_token_ids=[token]))]))["p", 0]
    assert stopped.stop_reason == StopReason.STOP_TOKEN
    assert stopped.completion_tokens[-1] == token and token not in stopped.completion_tokens[:-1]
    assert len(stopped.behaviour_logprobs) == len(stopped.completion_tokens)


def test_control_tokens_are_not_drawn_unless_asked_for(engine):
    eager = SamplingParams(max_new_tokens=12, n=8, logit_bias={0: 9.0, 1: 9.0, PAD_ID: 9.0})
    masked = eager.replace(suppress_control_tokens=True)
    assert {0, 1, PAD_ID} <= drawn_ids(engine, eager)
    assert drawn_ids(engine, masked) & {0, 1, PAD_ID} == set()
    assert drawn_ids(engine, masked.replace(stop_token_ids=[1])) & {0, 1, PAD_ID} == {1}
    assert EOS_ID in drawn_ids(engine, masked.replace(logit_bias={EOS_ID: 9.0}))
    assert EOS_ID not in drawn_ids(engine, masked.replace(logit_bias={EOS_ID: 9.0}, ignore_eos=True))
    request = Request("p", prompt(1, 10), masked)
    found = rows(engine.generate([request]))
    (resolved,) = {row.params for row in found.values()}
    assert resolved.suppress_control_tokens and resolved.suppress_tokens == (0, 1, PAD_ID)
    assert_same_bits(rows(engine.generate([dataclasses.replace(request, params=resolved)])), found)


def drawn_ids(engine, params):
    found = rows(engine.generate([Request("p", prompt(1, 10), params)])).values()
    return set(np.concatenate([row.completion_tokens for row in found]).tolist())


def test_every_end_leaves_arrays_of_one_length(engine):
    """Case B031: the token that ends a row stays in it, with its log-prob, whatever the reason."""
    ends = {
        StopReason.EOS: {"logit_bias": {EOS_ID: 50.0}},
        StopReason.STOP_TOKEN: {"logit_bias": {9: 50.0}, "stop_token_ids": [9]},
        StopReason.STOP_STRING: {"logit_bias": {69: 50.0}, "stop": engine._vocabulary.text_bytes([69]).decode()},
        StopReason.LENGTH: {"ignore_eos": True},
        StopReason.CACHE_FULL: {"ignore_eos": True, "max_new_tokens": 500},
    }
    for reason, params in ends.items():
        asked = Request("p", prompt(1, 10), SamplingParams(**{"max_new_tokens": 5, **params}))
        row = rows(engine.generate([asked]))["p", 0]
        assert row.stop_reason == reason
        columns = (row.completion_tokens, row.behaviour_logprobs, row.model_logprobs, row.log_kept_mass)
        assert {len(column) for column in (*columns, row.policy_versions)} == {len(row.completion_tokens)}
        assert len(row.completion_tokens) > 0
    assert row.completion_tokens.size == 48 - 10


def test_forced_ends_and_limits(engine):
    forced = SamplingParams(max_new_tokens=7, forced_eos=9, ignore_eos=True)
    row = rows(engine.generate([Request("p", prompt(1, 10), forced)]))["p", 0]
    assert len(row.completion_tokens) == 7 and row.completion_tokens[-1] == 9
    assert row.behaviour_logprobs[-1] == 0.0
    short = rows(engine.generate([Request("p", prompt(1, 10), forced.replace(max_length=14))]))["p", 0]
    assert len(short.completion_tokens) == 4 and short.completion_tokens[-1] == 9
    assert short.stop_reason == StopReason.LENGTH
    begun = rows(engine.generate([Request("p", [5], SamplingParams(forced_bos=8, max_new_tokens=3))]))["p", 0]
    assert begun.completion_tokens[0] == 8


def test_allowed_and_banned_tokens(engine):
    few = SamplingParams(allowed_token_ids=[5, 6, 7], suppress_tokens=[6], max_new_tokens=30, ignore_eos=True)
    row = rows(engine.generate([Request("p", prompt(1, 5), few)]))["p", 0]
    assert set(row.completion_tokens.tolist()) == {5, 7}


def test_a_banned_word_does_not_occur(engine):
    free = SamplingParams(max_new_tokens=30, ignore_eos=True, temperature=0.5, n=4)
    found = rows(engine.generate([Request("p", prompt(1, 5), free)]))
    words = ["e", [int(found["p", 0].completion_tokens[3])]]
    banned = rows(engine.generate([Request("p", prompt(1, 5), free.replace(bad_words=words))]))
    for row in banned.values():
        assert row.params.bad_words[-1] == (int(found["p", 0].completion_tokens[3]),)
        assert not set(row.completion_tokens.tolist()) & {word[0] for word in row.params.bad_words if len(word) == 1}


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"logit_bias": {TOKENIZER_LEN: 1.0}}, f"sampling.logit_bias: expected token ids in 0 .. {TOKENIZER_LEN - 1}"),
        ({"suppress_tokens": [99999]}, "sampling.suppress_tokens"),
        ({"sequence_bias": [([5, 99999], 1.0)]}, "sampling.sequence_bias"),
        ({"forced_eos": 99999}, "sampling.forced_eos"),
        ({"forced_bos": 99999}, "sampling.forced_bos"),
        ({"max_length": 10}, "expected more than the prompt's 10 tokens, got 10"),
    ],
)
def test_ids_that_are_no_token_are_refused(engine, params, says):
    with pytest.raises(ConfigError, match=says):
        engine.submit(Request("p", prompt(1, 10), SamplingParams(**params)))
    assert engine.idle
