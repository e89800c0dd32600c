"""The Python in docs/ runs as it stands there and prints what it says; files and tests that a page names exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}", marks=[pytest.mark.real] if "package:" in block else [])
    for page in sorted(DOCS.glob("*.md"))
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_the_example_prints_what_it_says(block, capsys):
    exec(compile(block, "docs", "exec"), {"__name__": "docs"})
    said = re.findall(r"^# (.*)$", block, re.M)
    assert said and capsys.readouterr().out.strip().splitlines() == said


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_what_it_names_exists(page):
    file = None
    for named in re.findall(r"`(?:pytest -s )?(tests/[\w/]+\.py(?:::\w+)?|::\w+)`", page.read_text()):
        path, _, function = named.partition("::")
        file = ROOT / path if path else file
        assert file and file.is_file(), named
        assert not function or f"def {function}(" in file.read_text(), named
    for link in re.findall(r"\]\(([^):#]+)\)", page.read_text()):
        assert (DOCS / link).exists(), link
