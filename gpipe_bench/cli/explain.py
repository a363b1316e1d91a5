"""``explain``: where the time of a step went, what other schedules give, and how it differs from another step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gpipe_bench.cli.cells import check_unused
from gpipe_bench.cli.options import VALUES, complete
from gpipe_bench.errors import ScheduleError
from gpipe_bench.results.explain import alternatives, by_arithmetic, shifts, split
from gpipe_bench.results.tables import lines_text
from gpipe_bench.results.traced import TracedStep, read_step
from gpipe_bench.schedules import SCHEDULES, Schedule, named_schedule
from gpipe_bench.schedules.table import is_schedule_file
from gpipe_bench.util.console import Column, Grid, output
from gpipe_bench.util.files import check_writable, write_files

_MODES = ("never", "always")
_COLUMNS = (
    "device",
    "kind",
    "microbatch",
    "partition",
    "other_start_ms",
    "other_end_ms",
    "start_ms",
    "end_ms",
    "late_ms",
)
_SHARES = ("compute", "recompute", "copy", "imbalance", "bubble")


def explain(
    traces: Annotated[
        list[Path],
        typer.Argument(
            help="A timeline of ours, a trace row by row (.jsonl), or the PyTorch profiler's traces of all ranks, with "
            "ranges as PP:0F3."
        ),
    ],
    *,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE|NAME",
            autocompletion=complete(VALUES["schedule"]),
            help="Compare each action with another trace, whose files are named as often as there are; or with a "
            "schedule, a name or a CSV file, of the same durations and free transfers.",
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, max=1, help="With --against: share of the step by which an action may be off.")
    ] = 0.02,
    out: Annotated[
        Path | None, typer.Option(help="With --against: table of all actions, a CSV file, times in milliseconds.")
    ] = None,
) -> None:
    """Split the time of a traced step into compute, copies, bubble, imbalance, host; say what other schedules give.

    With --against, say where the step and another one, or a schedule, part.
    """
    check_writable(out, inputs=[*traces, *(against or ())])
    step = read_step(traces)
    if against:
        _compare(step, against, tolerance, out)
        return
    check_unused("without --against", out=out)
    period, span = _ms(step.length_us if step.period_us is None else step.period_us), _ms(step.length_us)
    of_actions = "" if period == span else f", {span} from its first action to its last"
    table = Grid(
        [Column("device", text=True), *map(Column, _SHARES), Column("of idle: host")],
        f"step of {period}{of_actions}: shares of each device's time",
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
    if not any(event.kind == "backward_weights" for event in step.events):
        typer.echo(
            "The trace does not tell I from W: each counts as half of B. Where they differ,\n"
            "the lines of schedules that split B are wrong; trace one of these to know them."
        )


def _compare(step: TracedStep, against: Sequence[str], tolerance: float, out: Path | None) -> None:
    """Print by how much the step differs from another one, and at which action the two part."""
    found = shifts(step, _other(step, against))
    ends = max(one.actual_us[1] for one in found), max(one.expected_us[1] for one in found)
    typer.echo(
        f"{_ms(ends[0])} against {_ms(ends[1])}, from the first action to the last: {ends[0] / ends[1] - 1:+.1%}"
    )
    latest = max(found, key=lambda one: one.late_us)
    typer.echo(f"latest action: {latest.action} on {latest.device}, {_ms(latest.late_us)} after the other")
    limit_us = tolerance * ends[0]
    first = next((one for one in found if one.off_us > limit_us), None)
    if first is None:
        typer.echo(f"no action is more than {_ms(limit_us)} off the other")
    else:
        times = " against ".join(
            f"{start / 1000:.3f} to {_ms(end)}" for start, end in (first.actual_us, first.expected_us)
        )
        typer.echo(f"the two part at {first.action} on {first.device}: {times}")
    if out is not None:
        rows = [
            [
                one.device,
                *one.action,
                *(f"{time / 1000:.6f}" for time in (*one.expected_us, *one.actual_us, one.late_us)),
            ]
            for one in found
        ]
        write_files({out: lines_text([_COLUMNS, *rows])})
        typer.echo(f"wrote {out}")


def _other(step: TracedStep, against: Sequence[str]) -> TracedStep | Schedule:
    """What a step is compared with: one or more files of a trace, or a schedule."""
    (name, *more) = against
    if more or not (name in SCHEDULES or is_schedule_file(name)):
        return read_step([Path(file) for file in against])
    m, n = (1 + max(getattr(event, axis) for event in step.events) for axis in ("microbatch", "partition"))
    return named_schedule(name, m, n, len(step.devices))


def _ways(step: TracedStep) -> Grid:
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
