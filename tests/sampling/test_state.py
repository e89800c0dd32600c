"""sampling/state.py: histories without padding, and committing tokens."""

import jax.numpy as jnp
import pytest

from sampling.errors import ConfigError
from sampling.state import NO_TOKEN, StepState


def state():
    return StepState.from_histories([[5, 6], [7]], [[1], []], capacity=4, vocab_size=10)


def test_views_of_the_history():
    rows = state()
    assert rows.total().tolist() == [3, 1]
    assert rows.step.tolist() == [1, 0]
    assert rows.history().tolist() == [[5, 6, 1, NO_TOKEN], [7, NO_TOKEN, NO_TOKEN, NO_TOKEN]]
    assert rows.prompt_history().tolist() == [[5, 6, NO_TOKEN, NO_TOKEN], [7, NO_TOKEN, NO_TOKEN, NO_TOKEN]]
    assert rows.generated().tolist() == [[NO_TOKEN, NO_TOKEN, 1, NO_TOKEN], [NO_TOKEN] * 4]


def test_commit_appends_to_active_rows_only():
    rows = state().replace(active=jnp.array([True, False])).commit(jnp.int32([2, 3]))
    assert rows.history().tolist() == [[5, 6, 1, 2], [7, NO_TOKEN, NO_TOKEN, NO_TOKEN]]


def test_commit_never_writes_past_the_end():
    rows = state()
    for _ in range(3):
        rows = rows.commit(jnp.int32([2, 3]))
    assert rows.history().tolist() == [[5, 6, 1, 2], [7, 3, 3, 3]]
    assert rows.total().tolist() == [4, 4]


def test_what_lies_past_the_length_is_invisible():
    rows = state()
    noisy = rows.replace(buffer=rows.buffer.at[0, 3].set(9).at[1, 1:].set(8))
    assert noisy.history().tolist() == rows.history().tolist()


@pytest.mark.parametrize(
    ("prompts", "drawn", "capacity", "says"),
    [
        ([[1]], [], None, "one list of drawn tokens per prompt"),
        ([[1, 2, 3]], [[4]], 3, "at least 4"),
        ([[1, 99]], [[]], None, "0 .. 9"),
        ([[-1]], [[]], None, "0 .. 9"),
    ],
)
def test_bad_histories_are_refused(prompts, drawn, capacity, says):
    with pytest.raises(ConfigError, match=says):
        StepState.from_histories(prompts, drawn, capacity, vocab_size=10)
