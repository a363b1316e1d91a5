"""Options of several commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from gpipe_bench.errors import ConfigError, GpipeBenchError
from gpipe_bench.models.own import is_own, uses_default_loss
from gpipe_bench.processes import PROCESSES

__all__ = ["Processes", "running", "settings_of", "tell_loss"]

Processes = Annotated[
    int, typer.Option(min=1, envvar=PROCESSES, help="How many processes share the work; results are the same.")
]


def tell_loss(model: str) -> None:
    """Say on stderr what stands in for the loss of a model of one's own that has none."""
    if uses_default_loss(model):
        function = f"{model.rpartition(':')[2]}_loss"
        typer.echo(f"note: {model} has no function {function}; the loss is the mean of the squared output", err=True)


@contextmanager
def running(model: str) -> Iterator[None]:
    """Turn what the layers of a model of one's own raise into one line.

    Raises:
        ConfigError: they raised something.
    """
    try:
        yield
    except GpipeBenchError:
        raise
    except Exception as error:
        if not is_own(model):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        rule = f"--model must have layers that take what the ones before them give, got {model} with {reason}"
        raise ConfigError([f"{rule}; correct them"]) from error


def settings_of(section: type[BaseModel]) -> Callable[[str], Any]:
    """Makes options that are named and described like the settings of ``section``."""

    def option(name: str) -> Any:
        return typer.Option(help=section.model_fields[name].description, show_default=True)

    return option
