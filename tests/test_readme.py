"""The README's Python example, run as it stands there; its second-to-last claim, the named tests, exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.real
@pytest.mark.ray
def test_the_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    lines = capsys.readouterr().out.strip().splitlines()
    assert [line.split()[:2] for line in lines] == [["sum", str(i)] for i in range(4)] + [["france", "0"]]
    assert lines[-1].split()[-2:] == ["0.0", "length"]  # greedy: log-prob 0, and 16 tokens


def test_the_tests_it_names_exist():
    file = None
    for named in re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?|::\w+)`", README):
        path, _, function = named.partition("::")
        file = ROOT / path if path else file
        assert file and file.is_file(), named
        assert not function or f"def {function}(" in file.read_text(), named


def test_the_files_it_links_exist():
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / link).exists(), link
