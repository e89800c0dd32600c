"""verify_run: draws a run's samples again and compares them with the records, to the bit.

A record names everything that its tokens depend on, so the same programs must give the same tokens and the same
log-probs. Where the numerics differ (another machine, another release), the recorded tokens are scored instead and
their log-probs compared within a bound.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from actors import GroupFailure, WorkerPool
from rollout.canary import chosen
from rollout.codec import read_parquet
from rollout.comparison import OTHER_NUMERICS_BOUND, Distances, difference
from rollout.config_file import load_config
from rollout.driver import worker_pool
from rollout.manifest import Manifest, read_manifest
from rollout.progress import Progress, ProgressReporter
from rollout.shards import SHARDS_NAME, check_digest
from rollout.trajectory import Trajectory
from sampling.checkpoints import inspect_checkpoint
from sampling.errors import RecordError
from sampling.fingerprint import fingerprint_digest
from sampling.params import SamplingParams
from sampling.plugins import load_plugins
from sampling.types import Request, StopReason


@dataclass
class Verification:
    """What a verification found.

    Attributes:
        samples, tokens: compared with a fresh draw or a fresh score.
        never_drawn: samples of the share that no policy has drawn: nothing to compare.
        bit_exact: the numerics are those of the run, so every bit had to match.
        bound: where the numerics are others, nats that may lie between a record and its score.
        distances: how far the behaviour log-probs lie apart.
        faults: what is wrong, one line each, naming the record and the first bad token.
    """

    samples: int = 0
    tokens: int = 0
    never_drawn: int = 0
    bit_exact: bool = True
    bound: float = 0.0
    distances: Distances = field(default_factory=Distances)
    faults: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For people."""
        how = "bit for bit" if self.bit_exact else f"within {self.bound} nats, the numerics being others"
        return [
            *self.faults,
            f"{self.samples} samples, {self.tokens} tokens compared {how}: {len(self.faults)} faults",
            f"differences: {self.distances}",
            *([f"{self.never_drawn} failed samples were never drawn"] if self.never_drawn else []),
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
        ConfigError: the folder holds no run, or a plugin of it is missing or of another version.
        RecordError: the manifest cannot be read.
        WorkerError, CheckpointError: the run's model cannot be loaded.
    """
    path = Path(path)
    manifest, config = read_manifest(path), load_config(path / "config.yaml")
    progress = progress or ProgressReporter(quiet=True)
    found = Verification()
    inspect_checkpoint(config.model.checkpoint)  # what is missing is told before workers start
    load_plugins(config.plugins)
    with worker_pool(config, address) as pool:
        if pool.description.weights_digest != manifest.weights_digest:
            found.faults.append(
                f"weights: expected digest {manifest.weights_digest}, got {pool.description.weights_digest}:"
                f" {config.model.checkpoint} is not what the run was drawn from"
            )
        found.bit_exact = fingerprint_digest(pool.description.fingerprint) in manifest.numerics
        found.bound = OTHER_NUMERICS_BOUND[config.model.dtype]
        groups = _groups(_records(path, manifest, found))
        # The first prompt always belongs to the share: a verification that compares nothing proves nothing.
        share_of_them = (group for place, group in enumerate(groups) if place == 0 or chosen(group[0].prompt_id, share))
        for compared in _replay(share_of_them, pool, config.seed, found):
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


def _replay(groups: Iterable[list[Trajectory]], pool: WorkerPool, seed: int, found: Verification) -> Iterator[int]:
    """Compares groups as they come back; yields how many samples have been."""
    waiting: dict[str, list[Trajectory]] = {}

    def requests() -> Iterator[Request]:
        for group in groups:
            found.never_drawn += sum(record.stop_reason is StopReason.ABORTED for record in group)
            if records := [record for record in group if record.stop_reason is not StopReason.ABORTED]:
                waiting[records[0].prompt_id] = records
                yield _request(records, seed, redraw=found.bit_exact)

    for outcome in pool.run(requests()):
        if isinstance(outcome, GroupFailure):
            found.faults.append(f"prompt {outcome.request.prompt_id!r}: {outcome.error_type}: {outcome.message}")
            continue
        records = waiting.pop(outcome.group.prompt_id)
        for record, completion in zip(records, outcome.group.completions, strict=True):
            fault = _of_another_group(record, records[0])
            fault = fault or difference(record, completion, None if found.bit_exact else found.bound)
            found.faults += [fault] if fault else []
            if np.array_equal(record.completion_tokens, completion.completion_tokens):
                found.distances.add(record, completion)
            found.samples += 1
            found.tokens += record.completion_len
        yield found.samples


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


def _of_another_group(record: Trajectory, first: Trajectory) -> str | None:
    """What tells a record from the first of its group, from which the whole group is drawn again."""
    where = f"prompt {record.prompt_id!r}, sample {record.sample_index}"
    if record.policy != first.policy:
        keys = [key for key in first.policy if record.policy.get(key) != first.policy[key]]
        return f"{where}: policy: {', '.join(keys)} differ from those of its group"
    if not np.array_equal(record.prompt_tokens, first.prompt_tokens):
        return f"{where}: prompt_tokens differ from those of its group"
    return None
