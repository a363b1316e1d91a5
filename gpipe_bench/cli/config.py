"""``config check`` and ``config write``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpipe_bench.data import DEFAULT_CONFIG
from gpipe_bench.suite.experiments.config import CONFIG_PATH, SCHEMA_PATH, json_schema_text, load_config
from gpipe_bench.suite.machine import find_machine
from gpipe_bench.util.files import write_files

app = typer.Typer(help="Check configuration files, or write the default one and its schema.", no_args_is_help=True)


@app.command("check")
def check(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help=f"Files, later ones over earlier ones, all of them over {CONFIG_PATH}."),
    ] = None,
) -> None:
    """Check configuration files as Snakemake merges them, and say what they ask for on this machine.

    Every problem gets a line.
    """
    config = load_config(files or [])
    machine = find_machine(config.device, config.device_count)
    typer.echo(f"device: {machine.device}, {machine.count} {'of each job' if config.device_count else 'here'}")
    for name, experiment in config.experiments.items():
        runs = experiment.runs(machine)
        cells = {run.cell.id: run.cell for run in runs}
        unsupported = sum(bool(cell.unsupported()) for cell in cells.values())
        parts = [f"{len(cells)} cells, {unsupported} of them unsupported here; {len(runs)} runs"] if runs else []
        parts += [f"{len(experiment.simulated)} cells simulated"] if experiment.simulated else []
        parts += [f"{len(experiment.emulated)} cells emulated"] if experiment.emulated else []
        parts += [f"published tables simulated: {', '.join(experiment.tables)}"] if experiment.tables else []
        typer.echo(f"{name}: {'; '.join(parts) or 'nothing'}")
    typer.echo(f"advice: {', '.join(config.advice) or 'nothing'}")


@app.command("write")
def write(
    config: Annotated[Path, typer.Option(help="The default configuration.")] = CONFIG_PATH,
    schema: Annotated[Path, typer.Option(help="Its JSON schema.")] = SCHEMA_PATH,
) -> None:
    """Write the default configuration, to start from, and the JSON schema that follows from the settings of cells."""
    write_files({config: DEFAULT_CONFIG.read_text(encoding="utf-8"), schema: json_schema_text()})
    typer.echo(f"wrote {config} and {schema}")
