"""The application: its commands, and how errors become one line and an exit status."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, Final, NoReturn, cast

import typer
from typer.core import TyperGroup

from gpipe_bench import __version__
from gpipe_bench.errors import ConfigError, GpipeBenchError, ScheduleError

_INTERRUPTED: Final = 130
_LONGEST: Final = 200
"""Letters of a word of the command line, or of a name, that an error shows."""

# Typer depends on Click or carries a copy inside, as its version goes; what it exports leads to the class in use.
_UsageError = cast("type[Exception]", typer.BadParameter.__base__)

_CHOOSE: Final = "Simulate and choose"
_MEASURE: Final = "Measure"
_RESULTS: Final = "Results and figures"
_HIDDEN: Final = ""

# Of each command its function, below gpipe_bench.cli, and where and with what words the help lists it. Those that the
# workflow, the Makefile and single pages of the documentation call are listed by their names alone.
_COMMANDS: Final = {
    "simulate": ("simulate.simulate", _CHOOSE, "a training step on hardware that need not be here"),
    "emulate": ("emulate.emulate", _CHOOSE, "a training script, or the engine, on virtual devices"),
    "explain": ("explain.explain", _CHOOSE, "where the time of a traced step goes; compare two"),
    "advise": ("advise.advise", _CHOOSE, "balance, chunks, checkpoint mode and schedule"),
    "schedule": ("schedule.app", _CHOOSE, "check, draw, time and write a schedule"),
    "playground": ("playground.playground", _CHOOSE, "a page to compare schedules and change them by hand"),
    "run": ("measure.run", _MEASURE, "measure pipelines on this machine"),
    "profile": ("measure.profile", _MEASURE, "measure a device for simulations"),
    "table": ("results.table", _RESULTS, "variants with medians, intervals, memory and failures"),
    "compare": ("compare.compare", _RESULTS, "whether two result sets differ, cell by cell"),
    "verify": ("verify.verify", _RESULTS, "whether results are within tolerance of the reference"),
    "report": ("report.report", _RESULTS, "all results on one HTML page that needs no network"),
    "figure": ("figure.figure", _RESULTS, "a figure of a table of rows"),
    "cite": ("cite.cite", _RESULTS, "BibTeX, version, commit, checksum, evidence of a table"),
    "config": ("config.app", _HIDDEN, ""),
    "balance": ("balance.balance", _HIDDEN, ""),
    "predictions": ("predictions.predictions", _HIDDEN, ""),
    "datapackage": ("datapackage.app", _HIDDEN, ""),
    "simulate-published": ("results.simulate_published", _HIDDEN, ""),
    "collect": ("results.collect", _HIDDEN, ""),
    "published": ("results.published", _HIDDEN, ""),
    "trace": ("results.trace", _HIDDEN, ""),
    "diff": ("diff.diff", _HIDDEN, ""),
    "judge": ("judge.judge", _HIDDEN, ""),
}


class _Commands(TyperGroup):
    """The group of all commands, whose help is one screen of 24 lines."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write a line for each command that has words, and the names of the others."""
        lines = [f"Usage: {ctx.command_path} COMMAND [OPTIONS], --version, --install-completion"]
        lines += ["Simulate and measure pipeline-parallel training; make tables and figures of it."]
        for panel in (_CHOOSE, _MEASURE, _RESULTS):
            own = [(name, words) for name, (_, shown, words) in _COMMANDS.items() if shown == panel]
            lines += [*[""] * (panel != _CHOOSE), panel, *(f"  {name:<11}{words}" for name, words in own)]
        others = ", ".join(sorted(name for name, (_, shown, _) in _COMMANDS.items() if shown == _HIDDEN))
        lines += ["", *textwrap.wrap(f"More: {others}. COMMAND --help explains each.", 80)]
        formatter.write("\n".join(lines) + "\n")


def application(words: Sequence[str] = ()) -> typer.Typer:
    """The application, with the one command that ``words`` begin with, so that no other is loaded; else with all."""
    app = typer.Typer(
        name="gpipe-bench",
        cls=_Commands,
        rich_markup_mode="markdown",
        invoke_without_command=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name in _COMMANDS.keys() & words[:1] or _COMMANDS:
        place, panel, _ = _COMMANDS[name]
        module, _, attribute = place.partition(".")
        command = getattr(import_module(f"gpipe_bench.cli.{module}"), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, hidden=panel == _HIDDEN)
        else:
            app.command(name, hidden=panel == _HIDDEN)(command)
    return app


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
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        result: Any = application(words)(args=words, standalone_mode=False)
    except _UsageError as error:
        return _complain([_usage(error, words)])
    except (ConfigError, ScheduleError) as error:
        return _complain(error.problems)
    except GpipeBenchError as error:
        return _complain([str(error)])
    except (OSError, MemoryError, OverflowError) as error:
        return _complain([_last_resort(error)])
    except (typer.Abort, KeyboardInterrupt):
        result = _INTERRUPTED
    if result == _INTERRUPTED:  # into which Typer turns an interrupt
        typer.echo("interrupted", err=True)
    return result if isinstance(result, int) else 0


def _last_resort(error: Exception) -> str:
    """What a command met in the system, or a number that is too large for it, on one line."""
    if isinstance(error, OSError):
        where = f" ({str(error.filename)[:_LONGEST]})" if error.filename else ""
        return f"files must be readable and writable, got: {error.strerror or error}{where}; use another path or folder"
    what = "memory" if isinstance(error, MemoryError) else "numbers"
    return f"{what} must suffice, got: {str(error)[:_LONGEST] or type(error).__name__}; use smaller values"


def _usage(error: Any, words: Sequence[str]) -> str:
    """What is wrong with a word of the command line, with the word; the parser leaves that out."""
    message = error.format_message().rstrip(".")
    for option in getattr(getattr(error, "param", None), "opts", ()):
        for word, following in zip(words, [*words[1:], ""], strict=True):
            if word == option or word.startswith(f"{option}="):
                value = following if word == option else word.removeprefix(f"{option}=")
                return f"{_short(message)}, got {_short(repr(value))}; --help says what {option} takes"
    return f"{_short(message)}; --help lists commands and options" if message else ""


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _complain(problems: Sequence[str]) -> int:
    # A group that was called without a command has shown its help and has no more to say.
    for problem in filter(None, problems):
        typer.echo(f"error: {' '.join(problem.split())}", err=True)
    return 2
