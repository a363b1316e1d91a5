"""What the command lines of the studies share: settings as text, and errors as one line each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from gpipe_bench.errors import ConfigError, GpipeBenchError

SettingsText = Annotated[
    str, typer.Option("--settings", help="Settings as YAML text, such as '{unet: {steps: 20}}', or a file of them.")
]


def settings_data(given: str) -> dict[str, Any]:
    """The settings in a file of that name, or in the text itself.

    Raises:
        ConfigError: they are no sections of settings.
    """
    try:
        path = Path(given)
        data = yaml.safe_load(path.read_text(encoding="utf-8") if given.endswith((".yaml", ".json")) else given)
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError([f"--settings must be YAML, got an error in it: {error}; correct it"]) from error
    if not isinstance(data, dict):
        raise ConfigError([f"--settings must be sections of settings, got {given!r}; write {{section: {{key: 1}}}}"])
    return data


def run_app(app: typer.Typer) -> None:
    """Run a command line and exit: status 2 and a line per problem on bad input."""
    try:
        app()
    except GpipeBenchError as error:
        for problem in getattr(error, "problems", None) or [str(error)]:
            print(f"error: {' '.join(problem.split())}", file=sys.stderr)
        sys.exit(2)
