"""``python -m studies.training``: the jobs of ``snakemake --cores 1 transparency``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gpipe_bench.errors import ConfigError
from gpipe_bench.results.transparency_rows import arm_label
from gpipe_bench.util.files import check_writable, json_text, write_files
from gpipe_bench.util.processes import PROCESSES
from studies.command import SettingsText, add_figures, run_app, settings_data
from studies.training.settings import MODELS, Workload, read_settings

if TYPE_CHECKING:
    from gpipe_bench.figures.base import Figure

app = typer.Typer(
    pretty_exceptions_enable=False,
    help="Train on real images with and without the pipeline, and say what differs and why.",
)


@app.command()
def train(
    workload: Annotated[Literal["amoebanet", "unet"], typer.Argument(help="What to train.")],
    *,
    out: Annotated[Path, typer.Option(help="The raw result to write, a JSON file.")],
    settings: SettingsText = "{}",
    processes: Annotated[int, typer.Option(min=1, envvar=PROCESSES, help="Arms that are trained at once.")] = 1,
) -> None:
    """Train all arms of one model, seed by seed, and write the raw result."""
    if find_spec("sklearn") is None:
        raise ConfigError(["scikit-learn must be installed for its images, got none; pip install scikit-learn"])
    chosen: Workload = getattr(read_settings(settings_data(settings)), workload)
    check_writable(out)
    from studies.training.tables import run_cases

    write_files({out: json_text(run_cases(chosen.cases(), processes))})
    typer.echo(f"wrote {out}")


@app.command()
def collect(
    raw: Annotated[list[Path], typer.Argument(help="Raw results.")],
    out: Annotated[Path, typer.Option(help="Table of rows; its companions go beside it.")],
    settings: SettingsText = "{}",
) -> None:
    """Join raw results into tables, and print the verdicts."""
    from studies.training.tables import collect as collected
    from studies.training.verdict import Margins

    given = read_settings(settings_data(settings))
    for v in collected(raw, out, Margins(given.margin, given.loss_margin)):
        setting = arm_label(v["arm"], v["checkpoint"], v["deferred_batch_norm"])
        interval = "" if v["low"] is None else f" [{v['low']:.3g}, {v['high']:.3g}]"
        head = f"{v['model']} {v['precision']} {v['normalisation']} {setting}"
        typer.echo(f"{head}: {v['quantity']} {v['estimate']:.3g}{interval} n={v['n']}: {v['verdict']}")


def _figure() -> Figure:
    from studies.training.figure import FIGURE

    return FIGURE


add_figures(app, _figure, MODELS)

if __name__ == "__main__":
    run_app(app)
