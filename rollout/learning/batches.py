"""TrainBatch: trajectories as padded arrays, whole on the host and cut into micro-batches of few fixed shapes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np
from flax import struct

from rollout.trajectory import Trajectory
from sampling.errors import ConfigError
from sampling.params import SamplingParams
from sampling.state import NO_TOKEN
from sampling.types import StopReason

FREE = frozenset(
    "temperature renormalize max_new_tokens max_length stop stop_token_ids eos_token_ids ignore_eos n seed order"
    " record_support forced_bos forced_eos thinking_budget thinking_start thinking_end".split()
)
"""Parameters that, but for the temperature, leave the probability of every token that is drawn alone."""

TRUNCATIONS = frozenset(
    "top_k top_p min_p typical_p epsilon_cutoff eta_cutoff top_h allowed_token_ids suppress_tokens"
    " begin_suppress_tokens suppress_control_tokens min_new_tokens min_length".split()
)
"""Parameters that remove tokens and do nothing else: the recorded support tells what they left."""

CUT_OFF = frozenset({StopReason.LENGTH, StopReason.CACHE_FULL})
"""Stop reasons of completions that a limit of length ended."""


class TrainBatch(struct.PyTreeNode):
    """Sequences to learn from, each a prompt and its completion from column 0 on.

    Arrays of completions have token j of the completion in column j. What lies under a False mask is 0, and what lies
    behind a sequence's end means nothing.

    Attributes:
        tokens: int32 [rows, len].
        prompt_len, length: int32 [rows]; length of prompt and completion together, 0 in a row of padding.
        behaviour_logprobs: float32 [rows, completion_len], as recorded.
        mask: bool [rows, completion_len], tokens that are learnt from.
        policy_versions: int32 [rows, completion_len].
        temperature: float32 [rows].
        support: int32 [rows, completion_len, places], ids that the token was drawn among, NO_TOKEN after them, and
            everywhere if it was drawn from the whole vocabulary.
        group: int32 [rows], which samples share a prompt.
        rewards: float32 [rows], NaN where there is none.
        cut_off: bool [rows], completions that a limit of length ended.
        advantages, weights: float32 [rows, completion_len], the latter of each token in the loss.
        proximal_logprobs, reference_logprobs: float32 [rows, completion_len], of the policy before the step and of
            the frozen reference; None where the loss asks for none.
        values, returns: float32 [rows, completion_len], of the value head before the step, and what it is to learn;
            None without one.
    """

    tokens: Any
    prompt_len: Any
    length: Any
    behaviour_logprobs: Any
    mask: Any
    policy_versions: Any
    temperature: Any
    support: Any
    group: Any
    rewards: Any
    cut_off: Any
    advantages: Any
    weights: Any
    proximal_logprobs: Any = None
    reference_logprobs: Any = None
    values: Any = None
    returns: Any = None

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], rules: Collection[str] = ()) -> Self:
        """The batch of trajectories, in their order; advantages and weights are 0 until they are assigned.

        Nothing is learnt from failed rows, from given and from forced tokens. The arrays are as long as the longest
        row needs.

        Args:
            rules: as in `require_learnable`.
        Raises:
            ConfigError: a row's policy cannot be computed from the model's scores; see `require_learnable`.
        """
        rows = len(trajectories)
        longest = max((t.prompt_tokens.size + t.completion_len for t in trajectories), default=1)
        completion = (rows, max([t.completion_len for t in trajectories if not t.failed], default=1))
        places = max((int(t.support_sizes.max(initial=0)) for t in trajectories), default=0)
        groups = {name: index for index, name in enumerate(dict.fromkeys(t.group_id for t in trajectories))}
        batch = cls(
            tokens=np.zeros((rows, longest), np.int32),
            prompt_len=np.array([t.prompt_tokens.size for t in trajectories], np.int32),
            length=np.array([t.prompt_tokens.size + t.completion_len for t in trajectories], np.int32),
            behaviour_logprobs=np.zeros(completion, np.float32),
            mask=np.zeros(completion, bool),
            policy_versions=np.zeros(completion, np.int32),
            temperature=np.ones(rows, np.float32),
            support=np.full((*completion, places), NO_TOKEN, np.int32),
            group=np.array([groups[t.group_id] for t in trajectories], np.int32),
            rewards=np.array([math.nan if t.reward is None else t.reward for t in trajectories], np.float32),
            cut_off=np.array([t.stop_reason in CUT_OFF for t in trajectories], bool),
            advantages=np.zeros(completion, np.float32),
            weights=np.zeros(completion, np.float32),
        )
        for row, trajectory in enumerate(trajectories):
            prompt_len = trajectory.prompt_tokens.size
            batch.tokens[row, :prompt_len] = trajectory.prompt_tokens
            batch.tokens[row, prompt_len : prompt_len + trajectory.completion_len] = trajectory.completion_tokens
            if trajectory.failed:
                continue
            drawn = np.flatnonzero(trajectory.drawn)
            batch.temperature[row] = _learnable(trajectory, rules).temperature
            batch.behaviour_logprobs[row, drawn] = trajectory.behaviour_logprobs[drawn]
            batch.policy_versions[row, drawn] = trajectory.policy_versions[drawn]
            batch.mask[row, drawn] = True
            ends = np.cumsum(trajectory.support_sizes)
            for place in np.flatnonzero(trajectory.support_sizes):
                size = trajectory.support_sizes[place]
                batch.support[row, place, :size] = trajectory.support_ids[ends[place] - size : ends[place]]
        return batch

    @property
    def num_rows(self) -> int:
        """Sequences, rows of padding included."""
        return self.tokens.shape[0]

    @property
    def completion_len(self) -> int:
        """Columns of the completions."""
        return self.mask.shape[1]


def require_learnable(params: SamplingParams, place: str = "", rules: Collection[str] = ()) -> list[str]:
    """Checks that a policy's probabilities follow from scores, temperature and recorded support.

    Args:
        place: begins the message.
        rules: names of plugins that end rows, and so change no probability.
    Returns:
        The truncations that are on, by name; with any, every token needs its recorded support.
    Raises:
        ConfigError: they do not; the message names the parameter, and what to do.
    """
    if params.greedy:
        raise ConfigError(
            f"{place}sampling.temperature: expected more than 0, got 0; a greedy row has no probabilities to learn"
            " from, draw with a temperature"
        )
    fields = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    changed = [name for name, default in fields.items() if name not in FREE and getattr(params, name) != default]
    if {plugin for plugin, _ in params.plugins} <= set(rules):
        changed = [name for name in changed if name != "plugins"]
    for name in changed:
        if name not in TRUNCATIONS:
            raise ConfigError(
                f"{place}sampling.{name} = {getattr(params, name)!r}: expected its default {fields[name]!r}; a learner"
                " knows temperature and truncation alone, leave it out"
            )
        if not params.record_support:
            raise ConfigError(
                f"{place}sampling.{name} = {getattr(params, name)!r}: expected sampling.record_support above 0, got 0;"
                f" a learner needs what was left of the vocabulary (1024 ids at most), or leave {name} out"
            )
    return changed


def _learnable(trajectory: Trajectory, rules: Collection[str]) -> SamplingParams:
    """The policy of a trajectory that can be learnt from; raises ConfigError for another one's."""
    place = f"trajectory of prompt {trajectory.prompt_id!r}, sample {trajectory.sample_index}: "
    params = SamplingParams.from_dict(trajectory.policy)
    truncations = require_learnable(params, place, rules)
    bare = np.flatnonzero((trajectory.support_sizes == 0) & trajectory.drawn)
    if truncations and bare.size:
        raise ConfigError(
            f"{place}sampling.{truncations[0]}: expected the recorded support of every drawn token, got none of token"
            f" {bare[0]}; draw with a larger sampling.record_support (it is {params.record_support}, 1024 at most), or"
            f" leave {truncations[0]} out"
        )
    return params


@dataclass(frozen=True)
class BatchShapes:
    """The shapes of micro-batches: few, so that few programs are compiled.

    Attributes:
        rows: sequences of a micro-batch.
        longest, longest_completion: tokens that a sequence and a completion may have.
        bucket_len: lengths are padded to this times a power of two, at most to the longest.
    """

    rows: int
    longest: int
    longest_completion: int
    bucket_len: int = 64

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"batch shapes: {name}: expected at least 1, got {value}")

    def len_for(self, longest: int) -> int:
        """Padded length of sequences of at most `longest` tokens."""
        return self._bucket(longest, self.longest, "sequence")

    def completion_len_for(self, longest: int) -> int:
        """Padded length of completions of at most `longest` tokens."""
        return self._bucket(longest, self.longest_completion, "completion")

    def _bucket(self, size: int, limit: int, what: str) -> int:
        if size > limit:
            raise ConfigError(f"batch shapes: expected a {what} of at most {limit} tokens, got {size}")
        padded = self.bucket_len
        while padded < size:
            padded *= 2
        return min(padded, limit)


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch.

    Attributes:
        rows: int [up to the shape's rows], which of the batch's rows it holds, in its first places.
        batch: those rows, and rows of padding after them.
    """

    rows: np.ndarray
    batch: TrainBatch


def cut(batch: TrainBatch, shapes: BatchShapes) -> list[MicroBatch]:
    """Micro-batches of the rows that are learnt from, longest first; none if there are none."""
    learnt = np.flatnonzero(batch.mask.any(axis=1))
    by_length = learnt[np.argsort(-batch.length[learnt], kind="stable")]
    micro = []
    for start in range(0, by_length.size, shapes.rows):
        rows = by_length[start : start + shapes.rows]
        length = shapes.len_for(int(batch.length[rows].max()))
        completions = batch.length[rows] - batch.prompt_len[rows]
        completion_len = shapes.completion_len_for(int(completions.max()))
        micro.append(MicroBatch(rows, _padded(batch, rows, shapes.rows, length, completion_len)))
    return micro


def joined(batch: TrainBatch, micro: Sequence[MicroBatch], parts: Sequence[Any]) -> Any:
    """Arrays [rows, completion_len] of micro-batches as arrays of the whole batch, 0 in the rows that are in none.

    Args:
        parts: for each micro-batch a tree of arrays, all trees alike.
    """

    def whole(*arrays: np.ndarray) -> np.ndarray:
        out = np.zeros((batch.num_rows, batch.completion_len), arrays[0].dtype)
        for piece, array in zip(micro, arrays, strict=True):
            columns = min(array.shape[1], batch.completion_len)
            out[piece.rows, :columns] = array[: piece.rows.size, :columns]
        return out

    return jax.tree.map(whole, *parts)


def split(batch: TrainBatch, parts: int) -> list[TrainBatch]:
    """The rows that are learnt from, in their order, as up to `parts` batches of about as many each."""
    learnt = np.flatnonzero(batch.mask.any(axis=1))
    pieces = [rows for rows in np.array_split(learnt, parts) if rows.size]
    return [jax.tree.map(lambda leaf, rows=rows: leaf[rows], batch) for rows in pieces]


def _padded(batch: TrainBatch, rows: np.ndarray, num_rows: int, length: int, completion_len: int) -> TrainBatch:
    fillers = {"prompt_len": 1, "temperature": 1, "support": NO_TOKEN}

    def padded(name: str, array: np.ndarray) -> np.ndarray:
        columns = () if array.ndim == 1 else (length if name == "tokens" else completion_len,)
        rest = array.shape[2:] if name != "support" else (_places(array.shape[2]),)
        out = np.full((num_rows, *columns, *rest), fillers.get(name, 0), array.dtype)
        kept = tuple(slice(0, min(have, room)) for have, room in zip(array.shape[1:], out.shape[1:], strict=True))
        out[(slice(0, rows.size), *kept)] = array[(rows, *kept)]
        return out

    names = [field.name for field in dataclasses.fields(batch)]
    present = {name: getattr(batch, name) for name in names if getattr(batch, name) is not None}
    return TrainBatch(**{name: padded(name, array) for name, array in present.items()})


def _places(size: int) -> int:
    """Room for supports: a power of two, so that few shapes occur; 0 for none."""
    return 1 << (size - 1).bit_length() if size else 0
