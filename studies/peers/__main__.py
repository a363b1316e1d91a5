"""``python -m studies.peers``: the jobs of ``snakemake --cores 1 peers``, and the packages on virtual devices."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gpipe_bench.suite.machine import find_machine
from gpipe_bench.util.files import check_writable
from studies.command import SettingsText, add_figures, run_app, settings_data
from studies.peers.contenders import contenders_of
from studies.peers.settings import read_settings

if TYPE_CHECKING:
    from gpipe_bench.figures.base import Figure

app = typer.Typer(
    pretty_exceptions_enable=False, help="Race the engine, other pipelines and the plain module, in turns."
)


@app.command()
def run(
    out: Annotated[Path, typer.Option(help="Table of rows; its companions go beside it.")] = Path("results/peers.csv"),
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to race.")] = "cpu",
    preset: Annotated[
        Literal["full", "short", "quick"], typer.Option(help="short: one GPU; quick: a rehearsal of seconds.")
    ] = "full",
    settings: SettingsText = "{}",
) -> None:
    """Run the race and write rows, timed steps and ratios; 1 to 3 hours on two cores."""
    chosen = read_settings(settings_data(settings), preset)
    check_writable(out)
    machine = find_machine(device)
    from studies.peers.race import ENVIRONMENT, run_race
    from studies.peers.table import write_race

    os.environ.update(ENVIRONMENT)
    facts, raced = run_race(
        chosen.cases(machine), contenders_of(chosen.contenders), timeout_s=chosen.timeout_s,
        balance_s=chosen.balance_s, report=lambda line: typer.echo(line, err=True),
    )  # fmt: skip
    rows = write_race(raced, facts, chosen.tolerance, out, chosen.configuration)
    for name, reason in dict.fromkeys((row.contender, row.reason) for row in rows if row.reason):
        typer.echo(f"{name}: {reason}")
    typer.echo(f"wrote {out}")


@app.command()
def emulate(
    out: Annotated[Path, typer.Option(help="Table of rows.")] = Path("results/peers_emulated.csv"),
) -> None:
    """Run the engine, torchgpipe and fairscale on virtual P40s: the published ablation and speed of the U-Net.

    Kernels compute nothing and time is virtual; threads, autograd and allocations are those of the packages.
    """
    from gpipe_bench.emulator.build import require_virtual_devices
    from studies.peers.emulated import emulated_cases, run_cases, write_rows

    check_writable(out)
    require_virtual_devices()
    write_rows(out, emulated_cases(), run_cases(emulated_cases(), typer.echo))
    typer.echo(f"wrote {out}")


def _figure() -> Figure:
    from studies.peers.figure import FIGURE

    return FIGURE


add_figures(app, _figure)

if __name__ == "__main__":
    run_app(app)
