"""sampling/stopping.py and the reasons that a policy derives from its rules."""

import jax.numpy as jnp
import numpy as np

from sampling import EndOfSequence, MaxNewTokens, StepState, StopReason
from sampling.policy import Policy
from sampling.state import NO_TOKEN


def state(drawn, prompt_len=6):
    return StepState.from_histories([[1] * prompt_len] * len(drawn), drawn, capacity=32, vocab_size=10)


def test_end_of_sequence_knows_several_ids_per_row():
    rule = EndOfSequence(np.int32([[2, 9], [3, NO_TOKEN]]))
    assert rule(state([[9], [9]]), jnp.int32([9, 9])).tolist() == [True, False]
    assert rule(state([[2], [3]]), jnp.int32([2, 3])).tolist() == [True, True]
    assert EndOfSequence([2, 9])(state([[9], [1]]), jnp.int32([9, 1])).tolist() == [True, False]


def test_the_filler_of_a_short_list_is_no_token():
    rule = EndOfSequence(np.int32([[NO_TOKEN, NO_TOKEN]]))
    assert rule(state([[1]]), jnp.int32([NO_TOKEN])).tolist() == [False]


def test_max_new_tokens_counts_drawn_tokens_only():
    rule = MaxNewTokens(np.int32([1, 2, 2]))
    assert rule(state([[1], [1], [1, 1]]), jnp.int32([1, 1, 1])).tolist() == [True, False, True]


def test_the_first_rule_gives_the_reason():
    policy = Policy(order=np.int32(0), transforms={}, stopping=(EndOfSequence([2]), MaxNewTokens(1)))
    codes = policy.stop_codes(state([[], []]), state([[2], [1]]), jnp.int32([2, 1]))
    assert [StopReason.from_code(int(code)) for code in codes] == [StopReason.EOS, StopReason.LENGTH]
    going = policy.stop_codes(state([[], []]), state([[], []]), jnp.int32([1, 1]))
    assert going.tolist() == [0, 0]
