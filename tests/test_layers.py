"""The house stands: sampling <- actors <- rollout, and Ray is imported under actors/ alone."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORBIDDEN = {
    "sampling": {"actors", "rollout", "ray"},
    "actors": {"rollout"},
    "rollout": {"ray"},
}


def imported_packages(file: Path) -> set[str]:
    """Top-level names of every import in a file, those inside functions included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import; layers are told apart by full names"
            names.add((node.module or "").partition(".")[0])
    return names


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_layer_imports_no_layer_above_it(layer):
    files = sorted((ROOT / layer).rglob("*.py"))
    wrong = {
        str(file.relative_to(ROOT)): sorted(found)
        for file in files
        if (found := imported_packages(file) & FORBIDDEN[layer])
    }
    assert wrong == {}


def test_within_rollout_only_driver_and_facade_reach_the_actors():
    reaching = {file.name for file in (ROOT / "rollout").rglob("*.py") if "actors" in imported_packages(file)}
    names = "driver verify groups service canary job selftest explain bench_publish bench_chaos loop"
    assert reaching <= {f"{name}.py" for name in names.split()}


def test_imports_inside_functions_are_seen(tmp_path):
    file = tmp_path / "late.py"
    file.write_text("def f():\n    import ray.util\n    from actors.pool import Pool\n")
    assert imported_packages(file) == {"ray", "actors"}
