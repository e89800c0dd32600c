"""Given tokens: replays, branches and scoring through the very programs that draw."""

import jax
import numpy as np
import pytest

from sampling import Engine, Request, SamplingParams, StopReason, load_checkpoint
from sampling.capacity import Capacity
from sampling.errors import ConfigError, PromptError
from sampling.params import ORDERS
from tests.sampling.test_engine import GEOMETRY, MIXED, assert_same_bits, prompt, rows
from tests.sampling.test_engine_policies import random_policy
from tests.tiny_models import TOKENIZER_LEN, tiny_llama


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    checkpoint = load_checkpoint(tiny_llama(tmp_path_factory.mktemp("tiny")))
    return Engine(checkpoint, GEOMETRY, capacity=Capacity(orders=tuple(ORDERS), support=16))  # as in test_scoring.py


def test_a_replay_gives_the_recorded_bits(engine):
    """Tokens, both log-probs, kept mass and the reason to end, for mixed policies and groups."""
    rng = np.random.default_rng(1)
    requests = [Request(f"p{i}", prompt(i), random_policy(rng).replace(n=3), run_seed=3) for i in range(40)]
    recorded = list(engine.generate(requests))
    replays = [
        Request(
            group.prompt_id,
            group.completions[0].prompt_tokens,
            group.completions[0].params,
            run_seed=3,
            given=tuple(completion.completion_tokens for completion in group.completions),
        )
        for group in recorded[::-1]
    ]
    assert_same_bits(rows(recorded), rows(engine.generate(replays)))


@pytest.mark.parametrize("kept", [0, 1, 5, 11, 12])
def test_a_branch_with_nothing_changed_is_the_original(engine, kept):
    """Case B039: taken up again at any step, the row goes on as if it had not been interrupted."""
    for params in (MIXED[5], MIXED[5].replace(frequency_penalty=0.5, min_new_tokens=6, no_repeat_ngram_size=2)):
        original = rows(engine.generate([Request("p", prompt(3), params)]))
        begun = original["p", 0].completion_tokens[:kept]
        assert_same_bits(original, rows(engine.generate([Request("p", prompt(3), params, given=(begun,))])))


def test_a_branch_under_another_sample_index_goes_its_own_way(engine):
    original = rows(engine.generate([Request("p", prompt(3), MIXED[6])]))["p", 0]
    begun = original.completion_tokens[:4]
    other = rows(engine.generate([Request("p", prompt(3), MIXED[6], sample_indices=(1,), given=(begun,))]))["p", 1]
    np.testing.assert_array_equal(other.completion_tokens[:4], begun)
    np.testing.assert_array_equal(other.behaviour_logprobs[:4], original.behaviour_logprobs[:4])
    assert other.completion_tokens.tolist() != original.completion_tokens.tolist()


def test_given_tokens_are_scored_under_the_policy_asked_for(engine):
    """A token that the policy removes has log-prob -inf; no rule ends the row before its last given token."""
    given = np.int32([5, 6, 7, 8])
    params = SamplingParams(max_new_tokens=4, stop_token_ids=[6], suppress_tokens=[7])
    row = rows(engine.generate([Request("p", prompt(3), params, given=(given,))]))["p", 0]
    np.testing.assert_array_equal(row.completion_tokens, given)
    assert np.isneginf(row.behaviour_logprobs[2]) and np.all(np.isfinite(row.behaviour_logprobs[[0, 1, 3]]))
    assert np.all(np.isfinite(row.model_logprobs))
    assert row.stop_reason == StopReason.LENGTH
    plain = rows(engine.generate([Request("p", prompt(3), SamplingParams(max_new_tokens=4), given=(given,))]))["p", 0]
    # Only the ids that pad the head are removed: the difference is the mass that is kept.
    np.testing.assert_allclose(plain.behaviour_logprobs + plain.log_kept_mass, plain.model_logprobs, atol=1e-5)
    np.testing.assert_array_equal(plain.model_logprobs, row.model_logprobs)


def test_the_scores_that_a_token_was_drawn_from_can_be_seen(engine):
    """Through the programs that drew it: the log-prob that follows from them is the recorded one."""
    row = rows(engine.generate([Request("p", prompt(3), MIXED[6])]))["p", 0]
    for place in (0, 1, 7, row.completion_tokens.size - 1):
        given = (row.completion_tokens[:place],)
        scores = engine.next_scores(Request("p", prompt(3), given=given))
        logprobs = scores - jax.nn.logsumexp(scores)
        assert logprobs[row.completion_tokens[place]] == pytest.approx(row.model_logprobs[place], abs=1e-6)
        assert engine.idle
    again = rows(engine.generate([Request("p", prompt(3), MIXED[6])]))
    assert_same_bits({("p", 0): row}, again)


def test_what_is_aborted_leaves_nothing_behind(engine):
    alone = rows(engine.generate([Request("p", prompt(3), MIXED[6])]))
    for i in range(20):
        engine.submit(Request(f"p{i}", prompt(i), SamplingParams(max_new_tokens=40, ignore_eos=True)))
    engine.submit(Request("s", prompt(3), given=([5, 6],), forward=True))
    engine._prefill()
    engine._admit(*engine._staging.ready())
    engine.abort()
    assert engine.idle and engine.step() == [] and engine.stats().slots_busy == 0
    assert_same_bits(alone, rows(engine.generate([Request("p", prompt(3), MIXED[6])])))


def test_bad_given_tokens_are_refused(engine):
    with pytest.raises(ConfigError, match="each of 2 samples, got 1"):
        Request("p", [5], SamplingParams(n=2), given=([5],))
    with pytest.raises(PromptError, match="given tokens as a list of integers"):
        Request("p", [5], given=([0.5],))
    with pytest.raises(PromptError, match="at position 1 of its given tokens"):
        engine.submit(Request("p", [5], given=([5, TOKENIZER_LEN],)))
    with pytest.raises(PromptError, match="47 tokens and 2 given ones do not fit a cache of 48"):
        engine.submit(Request("p", prompt(1, 47), given=([5, 6],)))
    assert engine.idle
