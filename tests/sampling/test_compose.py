"""sampling/compose.py"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from sampling.compose import as_pytree, chain, components, criterion
from sampling.draw import Distribution, draw
from sampling.errors import ConfigError
from sampling.state import StepState
from sampling.stopping import EndOfSequence, MaxLength, MaxNewTokens
from sampling.transforms import FrequencyPenalty, Greedy, PresencePenalty, Temperature, TopK, TopP, apply
from tests.sampling.transforms.live import kept, state
from tests.sampling.transforms.test_base import EXAMPLES, ROW, ROWS, VOCAB, rows_of

SCORES = np.float32([[2.0, 1.5, 0.5]])


def plus(amount, state, logits):
    return logits + amount


def doubled(state, logits):
    return 2 * logits


def ends_even(state, tokens):
    return tokens % 2 == 0


# ---- as_pytree ----


def test_a_function_becomes_a_pytree_and_a_pytree_stays():
    assert isinstance(as_pytree(doubled), Partial)
    for already in (Partial(plus, 1.0), Temperature(0.5), chain(Temperature(0.5)), MaxLength(5)):
        assert as_pytree(already) is already


def test_what_a_partial_binds_is_data(compilations):
    jitted = jax.jit(apply)
    for bind in (functools.partial, Partial):
        first, second = (as_pytree(bind(plus, np.float32(amount))) for amount in (1.0, 2.0))
        assert jitted(first, state(1, 3), SCORES).tolist() == (SCORES + 1).tolist()
        before = len(compilations)
        assert jitted(second, state(1, 3), SCORES).tolist() == (SCORES + 2).tolist()
        assert len(compilations) == before


# ---- components ----


def test_components_come_from_none_from_one_and_from_many():
    assert components(None, "transforms") == ()
    top_k, partial = TopK(2), Partial(doubled)
    assert components(top_k, "transforms") == (top_k,)
    assert components([partial, top_k], "transforms") == (partial, top_k)
    (function,) = components(doubled, "transforms")
    assert isinstance(function, Partial)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (0.7, "transforms: expected a callable .* got 0.7"),
        ("top_k", "transforms: expected a callable .* got 'top_k'"),
        ([TopK(2), None], r"transforms\[1\]: expected a callable .* got None"),
        (TopK, r"transforms: expected an instance such as TopK\(...\), got the class itself"),
    ],
)
def test_what_cannot_be_called_is_refused_by_place_and_value(values, message):
    with pytest.raises(ConfigError, match=message):
        components(values, "transforms")


# ---- chain ----


def test_a_chain_applies_its_stages_in_order():
    rows = state(1, 3)
    assert chain(doubled, Partial(plus, 1.0))(rows, SCORES).tolist() == [[5.0, 4.0, 2.0]]
    assert chain([Partial(plus, 1.0), doubled])(rows, SCORES).tolist() == [[6.0, 5.0, 3.0]]
    assert chain(chain(doubled), TopK(1))(rows, SCORES).tolist() == [[4.0, -np.inf, -np.inf]]
    assert chain()(rows, SCORES).tolist() == SCORES.tolist()


def test_worked_example():
    """A, B, C drawn 2, 1 and 0 times: support {A, B} at (0.593, 0.407), and the uniform 0.63 selects B."""
    rows = StepState.from_histories([[]], [[0, 0, 1]], vocab_size=3)
    stages = chain(PresencePenalty(0.1), FrequencyPenalty(0.2), Temperature(0.8), TopP(0.8))
    scores = jax.jit(apply)(stages, rows, SCORES)
    assert kept(scores) == [[0, 1]]
    final = Distribution.of(scores)
    assert np.asarray(final.probabilities()[0]) == pytest.approx([0.593, 0.407, 0], abs=5e-4)
    assert draw(final, jnp.float32([0.63])).tolist() == [1]


def test_another_number_in_a_chain_compiles_nothing(compilations):
    jitted = jax.jit(apply)
    one = chain(Temperature(0.5), TopK(2), Partial(plus, 1.0), doubled)
    other = chain(Temperature(0.9), TopK(1), Partial(plus, -3.0), doubled)
    jitted(one, state(1, 3), SCORES)
    before = len(compilations)
    jitted(other, state(1, 3), SCORES)
    assert len(compilations) == before


def test_a_chain_at_rest_is_the_identity():
    scores = np.float32([ROW] * ROWS)
    np.testing.assert_array_equal(jax.jit(apply)(chain([rest for _, rest in EXAMPLES]), rows_of(None), scores), scores)


def test_a_chain_of_everything_differentiates():
    everything = chain([active for active, _ in EXAMPLES if not isinstance(active, Greedy)])

    @jax.jit
    @jax.grad
    def gradient(scores):
        final = Distribution.of(everything(rows_of(None), scores))
        return jnp.sum(final.logprobs(jnp.argmax(final.scores, axis=-1)))

    scores = np.random.default_rng(0).normal(size=(ROWS, VOCAB)).astype(np.float32)
    scores[:, 5] = -np.inf
    assert np.all(np.isfinite(gradient(scores)))


# ---- criterion ----


def test_any_rule_of_a_criterion_ends_a_row():
    rows = StepState.from_histories([[1]] * 4, [[3], [4], [2], [3, 3]], vocab_size=5)
    tokens = jnp.int32([3, 4, 2, 3])
    assert criterion(EndOfSequence([2]), MaxNewTokens(2))(rows, tokens).tolist() == [False, False, True, True]
    assert criterion([ends_even, MaxLength(3)])(rows, tokens).tolist() == [False, True, True, True]
    assert criterion()(rows, tokens).tolist() == [False] * 4


def test_another_number_in_a_criterion_compiles_nothing(compilations):
    jitted = jax.jit(lambda rule, rows, tokens: rule(rows, tokens))
    rows, tokens = StepState.from_histories([[1]], [[3]], vocab_size=5), np.int32([3])
    assert jitted(criterion(EndOfSequence([2]), MaxLength(3), ends_even), rows, tokens).tolist() == [False]
    before = len(compilations)
    assert jitted(criterion(EndOfSequence([3]), MaxLength(9), ends_even), rows, tokens).tolist() == [True]
    assert len(compilations) == before


@pytest.mark.parametrize(("combine", "where"), [(chain, "chain"), (criterion, "criterion")])
def test_combining_what_cannot_be_called_names_the_place(combine, where):
    with pytest.raises(ConfigError, match=rf"{where}\[1\]: .* got 3"):
        combine(doubled, 3)
