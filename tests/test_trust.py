"""Files are data: nothing that is read from disk is unpickled or evaluated, and code is loaded by names we know."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

RUNS_DATA = {"eval", "exec", "compile", "__import__", "import_module", "load_module", "unsafe_load", "full_load"}
UNPICKLES = {"pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib"}

KNOWN = {
    ("rollout/__init__.py", "import_module"): "our own modules, by a table in the file",
    ("rollout/bench_peers.py", "importlib.import_module"): "two names in the file",
    ("rollout/reward_process.py", "pickle.loads"): "what the driver sends over their socket",
    ("rollout/tasks.py", "importlib.import_module"): "one name in the file",
    ("sampling/references.py", "importlib.import_module"): "scorers and plugins that the config or the caller names",
}
"""Calls that load code or unpickle, and what from."""


def calls(source: str) -> set[str]:
    """Calls of a file that could run what a file holds."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        module, _, function = name.rpartition(".")
        named = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if (
            (function in RUNS_DATA and module in ("", "importlib", "builtins", "yaml"))
            or (module in UNPICKLES and function in ("load", "loads", "open", "Unpickler"))
            or (name == "yaml.load" and len(node.args) + ("Loader" in named) < 2)
            or named.get("allow_pickle", "False") != "False"
            or name == "torch.load"
        ):
            found.add(name)
    return found


def test_nothing_from_disk_is_run():
    files = [file for layer in ("sampling", "actors", "rollout") for file in sorted((ROOT / layer).rglob("*.py"))]
    found = {(str(file.relative_to(ROOT)), call) for file in files for call in calls(file.read_text("utf-8"))}
    assert found == KNOWN.keys()


@pytest.mark.parametrize(
    "line",
    [
        "pickle.load(file)",
        "eval(text)",
        "yaml.load(text)",
        "yaml.unsafe_load(text)",
        "np.load(file, allow_pickle=True)",
        "importlib.import_module(name)",
        "torch.load(file)",
    ],
)
def test_such_calls_are_seen(line):
    assert calls(line)
    assert not calls("yaml.load(text, _StrictLoader); json.load(file); model.eval(); re.compile(text)")
