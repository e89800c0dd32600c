"""The choice of an engine (sampling/decode.py), drawn many times: frequencies against the recorded log-probs.

Chi-square at a significance of one in a million, with fixed seeds. Draws are counted along every name that a uniform
depends on; and the same statistic refuses distributions and keys that are wrong.
"""

from functools import cache
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import chi2

from sampling import SamplingParams
from sampling.capacity import Capacity
from sampling.decode import choose
from sampling.keys import row_key
from sampling.policy import lower, stack
from sampling.state import NO_TOKEN, StepState

VOCAB = 96
TOKENIZER_LEN = 90
DRAWS = 4096
SIGNIFICANCE = 1e-6

LOGITS = (np.random.default_rng(0).normal(size=VOCAB) * 1.5).astype(np.float32)
BEST = np.argsort(-LOGITS[:TOKENIZER_LEN])
PROMPT, DRAWN = BEST[[0, 2, 2, 5, 30]].tolist(), BEST[[1, 3, 3, 3, 4, 0, 40]].tolist()

CHAINS = {
    "plain": SamplingParams(),
    "warm": SamplingParams(temperature=1.7),
    "top-k, top-p, min-p": SamplingParams(temperature=0.9, top_k=40, top_p=0.93, min_p=0.01),
    "typical, eta": SamplingParams(typical_p=0.8, eta_cutoff=1e-3),
    "penalties": SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.6),
    "all of it": SamplingParams(
        temperature=1.2,
        top_k=60,
        top_p=0.97,
        repetition_penalty=0.8,
        frequency_penalty=-0.3,
        presence_penalty=0.5,
        logit_bias={int(BEST[6]): -1.0, int(BEST[50]): 2.0},
        bad_words=[[int(BEST[7])]],
        suppress_tokens=[int(BEST[8])],
        min_new_tokens=DRAWS,
        max_new_tokens=DRAWS,
        eos_token_ids=[int(BEST[9])],
    ),
}
CAPACITY = Capacity()
for params in CHAINS.values():
    CAPACITY = CAPACITY.grown_for(Capacity.needed(params))
POLICIES = {name: lower(params, CAPACITY) for name, params in CHAINS.items()}

ROWS = StepState.from_histories([PROMPT] * DRAWS, [DRAWN] * DRAWS, vocab_size=VOCAB)

chosen = jax.jit(choose, static_argnames="tokenizer_len")


def choice(policy, keys, draw_index=None, given=None, logits=LOGITS):
    """What an engine chooses for DRAWS rows of one history: `Choice`.

    Args:
        policy: of one row, or stacked for all.
        keys: uint32 [DRAWS, 2].
        draw_index: int [DRAWS]; by default what the history says. The history stays what it is.
        given: int [DRAWS], tokens to record instead of drawing them.
        logits: float32 [VOCAB].
    """
    if np.ndim(policy.order) == 0:
        policy = jax.tree.map(lambda leaf: np.repeat(leaf, DRAWS, axis=0), stack([policy]))
    length = ROWS.length if draw_index is None else ROWS.prompt_len + jnp.asarray(draw_index, jnp.int32)
    rows = ROWS.replace(keys=jnp.asarray(keys), length=length)
    given = np.full(DRAWS, NO_TOKEN) if given is None else given
    logits = jnp.broadcast_to(jnp.asarray(logits)[None], (DRAWS, VOCAB))
    return chosen(policy, rows, logits, jnp.asarray(given, jnp.int32), TOKENIZER_LEN)


def drawn(policy, keys, draw_index=None):
    return np.asarray(choice(policy, keys, draw_index).tokens)


def recorded_probabilities(policy):
    """exp(behaviour_logprobs) of every id, as an engine records it for that id when it is given."""
    record = choice(policy, keys_along("samples"), given=np.arange(DRAWS) % VOCAB).record
    return np.exp(np.asarray(record.behaviour_logprobs, np.float64)[:VOCAB])


def p_value(tokens, expected):
    """Of Pearson's chi-square; bins that expect fewer than 5 are one bin. A token that cannot be makes it 0.

    Args:
        tokens: int [n], drawn.
        expected: float64 [bins], probabilities.
    """
    counts = np.bincount(tokens, minlength=len(expected))
    if counts[expected == 0].any():
        return 0.0
    order = np.argsort(expected)
    counts, expected = counts[order], expected[order] * len(tokens)
    few = max(np.searchsorted(expected, 5), np.searchsorted(np.cumsum(expected), 5) + 1)
    counts, expected = (np.r_[bins[:few].sum(), bins[few:]] for bins in (counts, expected))
    return float(chi2.sf(np.sum((counts - expected) ** 2 / expected), len(counts) - 1.0))


@cache
def keys_along(axis):
    """uint32 [DRAWS, 2]: neighbours in one of the names that a row's key is made of."""
    names = {
        "samples": lambda i: (11, "prompt", i),
        "prompt ids": lambda i: (11, f"prompt-{i}", 0),
        "seeds": lambda i: (i, "prompt", 0),
        "groups of eight": lambda i: (42, f"prompt-{i // 8}", i % 8),
    }
    return np.stack([row_key(*names[axis](i)) for i in range(DRAWS)])


AXES = {
    "sample indices": ("samples", None),
    "sample indices, a later draw": ("samples", np.full(DRAWS, 1000)),
    "prompt ids": ("prompt ids", None),
    "seeds": ("seeds", None),
    "draw indices of one row": (None, np.arange(DRAWS)),
}


def drawn_along(axis, policy):
    names, index = AXES[axis]
    keys = keys_along(names) if names else np.repeat(keys_along("samples")[:1], DRAWS, axis=0)
    return drawn(policy, keys, index)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("chain", CHAINS)
def test_tokens_come_as_often_as_their_log_probs_say(chain, axis):
    expected = recorded_probabilities(POLICIES[chain])
    assert expected.sum() == pytest.approx(1, abs=1e-6)
    assert p_value(drawn_along(axis, POLICIES[chain]), expected) > SIGNIFICANCE


def test_tokens_of_mixed_slots_come_as_often_as_their_log_probs_say():
    """All chains in one batch, in any slots, each row with its own draw index; and no slot changes a token."""
    rng = np.random.default_rng(5)
    stacked = stack(list(POLICIES.values()))
    tokens = {name: [] for name in CHAINS}
    for batch in range(len(CHAINS)):
        which = rng.permutation(np.arange(DRAWS) % len(CHAINS))
        keys = rng.permutation(keys_along("samples"))
        index = rng.integers(600 * batch, 600 * (batch + 1), DRAWS)
        together = drawn(jax.tree.map(lambda leaf, which=which: leaf[which], stacked), keys, index)
        for i, name in enumerate(CHAINS):
            tokens[name].append(together[which == i])
            if batch == 0:
                alone = drawn(POLICIES[name], keys, index)
                np.testing.assert_array_equal(together[which == i], alone[which == i])
    for name in CHAINS:
        assert p_value(np.concatenate(tokens[name]), recorded_probabilities(POLICIES[name])) > SIGNIFICANCE


def test_the_next_token_does_not_know_the_last():
    """Pairs of consecutive draws of many rows, and pairs of neighbouring samples: products of the single rates."""
    policy = lower(SamplingParams(top_k=8), CAPACITY)
    expected = recorded_probabilities(policy)
    pair = np.multiply.outer(expected, expected).ravel()
    first, second = (drawn(policy, keys_along("samples"), np.full(DRAWS, i)) for i in (4, 5))
    assert p_value(first * VOCAB + second, pair) > SIGNIFICANCE
    assert p_value(first[:-1] * VOCAB + first[1:], pair) > SIGNIFICANCE
    assert p_value(first * VOCAB + np.where(np.arange(DRAWS) % 4, second, first), pair) < SIGNIFICANCE


# ---- the statistic can fail ----


@pytest.mark.parametrize("statistic, freedom, p", [(3.841459, 1, 0.05), (27.631021, 2, 1e-6), (135.8067, 100, 0.01)])
def test_chi_square_by_the_tables(statistic, freedom, p):
    assert float(chi2.sf(statistic, float(freedom))) == pytest.approx(p, rel=1e-4)


def test_small_bins_are_one_bin():
    """Expected 1, 1, 3, 5, 10, 20: the first three become one, which has 5."""
    expected = np.array([20, 1, 10, 3, 5, 1]) / 40
    tokens = np.repeat(np.arange(6), [18, 0, 11, 6, 4, 1])
    by_hand = (7 - 5) ** 2 / 5 + (4 - 5) ** 2 / 5 + (11 - 10) ** 2 / 10 + (18 - 20) ** 2 / 20
    assert p_value(tokens, expected) == pytest.approx(float(chi2.sf(by_hand, 3.0)))
    assert p_value(np.array([0, 1]), np.array([1.0, 0.0])) == 0


@pytest.mark.parametrize("chain", CHAINS)
def test_a_slightly_warmer_distribution_is_refused(chain):
    params = CHAINS[chain]
    warmer = lower(params.replace(temperature=params.temperature * 1.2), CAPACITY)
    assert p_value(drawn_along("sample indices", POLICIES[chain]), recorded_probabilities(warmer)) < SIGNIFICANCE


def test_model_probabilities_are_no_behaviour_probabilities():
    for chain in ("warm", "top-k, top-p, min-p", "penalties"):
        expected = recorded_probabilities(POLICIES["plain"])
        assert p_value(drawn_along("sample indices", POLICIES[chain]), expected) < SIGNIFICANCE


def test_keys_that_repeat_are_refused():
    """Four samples that share a key give four times the same token, and four times the statistic."""
    repeated = keys_along("samples")[np.arange(DRAWS) // 4]
    assert p_value(drawn(POLICIES["plain"], repeated), recorded_probabilities(POLICIES["plain"])) < SIGNIFICANCE


# ---- cases ----


def groups(length):
    """int [512, 8, length]: what 8 samples of 512 prompts draw from a uniform distribution over 50 ids, seed 42."""
    keys, flat = keys_along("groups of eight"), np.zeros(VOCAB, np.float32)
    policy = lower(SamplingParams(allowed_token_ids=list(range(50))), CAPACITY)
    steps = [choice(policy, keys, np.full(DRAWS, step), logits=flat).tokens for step in range(length)]
    return np.stack(steps, axis=-1).reshape(-1, 8, length)


def test_the_samples_of_a_prompt_are_eight_sequences():
    """Case B037: uniform over 50 ids, four tokens, n = 8: eight sequences, and the same whenever they are drawn."""
    once = groups(4)
    assert all(len(np.unique(group, axis=0)) == 8 for group in once)
    np.testing.assert_array_equal(once, groups(4))


@pytest.mark.parametrize("length", [1, 2])
def test_samples_agree_as_often_as_chance_has_it(length):
    """Case B037: C(8, 2) / 50^length equal pairs are expected in a group."""
    tokens = groups(length)
    equal = sum(np.all(tokens[:, i] == tokens[:, j], axis=-1).sum() for i, j in combinations(range(8), 2))
    expected = len(tokens) * 28 / 50**length
    assert abs(equal - expected) < 5 * np.sqrt(expected)


@pytest.mark.parametrize("score", [0.0, 4.477])
def test_draws_from_bfloat16_scores_are_fair(score):
    """Case B041 through the engine's choice: equal scores are equally likely, and one with half the mass has half."""
    logits = np.asarray(jnp.zeros(VOCAB, jnp.bfloat16).at[45].set(score).astype(jnp.float32))
    weights = np.where(np.arange(VOCAB) < TOKENIZER_LEN, np.exp(logits.astype(np.float64)), 0)
    assert score == 0 or weights[45] / weights.sum() == pytest.approx(0.5, abs=0.01)
    tokens = choice(POLICIES["plain"], keys_along("samples"), logits=logits).tokens
    assert p_value(np.asarray(tokens), weights / weights.sum()) > SIGNIFICANCE
