"""Options of commands that are settings of the suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from pydantic import BaseModel

__all__ = ["settings_of"]


def settings_of(section: type[BaseModel]) -> Callable[[str], Any]:
    """Makes options that are named and described like the settings of ``section``."""

    def option(name: str) -> Any:
        return typer.Option(help=section.model_fields[name].description, show_default=True)

    return option
