"""Tests rollout/signals.py: signals end a command in order, at any moment, and none is lost."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.signals import STOPPED_WORDS, Stopped, stopping_at_once, stopping_in_order

ROOT = Path(__file__).parents[2]
SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


@pytest.mark.parametrize(("signum", "code"), SIGNALS)
def test_a_signal_raises_with_its_exit_code_and_the_old_handlers_come_back(signum, code):
    before = [signal.getsignal(s) for s, _ in SIGNALS]
    with pytest.raises(Stopped) as caught, stopping_in_order():
        signal.raise_signal(signum)
    assert caught.value.exit_code == code
    assert [signal.getsignal(s) for s, _ in SIGNALS] == before


def test_a_signal_that_was_swallowed_is_raised_again(monkeypatch):
    swallowed = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: swallowed.append(report.exc_type))

    class Swallows:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Stopped), stopping_in_order() as check:
        check()
        Swallows()
        assert swallowed == [Stopped]
        check()


def test_rays_own_way_of_stopping_counts_and_other_exits_pass():
    with pytest.raises(Stopped) as caught, stopping_in_order():
        sys.exit(int(signal.SIGTERM))
    assert caught.value.exit_code == 143
    with pytest.raises(SystemExit) as other, stopping_in_order():
        sys.exit(3)
    assert other.value.code == 3


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stopping_in_order() as check, stopping_at_once():
            signal.raise_signal(signal.SIGINT)
            check()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("signum", "code"), SIGNALS)
def test_while_libraries_load_the_process_leaves_with_one_line(tmp_path, signum, code):
    """A library that asks for an interrupt while it is imported stands for a person who is quick."""
    (tmp_path / "pydantic.py").write_text(f"import os, time\nos.kill(os.getpid(), {int(signum)})\ntime.sleep(60)\n")
    found = subprocess.run(
        [sys.executable, "-m", "rollout.cli", "sample", "run.yaml", "--out", str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (found.returncode, found.stdout, found.stderr) == (code, "", f"{STOPPED_WORDS}\n")
