"""A run on disk: the resolved config, the manifest, and the trajectories as Parquet files.

    DIR/config.yaml                         the resolved config
    DIR/manifest.json                       what is committed (rollout/manifest.py)
    DIR/trajectories/part-00000.parquet     whole groups, in prompt order

Every file is written whole under a temporary name, flushed, then renamed; the manifest comes last. A kill at any
moment therefore loses only rows that were not committed, and a later start draws those again, to the same bits.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from rollout.atomic import TEMPORARY_SUFFIX, write_atomically
from rollout.codec import write_parquet
from rollout.config import RunConfig, differences
from rollout.config_file import dump_config, load_config
from rollout.manifest import MANIFEST_NAME, Manifest, Shard, read_manifest
from rollout.shards import SHARDS_NAME, read_prompt_ids
from rollout.trajectory import Trajectory
from sampling.errors import ConfigError, RecordError, RunError

CONFIG_NAME = "config.yaml"
_LOCK_NAME = ".lock"
LOOK_S = 0.1
"""Seconds for which somebody who looks whether a run is locked may hold its lock."""


class RunFolder:
    """Writes a run, or continues one. A context manager: leaving it commits the groups added so far.

    Groups are added whole, in the order of the prompts; only the prompts outside `done_prompt_ids` are missing.
    """

    def __init__(self, path: Path, config: RunConfig, manifest: Manifest, lock: Any) -> None:
        self.path = path
        self.config = config
        self.manifest = manifest
        self.done_prompt_ids = read_prompt_ids(path, manifest)
        self._lock = lock
        self._buffer: list[Trajectory] = []

    @classmethod
    def open(cls, path: str | Path, config: RunConfig) -> Self:
        """Makes the folder, or opens the same run again and removes what was not committed.

        A run that has no rows on disk yet is begun anew, whatever its config was.

        Raises:
            ConfigError: the folder holds another run (the differing keys are listed) or foreign files.
            RunError: another process is writing to it.
            RecordError: its manifest or a committed file is damaged.
        """
        path = Path(path)
        with opening(path):
            if path.is_dir() and not (path / MANIFEST_NAME).exists():
                _refuse_foreign_files(path)
            lock = locked(path, SHARDS_NAME)
        try:
            manifest = read_manifest(path) if (path / MANIFEST_NAME).exists() else None
            if manifest is None or not manifest.shards:
                manifest = _begin_anew(path, config)
            elif manifest.config_fingerprint != config.fingerprint():
                raise _another_run(path, config, manifest)
            _remove_uncommitted(path, manifest)
            return cls(path, config, manifest, lock)
        except BaseException:
            lock.close()
            raise

    @property
    def finished(self) -> bool:
        """Whether every row is on disk, so that nothing is left to do."""
        return self.manifest.finished_at is not None

    def begin(
        self,
        *,
        weights_digest: str,
        numerics: Mapping[str, Mapping[str, Any]],
        prompts_digest: str,
        prompts_total: int | None = None,
        rows_total: int | None = None,
    ) -> None:
        """Records what the rows are made from, before the first of them is added.

        Args:
            weights_digest: of the weights that the workers loaded.
            numerics: fingerprint to facts, of every worker.
            prompts_digest: `sources.digest_prompts` of the config's prompts.
            prompts_total: prompts of the source, if known.
            rows_total: samples over all prompts, if known.
        Raises:
            ConfigError: the folder's rows came from other weights or another prompt file.
        """
        self.require_same(weights_digest=weights_digest, prompts_digest=prompts_digest)
        self._commit(
            weights_digest=weights_digest,
            prompts_digest=prompts_digest,
            numerics={**self.manifest.numerics, **{name: dict(facts) for name, facts in numerics.items()}},
            prompts_total=prompts_total,
            rows_total=rows_total,
        )

    def require_same(self, **digests: str) -> None:
        """Refuses what is not that which the folder's rows were made from; see `begin`.

        Raises:
            ConfigError: `weights_digest` or `prompts_digest` is another than the manifest's.
        """
        for name, ours in digests.items():
            theirs = getattr(self.manifest, name)
            if theirs not in (None, ours):
                raise ConfigError(
                    f"{self.path}: holds rows made with {name} {theirs}, this start has {ours}: the file behind the"
                    " same name has changed. Restore it, or choose another --out"
                )

    def add_group(self, group: Sequence[Trajectory]) -> None:
        """Takes all samples of one prompt; commits a file when enough rows have come together.

        Raises:
            RecordError: the group is empty, mixes prompts, repeats a sample, or its prompt is on disk already.
        """
        prompt_ids = {trajectory.prompt_id for trajectory in group}
        if len(prompt_ids) != 1:
            raise RecordError(f"{self.path}: expected all samples of one prompt, got prompts {sorted(prompt_ids)}")
        indices = [trajectory.sample_index for trajectory in group]
        if indices != sorted(set(indices)):
            raise RecordError(f"{self.path}: prompt {group[0].prompt_id!r}: sample indices repeat or fall: {indices}")
        if group[0].prompt_id in self.done_prompt_ids:
            raise RecordError(f"{self.path}: prompt {group[0].prompt_id!r} was added before")
        self._buffer.extend(group)
        self.done_prompt_ids |= prompt_ids
        if len(self._buffer) >= self.config.output.rows_per_shard:
            self.commit()

    def commit(self) -> None:
        """Writes the groups added since the last commit as one file and names it in the manifest."""
        if not self._buffer:
            return
        rows = self._buffer
        name = f"part-{len(self.manifest.shards):05d}.parquet"
        digest = write_atomically(self.path / SHARDS_NAME / name, lambda file: write_parquet(file, rows))
        shard = Shard(
            file=name,
            sha256=digest,
            rows=len(rows),
            failed=sum(row.failed for row in rows),
            groups=len({row.prompt_id for row in rows}),
            tokens=sum(row.completion_len for row in rows),
            first_prompt=rows[0].prompt_id,
            last_prompt=rows[-1].prompt_id,
        )
        self._commit(shards=(*self.manifest.shards, shard))
        self._buffer = []

    def finish(self) -> None:
        """Commits the rest and marks the run as complete."""
        self.commit()
        self._commit(prompts_total=self.manifest.groups, rows_total=self.manifest.rows, finished_at=_now())

    def close(self) -> None:
        """Commits the groups added so far and lets other processes write."""
        try:
            self.commit()
        finally:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _commit(self, **changes: Any) -> None:
        manifest = self.manifest.model_copy(update=changes)
        manifest.write(self.path)  # what could not be written is not committed, and may be tried again
        self.manifest = manifest


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@contextlib.contextmanager
def opening(path: Path) -> Iterator[None]:
    """Within it a folder is looked at, made and locked; what the system has against it becomes a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be made or written: {error.strerror}; choose another --out, or make room for it"
        ) from error


def locked(path: Path, *inside: str) -> Any:
    """Makes a run's folder, and some within it, and takes its lock, which the system drops with the process.

    Raises:
        RunError: another process is writing to it.
    """
    for name in inside:
        (path / name).mkdir(parents=True, exist_ok=True)
    file = (path / _LOCK_NAME).open("w")
    for last_try in (False, True):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            if last_try:
                file.close()
                raise RunError(
                    f"{path}: another process is writing this run; wait for it, or choose another --out"
                ) from error
            time.sleep(LOOK_S)
    return file


def is_locked(path: Path) -> bool:
    """Whether a process is writing to a run's folder."""
    try:
        with (path / _LOCK_NAME).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is none, it is somebody else's, or the file system knows no locks
        return False
    return False


def _refuse_foreign_files(path: Path) -> None:
    ours = {CONFIG_NAME, SHARDS_NAME, _LOCK_NAME}
    names = [entry.name for entry in path.iterdir()]
    foreign = sorted(name for name in names if name not in ours and not name.endswith(TEMPORARY_SUFFIX))
    if foreign:
        raise ConfigError(f"{path}: expected a new or empty folder, or a run; it holds {', '.join(foreign[:5])}")


def _begin_anew(path: Path, config: RunConfig) -> Manifest:
    manifest = Manifest(run_id=uuid.uuid4().hex[:12], config_fingerprint=config.fingerprint(), started_at=_now())
    write_atomically(path / CONFIG_NAME, lambda file: file.write(dump_config(config).encode()))
    manifest.write(path)
    return manifest


def _another_run(path: Path, config: RunConfig, manifest: Manifest) -> ConfigError:
    there = f"{path}: holds another run ({manifest.run_id})"
    changed = differences(load_config(path / CONFIG_NAME), config)
    if not changed:
        return ConfigError(
            f"{there}: its {CONFIG_NAME} was edited, or another release wrote it; choose another --out,"
            " or continue with the release that began it"
        )
    lines = [f"  {key}: {theirs!r} there, {ours!r} here" for key, (theirs, ours) in changed.items()]
    advice = "Choose another --out, or give the same values to continue that run"
    return ConfigError("\n".join([f"{there}; these keys differ:", *lines, advice]))


def _remove_uncommitted(path: Path, manifest: Manifest) -> None:
    committed = {shard.file for shard in manifest.shards}
    for file in [*path.glob(f"*{TEMPORARY_SUFFIX}"), *(path / SHARDS_NAME).glob("part-*")]:
        if file.name not in committed:
            file.unlink()
