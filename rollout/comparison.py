"""Comparing a record with what the same request gives again: to the bit, or within rounding."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rollout.trajectory import Trajectory
from sampling.scoring import FORWARD_BOUND
from sampling.types import Completion

CHAIN_BOUND = 1e-4
"""Nats: how far a token's figures may lie from their record where the model's scores are the same to the bit, and the
chain was gone through outside the engine's program. What was seen is below 1e-5."""

OTHER_NUMERICS_BOUND = {"float32": 1e-3, "bfloat16": 0.5}
"""Nats, by dtype: the largest difference of one token between machines or releases whose numerics are not the same."""

_IN_NATS = ("behaviour_logprobs", "model_logprobs", "log_kept_mass", "entropy")


@dataclass
class Distances:
    """Absolute differences of behaviour log-probs, nats, of as many tokens as were compared."""

    _parts: list[np.ndarray] = field(default_factory=list)

    def add(self, record: Trajectory, completion: Completion) -> None:
        """Takes a completion of the same tokens."""
        ours, theirs = completion.behaviour_logprobs.astype(np.float64), record.behaviour_logprobs
        self._parts.append(np.abs(np.where(np.isnan(ours), np.inf, ours) - theirs).astype(np.float32))

    def quantile(self, share: float) -> float:
        """The difference that this share of the tokens does not exceed; 0 without tokens."""
        together = np.concatenate([np.zeros(0, np.float32), *self._parts])
        return float(np.quantile(together, share, method="higher")) if together.size else 0.0

    def fault(self, dtype: str) -> str | None:
        """What is wrong if too many tokens lie too far from their record for forward scores; None if not."""
        share, bound = FORWARD_BOUND[dtype]
        far = self.quantile(share)
        if far <= bound:
            return None
        return f"expected {100 * share:g} % of the tokens within {bound} nats of their records, got {far:.2e}"

    def __str__(self) -> str:
        shares = (("median", 0.5), ("99 %", 0.99), ("99.9 %", 0.999), ("largest", 1.0))
        return ", ".join(f"{name} {self.quantile(share):.2e}" for name, share in shares) + " nats"


def difference(record: Trajectory, completion: Completion | Trajectory, bound: float | None) -> str | None:
    """What is wrong with a record, the most telling first and nothing after it; None if nothing is.

    Args:
        record: as it is on disk.
        completion: what its request gives.
        bound: nats that may lie between them; None compares to the bit.
    """
    where = f"prompt {record.prompt_id!r}, sample {record.sample_index}"
    if not np.array_equal(record.key, completion.key):
        return f"{where}: key: expected {completion.key.tolist()}, got {record.key.tolist()}"
    ours, theirs = completion.completion_tokens, record.completion_tokens
    common = min(ours.size, theirs.size)
    unequal = np.flatnonzero(ours[:common] != theirs[:common])
    if unequal.size or ours.size != theirs.size:
        place = int(unequal[0]) if unequal.size else common
        expected, got = ([*part.tolist(), "the end"][place] for part in (ours, theirs))
        return f"{where}: completion token {place}: expected {expected}, got {got}"
    for name in _IN_NATS:
        mine, recorded = getattr(completion, name), getattr(record, name)
        if bound is None:
            wrong = mine.view(np.uint32) != recorded.view(np.uint32)
        else:
            wrong = ~(np.abs(mine.astype(np.float64) - recorded) <= bound) & (mine != recorded)
        if wrong.any():
            place = int(np.argmax(wrong))
            return f"{where}: {name} of completion token {place}: expected {mine[place]!r}, got {recorded[place]!r}"
    if bound is not None:
        return None
    for name in ("support_sizes", "support_ids"):
        if not np.array_equal(getattr(completion, name), getattr(record, name)):
            return f"{where}: {name}: other ids than the policy leaves"
    if not np.array_equal(completion.forced, record.forced):
        return f"{where}: forced: expected places {completion.forced.tolist()}, got {record.forced.tolist()}"
    if completion.stop_reason != record.stop_reason:
        return f"{where}: stop_reason: expected {completion.stop_reason}, got {record.stop_reason}"
    return None
