"""Options of several commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from gpipe_bench.models.own import uses_default_loss
from gpipe_bench.processes import PROCESSES

__all__ = ["Processes", "settings_of", "tell_loss"]

Processes = Annotated[
    int, typer.Option(min=1, envvar=PROCESSES, help="How many processes share the work; results are the same.")
]


def tell_loss(model: str) -> None:
    """Say on stderr what stands in for the loss of a model of one's own that has none."""
    if uses_default_loss(model):
        function = f"{model.rpartition(':')[2]}_loss"
        typer.echo(f"note: {model} has no function {function}; the loss is the mean of the squared output", err=True)


def settings_of(section: type[BaseModel]) -> Callable[[str], Any]:
    """Makes options that are named and described like the settings of ``section``."""

    def option(name: str) -> Any:
        return typer.Option(help=section.model_fields[name].description, show_default=True)

    return option
