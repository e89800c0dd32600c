"""sampling/transforms/thinking.py against plain loops over lists."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling.state import NO_TOKEN, StepState
from sampling.transforms import ThinkingBudget, apply

VOCAB, PLACES = 6, 4


def at(tokens, marker, place):
    return tokens[place : place + len(marker)] == marker


def forced_after(tokens, budget, start, end):
    """The token that has to follow a history, or None."""
    ended = max((i + len(end) for i in range(len(tokens)) if at(tokens, end, i)), default=0)
    first = next((i for i in range(ended, len(tokens)) if at(tokens, start, i)), None)
    if first is None or len(tokens) - first - len(start) < budget:
        return None
    begun = max(size for size in range(len(end)) if tokens[len(tokens) - size :] == end[:size])
    return end[begun]


def filled(marker):
    return np.int32(marker + [NO_TOKEN] * (PLACES - len(marker)))


def rows_of(histories):
    return StepState.from_histories([tokens[:1] for tokens in histories], [t[1:] for t in histories], vocab_size=VOCAB)


def contains(tokens, part):
    return any(at(tokens, part, i) for i in range(len(tokens)))


run = jax.jit(apply)
forces = jax.jit(ThinkingBudget.forces)
few_ids = st.integers(0, 2)
markers = st.lists(few_ids, min_size=1, max_size=PLACES)
row = st.tuples(st.lists(few_ids, min_size=1, max_size=14), st.none() | st.integers(0, 5), markers, markers)


@settings(max_examples=200, deadline=None)
@given(st.lists(row, min_size=3, max_size=3))
def test_each_row_is_forced_as_a_plain_loop_says(rows):
    histories, budgets, starts, ends = zip(*rows, strict=True)
    budget = np.int32([-1 if one is None else one for one in budgets])
    stage = ThinkingBudget(budget, np.stack([*map(filled, starts)]), np.stack([*map(filled, ends)]))
    state, logits = rows_of(histories), np.tile(np.linspace(-1, 1, VOCAB, dtype=np.float32), (3, 1))
    scores, found = np.asarray(run(stage, state, logits)), np.asarray(forces(stage, state))
    for i, (tokens, budget, start, end) in enumerate(rows):
        wanted = None if budget is None else forced_after(tokens, budget, start, end)
        assert found[i] == (wanted is not None)
        expected = logits[i] if wanted is None else np.where(np.arange(VOCAB) == wanted, 0.0, -np.inf)
        np.testing.assert_array_equal(scores[i], np.float32(expected))


@pytest.mark.parametrize(("start", "end"), [([3], [4]), ([3, 1], [4, 4, 1]), ([3, 1, 2], [3, 4]), ([0], [1, 0, 1, 2])])
@pytest.mark.parametrize("budget", [0, 1, 4])
def test_thinking_never_takes_longer_and_ends_with_a_whole_marker(start, end, budget):
    """Tokens drawn evenly over few ids, so that markers often begin by themselves."""
    rng = np.random.default_rng(budget)
    for _ in range(200):
        tokens, thought, ends = [5], None, 0
        for _ in range(40):
            forced = forced_after(tokens, budget, start, end)
            tokens.append(int(rng.integers(VOCAB)) if forced is None else forced)
            if thought is not None and at(tokens, end, len(tokens) - len(end)):
                assert len(tokens) - thought - len(end) <= budget
                thought, ends = None, ends + 1
            elif thought is None and at(tokens, start, len(tokens) - len(start)):
                thought = len(tokens)
            assert thought is None or len(tokens) - thought < budget + len(end)
        assert ends or not contains(tokens[: -budget - len(end)], start)


def test_a_marker_that_the_row_has_begun_is_only_completed():
    start, end = filled([3]), filled([4, 5, 4])
    histories = [[1, 3, 1, 4], [1, 3, 4, 5], [1, 3, 4, 5, 4], [1, 3, 1, 1]]
    state = rows_of(histories)
    logits = np.zeros((4, VOCAB), np.float32)
    scores = np.asarray(run(ThinkingBudget(2, start, end), state, logits))
    assert [np.flatnonzero(np.isfinite(one)).tolist() for one in scores] == [[5], [4], [0, 1, 2, 3, 4, 5], [4]]
