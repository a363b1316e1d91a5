"""A schedule on the command line: its name, or a CSV file of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpipe_bench.errors import ScheduleError
from gpipe_bench.schedules import SCHEDULES, Schedule, named_schedule, read_csv
from gpipe_bench.schedules.table import LOOP, TWO_PER_DEVICE

Source = Annotated[
    str, typer.Argument(metavar="NAME|FILE", help=f"{', '.join(SCHEDULES)}; or a CSV file with a line for each device.")
]
Devices = Annotated[int, typer.Option(help="p, for a name.")]
Microbatches = Annotated[int, typer.Option(help="m, for a name.")]
PerDevice = Annotated[int, typer.Option(help=f"Partitions on each device, for {', '.join(LOOP)}.")]


def schedule_of(source: str, devices: int, microbatches: int, per_device: int) -> Schedule:
    """The schedule of that name, or of that file.

    Raises:
        ScheduleError: there is neither, or not for these numbers, or the file has fields that are no actions.
    """
    if source in SCHEDULES:
        parts = (per_device if source in LOOP else 2) if source in TWO_PER_DEVICE else 1
        return named_schedule(source, microbatches, devices * parts, devices)
    if not Path(source).exists():
        rule = f"a schedule must be one of {', '.join(SCHEDULES)}, or a CSV file"
        raise ScheduleError([f"{rule}, got {source!r}; correct the name or the path"])
    return read_csv(Path(source).read_text(encoding="utf-8", errors="replace"))
