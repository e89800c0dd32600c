"""Tests rollout/reward_pool.py: what a scorer does is its own text's failure, and no process outlives its driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError

import pytest

from rollout.prompts import Prompt
from rollout.reward_pool import RewardPool
from rollout.reward_process import GRACE_S
from rollout.rewards import ExactMatchReward, Score
from sampling.errors import ConfigError, RunError
from tests.processes import alive, await_end
from tests.rollout import scorers

PROMPT = Prompt("p", text="hi", metadata={"answer": "7"})
PATIENCE_S = 30


def test_each_failure_is_its_own_texts():
    expected = {
        "hang": "timed out after 1 s",
        "spin": "timed out after 1 s",
        "exit": "the scorer's process ended with exit status 3",
        "segfault": "the scorer's process ended with SIGSEGV",
        "kill": "the scorer's process ended with SIGKILL (out of memory?)",
        "quit": "the scorer's process ended with exit status 0",
        "raise": "ZeroDivisionError: no samples",
        "nan": "expected a finite reward, got nan",
    }
    texts = ["fine", *(text for name in expected for text in (name, "fine"))]
    with RewardPool(scorers.told, timeout_s=1) as rewards:
        scores = rewards.score(PROMPT, texts).result(PATIENCE_S)
    assert {text: score.error for text, score in zip(texts, scores, strict=True)} == {"fine": None, **expected}
    assert [score.value for score in scores] == [1.0 if text == "fine" else None for text in texts]


def test_scores_come_in_the_order_of_the_texts_whatever_they_take():
    texts = ["1", "2", "", "4"]
    with RewardPool(lambda prompt, text: len(text) + len(prompt.id), workers=2) as rewards:
        futures = [rewards.score(PROMPT, texts[: 1 + count % 4]) for count in range(40)]
        scores = [future.result(PATIENCE_S) for future in futures]
    assert scores == [tuple(Score(1.0 + len(text)) for text in texts[: 1 + count % 4]) for count in range(40)]


def test_one_that_hangs_holds_up_one_process_alone():
    with RewardPool(scorers.told, timeout_s=20, workers=2) as rewards:
        rewards.score(PROMPT, ["fine"]).result(PATIENCE_S)
        hanging = rewards.score(PROMPT, ["hang"])
        assert rewards.score(PROMPT, ["fine"] * 3).result(15) == (Score(1.0),) * 3
        assert not hanging.done()
    assert isinstance(hanging.exception(PATIENCE_S), RunError)


def test_a_process_is_used_again_until_it_fails():
    with RewardPool(scorers.told, timeout_s=1) as rewards:
        pids = [score.value for score in rewards.score(PROMPT, ["pid", "pid", "exit", "pid", "pid"]).result(PATIENCE_S)]
        again = [score.value for score in rewards.score(PROMPT, ["pid"]).result(PATIENCE_S)]
    assert pids[0] == pids[1] != os.getpid()
    assert pids[2] is None
    assert pids[3] == pids[4] == again[0] != pids[0]


def test_the_limit_is_of_one_score_and_not_of_a_group():
    with RewardPool(scorers.told, timeout_s=1) as rewards:
        assert rewards.score(PROMPT, ["sleep 0.4"] * 4).result(PATIENCE_S) == (Score(1.0),) * 4


def test_closing_ends_what_runs_and_what_it_started():
    with RewardPool(scorers.told, timeout_s=100) as rewards:
        own, child = (int(score.value) for score in rewards.score(PROMPT, ["pid", "child"]).result(PATIENCE_S))
        assert alive(own) and alive(child)
        running, waiting = rewards.score(PROMPT, ["hang"]), rewards.score(PROMPT, ["fine"])
        began = time.monotonic()
    assert time.monotonic() - began < 5
    await_end(own, child, within_s=5)
    assert isinstance(running.exception(PATIENCE_S), RunError)
    with pytest.raises((CancelledError, RunError)):
        waiting.result(PATIENCE_S)


def test_a_pool_may_be_opened_again_but_not_twice_at_once():
    rewards = RewardPool(ExactMatchReward())
    for _ in range(2):
        with rewards:
            assert rewards.score(PROMPT, ["7", "8"]).result(PATIENCE_S) == (Score(1.0), Score(0.0))
            with pytest.raises(RunError, match="the pool is open already"):
                rewards.__enter__()


class Unloadable:
    """Can be sent and not be received."""

    def __reduce__(self):
        return int, ("not a number",)

    def __call__(self, prompt, text):
        return 0.0


def test_a_scorer_that_cannot_be_sent_or_loaded_is_refused():
    with pytest.raises(ConfigError, match=r"reward: cannot be sent to a process .*lock.*open files, locks and conn"):
        RewardPool(scorers.Keyed(threading.Lock()))
    with (
        RewardPool(Unloadable()) as rewards,
        pytest.raises(ConfigError, match=r"cannot be loaded in a process .*: ValueError"),
    ):
        rewards.score(PROMPT, ["a"]).result(PATIENCE_S)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"timeout_s": 0}, "reward_timeout_s: expected seconds above 0, got 0"),
        ({"timeout_s": float("inf")}, "reward_timeout_s: expected seconds above 0, got inf"),
        ({"timeout_s": "5"}, "reward_timeout_s: expected seconds above 0, got '5'"),
        ({"workers": 0}, "reward_workers: expected a whole number of at least 1, got 0"),
        ({"workers": True}, "reward_workers: expected a whole number of at least 1, got True"),
        ({"reward": scorers.one_argument}, r"expected a function of \(prompt, text\), got one of \(text\)"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ConfigError, match=message):
        RewardPool(**{"reward": scorers.told, **settings})


SCRIPT = """
import sys
from rollout.prompts import Prompt
from rollout.reward_pool import RewardPool
from tests.rollout.scorers import told

bonus = 5.0

def reward(prompt, text):
    return bonus + told(prompt, text)

print("begun", flush=True)
with RewardPool(reward, timeout_s=2) as rewards:
    for text in sys.argv[1:]:
        print(*(score.value for score in rewards.score(Prompt("p", text="hi"), [text]).result(60)), flush=True)
"""
"""A script without a guard for its processes, whose scorer is a function of its own."""


def run_script(tmp_path, *texts):
    (tmp_path / "script.py").write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), *texts],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_script_scores_with_its_own_functions_and_runs_once(tmp_path):
    out, err = run_script(tmp_path, "fine", "print").communicate(timeout=PATIENCE_S)
    assert out.split("\n") == ["begun", "6.0", "6.0", ""]
    assert "printed by a scorer" in err


@pytest.mark.parametrize(
    ("texts", "within_s"),
    [(["pid"], 2), (["pid", "child", "hang"], 2), (["pid", "spin"], 2 + GRACE_S + 3)],
    ids=["idle", "hangs", "spins"],
)
def test_nothing_outlives_a_driver_that_is_killed(tmp_path, texts, within_s):
    """Not even code that never gives up Python's lock: its process is ended by its own clock."""
    driver = run_script(tmp_path, *texts, *(["sleep 1.5"] * 20))
    assert driver.stdout is not None and driver.stdout.readline() == "begun\n"
    pids = [int(float(driver.stdout.readline())) - 5 for text in texts if text in ("pid", "child")]
    time.sleep(0.5)
    assert all(alive(pid) for pid in pids)
    os.kill(driver.pid, signal.SIGKILL)
    await_end(*pids, within_s=within_s)
    driver.communicate(timeout=PATIENCE_S)
