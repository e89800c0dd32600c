"""Reads the files of trajectories that a run has committed, and names their content by one hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet

from rollout.codec import read_parquet
from rollout.json_values import canonical_json
from rollout.manifest import Manifest, Shard, read_manifest
from rollout.trajectory import Trajectory
from sampling.errors import RecordError

SHARDS_NAME = "trajectories"
"""Folder of the files within a run folder."""


def read_trajectories(path: str | Path) -> Iterator[Trajectory]:
    """The committed trajectories of a run folder, in prompt order, one file in memory at a time at most.

    Raises:
        ConfigError: the folder holds no run.
        RecordError: a file is missing, changed, truncated or damaged; it is named.
    """
    path = Path(path)
    for shard in read_manifest(path).shards:
        file = path / SHARDS_NAME / shard.file
        check_digest(file, shard)
        yield from read_parquet(file)


def read_prompt_ids(path: Path, manifest: Manifest) -> set[str]:
    """Ids of the prompts whose samples are committed.

    Raises:
        RecordError: as `read_trajectories`.
    """
    done: set[str] = set()
    for shard in manifest.shards:
        file = path / SHARDS_NAME / shard.file
        check_digest(file, shard)
        done.update(pyarrow.parquet.read_table(file, columns=["prompt_id"]).column(0).unique().to_pylist())
    return done


def content_hash(trajectories: Iterable[Trajectory]) -> str:
    """sha256 over what was sampled, hexadecimal: equal for equal content, whoever drew it, where and how fast.

    Covers ids, tokens and which were forced, the bits of what is in nats, supports, policy versions, keys, policy, ends
    and rewards; not the run's id, timings, workers, texts or the way the rows are cut into files. The order of the rows
    counts.
    """
    total = hashlib.sha256()
    for row in trajectories:
        arrays = (
            row.prompt_tokens,
            row.completion_tokens,
            row.behaviour_logprobs,
            row.model_logprobs,
            row.log_kept_mass,
            row.entropy,
            row.policy_versions,
            row.support_sizes,
            row.support_ids,
            row.forced,
            row.key,
        )
        reward = None if row.reward is None else row.reward.hex()
        plain = [row.prompt_id, row.sample_index, row.given_len, row.stop_reason, row.status, reward, row.policy]
        parts = [canonical_json(plain).encode(), *(_little_endian(array) for array in arrays)]
        for part in parts:
            total.update(len(part).to_bytes(8, "little"))
            total.update(part)
    return total.hexdigest()


def _little_endian(array: np.ndarray) -> bytes:
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def check_digest(file: Path, shard: Shard) -> None:
    """Compares a file with what the manifest says of it.

    Raises:
        RecordError: it cannot be read, or is not the file that was committed.
    """
    try:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise RecordError(f"{file}: named in the manifest, but cannot be read: {error.strerror}") from error
    if digest != shard.sha256:
        raise RecordError(
            f"{file}: expected sha256 {shard.sha256}, got {digest}: changed, truncated or damaged since it was written;"
            " restore it from a copy"
        )
