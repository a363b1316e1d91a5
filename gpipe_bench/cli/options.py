"""Options of several commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from gpipe_bench.processes import PROCESSES

__all__ = ["Processes", "settings_of"]

Processes = Annotated[
    int, typer.Option(min=1, envvar=PROCESSES, help="How many processes share the work; results are the same.")
]


def settings_of(section: type[BaseModel]) -> Callable[[str], Any]:
    """Makes options that are named and described like the settings of ``section``."""

    def option(name: str) -> Any:
        return typer.Option(help=section.model_fields[name].description, show_default=True)

    return option
