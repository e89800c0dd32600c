"""Canary: a share of a run's groups, verified while the run goes on.

Each of them is drawn again, which has to give the same bits, and scored by forward passes, which tells how far the
log-probs lie from those that a learner computes.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from actors import GroupFailure, Outcome
from rollout.atomic import write_atomically
from rollout.comparison import Distances, difference
from rollout.trajectory import Trajectory
from sampling.types import Request

CANARY_NAME = "canary.json"


@dataclass(frozen=True)
class CanaryReport:
    """What was verified.

    Attributes:
        samples, tokens: drawn again and scored.
        distances: quantiles of |forward score - record| of the behaviour log-probs, in words.
        faults: what is wrong, one line each.
    """

    samples: int
    tokens: int
    distances: str
    faults: tuple[str, ...]


class Canary:
    """Chooses groups, asks for them again, and compares.

    Args:
        share: of the prompts, in (0, 1]; the same ones every time.
        dtype: of the run's model.
    """

    def __init__(self, share: float, dtype: str) -> None:
        self._share = share
        self._dtype = dtype
        self._due: deque[tuple[Request, Sequence[Trajectory]]] = deque()
        self._open: list[tuple[Request, Sequence[Trajectory]]] = []
        self._distances = Distances()
        self._samples = self._tokens = 0
        self._faults: list[str] = []

    @property
    def waiting(self) -> bool:
        """Whether anything is still to be compared."""
        return bool(self._due or self._open)

    def watch(self, request: Request, records: Sequence[Trajectory]) -> None:
        """Takes a request and what was recorded of it; forgets it unless its prompt belongs to the share."""
        if not chosen(request.prompt_id, self._share) or any(record.failed for record in records):
            return
        given = tuple(record.completion_tokens for record in records)
        self._due.append((request, records))
        self._due.append((replace(request, given=given, forward=True), records))

    def requests(self) -> Iterator[Request]:
        """What is to be asked next."""
        while self._due:
            request, records = self._due.popleft()
            request = replace(request)  # an object of its own, by which its outcome is known
            self._open.append((request, records))
            yield request

    def settle(self, outcome: Outcome) -> bool:
        """Compares an outcome; False if nobody here asked for it."""
        asked = next((case for case in self._open if case[0] is outcome.request), None)
        if asked is None:
            return False
        self._open = [case for case in self._open if case is not asked]
        request, records = asked
        if isinstance(outcome, GroupFailure):
            self._faults.append(f"prompt {request.prompt_id!r}: {outcome.error_type}: {outcome.message}")
            return True
        for record, completion in zip(records, outcome.group.completions, strict=True):
            if np.unique(np.concatenate([record.policy_versions, completion.policy_versions])).size > 1:
                continue  # weights were published amid it: other weights, other bits
            if request.forward:
                self._distances.add(record, completion)
                continue
            self._samples += 1
            self._tokens += record.completion_len
            fault = difference(record, completion, bound=None)
            self._faults += [f"drawn again: {fault}"] if fault else []
        return True

    def report(self) -> CanaryReport:
        """What has been found so far."""
        far = self._distances.fault(self._dtype)
        faults = (*self._faults, f"forward scores: {far}") if far else tuple(self._faults)
        return CanaryReport(self._samples, self._tokens, str(self._distances), faults)

    def write(self, folder: Path) -> None:
        """Writes the report beside the run's records."""
        report = self.report()
        text = json.dumps({**vars(report), "faults": list(report.faults)}, indent=2)
        write_atomically(folder / CANARY_NAME, lambda file: file.write(f"{text}\n".encode()))


def chosen(prompt_id: str, share: float) -> bool:
    """Whether a prompt belongs to the share that is verified; the same answer every time."""
    digest = hashlib.sha256(f"verify {prompt_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64
