"""sampling/explain.py: what it shows of a step is what the engine did, and every number can be checked by hand."""

import dataclasses

import numpy as np
import pytest

from sampling import Engine, Geometry, Request, SamplingParams, StopReason, load_checkpoint
from sampling.capacity import Capacity
from sampling.errors import ConfigError, PromptError, RunError
from sampling.explain import PADDED_IDS, explain, place_in
from sampling.explanation import Verdict
from sampling.keys import row_key
from sampling.params import ORDERS
from sampling.policy import STAGES
from tests.sampling.test_engine_policies import random_policy
from tests.tiny_models import EOS_ID, TOKENIZER_LEN, byte_tokenizer, tiny_llama

GEOMETRY = Geometry(slots=8, cache_len=48, prefill_chunk=8)
CAPACITY = Capacity(orders=tuple(ORDERS))
KEY = row_key(7, "p", 0)
VOCAB = 272


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return load_checkpoint(tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def engines(checkpoint):
    return {dtype: Engine(checkpoint, GEOMETRY, dtype, CAPACITY) for dtype in ("float32", "bfloat16")}


@pytest.fixture(scope="module")
def engine(engines):
    return engines["float32"]


def ids(text):
    return byte_tokenizer()(text)["input_ids"] if isinstance(text, str) else text


@pytest.fixture(scope="module")
def explained(engine):
    """Explains the token at `place` of a completion given as text or ids, after the prompt "abc"."""

    def make(completion, params=None, place=-1, key=KEY, **settings):
        return explain(engine, ids("abc"), ids(completion), place, params or SamplingParams(), key, **settings)

    return make


def counts(explanation):
    return [(stage.name, stage.left, stage.removed) for stage in explanation.stages]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_token_of_random_policies_is_drawn_again(engines, dtype):
    """Token, log-probs, kept mass, entropy, uniform and end, over all parameters and orders."""
    engine, rng = engines[dtype], np.random.default_rng(3)
    requests = [
        Request(f"p{i}", rng.integers(4, TOKENIZER_LEN, rng.integers(1, 20)), random_policy(rng), run_seed=3)
        for i in range(30)
    ]
    tokens, ends = 0, set()
    for row in [group.completions[0] for group in engine.generate(requests)]:
        for place in range(row.completion_tokens.size):
            found = explain(engine, row.prompt_tokens, row.completion_tokens, place, row.params, row.key)
            where = row.prompt_id, place
            assert found.agrees and found.token.token == row.completion_tokens[place], where
            assert found.behaviour_logprob == pytest.approx(row.behaviour_logprobs[place], abs=1e-5), where
            assert found.model_logprob == pytest.approx(row.model_logprobs[place], abs=1e-5), where
            assert found.log_kept_mass == pytest.approx(row.log_kept_mass[place], abs=1e-5), where
            assert found.entropy == pytest.approx(row.entropy[place], abs=1e-5), where
            assert found.token.low - 1e-6 <= found.uniform <= found.token.high + 1e-6, where
            assert found.token.probability == pytest.approx(np.exp(found.behaviour_logprob), abs=1e-5), where
            assert (found.stages[-1] if found.stages else found.model).left == found.support, where
            last = place == row.completion_tokens.size - 1
            assert found.stop_reason == (row.stop_reason if last else None), where
            tokens += 1
        ends.add(row.stop_reason)
    assert tokens > 200 and {StopReason.EOS, StopReason.STOP_STRING, StopReason.LENGTH} <= ends
    assert engine.idle and engine.stats().programs_compiled == 3


def test_the_ids_left_after_each_stage_can_be_counted_by_hand(explained):
    params = SamplingParams(
        eos_token_ids=[EOS_ID],
        stop_token_ids=[20],
        min_new_tokens=3,
        suppress_tokens=[10, 11, 12],
        allowed_token_ids=[10, *range(20, 30)],
        bad_words=[[25], [26, 27]],
        temperature=0.5,
        top_k=4,
    )
    found = explained([30, 31], params)
    assert (found.model.left, found.model.removed) == (VOCAB, 0)
    assert counts(found) == [
        (PADDED_IDS, 266, 6),
        ("bad_words", 265, 1),  # 27 alone follows 26 alone, which is not there
        ("min_new_tokens", 263, 2),
        ("suppress_tokens", 260, 3),
        ("allowed_token_ids", 8, 252),  # 21 .. 29 without 25
        ("temperature", 8, 0),
        ("top_k", 4, 4),
    ]
    assert [stage.value for stage in found.stages[3:]] == [[10, 11, 12], [10, *range(20, 30)], 0.5, 4]
    assert found.num_off == len(STAGES["transformers"]) - 6 and found.without_effect == {}
    assert explained([26, 31], params).stages[1].removed == 2
    assert explained([30, 31, 32, 33], params).stages[2].removed == 0


def test_scores_and_ranks_follow_one_token_through_the_chain(explained):
    found = explained([40, 41], SamplingParams(logit_bias={41: 50.0, 50: -np.inf}, temperature=0.5, top_k=2))
    _, bias, temperature, top_k = found.stages
    assert found.token.token == 41 and found.model.token_rank > 1
    assert bias.token.score == pytest.approx(found.model.token.score + 50, abs=1e-4)
    assert (bias.token_rank, bias.best[0].token, bias.removed) == (1, 41, 1)
    assert temperature.token.score == pytest.approx(2 * bias.token.score, rel=1e-6)
    assert [candidate.token for candidate in top_k.best] == [candidate.token for candidate in found.candidates]
    assert len(top_k.best) == 2 and len(bias.best) == 5
    assert top_k.best[0].probability == pytest.approx(1) and found.token.high - found.token.low == pytest.approx(1)
    removed = explained([40, 50], SamplingParams(logit_bias={50: -np.inf})).stages[1]
    assert (removed.token.score, removed.token.probability, removed.token_rank) == (-np.inf, 0.0, None)


def test_a_removed_token_has_an_empty_share_and_the_draw_says_which_it_should_have_been(explained):
    found = explained([40, 50], SamplingParams(suppress_tokens=[50]))
    assert not found.agrees and found.behaviour_logprob == -np.inf
    assert found.token.low == found.token.high
    assert found.drawn.low <= found.uniform < found.drawn.high


def test_shares_are_in_ascending_id_and_fill_the_unit_interval(explained):
    found = explained([40, 41], SamplingParams(allowed_token_ids=[3, 9, 41, 100]), top=10)
    shares = sorted(found.candidates, key=lambda share: share.token)
    assert [share.token for share in shares] == [3, 9, 41, 100] and found.support == 4
    assert [share.low for share in shares] == [0.0, *(share.high for share in shares[:-1])] and shares[-1].high == 1.0
    probabilities = np.array([share.probability for share in shares])
    np.testing.assert_allclose([share.high - share.low for share in shares], probabilities, atol=1e-6)
    assert found.entropy == pytest.approx(-np.sum(probabilities * np.log(probabilities)), abs=1e-5)


def test_a_greedy_row_is_certain_and_says_what_cannot_matter(explained):
    found = explained([40], SamplingParams(temperature=0, top_p=0.5, repetition_penalty=1.2))
    assert counts(found) == [(PADDED_IDS, 266, 6), ("repetition_penalty", 266, 0), ("greedy", 1, 265)]
    assert found.stages[-1].value == 0 and found.without_effect == {"top_p": 0.5}
    assert (found.support, found.entropy, found.drawn.low, found.drawn.high) == (1, 0.0, 0.0, 1.0)
    again = explained([found.drawn.token], SamplingParams(temperature=0, top_p=0.5, repetition_penalty=1.2))
    assert again.agrees and again.behaviour_logprob == 0.0


def test_a_stage_may_bring_ids_back(explained):
    params = SamplingParams(eos_token_ids=[EOS_ID], min_new_tokens=2, forced_eos=[EOS_ID], max_new_tokens=2)
    held, forced = explained([40, EOS_ID], params).stages[-2:]
    assert (held.name, held.removed, forced.name) == ("min_new_tokens", 1, "forced_eos")
    assert (forced.left, forced.removed, forced.restored) == (1, 265, 1)


@pytest.mark.parametrize("order", ORDERS)
def test_stages_stand_in_the_rows_own_order(explained, order):
    params = SamplingParams(order=order, temperature=0.7, min_p=0.01, top_k=9, logit_bias={5: 1.0}, suppress_tokens=[6])
    names = [stage.name for stage in explained([40], params).stages[1:]]
    wanted = {"temperature", "min_p", "top_k", "logit_bias", "suppress_tokens"}
    assert names == [name for name in STAGES[order] if name in wanted]


def test_the_uniform_is_that_of_the_draw_index(explained):
    """The vectors of docs/keys.md."""
    key = row_key(7, "basic_arithmetic-0", 0)
    for place, multiple in enumerate((12042154, 5849120, 7085644)):
        found = explained([40, 41, 42], place=place, key=key)
        assert (found.place, found.key) == (place, (0x171183C3, 0xD3794ED5))
        assert (found.uniform_multiple, found.uniform) == (multiple, multiple / 2**24)


def rules(explanation, name):
    return [(rule.value, rule.before, rule.after, rule.verdict) for rule in explanation.rules if rule.name == name]


@pytest.mark.parametrize(
    ("completion", "before", "after", "verdict"),
    [
        ("x", "", "", Verdict.GOES_ON),
        ("xt", "", "t", Verdict.GOES_ON),
        ("tt", "t", "t", Verdict.GOES_ON),
        ("th", "t", "th", Verdict.GOES_ON),
        ("thx", "th", "", Verdict.GOES_ON),
        ("thé", "th\\xc3", "thé", Verdict.ENDS),
    ],
)
def test_a_stop_string_shows_how_much_of_it_the_text_ends_with(explained, completion, before, after, verdict):
    found = explained(completion, SamplingParams(stop=["thé", "zz"], max_new_tokens=50))
    assert rules(found, "stop") == [("thé", before, after, verdict), ("zz", "", "", Verdict.GOES_ON)]
    assert found.stop_reason == (StopReason.STOP_STRING if verdict is Verdict.ENDS else None)


def test_a_stop_string_may_end_inside_the_last_token_and_begin_in_the_prompt(explained):
    (the,) = byte_tokenizer()(" the")["input_ids"]
    assert rules(explained([the], SamplingParams(stop="c t")), "stop") == [("c t", "c", "c t", Verdict.ENDS)]


def test_minimum_lengths_hold_back_what_would_end_the_row(explained):
    found = explained("zz", SamplingParams(stop="z", min_new_tokens=2, min_length=20, max_new_tokens=50))
    assert rules(found, "min_new_tokens") == [(2, 1, 2, Verdict.HELD_BACK)]
    assert rules(found, "min_length") == [(20, 4, 5, Verdict.HELD_BACK)]
    assert rules(found, "stop") == [("z", "z", "z", Verdict.HELD_BACK)] and found.stop_reason is None
    free = explained("zzz", SamplingParams(stop="z", min_new_tokens=2, max_new_tokens=50))
    assert rules(free, "min_new_tokens") == [(2, 2, 3, Verdict.MAY_END)]
    assert free.stop_reason is StopReason.STOP_STRING


def test_budgets_and_ids_that_end_a_row(explained):
    params = SamplingParams(eos_token_ids=[EOS_ID], stop_token_ids=[9], max_new_tokens=3, max_length=5)
    found = explained([40, 9], params)
    assert [(rule.name, rule.before, rule.after, rule.verdict) for rule in found.rules] == [
        ("eos_token_ids", None, None, Verdict.GOES_ON),
        ("stop_token_ids", None, None, Verdict.ENDS),
        ("max_new_tokens", 1, 2, Verdict.GOES_ON),
        ("max_length", 4, 5, Verdict.ENDS),
        ("cache_len", 4, 5, Verdict.GOES_ON),
    ]
    assert found.stop_reason is StopReason.STOP_TOKEN
    assert explained([EOS_ID], params).stop_reason is StopReason.EOS
    assert explained([40, 41], params).stop_reason is StopReason.LENGTH
    assert [rule.name for rule in explained([40], SamplingParams()).rules] == ["max_new_tokens", "cache_len"]
    full = [40] * (GEOMETRY.cache_len - len(ids("abc")))
    assert explained(full, SamplingParams(max_new_tokens=99)).stop_reason is StopReason.CACHE_FULL
    assert explained(full, SamplingParams(max_new_tokens=99), place=-2).stop_reason is None


def broken(checkpoint, rows):
    """The checkpoint with a head whose rows give NaN."""
    head = checkpoint.params["head"].copy()
    head[rows] = np.nan
    return dataclasses.replace(checkpoint, params=checkpoint.params | {"head": head})


def test_broken_scores_are_shown_and_nothing_is_drawn(checkpoint):
    engine = Engine(broken(checkpoint, slice(None)), GEOMETRY, capacity=CAPACITY)
    for place in (0, 3):
        found = explain(engine, [5, 6], [40] * 4, place, SamplingParams(top_k=5), KEY)
        assert found.drawn is None and not found.agrees
        assert (found.model.left, found.model.best, found.model.token_rank, found.candidates) == (0, (), None, ())
        assert np.isnan(found.entropy) and np.isnan(found.token.high)


def test_a_row_that_repaired_its_scores_is_drawn_again(checkpoint):
    engine = Engine(broken(checkpoint, [7]), GEOMETRY, capacity=CAPACITY)
    params = SamplingParams(remove_invalid_values=True, max_new_tokens=12)
    (row,) = next(engine.generate([Request("p", [5, 6], params)])).completions
    assert row.completion_tokens.size == 12
    for place in range(12):
        found = explain(engine, row.prompt_tokens, row.completion_tokens, place, row.params, row.key)
        assert found.agrees and np.isnan(found.model.token.probability)
        assert [stage.name for stage in found.stages] == [PADDED_IDS, "remove_invalid_values"]


def test_texts_are_those_of_the_tokenizer_and_empty_without_one(checkpoint, explained, tmp_path):
    tokens = [*byte_tokenizer()(" theé")["input_ids"][:2], 40]
    found = explained(tokens, place=2)
    assert found.context == "abc the\\xc3" and found.token.text == byte_tokenizer().decode([40])
    info = dataclasses.replace(checkpoint.info, path=tmp_path)
    bare = Engine(dataclasses.replace(checkpoint, info=info), GEOMETRY)
    assert bare.vocabulary is None
    nameless = explain(bare, ids("abc"), tokens, 2, SamplingParams(), KEY)
    assert (nameless.context, nameless.token.text, nameless.candidates[0].text) == ("", "", "")
    assert nameless.token.probability == found.token.probability
    with pytest.raises(ConfigError, match=r"sampling\.stop: .* has no tokenizer"):
        explain(bare, [5], [40], 0, SamplingParams(stop="x"), KEY)


def test_places_of_one_row_share_their_programs(explained, compilations):
    params = SamplingParams(repetition_penalty=1.1, temperature=0.7, top_p=0.9)
    explained(list(range(40, 70)), params, place=3)
    compilations.clear()
    explained(list(range(40, 70)), params, place=25)
    assert compilations == []


@pytest.mark.parametrize(("place", "expected"), [(0, 0), (4, 4), (-1, 4), (-5, 0)])
def test_places_count_from_both_ends(place, expected):
    assert place_in(5, place) == expected


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda e: e([40], place=1), ConfigError, "token: expected a place in 0 .. 0, or -1 .. -1 from the end, got 1"),
        (lambda e: e([40], place=-2), ConfigError, "got -2"),
        (lambda e: e([], place=0), ConfigError, "token: expected a completion with tokens, got 0"),
        (lambda e: e([VOCAB]), ConfigError, "expected token ids in 0 .. 271, got 272"),
        (lambda e: e([-1]), ConfigError, "expected token ids in 0 .. 271, got -1"),
        (lambda e: e([-1, 40]), PromptError, "expected token ids in 0 .. 265, got -1"),
        (lambda e: e([40] * 47), PromptError, "do not fit a cache of 48"),
    ],
)
def test_what_cannot_be_explained_is_refused(explained, engine, call, error, message):
    with pytest.raises(error) as caught:
        call(explained)
    assert message in str(caught.value) and engine.idle


def test_an_engine_at_work_explains_nothing(engine, explained):
    engine.submit(Request("p", [5, 6]))
    with pytest.raises(RunError, match="idle engine"):
        explained([40])
    engine.abort()
