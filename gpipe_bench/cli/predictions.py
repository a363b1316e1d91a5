"""``predictions``: every published value beside the simulator's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from gpipe_bench.errors import ConfigError
from gpipe_bench.util.files import check_writable
from gpipe_bench.util.garbage import retire_collection
from gpipe_bench.util.nearest import nearest


def predictions(
    out: Annotated[Path, typer.Option(help="Table to write; its companion goes beside it.")] = Path(
        "results/predictions.csv"
    ),
    table: Annotated[list[str] | None, typer.Option(help="Only this published table; may be repeated.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder of stored traces.  [default: below ~/.cache]")] = None,
) -> None:
    """Simulate every published throughput, memory and utilisation with known settings, and compare.

    In the file, a cell without a number ran out of memory. Printed after that: steps that were measured on an H200 and
    on an H100, and the bubbles and throughputs of schedules on A100s, from printed times of a partition. Traces are
    kept for the next time.
    """
    from gpipe_bench.schedules import printed
    from gpipe_bench.simulator.published.settings import published_settings
    from gpipe_bench.suite.published.measured import TABLES, print_measured
    from gpipe_bench.suite.published.predictions import print_predictions

    others: dict[str, tuple[str, Callable[[], None]]] = {
        **{name: (measured.title, partial(print_measured, measured, cache)) for name, measured in TABLES.items()},
        printed.TABLE: ("schedules on A100s, from printed times of a partition", printed.print_steps),
    }
    tables = list(dict.fromkeys(setting.table for setting in published_settings()))
    names = [*tables, *others]
    for name in table or ():
        if name not in names:
            raise ConfigError([f"--table must be one of {', '.join(names)}, got {name!r}; {nearest(name, names)}"])
    published = [name for name in table or tables if name in tables]
    if published:
        check_writable(out)
        print_predictions(out, published, cache)
    for name, (title, show) in others.items():
        if name in (table or others):
            print(f"\n{title} ({name})")
            show()
    retire_collection()
