"""sampling/transforms/base.py: the rules of the contract, held to every transform.

1. Neutral is the identity, to the bit, also for one row among others.
2. A removed token stays removed, but for those that replace scores.
3. A row does not see its neighbours.
4. Where it says so, the best token of a row stays the best.
5. A row without a distribution stays without one, but for those that replace scores.
6. Gradients are finite where scores are removed.
7. It is the same under jit, under vmap and without; another number compiles nothing.
8. No two share a tree structure, so that none can be run with the program of another.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import sampling.transforms as transforms
from sampling.draw import Distribution
from sampling.state import NO_TOKEN, StepState
from sampling.transforms import (
    FILTER,
    AllowedTokens,
    BeginSuppressTokens,
    EpsilonCutoff,
    EtaCutoff,
    ExponentialDecayLengthPenalty,
    ForcedBOS,
    ForcedEOS,
    FrequencyPenalty,
    GrammarMask,
    Greedy,
    LogitBias,
    MinLength,
    MinNewTokens,
    MinP,
    NoRepeatNGram,
    PresencePenalty,
    PromptNoRepeatNGram,
    PromptRepetitionPenalty,
    RemoveInvalidValues,
    Renormalize,
    RepetitionPenalty,
    SequenceBias,
    SuppressTokens,
    Temperature,
    ThinkingBudget,
    TopH,
    TopK,
    TopP,
    Transform,
    Typical,
    apply,
)
from tests.sampling.transforms.live import ROWS, jitted, score_rows

VOCAB = 8
ROW = [2.0, 1.5, 0.5, -1.0, 0.2, -0.7, 1.0, FILTER]

# Each transform at work, and of the same structure and shapes at rest.
EXAMPLES = [
    (Temperature(0.7), Temperature(1.0)),
    (Greedy(True), Greedy(False)),
    (TopK(2), TopK(0)),
    (TopP(0.5), TopP(1.0)),
    (MinP(0.5), MinP(0.0)),
    (Typical(0.3), Typical(1.0)),
    (EpsilonCutoff(0.1), EpsilonCutoff(0.0)),
    (EtaCutoff(0.1), EtaCutoff(0.0)),
    (TopH(0.3), TopH(0.0)),
    (Renormalize(True), Renormalize(False)),
    (RemoveInvalidValues(True), RemoveInvalidValues(False)),
    (RepetitionPenalty(1.3), RepetitionPenalty(1.0)),
    (PromptRepetitionPenalty(1.3), PromptRepetitionPenalty(1.0)),
    (FrequencyPenalty(0.5), FrequencyPenalty(0.0)),
    (PresencePenalty(0.5), PresencePenalty(0.0)),
    (NoRepeatNGram(2), NoRepeatNGram(0)),
    (PromptNoRepeatNGram(2), PromptNoRepeatNGram(0)),
    (
        SequenceBias(np.int32([[2, 1, NO_TOKEN], [3, NO_TOKEN, NO_TOKEN]]), np.int32([2, 1]), np.float32([1.0, -2.0])),
        SequenceBias(np.full((2, 3), NO_TOKEN, np.int32), np.zeros(2, np.int32), np.zeros(2, np.float32)),
    ),
    (LogitBias(np.int32([1, 2]), np.float32([0.5, -0.5])), LogitBias(np.full(2, NO_TOKEN), np.zeros(2, np.float32))),
    (AllowedTokens(np.int32([1, 2, 7])), AllowedTokens(np.full(3, NO_TOKEN, np.int32))),
    (SuppressTokens(np.int32([1, 2])), SuppressTokens(np.full(2, NO_TOKEN, np.int32))),
    (BeginSuppressTokens(np.int32([1, 2]), 4), BeginSuppressTokens(np.full(2, NO_TOKEN, np.int32), 4)),
    (ForcedBOS(3), ForcedBOS(NO_TOKEN)),
    (ForcedEOS(np.int32([3, 4]), 8), ForcedEOS(np.full(2, NO_TOKEN, np.int32), 8)),
    (
        ThinkingBudget(1, np.int32([3, NO_TOKEN]), np.int32([4, 5])),
        ThinkingBudget(-1, np.full(2, NO_TOKEN, np.int32), np.full(2, NO_TOKEN, np.int32)),
    ),
    (MinLength(9, np.int32([3])), MinLength(0, np.int32([3]))),
    (MinNewTokens(9, np.int32([3])), MinNewTokens(0, np.int32([3]))),
    (ExponentialDecayLengthPenalty(1, 1.5, np.int32([3])), ExponentialDecayLengthPenalty(1, 1.0, np.int32([3]))),
]
REPLACE_SCORES = (ForcedBOS, ForcedEOS, RemoveInvalidValues, ThinkingBudget)

every = pytest.mark.parametrize(("active", "rest"), EXAMPLES, ids=[type(active).__name__ for active, _ in EXAMPLES])
scores = score_rows(VOCAB)
few = settings(max_examples=15, deadline=None)


def rows_of(transform, count=ROWS):
    """Histories in which every transform has something to do."""
    prompt, drawn = ([1], []) if isinstance(transform, ForcedBOS) else ([1, 2, 1], [2, 1, 3, 2])
    return StepState.from_histories([prompt] * count, [drawn] * count, vocab_size=VOCAB)


def run(transform, scores):
    return np.asarray(jitted(transform, rows_of(transform, len(scores)), np.asarray(scores, np.float32)))


def test_every_built_in_is_held_to_the_rules():
    built_in = {
        value
        for value in vars(transforms).values()
        if isinstance(value, type) and issubclass(value, Transform) and value is not Transform
    }
    # A grammar's mask follows tables that all rows share: tests/sampling/test_grammars.py holds it to the same rules.
    assert built_in - {GrammarMask} == {type(active) for active, _ in EXAMPLES}


@every
def test_the_examples_are_at_work_and_at_rest(active, rest):
    assert not np.array_equal(run(active, [ROW] * ROWS), np.float32([ROW] * ROWS))
    assert not np.any(active.is_neutral())
    assert np.all(rest.is_neutral())
    assert np.all(type(active)(*type(active).NEUTRAL).is_neutral())


@every
@given(scores=scores)
@few
def test_neutral_is_the_identity(active, rest, scores):
    np.testing.assert_array_equal(run(rest, scores).view(np.int32), scores.view(np.int32))


@every
@given(scores=scores)
@few
def test_a_neutral_row_keeps_its_bits_beside_one_that_is_not(active, rest, scores):
    mixed = jax.tree.map(lambda *leaves: np.stack(leaves), active, rest, active)
    result = run(mixed, scores)
    np.testing.assert_array_equal(result[1].view(np.int32), scores[1].view(np.int32))
    np.testing.assert_array_equal(result[[0, 2]], run(active, scores)[[0, 2]])


@every
@given(scores=scores)
@few
def test_rows_are_independent_and_removals_final(active, rest, scores):
    result = run(active, scores)
    if not isinstance(active, REPLACE_SCORES):
        assert np.all(np.isneginf(result[np.isneginf(scores)]))
    if active.argmax_invariant:
        best = scores.max(-1, keepdims=True)
        assert np.all(np.any((scores == best) & (result == result.max(-1, keepdims=True)), axis=-1))
    for row in range(ROWS):
        for neighbour in (scores[row], np.full(VOCAB, np.nan, np.float32)):
            among = np.stack([scores[row] if i == row else neighbour for i in range(ROWS)])
            np.testing.assert_array_equal(result[row], run(active, among)[row])


@every
def test_a_row_without_a_distribution_stays_without_one(active, rest):
    if isinstance(active, REPLACE_SCORES):
        pytest.skip("replaces scores, as its reference does")
    broken = np.array([[*ROW[:-1], bad] for bad in (np.nan, -np.nan, np.inf)] + [[FILTER] * VOCAB], np.float32)
    assert not np.any(Distribution.of(jnp.asarray(run(active, broken))).masses.defined)


@every
def test_gradients_are_finite_where_scores_are_removed(active, rest):
    state = rows_of(active)

    @jax.jit
    @jax.grad
    def gradient(scores):
        return jnp.sum(Distribution.of(apply(active, state, scores)).logprobs(jnp.int32([0, 3, 6])))

    assert np.all(np.isfinite(gradient(jnp.float32([ROW] * ROWS))))


@every
def test_it_is_the_same_under_jit_and_vmap_and_without(active, rest):
    state = rows_of(active)
    scores = np.random.default_rng(0).normal(size=(2, ROWS, VOCAB)).astype(np.float32)
    mapped = jax.jit(jax.vmap(apply, in_axes=(None, None, 0)))(active, state, scores)
    for i in range(2):
        result = run(active, scores[i])
        np.testing.assert_allclose(mapped[i], result, rtol=1e-6, atol=1e-6)
        with jax.disable_jit():
            np.testing.assert_allclose(active(state, jnp.asarray(scores[i])), result, rtol=1e-6, atol=1e-6)


@every
def test_another_number_compiles_nothing(active, rest, compilations):
    run(active, [ROW] * ROWS)
    before = len(compilations)
    run(rest, [ROW] * ROWS)
    run(jax.tree.map(lambda leaf: leaf, active), [ROW] * ROWS)
    assert len(compilations) == before


def test_no_two_share_a_structure():
    structures = [jax.tree.structure(active) for active, _ in EXAMPLES]
    for i, one in enumerate(structures):
        assert [one == other for other in structures].count(True) == 1, EXAMPLES[i]


def test_a_stage_at_rest_is_not_computed():
    computed = []

    class Counted(Temperature):
        def summary(self, state, logits):
            jax.debug.callback(lambda: computed.append(1))
            return super().summary(state, logits)

    for value, times in ((1.0, 0), (0.5, 1), (1.0, 1)):
        run(Counted(value), [ROW] * ROWS)
        jax.effects_barrier()
        assert len(computed) == times


def test_an_inactive_row_does_not_keep_a_stage_running():
    state = rows_of(Temperature(1.0), 2).replace(active=jnp.array([True, False]))
    result = jitted(Temperature(np.float32([1.0, 0.5])), state, np.float32([ROW] * 2))
    np.testing.assert_array_equal(result, np.float32([ROW] * 2))


def test_a_plain_function_is_a_stage_too():
    result = apply(lambda state, logits: logits / 2, rows_of(None, 1), jnp.float32([ROW]))
    np.testing.assert_array_equal(result, np.float32([ROW]) / 2)
