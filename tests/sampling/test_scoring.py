"""Scoring by forward passes: the same chain, the same columns, many tokens at a time.

1.  What it gives equals the record within rounding, for every column and mixed policies.
2.  Its own bits do not depend on batch mates, order, or the kind of work that the engine does beside it.
3.  It scores what no policy would have drawn: removed tokens, tokens past an end.
4.  Entropies and supports are those of the distribution that the token was drawn from.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sampling import Engine, Geometry, Request, SamplingParams, StopReason, load_checkpoint
from sampling.capacity import Capacity
from sampling.draw import Distribution
from sampling.errors import ConfigError
from sampling.params import ORDERS
from sampling.scoring import PASS_TOKENS
from tests.sampling.test_engine import GEOMETRY, MIXED, prompt, rows
from tests.sampling.test_engine_policies import random_policy
from tests.tiny_models import tiny_llama

COLUMNS = ("behaviour_logprobs", "model_logprobs", "log_kept_mass", "entropy")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return load_checkpoint(tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def engine(checkpoint):
    return Engine(checkpoint, GEOMETRY, capacity=Capacity(orders=tuple(ORDERS), support=16))


def scoring(completions, params=None):
    """A request that scores completions of one prompt, under their own policy unless another is given."""
    first = completions[0]
    return Request(
        first.prompt_id,
        first.prompt_tokens,
        params or first.params,
        sample_indices=tuple(completion.sample_index for completion in completions),
        given=tuple(completion.completion_tokens for completion in completions),
        forward=True,
    )


def test_forward_scores_are_the_recorded_ones_within_rounding(engine):
    rng = np.random.default_rng(1)
    policies = [random_policy(rng).replace(n=3, record_support=16) for _ in range(40)]
    recorded = list(
        engine.generate([Request(f"p{i}", prompt(i), params, run_seed=3) for i, params in enumerate(policies)])
    )
    drawn, scored = rows(recorded), rows(engine.generate([scoring(group.completions) for group in recorded]))
    assert drawn.keys() == scored.keys()
    for name, row in drawn.items():
        again = scored[name]
        np.testing.assert_array_equal(again.completion_tokens, row.completion_tokens)
        for column in COLUMNS:
            np.testing.assert_allclose(getattr(again, column), getattr(row, column), atol=1e-4, err_msg=column)
        np.testing.assert_array_equal(again.support_sizes, row.support_sizes)
        np.testing.assert_array_equal(again.support_ids, row.support_ids)
        assert again.stop_reason == row.stop_reason and again.ended_at is None is row.ended_at
    assert sum(row.support_ids.size for row in drawn.values()) > 100


def test_forward_bits_do_not_depend_on_company_or_order(engine, compilations):
    completions = [
        c
        for i, params in enumerate(MIXED)
        for c in rows(engine.generate([Request(f"p{i}", prompt(i), params)])).values()
    ]
    alone = {}
    for completion in completions:
        alone |= rows(engine.generate([scoring([completion])]))
    before = len(compilations)
    drawing = [Request(f"d{i}", prompt(i), MIXED[-1]) for i in range(3)]
    together = rows(engine.generate([*drawing, *(scoring([c]) for c in completions[::-1])]))
    for name, row in alone.items():
        for column in COLUMNS:
            ours, theirs = getattr(row, column), getattr(together[name], column)
            np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))
    assert len(compilations) == before


def test_siblings_that_share_a_prompt_score_as_if_alone(engine):
    """Prompts of every length about the lanes', more siblings than rows, prompts that lead into each other."""
    params = MIXED[5].replace(frequency_penalty=0.3)
    asked, alone = [], {}
    for length in (1, 2, 3, 17, 30, 31, 32):
        given = [prompt(40 + i, 1 + 3 * i) for i in range(6)]
        request = Request(
            f"p{length}",
            prompt(3, 32)[:length],
            params,
            sample_indices=tuple(range(6)),
            given=tuple(given),
            forward=True,
        )
        asked.append(request)
        for i in range(6):
            one = Request(
                request.prompt_id, request.prompt_tokens, params, sample_indices=(i,), given=(given[i],), forward=True
            )
            alone |= rows(engine.generate([one]))
    together = rows(engine.generate(asked))
    assert together.keys() == alone.keys()
    for name, row in alone.items():
        for column in COLUMNS:
            ours, theirs = getattr(row, column), getattr(together[name], column)
            np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


def test_an_engine_that_grows_while_it_scores_loses_nothing(checkpoint):
    engine = Engine(checkpoint, GEOMETRY)
    asked = [Request(f"p{i}", prompt(i), given=(prompt(i + 9, 25),), forward=True) for i in range(9)]
    before = rows(engine.generate(asked))
    for request in asked:
        engine.submit(request)
    early = rows(engine.step())
    assert len(early) < len(asked)
    wider = SamplingParams(top_k=20, record_support=20, max_new_tokens=2)
    after = early | rows(engine.generate([Request("larger", prompt(1), wider)]))
    assert after.keys() == before.keys() | {("larger", 0)}
    for name, row in before.items():
        np.testing.assert_array_equal(row.behaviour_logprobs, after[name].behaviour_logprobs)


def test_what_the_policy_removes_or_ends_is_scored_all_the_same(engine):
    """A removed token has log-prob -inf and counts as out of the support; the first overrun end is named."""
    params = SamplingParams(max_new_tokens=4, stop_token_ids=[6], suppress_tokens=[7], record_support=16)
    request = Request("p", prompt(3), params, given=([5, 6, 7, 8],))
    for asked in (request, Request("p", prompt(3), params, given=request.given, forward=True)):
        row = rows(engine.generate([asked]))["p", 0]
        assert np.isneginf(row.behaviour_logprobs).tolist() == [False, False, True, False]
        assert np.isfinite(row.model_logprobs).all() and np.isfinite(row.entropy).all()
        assert row.ended_at == 1 and row.stop_reason == StopReason.LENGTH
    stopped = Request("p", prompt(3), params, given=([5, 6],), forward=True)
    assert rows(engine.generate([stopped]))["p", 0].stop_reason == StopReason.STOP_TOKEN


def test_model_log_probs_are_those_of_the_plain_model(engine, checkpoint):
    """Against one forward over the whole sequence, without cache, chain or chunks."""
    long = np.concatenate([prompt(3, 12), prompt(4, 35)])
    row = rows(engine.generate([Request("p", long[:12], MIXED[-1], given=(long[12:],), forward=True)]))["p", 0]
    hidden, _ = engine._model.apply({"params": checkpoint.params}, long[None], jnp.arange(47)[None])
    logits = engine._model.apply({"params": checkpoint.params}, hidden[0, 11:46], method="logits")
    expected = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), long[12:, None], axis=1)[:, 0]
    np.testing.assert_allclose(row.model_logprobs, expected, atol=1e-5)


def test_a_request_to_score_nothing_is_refused():
    with pytest.raises(ConfigError, match="forward: expected given tokens to score, got none"):
        Request("p", [5], forward=True)
    with pytest.raises(ConfigError, match=r"expected keys of uint32 \[2\], got int64 \[2\]"):
        Request("p", [5], keys=([1, 2],))
    with pytest.raises(ConfigError, match="expected keys for each of 2 samples, got 1"):
        Request("p", [5], SamplingParams(n=2), keys=(np.zeros(2, np.uint32),))


def test_a_given_key_draws_what_its_owner_drew(engine):
    original = rows(engine.generate([Request("a", prompt(3), MIXED[-1], run_seed=8, sample_indices=(4,))]))["a", 4]
    same = rows(engine.generate([Request("b", prompt(3), MIXED[-1], keys=(original.key,))]))["b", 0]
    np.testing.assert_array_equal(same.completion_tokens, original.completion_tokens)


def test_supports_are_recorded_where_asked_for_and_small_enough(engine):
    """top_k 5 keeps five ids; the model's own distribution keeps far more than the limit."""
    policies = {
        "five": SamplingParams(top_k=5, record_support=5, max_new_tokens=8),
        "too many": SamplingParams(top_k=6, record_support=5, max_new_tokens=8),
        "all": SamplingParams(record_support=5, max_new_tokens=8),
        "greedy": SamplingParams(temperature=0, record_support=5, max_new_tokens=8),
        "unasked": SamplingParams(top_k=5, max_new_tokens=8),
    }
    found = rows(engine.generate([Request(name, prompt(2), params) for name, params in policies.items()]))
    sizes = {name: set(found[name, 0].support_sizes.tolist()) for name in policies}
    assert sizes == {"five": {5}, "too many": {0}, "all": {0}, "greedy": {1}, "unasked": {0}}
    five = found["five", 0]
    ids = five.support_ids.reshape(-1, 5)
    assert (np.diff(ids) > 0).all() and (ids == five.completion_tokens[:, None]).any(axis=1).all()
    np.testing.assert_array_equal(found["greedy", 0].support_ids, found["greedy", 0].completion_tokens)
    unasked = found["unasked", 0]
    assert unasked.support_ids.size == 0
    short = engine.generate([Request("five", prompt(2), policies["unasked"])])
    np.testing.assert_array_equal(rows(short)["five", 0].completion_tokens, five.completion_tokens)


def test_a_wider_support_grows_the_engine_and_changes_no_row(checkpoint):
    engine = Engine(checkpoint, GEOMETRY)
    plain = SamplingParams(top_k=20, max_new_tokens=30, ignore_eos=True)
    before = rows(engine.generate([Request("p", prompt(1, 10), plain)]))["p", 0]
    engine.submit(Request("p", prompt(1, 10), plain))
    assert engine.step() == []  # under way while the tables grow
    after = rows([*engine.generate([Request("q", prompt(2), plain.replace(record_support=20))])])
    np.testing.assert_array_equal(after["p", 0].completion_tokens, before.completion_tokens)
    assert set(after["q", 0].support_sizes.tolist()) == {20}


def test_b024_b025_entropy_is_of_the_final_distribution():
    """Tempered scores, not raw ones; removed tokens make neither the value nor its gradient NaN."""
    tempered = jnp.array([[4.0, 2.0, 0.0]])
    assert Distribution.of(tempered).entropy()[0] == pytest.approx(0.441057, abs=1e-6)
    masked = jnp.array([[1.0, 0.0, -jnp.inf]])
    assert Distribution.of(masked).entropy()[0] == pytest.approx(0.582203, abs=1e-6)
    gradient = jax.grad(lambda scores: Distribution.of(scores).entropy().sum())(masked)
    np.testing.assert_allclose(gradient[0], [-0.196612, 0.196612, 0.0], atol=1e-6)
    only = jnp.array([[-jnp.inf, 3.0, -jnp.inf]])
    assert Distribution.of(only).entropy()[0] == 0.0


def test_sequences_longer_than_a_pass_are_scored_whole(checkpoint):
    """One that takes more than a pass alone, beside short ones, against their replays."""
    engine = Engine(checkpoint, Geometry(slots=4, cache_len=320, prefill_chunk=8))
    assert PASS_TOKENS < 300
    params = SamplingParams(frequency_penalty=0.3, no_repeat_ngram_size=3)
    asked = [
        Request(f"p{size}", prompt(size), params.replace(max_new_tokens=size), given=(prompt(size, size),))
        for size in (300, 5, 40)
    ]
    replayed = rows(engine.generate(asked))
    scored = rows(engine.generate(dataclasses.replace(request, forward=True) for request in asked))
    for name, row in scored.items():
        np.testing.assert_array_equal(row.completion_tokens, replayed[name].completion_tokens)
        np.testing.assert_allclose(row.behaviour_logprobs, replayed[name].behaviour_logprobs, atol=1e-4)
