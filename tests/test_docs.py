"""The Python in docs/ runs as it stands there and prints what it says."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in sorted(DOCS.glob("*.md"))
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_the_example_prints_what_it_says(block, capsys):
    exec(compile(block, "docs", "exec"), {"__name__": "docs"})
    said = re.findall(r"^# (.*)$", block, re.M)
    assert said and capsys.readouterr().out.strip().splitlines() == said
