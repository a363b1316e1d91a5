"""``config check`` and ``config write``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpipe_bench.bench.experiments.config import load_config
from gpipe_bench.bench.experiments.config_files import CONFIG_PATH, SCHEMA_PATH, default_config_yaml, json_schema_text
from gpipe_bench.bench.spec.machine import find_machine
from gpipe_bench.data import DEFAULT_CONFIG
from gpipe_bench.util.files import write_files

app = typer.Typer(help="Check configuration files, or write the default one and its schema.", no_args_is_help=True)


@app.command("check")
def check(
    files: Annotated[
        list[Path] | None, typer.Argument(help=f"Files, later ones over earlier ones.  [default: {CONFIG_PATH}]")
    ] = None,
) -> None:
    """Check configuration files and say what they ask for on this machine; every problem gets a line."""
    config = load_config(files or [DEFAULT_CONFIG])
    machine = find_machine(config.device, config.device_count)
    typer.echo(f"device: {machine.device}, {machine.count} {'of each job' if config.device_count else 'here'}")
    for name, experiment in config.experiments().items():
        runs = config.runs(name, machine)
        cells = {run.cell.id: run.cell for run in runs}
        unsupported = sum(bool(cell.unsupported()) for cell in cells.values())
        parts = [f"{len(cells)} cells, {unsupported} of them unsupported here; {len(runs)} runs"] if runs else []
        parts += [f"{len(experiment.simulations())} cells simulated"] if experiment.simulations() else []
        parts += [f"{len(experiment.emulations())} cells emulated"] if experiment.emulations() else []
        parts += [f"published tables simulated: {', '.join(experiment.tables())}"] if experiment.tables() else []
        typer.echo(f"{name}: {'; '.join(parts) or 'nothing'}")
    typer.echo(f"advice: {', '.join(config.advice) or 'nothing'}")


@app.command("write")
def write(
    config: Annotated[Path, typer.Option(help="The default configuration.")] = Path(CONFIG_PATH),
    schema: Annotated[Path, typer.Option(help="Its JSON schema.")] = Path(SCHEMA_PATH),
) -> None:
    """Write the default configuration and the JSON schema that follow from the typed settings."""
    write_files({config: default_config_yaml(), schema: json_schema_text()})
    typer.echo(f"wrote {config} and {schema}")
