"""``predictions``: every published value beside the simulator's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpipe_bench.collection import retire_collection
from gpipe_bench.errors import ConfigError
from gpipe_bench.models.arguments import nearest


def predictions(
    out: Annotated[Path, typer.Option(help="Table to write; its companion goes beside it.")] = Path(
        "results/predictions.csv"
    ),
    table: Annotated[list[str] | None, typer.Option(help="Only this published table; may be repeated.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder of stored traces.  [default: below ~/.cache]")] = None,
) -> None:
    """Simulate every published throughput, memory and utilisation of the Tesla P40s, and compare.

    In the file, a cell without a number ran out of memory. Steps that were measured on an H200 are printed after that.
    Traces are kept for the next time.
    """
    from gpipe_bench.simulator.measured import TABLE, print_measured
    from gpipe_bench.simulator.predictions import TABLES, print_predictions

    for name in table or ():
        if name not in {*TABLES, TABLE}:
            hint = nearest(name, [*TABLES, TABLE])
            raise ConfigError([f"--table must be one of {', '.join((*TABLES, TABLE))}, got {name!r}; {hint}"])
    published = [name for name in table or TABLES if name != TABLE]
    if published:
        print_predictions(out, published, cache)
    if not table or TABLE in table:
        print(f"\nsteps measured on an H200 ({TABLE})")
        print_measured(cache)
    retire_collection()
