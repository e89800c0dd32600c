"""The live Transformers processors on each row's own unpadded history, beside our transforms on the whole batch."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

from sampling.state import NO_TOKEN, StepState
from sampling.transforms import FILTER, apply

ROWS = 3
VOCABS = (2, 7, 64, 512)
LONGEST = 12
"""Tokens that a prompt, and a completion, can hold."""
TOLERANCE = 1e-5

jitted = jax.jit(apply)
many = settings(max_examples=60, deadline=None)


@dataclass(frozen=True)
class Batch:
    """Rows with histories of different lengths; scores float32 [ROWS, vocab]."""

    prompts: list[list[int]]
    drawn: list[list[int]]
    scores: np.ndarray

    @property
    def vocab(self) -> int:
        return self.scores.shape[1]

    @property
    def histories(self) -> list[list[int]]:
        return [prompt + drawn for prompt, drawn in zip(self.prompts, self.drawn, strict=True)]

    def ours(self, transform) -> np.ndarray:
        """float32 [ROWS, vocab]: the transform on the whole batch."""
        state = StepState.from_histories(self.prompts, self.drawn, 2 * LONGEST, vocab_size=self.vocab)
        return np.asarray(jitted(transform, state, self.scores))

    def theirs(self, processors: Iterable) -> np.ndarray:
        """float32 [ROWS, vocab]: one processor per row, on that row alone."""
        rows = zip(processors, self.histories, self.scores, strict=True)
        return np.concatenate([one(torch.tensor([ids]), torch.tensor(row)[None]).numpy() for one, ids, row in rows])


# XLA counts subnormal floats as zero, so scores that differ by less than 1e-38 tie there and not in torch.
finite = st.floats(-30, 30, width=32, allow_subnormal=False)
ties = st.sampled_from([0.0, -0.0, 1.0, 1.5, -2.0])
extremes = st.sampled_from([1e4, -1e4, 1e30, -1e30, 3e38, -3e38])
score = finite | ties | extremes | st.just(FILTER)


@st.composite
def score_rows(draw: st.DrawFn, vocab: int) -> np.ndarray:
    """float32 [ROWS, vocab], no row without a finite score: score by score, or for larger vocabularies by texture."""
    if vocab <= 8:
        row = st.lists(score, min_size=vocab, max_size=vocab).filter(lambda row: max(row) > FILTER)
        return np.array(draw(st.lists(row, min_size=ROWS, max_size=ROWS)), np.float32)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(each_row(st.sampled_from([0.01, 1.0, 5.0, 100.0, 1e30])))
    rows = rng.normal(size=(ROWS, vocab)) * np.array(spread)[:, None]
    rows = np.array([row.round(draw(st.sampled_from([0, 1, 20]))) for row in rows])
    rows[rng.random(rows.shape) < draw(st.sampled_from([0.0, 0.3, 0.97]))] = FILTER
    rows[np.arange(ROWS), rng.integers(vocab, size=ROWS)] = draw(each_row(finite | ties))
    return rows.astype(np.float32)


@st.composite
def batches(draw: st.DrawFn, vocabs: Sequence[int] = VOCABS) -> Batch:
    """Histories over few ids, so that they repeat themselves."""
    vocab = draw(st.sampled_from(vocabs))
    pool = st.sampled_from(draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=4)))
    prompts = draw(each_row(st.lists(pool, min_size=1, max_size=LONGEST)))
    drawn = draw(each_row(st.lists(pool, max_size=LONGEST)))
    return Batch(prompts, drawn, draw(score_rows(vocab)))


def each_row(values: st.SearchStrategy) -> st.SearchStrategy[list]:
    """One value per row."""
    return st.lists(values, min_size=ROWS, max_size=ROWS)


def float32(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers that float32 and float64 share."""
    return st.floats(np.float32(low).item(), np.float32(high).item(), width=32)


@st.composite
def with_ids(draw: st.DrawFn, batch: st.SearchStrategy[Batch], most: int = 3) -> tuple[Batch, list[list[int]]]:
    """A batch, and per row a set of one to `most` of its ids."""
    one = draw(batch)
    ids = st.lists(st.integers(0, one.vocab - 1), min_size=1, max_size=min(most, one.vocab), unique=True)
    return one, draw(each_row(ids))


def filled(sets: Sequence[Sequence[int]], places: int = 3) -> np.ndarray:
    """int32 [rows, places]: sets of ids, filled up with NO_TOKEN."""
    return np.array([[*ids, *[NO_TOKEN] * (places - len(ids))] for ids in sets], np.int32)


def kept(scores) -> list[list[int]]:
    """Per row, the ids that are not removed."""
    return [np.flatnonzero(~np.isneginf(row)).tolist() for row in np.asarray(scores)]


def assert_equal(ours: np.ndarray, theirs: np.ndarray, scale: float | np.ndarray = 0.0) -> None:
    """The same entries removed; the others equal within 1e-5, absolute or relative to the terms of the sum."""
    np.testing.assert_array_equal(np.isneginf(ours), np.isneginf(theirs))
    np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs))
    there = np.isfinite(ours)
    allowed = TOLERANCE * np.maximum(np.maximum(1.0, scale), np.abs(np.where(there, theirs, 0.0).astype(np.float64)))
    error = np.abs(np.where(there, ours, 0.0).astype(np.float64) - np.where(there, theirs, 0.0))
    assert np.all(error <= allowed)
    np.testing.assert_array_equal(ours[~there], theirs[~there])


def assert_same_choice(
    batch: Batch,
    ours: np.ndarray,
    theirs: np.ndarray,
    values: Sequence[float],
    allows: Callable[[np.ndarray, np.ndarray, float], bool],
) -> None:
    """A filter removes, and changes nothing else; and it removes what the reference removes.

    Torch's sort is not stable, so which of several equal scores goes is arbitrary there; how many is not. Where the
    choices differ in more than that, `allows(row, kept, value)`, by float64 margins, must allow both: the threshold
    lies within rounding.
    """
    for row, mine, other, value in zip(batch.scores, ours, theirs, values, strict=True):
        here, there = ~np.isneginf(mine), ~np.isneginf(other)
        np.testing.assert_array_equal(mine[here], row[here])
        if sorted(row[here]) != sorted(row[there]):
            for choice in (here, there):
                assert allows(row.astype(np.float64), choice, value), "differs away from the threshold"


def logs(*probabilities: float) -> np.ndarray:
    """Scores with these probabilities."""
    return np.log(np.array(probabilities, np.float32))


def state(rows: int, vocab: int) -> StepState:
    """Rows whose prompt is token 0, with nothing drawn: for transforms that do not read the history."""
    return StepState.from_histories([[0]] * rows, [[]] * rows, vocab_size=vocab)


def run(transform, *rows) -> np.ndarray:
    """A transform that does not read the history, on rows of scores."""
    scores = jnp.asarray(rows, jnp.float32)
    return np.asarray(jitted(transform, state(*scores.shape), scores))
