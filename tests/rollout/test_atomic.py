"""Tests rollout/atomic.py: a file is the old one or the new one, never a part."""

import errno
import hashlib
import os

import pytest

from rollout.atomic import write_atomically
from sampling.errors import RunError


def test_the_content_is_replaced_and_its_digest_returned(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old and longer")
    assert write_atomically(path, lambda file: file.write(b"new")) == hashlib.sha256(b"new").hexdigest()
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_writer_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def fails(file):
        file.write(b"ne")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_atomically(path, fails)
    assert path.read_bytes() == b"old"


def test_the_content_is_on_the_disk_before_the_name_is(tmp_path, monkeypatch):
    path, events = tmp_path / "a", []
    real_fsync = os.fsync

    def fsync(descriptor):
        events.append(path.exists())
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(path, lambda file: file.write(b"x"))
    assert events == [False, True], "first the file under its temporary name, then the folder with the new name"


def test_a_write_that_fails_leaves_nothing_behind(tmp_path):
    def fails(file):
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(RunError, match="a: cannot be written: No space left on device; what was committed before is"):
        write_atomically(tmp_path / "a", fails)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_named(tmp_path):
    with pytest.raises(RunError, match=r"gone/a: cannot be written: No such file"):
        write_atomically(tmp_path / "gone" / "a", lambda file: file.write(b"x"))
