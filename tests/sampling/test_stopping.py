"""sampling/stopping.py and the reasons that a policy derives from its rules."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from sampling import EndOfSequence, MaxNewTokens, StepState, StopReason
from sampling.policy import Policy
from sampling.state import NO_TOKEN
from sampling.stopping import MaxLength, StopTokens
from tests.sampling.transforms.live import LONGEST, batches, each_row, filled, many, with_ids


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


def test_stop_tokens_end_a_row_for_a_reason_of_their_own():
    rule = StopTokens(np.int32([[2, 9], [3, NO_TOKEN]]))
    assert rule(state([[9], [9]]), jnp.int32([9, 9])).tolist() == [True, False]
    assert StopTokens([])(state([[9]]), jnp.int32([9])).tolist() == [False]
    policy = Policy(transforms={}, stopping=(EndOfSequence([2]), StopTokens([3])))
    codes = policy.stop_codes(state([[], []]), state([[2], [3]]), jnp.int32([2, 3]))
    assert [StopReason.from_code(int(code)) for code in codes] == [StopReason.EOS, StopReason.STOP_TOKEN]


def test_max_length_counts_the_prompt():
    rule = MaxLength(np.int32([7, 8, 8]))
    assert rule(state([[1], [1], [1, 1]]), jnp.int32([1, 1, 1])).tolist() == [True, False, True]
    assert MaxLength(8).reason is StopReason.LENGTH


def test_max_new_tokens_counts_drawn_tokens_only():
    rule = MaxNewTokens(np.int32([1, 2, 2]))
    assert rule(state([[1], [1], [1, 1]]), jnp.int32([1, 1, 1])).tolist() == [True, False, True]


def test_the_first_rule_gives_the_reason():
    policy = Policy(order=np.int32(0), transforms={}, stopping=(EndOfSequence([2]), MaxNewTokens(1)))
    codes = policy.stop_codes(state([[], []]), state([[2], [1]]), jnp.int32([2, 1]))
    assert [StopReason.from_code(int(code)) for code in codes] == [StopReason.EOS, StopReason.LENGTH]
    going = policy.stop_codes(state([[], []]), state([[], []]), jnp.int32([1, 1]))
    assert going.tolist() == [0, 0]


# ---- against Transformers ----

jitted = jax.jit(lambda rule, rows, tokens: rule(rows, tokens))


def ours(rule, batch):
    rows = StepState.from_histories(batch.prompts, batch.drawn, 2 * LONGEST, vocab_size=batch.vocab)
    return jitted(rule, rows, np.int32([history[-1] for history in batch.histories])).tolist()


def theirs(criteria, batch):
    return [one(torch.tensor([ids]), None).item() for one, ids in zip(criteria, batch.histories, strict=True)]


@given(with_ids(batches()))
@many
def test_end_of_sequence_equals_transformers(case):
    batch, eos = case
    assert ours(EndOfSequence(filled(eos)), batch) == theirs(map(EosTokenCriteria, eos), batch)


@given(batches(), each_row(st.integers(1, 2 * LONGEST)))
@many
def test_max_length_equals_transformers(batch, lengths):
    assert ours(MaxLength(np.int32(lengths)), batch) == theirs(map(MaxLengthCriteria, lengths), batch)
