"""What the command lines of the studies share: settings as text, figures, and errors as one line each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from gpipe_bench.errors import ConfigError, GpipeBenchError

if TYPE_CHECKING:
    from gpipe_bench.figures.base import Figure

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


def add_figures(app: typer.Typer, load: Callable[[], Figure], models: Sequence[str] = ("",)) -> None:
    """Add the commands that draw the figure of a study.

    Args:
        app: the command line of the study.
        load: gives the figure.
        models: what figures of the committed tables are drawn of; an empty name stands for all rows.
    """

    @app.command()
    def figure(
        rows: Annotated[Path, typer.Option(help="Table of rows; its companions lie beside it.")],
        out: Annotated[Path, typer.Option(help="Path of the figure without its suffix.")],
        model: Annotated[str, typer.Option(help="The model to draw, of a table with several.")] = models[-1],
    ) -> None:
        """Draw the figure from the tables alone."""
        from gpipe_bench.figures.base import Selection

        typer.echo(f"wrote {', '.join(map(str, load().draw(rows, out, Selection(model=model))))}")

    @app.command()
    def reference(
        out: Annotated[Path, typer.Option(help="Folder of the figures.")] = Path("figures/reference"),
    ) -> None:
        """Draw the figures of the committed tables again."""
        for paths in draw_reference(load(), models, out):
            typer.echo(f"wrote {', '.join(map(str, paths))}")


def draw_reference(figure: Figure, models: Sequence[str], out: Path) -> Iterator[list[Path]]:
    """Draw a figure of each model of every committed table below ``out``; gives the paths of each figure."""
    from gpipe_bench.data import REFERENCE_FOLDER
    from gpipe_bench.figures.base import Selection

    for table in sorted(REFERENCE_FOLDER.glob(f"measured/*/{figure.name}.csv")):
        for model in models:
            name = f"{figure.name}_{model}" if model else figure.name
            yield figure.draw(table, out / f"measured-{table.parent.name}" / name, Selection(model=model))


def run_app(app: typer.Typer) -> None:
    """Run a command line and exit: status 2 and a line per problem on bad input."""
    try:
        app()
    except GpipeBenchError as error:
        for problem in getattr(error, "problems", None) or [str(error)]:
            print(f"error: {' '.join(problem.split())}", file=sys.stderr)
        sys.exit(2)
