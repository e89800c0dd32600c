"""`rollout bench` and its commands. Thin, as rollout/cli.py."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import click

from rollout.cli_options import FAILED, chaos_option, debug_option, dtype_option, json_option, model_option
from rollout.signals import stopping_at_once, stopping_in_order


@click.group(invoke_without_command=True)
@click.option(
    "--workload",
    type=click.Choice(["uniform", "filters", "groups", "longtail", "single"]),
    help="What to draw; see docs/performance.md.",
)
@model_option
@click.option("--slots", default=32, show_default=True, type=click.IntRange(1), help="Rows that decode together.")
@dtype_option
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1), help="Timed runs.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of prompts, lengths and draws.")
@click.option("--against", type=click.Choice(["transformers", "vllm"]), help="Measure this, too, in turns.")
@click.option("--peer-python", metavar="PATH", help="The interpreter that has it; by default this one.")
@click.option("--peer-repeats", default=2, show_default=True, type=click.IntRange(1), help="Its timed runs.")
@json_option
@debug_option
@click.pass_context
def bench(ctx: click.Context, workload: str | None, model: str, json_file: Path | None, **settings: Any) -> None:
    """Measures this machine: how fast a workload is drawn, and what its parts cost beside what they cannot do without.

    With --workload, the engine's throughput; each command below measures one thing by itself.
    """
    if ctx.invoked_subcommand:
        named = click.core.ParameterSource.COMMANDLINE
        if any(ctx.get_parameter_source(name) is named for name in ctx.params):
            raise click.UsageError(f"options go after the command: rollout bench {ctx.invoked_subcommand} ...", ctx)
        return
    if workload is None:
        raise click.UsageError("expected --workload or a command", ctx)
    if settings["peer_python"] and not settings["against"]:
        raise click.UsageError("--peer-python goes with --against", ctx)
    with stopping_at_once():
        from rollout.bench import throughput

    with stopping_in_order():
        found = throughput(model, workload, **settings)
    _show(found, json_file)
    if found.faults:
        sys.exit(FAILED)


@bench.command("sampling")
@model_option
@click.option("--rows", default=32, show_default=True, type=click.IntRange(1), help="Rows that draw together.")
@json_option
@debug_option
def bench_sampling(model: str, rows: int, json_file: Path | None) -> None:
    """Times the chain of transforms against the matrix products of one decode step of the model."""
    with stopping_at_once():
        from rollout.bench_sampling import sampling_cost

        cost = sampling_cost(model, rows)
    _show(cost, json_file)


@bench.command("scoring")
@model_option
@dtype_option
@click.option("--rows", default=32, show_default=True, type=click.IntRange(1), help="Completions, and slots.")
@click.option("--tokens", default=256, show_default=True, type=click.IntRange(2), help="Tokens of each completion.")
@json_option
@debug_option
def bench_scoring(model: str, dtype: str, rows: int, tokens: int, json_file: Path | None) -> None:
    """Times replays and forward scores against the generation they follow, and the records against a loop without."""
    with stopping_at_once():
        from rollout.bench_scoring import scoring_cost

        cost = scoring_cost(model, rows, tokens, dtype)
    _show(cost, json_file)


@bench.command("publish")
@model_option
@dtype_option
@click.option("--workers", default=2, show_default=True, type=click.IntRange(1), help="Workers that draw meanwhile.")
@click.option("--slots", default=8, show_default=True, type=click.IntRange(1), help="Rows of each.")
@click.option("--tokens", default=64, show_default=True, type=click.IntRange(1), help="Tokens of each row.")
@json_option
@debug_option
def bench_publish(model: str, dtype: Any, workers: int, slots: int, tokens: int, json_file: Path | None) -> None:
    """Times the publication of weights to workers that draw, and what it takes from their work."""
    with stopping_at_once():
        from rollout.bench_publish import publish_cost

    with stopping_in_order():
        cost = publish_cost(model, workers=workers, slots=slots, tokens=tokens, dtype=dtype)
    _show(cost, json_file)


@bench.command("selftest")
@model_option
@dtype_option
@click.option("--learner", help="Another checkpoint to score with, which should make the test fail.")
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1), help="Workers that sample.")
@click.option("--tokens", default=64, show_default=True, type=click.IntRange(1), help="Tokens of each sample.")
@json_option
@debug_option
def bench_selftest(
    model: str, dtype: Any, learner: str | None, workers: int, tokens: int, json_file: Path | None
) -> None:
    """Samples, and scores as a learner that has learnt nothing: the log-probs have to be those of the rollouts."""
    with stopping_at_once():
        from rollout.selftest import selftest

    with stopping_in_order():
        found = selftest(model, learner=learner, dtype=dtype, workers=workers, max_new_tokens=tokens)
    _show(found, json_file)
    if found.faults:
        sys.exit(FAILED)


@bench.command("chaos")
@click.argument("config", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Keep both runs in this new folder.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Replace a value: workers.count=2.")
@click.option("--address", help="A Ray cluster to run on; without it, this machine.")
@chaos_option
@click.option("--quiet", is_flag=True, help="Show no progress.")
@json_option
@debug_option
def bench_chaos(
    config: Path,
    out: Path | None,
    overrides: tuple[str, ...],
    address: str | None,
    chaos: tuple[str, ...],
    quiet: bool,
    json_file: Path | None,
) -> None:
    """Runs the sampling job of CONFIG undisturbed and disturbed, and compares what was drawn by its hash."""
    with stopping_at_once():
        from rollout.config_file import load_config
        from rollout.progress import ProgressReporter

        run_config = load_config(config, overrides)
        from rollout.bench_chaos import compare_runs

    with stopping_in_order() as check, ProgressReporter(quiet=quiet, check=check) as progress:
        found = compare_runs(run_config, chaos, out, address=address, progress=progress)
    _show(found, json_file)
    if found.faults:
        sys.exit(FAILED)


def _show(figures: Any, json_file: Path | None) -> None:
    click.echo("\n".join(figures.lines()))
    if json_file:
        json_file.write_text(json.dumps(dataclasses.asdict(figures), indent=2) + "\n")
