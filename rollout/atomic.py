"""Files that are either whole or absent: written under a temporary name, flushed to the disk, then renamed."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO

from sampling.errors import RunError

TEMPORARY_SUFFIX = ".tmp"
"""Ends the name of a file that is not committed; such a file may be removed at any time."""


_before_write: ContextVar[Callable[[Path], None]] = ContextVar("before_write", default=lambda _: None)


@contextlib.contextmanager
def before_writes(call: Callable[[Path], None]) -> Iterator[None]:
    """Within it `call` is asked before a file is written; an OSError that it raises is taken as the disk's own."""
    token = _before_write.set(call)
    try:
        yield
    finally:
        _before_write.reset(token)


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> str:
    """Replaces `path` with what `write` puts into the file that it is given.

    Returns:
        sha256 of the content, hexadecimal.
    Raises:
        RunError: the file cannot be written; the one of that name, if any, is untouched.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        _before_write.get()(path)
        with temporary.open("w+b") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        temporary.replace(path)
        _sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()  # on a full disk, half a file takes the room that the next try needs
        raise RunError(
            f"{path}: cannot be written: {error.strerror}; what was committed before is safe,"
            " start the same command again to continue"
        ) from error
    return digest


def _sync_directory(path: Path) -> None:
    """Makes the rename itself durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
