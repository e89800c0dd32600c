"""verify_run: draws a run's samples again and compares them with the records, to the bit.

A record names everything that its tokens depend on, so the same programs must give the same tokens and the same
log-probs. Where the numerics differ (another machine, another release), the recorded tokens are scored instead and
their log-probs compared within a bound.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from actors import GroupFailure, WorkerPool
from rollout.codec import read_parquet
from rollout.config_file import load_config
from rollout.driver import worker_pool
from rollout.manifest import Manifest, read_manifest
from rollout.progress import Progress, ProgressReporter
from rollout.shards import SHARDS_NAME, check_digest
from rollout.trajectory import Trajectory
from sampling.errors import RecordError
from sampling.fingerprint import fingerprint_digest
from sampling.params import SamplingParams
from sampling.types import Completion, Request

LOGPROB_BOUND = 1e-3
"""Largest difference of a log-prob, in nats, between float32 numerics that are not the same."""

BITWISE = ("behaviour_logprobs", "model_logprobs", "log_kept_mass", "entropy")
"""Columns that are compared to the bit, after the tokens."""


@dataclass
class Verification:
    """What a verification found.

    Attributes:
        samples, tokens: compared with a fresh draw or a fresh score.
        bit_exact: the numerics are those of the run, so every bit had to match.
        max_difference: largest difference of a behaviour log-prob, nats.
        faults: what is wrong, one line each, naming the record and the first bad token.
    """

    samples: int = 0
    tokens: int = 0
    bit_exact: bool = True
    max_difference: float = 0.0
    faults: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For people."""
        how = "bit for bit" if self.bit_exact else f"within {LOGPROB_BOUND} nats, the numerics being others"
        return [
            *self.faults,
            f"{self.samples} samples, {self.tokens} tokens compared {how}:"
            f" {len(self.faults)} faults, largest difference {self.max_difference:.2e} nats",
        ]


def verify_run(
    path: str | Path,
    *,
    share: float = 1.0,
    address: str | None = None,
    progress: ProgressReporter | None = None,
) -> Verification:
    """Checks every record of a run folder, and replays a share of its prompts.

    Args:
        path: the folder of a finished or unfinished run; what is committed is verified.
        share: of the prompts to replay, in (0, 1]; the same ones every time, and the first in any case.
        address: of a running Ray cluster; None starts Ray on this machine.
    Raises:
        ConfigError: the folder holds no run.
        RecordError: the manifest cannot be read.
        WorkerError, CheckpointError: the run's model cannot be loaded.
    """
    path = Path(path)
    manifest, config = read_manifest(path), load_config(path / "config.yaml")
    progress = progress or ProgressReporter(quiet=True)
    found = Verification()
    with worker_pool(config, address) as pool:
        if pool.description.weights_digest != manifest.weights_digest:
            found.faults.append(
                f"weights: expected digest {manifest.weights_digest}, got {pool.description.weights_digest}:"
                f" {config.model.checkpoint} is not what the run was drawn from"
            )
        found.bit_exact = fingerprint_digest(pool.description.fingerprint) in manifest.numerics
        groups = _groups(_records(path, manifest, found))
        # The first prompt always belongs to the share: a verification that compares nothing proves nothing.
        chosen = (group for place, group in enumerate(groups) if place == 0 or _chosen(group[0].prompt_id, share))
        for compared in _replay(chosen, pool, config.seed, found):
            engines = pool.stats().engines
            total = manifest.rows if share == 1 else None
            progress.update(Progress(compared, total, engines.tokens, engines.slots_busy, pool.slots))
    return found


def _records(path: Path, manifest: Manifest, found: Verification) -> Iterator[Trajectory]:
    """Every record that can be read; what cannot be is a fault."""
    for shard in manifest.shards:
        file = path / SHARDS_NAME / shard.file
        for step in (lambda file=file, shard=shard: check_digest(file, shard), lambda file=file: read_parquet(file)):
            try:
                yield from step() or ()
            except RecordError as error:
                found.faults.append(str(error))


def _groups(records: Iterable[Trajectory]) -> Iterator[list[Trajectory]]:
    for _, group in itertools.groupby(records, key=lambda record: record.prompt_id):
        yield list(group)


def _chosen(prompt_id: str, share: float) -> bool:
    digest = hashlib.sha256(f"verify {prompt_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _replay(groups: Iterable[list[Trajectory]], pool: WorkerPool, seed: int, found: Verification) -> Iterator[int]:
    """Compares groups as they come back; yields how many samples have been."""
    waiting: dict[str, list[Trajectory]] = {}

    def requests() -> Iterator[Request]:
        for group in groups:
            if records := _drawn(group):
                waiting[records[0].prompt_id] = records
                yield _request(records, seed, redraw=found.bit_exact)

    for outcome in pool.run(requests()):
        if isinstance(outcome, GroupFailure):
            found.faults.append(f"prompt {outcome.request.prompt_id!r}: {outcome.error_type}: {outcome.message}")
            continue
        records = waiting.pop(outcome.group.prompt_id)
        for record, completion in zip(records, outcome.group.completions, strict=True):
            found.faults += _differences(record, completion, records[0], found)
            found.samples += 1
            found.tokens += record.completion_len
        yield found.samples


def _drawn(records: list[Trajectory]) -> list[Trajectory]:
    """Records that a policy has drawn; a request that was refused has nothing to replay."""
    return [record for record in records if not record.failed]


def _request(records: list[Trajectory], seed: int, redraw: bool) -> Request:
    first = records[0]
    return Request(
        first.prompt_id,
        first.prompt_tokens,
        SamplingParams.from_dict(first.policy),
        run_seed=seed,
        sample_indices=tuple(record.sample_index for record in records),
        given=() if redraw else tuple(record.completion_tokens for record in records),
    )


def _differences(record: Trajectory, completion: Completion, first: Trajectory, found: Verification) -> Iterator[str]:
    """What is wrong with a record, the most telling first, and nothing after the first."""
    where = f"prompt {record.prompt_id!r}, sample {record.sample_index}"
    if record.policy != first.policy:
        keys = [key for key in first.policy if record.policy.get(key) != first.policy[key]]
        yield f"{where}: policy: {', '.join(keys)} differ from those of its group"
        return
    if not np.array_equal(record.prompt_tokens, first.prompt_tokens):
        yield f"{where}: prompt_tokens differ from those of its group"
        return
    if not np.array_equal(record.key, completion.key):
        yield f"{where}: key: expected {completion.key.tolist()}, got {record.key.tolist()}"
        return
    ours, theirs = completion.completion_tokens, record.completion_tokens
    common = min(ours.size, theirs.size)
    unequal = np.flatnonzero(ours[:common] != theirs[:common])
    if unequal.size or ours.size != theirs.size:
        place = int(unequal[0]) if unequal.size else common
        expected, got = ([*part.tolist(), "the end"][place] for part in (ours, theirs))
        yield f"{where}: completion token {place}: expected {expected}, got {got}"
        return
    for name in BITWISE:
        mine, recorded = getattr(completion, name), getattr(record, name)
        difference = np.abs(mine.astype(np.float64) - recorded)
        if name == "behaviour_logprobs" and difference.size:
            found.max_difference = max(found.max_difference, float(np.nanmax(difference)))
        wrong = mine.view(np.uint32) != recorded.view(np.uint32) if found.bit_exact else ~(difference <= LOGPROB_BOUND)
        if wrong.any():
            place = int(np.argmax(wrong))
            yield f"{where}: {name} of completion token {place}: expected {mine[place]!r}, got {recorded[place]!r}"
            return
    if found.bit_exact and completion.stop_reason != record.stop_reason:
        yield f"{where}: stop_reason: expected {completion.stop_reason}, got {record.stop_reason}"
