"""sampling/engine.py on a tiny random model: what the service promises of a row, held to the bit.

1.  A row's tokens and log-probs do not depend on batch mates, slot, order of arrival, earlier tenants of its slot,
    group size, or the moment of admission.
2.  They depend on seed, prompt id and sample index.
3.  Policies of all kinds share one batch, each row as if alone, and nothing compiles after the engine is made.
4.  Greedy rows have behaviour log-prob exactly 0; every step's distribution sums to one.
5.  Decoding through the cache equals a full forward.
6.  Every way to end that exists here is reached and named.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sampling import Engine, Geometry, Request, SamplingParams, StopReason, load_checkpoint
from sampling.errors import ConfigError, PromptError
from sampling.models import Transformer
from sampling.policy import lower
from sampling.state import StepState
from tests.tiny_models import TOKENIZER_LEN, tiny_llama

GEOMETRY = Geometry(slots=8, cache_len=48, prefill_rows=2, prefill_chunk=32)

MIXED = [
    SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.3, max_new_tokens=12, ignore_eos=True),
    SamplingParams(top_k=5, max_new_tokens=12, ignore_eos=True),
    SamplingParams(top_p=0.5, max_new_tokens=12, ignore_eos=True),
    SamplingParams(min_p=0.2, temperature=1.5, max_new_tokens=12, ignore_eos=True),
    SamplingParams(top_k=100, top_p=0.9, min_p=0.01, temperature=0.8, max_new_tokens=12, ignore_eos=True),
    SamplingParams(max_new_tokens=12, ignore_eos=True),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return load_checkpoint(tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def engine(checkpoint):
    return Engine(checkpoint, GEOMETRY)


def prompt(i, length=None):
    rng = np.random.default_rng(i)
    return rng.integers(4, TOKENIZER_LEN, length or rng.integers(1, 20))


def request(i, params=MIXED[-1], **fields):
    return Request(f"p{i}", prompt(i), params, run_seed=5, **fields)


def rows(groups):
    return {(c.prompt_id, c.sample_index): c for group in groups for c in group.completions}


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name in one:
        a, b = one[name], other[name]
        np.testing.assert_array_equal(a.completion_tokens, b.completion_tokens)
        for field in (
            "behaviour_logprobs",
            "model_logprobs",
            "log_kept_mass",
            "entropy",
            "support_sizes",
            "support_ids",
        ):
            np.testing.assert_array_equal(getattr(a, field).view(np.uint32), getattr(b, field).view(np.uint32))
        assert a.stop_reason == b.stop_reason


@pytest.fixture(scope="module")
def alone(engine):
    """Each mixed policy's row, alone in the engine."""
    return {i: rows(engine.generate([request(i, params)])) for i, params in enumerate(MIXED)}


def test_mixed_policies_draw_each_row_as_if_alone_and_compile_nothing(engine, alone, compilations):
    jax.jit(lambda x: x * 3 + 1)(np.float32(2))
    assert len(compilations) == 1  # the counter counts
    together = rows(engine.generate([request(i, params) for i, params in enumerate(MIXED)]))
    assert len(compilations) == 1
    assert engine.stats().programs_compiled == 3
    for i in alone:
        assert_same_bits(alone[i], {name: row for name, row in together.items() if name[0] == f"p{i}"})


def test_order_of_arrival_and_crowding_change_nothing(engine, alone):
    crowd = [request(100 + i, SamplingParams(n=3, max_new_tokens=5 + i)) for i in range(6)]
    for order in (1, -1):
        requests = [*crowd[:3], *[request(i, params) for i, params in enumerate(MIXED)], *crowd[3:]][::order]
        found = rows(engine.generate(requests))
        for i in alone:
            assert_same_bits(alone[i], {name: row for name, row in found.items() if name[0] == f"p{i}"})


def test_late_arrivals_draw_the_same(engine, alone):
    """Rows that enter while others are in the middle of theirs."""
    long = SamplingParams(max_new_tokens=28, ignore_eos=True, n=4)
    engine.submit(request(200, long))
    found = engine.step()
    for i, params in enumerate(MIXED):
        engine.submit(request(i, params))
        found += engine.step()
    while not engine.idle:
        found += engine.step()
    for i in alone:
        assert_same_bits(alone[i], {name: row for name, row in rows(found).items() if name[0] == f"p{i}"})


def test_group_size_changes_no_sample(engine):
    params = MIXED[5]
    single = rows(engine.generate([request(1, params)]))
    eight = rows(engine.generate([request(1, params.replace(n=8))]))
    twenty = rows(engine.generate([request(1, params.replace(n=20))]))  # more than there are slots
    assert_same_bits(single, {("p1", 0): eight["p1", 0]})
    assert_same_bits(eight, {name: twenty[name] for name in eight})
    assert len({tuple(row.completion_tokens) for row in twenty.values()}) == 20
    chosen = rows(engine.generate([request(1, params, sample_indices=(13, 2))]))
    assert_same_bits(chosen, {name: twenty[name] for name in chosen})


def test_another_engine_of_the_same_geometry_gives_the_same_bits(checkpoint, alone):
    fresh = Engine(checkpoint, GEOMETRY)
    assert_same_bits(alone[5], rows(fresh.generate([request(5, MIXED[5])])))


def test_seed_prompt_id_and_sample_index_all_matter(engine):
    """Case B037: eight samples of one prompt are eight sequences, and the same eight every time."""

    def tokens(prompt_id="p", seed=0, **params):
        asked = Request(prompt_id, prompt(1), MIXED[-1].replace(**params), run_seed=seed)
        return [tuple(c.completion_tokens) for group in engine.generate([asked]) for c in group.completions]

    base = tokens()
    assert tokens() == base
    assert tokens(seed=1) != base
    assert tokens(prompt_id="q") != base
    assert len(set(tokens(n=8))) == 8 and tokens(n=8) == tokens(n=8)


def test_a_request_seed_takes_the_place_of_the_runs(engine):
    by_run = rows(engine.generate([Request("p", prompt(1), MIXED[-1], run_seed=9)]))
    by_request = rows(engine.generate([Request("p", prompt(1), MIXED[-1].replace(seed=9), run_seed=4)]))
    assert_same_bits(by_run, by_request)


def test_greedy_rows_have_log_prob_zero_exactly(alone):
    row = alone[0]["p0", 0]
    np.testing.assert_array_equal(row.behaviour_logprobs, np.zeros(12, np.float32))
    assert np.all(row.model_logprobs < 0)


def test_log_probs_are_those_of_a_full_forward_under_the_rows_policy(checkpoint, engine, alone):
    """Recomputes every step of every mixed row from one forward without a cache, in float64 after the logits."""
    model = Transformer(checkpoint.info.config)

    @jax.jit
    def forward(tokens):
        hidden, _ = model.apply({"params": checkpoint.params}, tokens, jnp.arange(tokens.size)[None])
        return model.apply({"params": checkpoint.params}, hidden, method="logits")[0]

    chain = jax.jit(lambda policy, state, logits: policy.scores(state, logits))
    for i, params in enumerate(MIXED):
        row = alone[i][f"p{i}", 0]
        tokens = np.concatenate([row.prompt_tokens, row.completion_tokens])
        padded = np.pad(tokens, (0, GEOMETRY.cache_len - tokens.size))[None]  # no token sees a later one
        steps = forward(padded)[row.prompt_tokens.size - 1 : tokens.size - 1]
        count = len(row.completion_tokens)
        state = StepState.from_histories([[0]] * count, [[]] * count, vocab_size=steps.shape[-1])
        known = jnp.where(jnp.arange(steps.shape[-1])[None] < TOKENIZER_LEN, steps, -jnp.inf)
        final = np.asarray(chain(lower(params), state, known), np.float64)
        behaviour = log_softmax(final)
        np.testing.assert_allclose(np.exp(behaviour).sum(-1), 1, atol=1e-6)
        raw = log_softmax(np.asarray(steps, np.float64))
        drawn = (np.arange(count), row.completion_tokens)
        np.testing.assert_allclose(row.behaviour_logprobs, behaviour[drawn], atol=2e-5)
        np.testing.assert_allclose(row.model_logprobs, raw[drawn], atol=2e-5)
        mass = np.where(np.isfinite(final), np.exp(raw), 0).sum(-1)
        np.testing.assert_allclose(row.log_kept_mass, np.log(mass), atol=2e-5)


def log_softmax(scores):
    scores = scores - scores.max(-1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def test_ids_past_the_tokenizer_are_never_drawn(engine, checkpoint):
    assert checkpoint.info.config.vocab_size > TOKENIZER_LEN
    found = rows(engine.generate([request(3, SamplingParams(temperature=50.0, n=40, max_new_tokens=20))]))
    assert max(row.completion_tokens.max() for row in found.values()) < TOKENIZER_LEN


def test_first_tokens_belong_to_their_prompts(engine):
    """Case B053: prompts of different lengths, prefilled beside each other, each continue from their own last token."""
    asked = [Request(f"q{n}", prompt(n, n), MIXED[0], run_seed=1) for n in (3, 5, 2, 1, 9, 17)]
    together = rows(engine.generate(asked))
    for one in asked:
        assert_same_bits(rows(engine.generate([one])), {(one.prompt_id, 0): together[one.prompt_id, 0]})


def test_ways_to_end(engine, checkpoint):
    endless = MIXED[-1].replace(max_new_tokens=1000)
    full = rows(engine.generate([Request("p", prompt(1, 47), endless), Request("q", prompt(1, 30), endless)]))
    assert full["p", 0].stop_reason == StopReason.CACHE_FULL and len(full["p", 0].completion_tokens) == 1
    assert full["q", 0].stop_reason == StopReason.CACHE_FULL and len(full["q", 0].completion_tokens) == 18
    budget = rows(engine.generate([Request("p", prompt(1, 40), endless.replace(max_new_tokens=8))]))
    assert budget["p", 0].stop_reason == StopReason.LENGTH  # the budget and the cache end together: the budget says so

    drawn = budget["p", 0].completion_tokens
    own = endless.replace(max_new_tokens=8, ignore_eos=False, eos_token_ids=(int(drawn[3]),))
    ended = rows(engine.generate([Request("p", prompt(1, 40), own)]))["p", 0]
    first = int(np.flatnonzero(drawn == drawn[3])[0])
    assert ended.stop_reason == StopReason.EOS
    assert ended.completion_tokens.tolist() == drawn[: first + 1].tolist()  # the stop token stays in the record
    assert len(ended.behaviour_logprobs) == len(ended.policy_versions) == first + 1
    assert set(checkpoint.info.eos_token_ids) <= set(ended.params.eos_token_ids)


def test_a_row_without_a_distribution_ends_alone(checkpoint):
    """A NaN in one token's embedding breaks the rows that read it, and neither neighbours nor later tenants."""
    embedding = np.array(checkpoint.params["embedding"])
    embedding[7] = np.nan
    broken = dataclasses.replace(checkpoint, params={**checkpoint.params, "embedding": embedding})
    engine = Engine(broken, Geometry(slots=2, cache_len=48, prefill_chunk=8))
    sound = Request("sound", [5, 6, 8, 9], MIXED[2])
    sick = Request("sick", [5, 7, 8, 9], MIXED[2])
    before = rows(engine.generate([sound]))
    found = rows(engine.generate([sick, sound, sick, sick, sound]))
    assert found["sick", 0].stop_reason == StopReason.UNDEFINED_DISTRIBUTION
    assert found["sick", 0].completion_tokens.size == 0
    assert_same_bits(before, {("sound", 0): found["sound", 0]})
    assert_same_bits(before, rows(engine.generate([sound])))


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (np.arange(48) % 9, "48 tokens leave no room in a cache of 48"),
        ([5, TOKENIZER_LEN], f"0 .. {TOKENIZER_LEN - 1}, got {TOKENIZER_LEN} at position 1"),
        ([-1], "got -1 at position 0"),
    ],
)
def test_bad_prompts_are_refused(engine, tokens, says):
    with pytest.raises(PromptError, match=says):
        engine.submit(Request("bad", tokens))
    assert engine.idle


def test_bad_requests_are_refused(engine, checkpoint):
    with pytest.raises(PromptError, match="at least one token"):
        Request("p", [])
    with pytest.raises(PromptError, match="integer"):
        Request("p", [0.5])
    with pytest.raises(ConfigError, match="distinct"):
        Request("p", [1], sample_indices=(1, 1))
    with pytest.raises(ConfigError, match="eos_token_ids"):
        engine.submit(Request("p", [5], SamplingParams(eos_token_ids=(10_000,))))
    with pytest.raises(ConfigError, match="dtype"):
        Engine(checkpoint, GEOMETRY, dtype="float8")
    with pytest.raises(ConfigError, match="cache_len"):
        Engine(checkpoint, Geometry(cache_len=10**6))


def test_bfloat16_keeps_its_own_bits(checkpoint):
    engine = Engine(checkpoint, GEOMETRY, dtype="bfloat16")
    single = {i: rows(engine.generate([request(i, params)])) for i, params in enumerate(MIXED)}
    together = rows(engine.generate([request(i, params) for i, params in enumerate(MIXED)]))
    for i in single:
        assert_same_bits(single[i], {(f"p{i}", 0): together[f"p{i}", 0]})
