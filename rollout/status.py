"""What `rollout status` tells about a run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollout.manifest import read_manifest
from rollout.shards import content_hash, read_trajectories
from rollout.store import is_locked


@dataclass(frozen=True)
class RunStatus:
    """The state of a run folder.

    Attributes:
        run_id: names the run.
        state: "finished"; "running" where a process is writing it; or "unfinished": the same command continues it.
        done: samples on disk with a usable completion.
        failed: samples on disk that failed.
        total: samples that the run will have, or None if that is not known yet.
        prompts: prompts with all samples on disk.
        tokens: completion tokens on disk.
        content_hash: `shards.content_hash` of the samples on disk.
    """

    run_id: str
    state: str
    done: int
    failed: int
    total: int | None
    prompts: int
    tokens: int
    content_hash: str


def read_status(path: str | Path) -> RunStatus:
    """Reads the whole folder, files included.

    Raises:
        ConfigError: the folder holds no run.
        RecordError: a file of it is damaged.
    """
    manifest = read_manifest(Path(path))
    return RunStatus(
        run_id=manifest.run_id,
        state="finished" if manifest.finished_at else "running" if is_locked(Path(path)) else "unfinished",
        done=manifest.rows - manifest.failed,
        failed=manifest.failed,
        total=manifest.rows_total,
        prompts=manifest.groups,
        tokens=manifest.tokens,
        content_hash=content_hash(read_trajectories(path)),
    )
