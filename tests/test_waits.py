"""No wait is without an end: whatever another process or thread does, a call of ours comes back."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]

BARE = {"get", "wait", "join", "result", "exception", "acquire", "communicate", "recv", "recv_bytes", "poll", "select"}
"""Methods that wait for ever when they are called without an argument."""

TIMED = {"ray.get", "ray.wait", "wait", "as_completed", "subprocess.run", "subprocess.check_output"}
"""Functions that do so without a timeout, given by name or by place."""

PLACES = {"wait": 2, "as_completed": 2}

BOUNDED = {
    ("rollout/atomic.py", "_before_write.get()"): "a context variable",
    ("rollout/groups.py", "self.scores.result()"): "only where the scores are done",
    ("rollout/learning/loop.py", "learning.result.result()"): "only where the step is done",
    ("rollout/reward_pool.py", "connection.recv()"): "only where something has arrived",
    ("rollout/reward_pool.py", "self._connection.recv()"): "only where something has arrived",
    ("rollout/reward_process.py", "connection.recv()"): "the driver's end of the pipe closes with the driver",
    ("rollout/reward_process.py", "select.poll()"): "makes the object that waits",
    ("rollout/reward_process.py", "hangup.poll()"): "the driver's end of the pipe closes with the driver",
}
"""Calls that look endless, and why they are not."""


def unbounded_calls(source: str) -> list[str]:
    """The calls of a file that may wait for ever, as they are written."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        timeout = any(keyword.arg in ("timeout", "timeout_s", None) for keyword in node.keywords)
        timeout |= len(node.args) >= PLACES.get(name, 99)
        method = isinstance(node.func, ast.Attribute) and node.func.attr in BARE
        if (name in TIMED and not timeout) or (method and not node.args and not node.keywords):
            found.append(ast.unparse(node))
    return found


def test_no_wait_is_unbounded():
    files = [file for layer in ("sampling", "actors", "rollout") for file in sorted((ROOT / layer).rglob("*.py"))]
    found = {(str(file.relative_to(ROOT)), call) for file in files for call in unbounded_calls(file.read_text("utf-8"))}
    assert found - BOUNDED.keys() == set()
    assert BOUNDED.keys() - found == set(), "not there any more"


def test_waits_are_seen():
    source = """
ray.get(ref)
ray.wait([ref], num_returns=1)
inbox.get()
future.result()
process.wait()
wait(futures)
subprocess.run(["true"])
ray.get(ref, timeout=1); inbox.get(True, 1.0); wait(futures, 2, FIRST_COMPLETED); values.get("x"); ", ".join(words)
"""
    assert len(unbounded_calls(source)) == 7
