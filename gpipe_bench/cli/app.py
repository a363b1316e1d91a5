"""The application: its commands, and how errors become one line and an exit status."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn, cast

import typer

from gpipe_bench import __version__
from gpipe_bench.cli import (
    advise,
    balance,
    calibrate,
    compare,
    config,
    datapackage,
    figure,
    measure,
    peers,
    predictions,
    report,
    results,
    simulate,
    simulations,
    transparency,
    verify,
)
from gpipe_bench.errors import ConfigError, GpipeBenchError

__all__ = ["app", "main"]

# Typer depends on Click or carries a copy inside, as its version goes; what it exports leads to the class in use.
_UsageError = cast("type[Exception]", typer.BadParameter.__base__)

app = typer.Typer(
    name="gpipe-bench",
    help=(
        "Measure pipeline-parallel training, cell by cell, and turn the results into tables, figures and traces.\n\n"
        "A workflow calls these commands: snakemake --cores 1 ablation. "
        "On a machine with one GPU and nothing else: python -m gpipe_bench gpu --out DIR."
    ),
    add_completion=False,
    rich_markup_mode="markdown",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(measure.run)
app.command("gpu")(measure.gpu)
app.command("profile")(measure.profile)
app.command("simulate")(simulate.simulate)
app.command("calibrate")(calibrate.calibrate)
app.command("simulate-cells")(simulations.simulate_cells)
app.command("simulate-published")(simulations.simulate_published)
app.command("advise")(advise.advise)
app.command("balance")(balance.balance)
app.command("predictions")(predictions.predictions)
app.command("collect")(results.collect)
app.command("published")(results.published)
app.command("table")(results.table)
app.command("compare")(compare.compare)
app.command("report")(report.report)
app.command("trace")(results.trace)
app.command("verify")(verify.verify)
app.add_typer(figure.app, name="figure")
app.add_typer(config.app, name="config")
app.add_typer(datapackage.app, name="datapackage")
app.add_typer(transparency.app, name="transparency")
app.add_typer(peers.app, name="peers")


@app.callback()
def _root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        typer.echo(__version__)
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Args:
        arguments: words after the program's name; by default those of this process.
    """
    sys.exit(_status(arguments))


def _status(arguments: Sequence[str] | None) -> int:
    try:
        result: Any = app(args=arguments, standalone_mode=False)
    except _UsageError as error:
        return _complain([_usage(error, sys.argv[1:] if arguments is None else arguments)])
    except ConfigError as error:
        return _complain(error.problems)
    except GpipeBenchError as error:
        return _complain([str(error)])
    except (typer.Abort, KeyboardInterrupt):
        typer.echo("interrupted", err=True)
        return 130
    return result if isinstance(result, int) else 0


def _usage(error: Any, words: Sequence[str]) -> str:
    """What is wrong with a word of the command line, with the word; the parser leaves that out."""
    message = error.format_message().rstrip(".")
    for option in getattr(getattr(error, "param", None), "opts", ()):
        for word, following in zip(words, [*words[1:], ""], strict=True):
            if word == option or word.startswith(f"{option}="):
                value = following if word == option else word.removeprefix(f"{option}=")
                return f"{message}, got {value!r}; --help says what {option} takes"
    return f"{message}; --help lists commands and options" if message else ""


def _complain(problems: Sequence[str]) -> int:
    # A group that was called without a command has shown its help and has no more to say.
    for problem in filter(None, problems):
        typer.echo(f"error: {' '.join(problem.split())}", err=True)
    return 2
