"""The manifest of a run folder: which files are committed, and what they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from rollout.atomic import write_atomically
from rollout.codec import check_version
from rollout.trajectory import LOGPROB_DEFINITION, SCHEMA_VERSION
from sampling.errors import ConfigError, RecordError

MANIFEST_NAME = "manifest.json"


class Shard(BaseModel):
    """One committed file of trajectories.

    Attributes:
        file: its name within the folder's `trajectories`.
        sha256: of its bytes, hexadecimal.
        rows: trajectories in it; groups are whole.
        failed: how many of them failed.
        groups: prompts in it.
        tokens: completion tokens in it.
        first_prompt: id of its first prompt, in the run's order.
        last_prompt: id of its last prompt.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    sha256: str
    rows: int
    failed: int
    groups: int
    tokens: int
    first_prompt: str
    last_prompt: str


class Manifest(BaseModel):
    """The state of a run. Replacing it is the commit point: a file that it does not name does not exist.

    Attributes:
        schema_version: of the trajectories.
        logprob_definition: what their log-prob columns mean.
        run_id: names the run; chosen once, kept by every resume.
        config_fingerprint: `RunConfig.fingerprint()`.
        weights_digest: of the weights; None until the first worker has loaded them.
        prompts_digest: sha256 of the prompt file; "" where the config holds the prompts.
        numerics: every numerics fingerprint that records of the run may carry, with the facts behind it.
        prompts_total: prompts of the source, None if that is not known yet.
        rows_total: samples that the run will have, None if that is not known yet.
        shards: the committed files, in prompt order.
        started_at: UTC, ISO 8601.
        finished_at: the same; None while rows are missing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = SCHEMA_VERSION
    logprob_definition: str = LOGPROB_DEFINITION
    run_id: str
    config_fingerprint: str
    weights_digest: str | None = None
    prompts_digest: str | None = None
    numerics: dict[str, dict[str, Any]] = {}
    prompts_total: int | None = None
    rows_total: int | None = None
    shards: Annotated[tuple[Shard, ...], Field(strict=False)] = ()
    started_at: str
    finished_at: str | None = None

    @property
    def rows(self) -> int:
        """Trajectories on disk, failed ones included."""
        return sum(shard.rows for shard in self.shards)

    @property
    def failed(self) -> int:
        """Failed trajectories on disk."""
        return sum(shard.failed for shard in self.shards)

    @property
    def groups(self) -> int:
        """Prompts whose samples are all on disk."""
        return sum(shard.groups for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Completion tokens on disk."""
        return sum(shard.tokens for shard in self.shards)

    def write(self, folder: Path) -> None:
        """Commits the manifest."""
        text = self.model_dump_json(indent=2)
        write_atomically(folder / MANIFEST_NAME, lambda file: file.write(text.encode()))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a run folder.

    Raises:
        ConfigError: the folder holds no run, or cannot be read.
        RecordError: the manifest is damaged or of another version.
    """
    path = folder / MANIFEST_NAME
    try:
        if not path.is_file():
            raise ConfigError(f"{folder}: expected a folder made by 'rollout sample', found no {MANIFEST_NAME} in it")
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        manifest = Manifest.model_validate_json(text)
    except pydantic.ValidationError as error:
        fault = error.errors()[0]
        place = "".join(f" {part}:" for part in fault["loc"])
        raise RecordError(
            f"{path}:{place} {fault['msg']}; it was edited, damaged or written by another release."
            " Restore it, or choose another --out"
        ) from error
    check_version(manifest.schema_version, str(path))
    return manifest
