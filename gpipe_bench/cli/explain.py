"""``explain``: where the time of a traced step went, and what other schedules would give."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpipe_bench.errors import ScheduleError
from gpipe_bench.results.explain import alternatives, by_arithmetic, split
from gpipe_bench.results.traced import Step, read_step
from gpipe_bench.util.console import Column, Grid, output

_MODES = ("never", "always")
_SHARES = ("compute", "recompute", "copy", "imbalance", "bubble")


def explain(
    traces: Annotated[
        list[Path],
        typer.Argument(
            help="A timeline of ours, a trace row by row (.jsonl), or the PyTorch profiler's traces of all ranks, with "
            "ranges as PP:0F3."
        ),
    ],
) -> None:
    """Split the time of a traced step into compute, copies, bubble, imbalance, host; say what other schedules give."""
    step = read_step(traces)
    table = Grid(
        [Column("device", text=True), *map(Column, _SHARES), Column("of idle: host")],
        f"{_title(step)}: shares of each device's time",
    )
    for name, (shares, host) in zip(step.devices, split(step), strict=True):
        table.add(
            name,
            *(f"{getattr(shares, f'{share}_fraction'):.1%}" for share in _SHARES),
            f"{host:.1%}" if step.issued else "",
        )
    output().print(table)
    if step.on_host:
        typer.echo(
            "These ranges are the host's: what a message takes counts as compute of the action that waits for it.\n"
            "On GPUs they show launches alone: trace with ProfilerActivity.CUDA."
        )
    if any(step.flushes):
        counts = ", ".join(f"{count} times on device {device}" for device, count in enumerate(step.flushes) if count)
        typer.echo(f"Allocators gave cached memory back while the device was idle: {counts}, in all steps together.")
    try:
        typer.echo(f"The same order with its mean durations and nothing else: {_ms(by_arithmetic(step))}.\n")
    except ScheduleError as error:
        typer.echo(f"The order cannot be computed, for lack of actions in the trace: {error}\n")
    output().print(_ways(step))


def _title(step: Step) -> str:
    period, span = _ms(step.length_us if step.period_us is None else step.period_us), _ms(step.length_us)
    return f"step of {period}" if period == span else f"step of {period}, {span} from its first action to its last"


def _ways(step: Step) -> Grid:
    """A line per schedule: its step over the traced one, by mode, for as many micro-batches, half and twice."""
    found = {(way.schedule, way.microbatches, way.checkpoint): way for way in alternatives(step)}
    counts = sorted({m for _, m, _ in found})
    traced = 1 + max(event.microbatch for event in step.events)
    columns = [Column(f"m = {m}\n{mode}", starts_part=mode == _MODES[0]) for m in counts for mode in _MODES]
    grid = Grid(
        [Column("schedule", text=True), Column("in flight"), *columns],
        f"step over the traced one, with its durations on {len(step.devices)} devices; in flight for m = {traced}",
    )
    for name in dict.fromkeys(name for name, _, _ in found):
        own = {key[1:]: way for key, way in found.items() if key[0] == name}
        held = own.get((traced, "never"))
        words = [own.get((m, mode)) for m in counts for mode in _MODES]
        ratios = (f"{way.length_us / step.length_us:.2f}" if way else "" for way in words)
        grid.add(name, f"{held.in_flight:.1f}" if held else "", *ratios)
    return grid


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1000:.3f} ms"
