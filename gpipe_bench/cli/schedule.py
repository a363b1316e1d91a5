"""``schedule``: prove, draw, time or write a schedule, by its name or from a file of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gpipe_bench.cli.options import tell
from gpipe_bench.cli.schedule_source import Devices, Microbatches, PerDevice, Source, schedule_of
from gpipe_bench.errors import ScheduleError
from gpipe_bench.results.tables import lines_text
from gpipe_bench.schedules import (
    CHANNELS,
    Durations,
    derived,
    drawn,
    read_messages,
    stuck,
    timing,
    to_csv,
    with_messages,
)
from gpipe_bench.schedules import check as checked
from gpipe_bench.schedules.progress import assumptions
from gpipe_bench.schedules.table import SCHEDULES
from gpipe_bench.util.files import check_writable, write_files

app = typer.Typer(help="Check, draw, time and write schedules, by name or from a CSV file.", no_args_is_help=True)

Skips = Annotated[
    list[str] | None,
    typer.Option("--skip", help="Partition that stashes a skip, and the one that pops it: 0-3. May be repeated."),
]


def _times(text: str) -> Any:
    """An option that takes times of partitions."""
    return typer.Option(help=f"{text}: one for all partitions, or one for each, joined by ','.")


@app.command("check")
def check(  # noqa: PLR0917 - options, which have names on the command line
    source: Source,
    devices: Devices = 4,
    microbatches: Microbatches = 8,
    per_device: PerDevice = 2,
    skips: Skips = None,
    channels: Annotated[
        str | None,
        typer.Option(help=f"Judge messages between processes that share queues in this way: {', '.join(CHANNELS)}."),
    ] = None,
    batched: Annotated[bool, typer.Option("--batched", help="Messages in a row are one batch_isend_irecv.")] = False,
    blocking: Annotated[bool, typer.Option("--blocking", help="Each SEND and RECV holds its process.")] = False,
) -> None:
    """Prove that a schedule can run, and print what is known of it; else the first problems, and exit status 2.

    With --channels, prove that its messages end, or print where each process is stuck, and exit with status 1. The
    file may then have PyTorch's messages, or calls; a folder is what gpipe_bench.distributed.recorded has written.
    """
    if channels is not None:
        ends = [_ends(text) for text in skips or ()]
        lists = (
            derived(checked(schedule_of(source, devices, microbatches, per_device), ends).schedule, ends)
            if source in SCHEDULES
            else read_messages(_text(source), ends, blocking=blocking)
        )
        if found := stuck(lists, channels, batched=batched):
            typer.echo("\n".join(found))
            raise typer.Exit(1)
        typer.echo(f"every message of {len(lists)} ranks ends, if {assumptions(channels, batched=batched)}")
        return
    schedule = schedule_of(source, devices, microbatches, per_device)
    facts = checked(schedule, [_ends(text) for text in skips or ()])
    homes = " ".join(map(str, facts.placement))
    typer.echo(f"{len(facts.schedule.devices)} devices, {facts.partitions} partitions, on devices {homes}")
    typer.echo(f"{facts.microbatches} micro-batches; most in flight on each device: {_numbers(facts.in_flight)}")
    typer.echo(f"bubble for T_F = T_B = T_W: {facts.bubble():.2%}")
    for early, late in facts.crossed:
        typer.echo(f"messages cross: {early} is needed before {late}, and sent after it")


@app.command("draw")
def draw(source: Source, devices: Devices = 4, microbatches: Microbatches = 8, per_device: PerDevice = 2) -> None:
    """Draw a schedule as text: a line for each device, time to the right, T_F = T_B = T_W."""
    typer.echo(drawn(checked(schedule_of(source, devices, microbatches, per_device)).schedule))


@app.command("time")
def time(  # noqa: PLR0917 - options, which have names on the command line
    source: Source,
    devices: Devices = 4,
    microbatches: Microbatches = 8,
    per_device: PerDevice = 2,
    forward: Annotated[str, _times("T_F, in any unit")] = "1",
    inputs: Annotated[str, _times("T_B, of the gradients of inputs")] = "1",
    weights: Annotated[str, _times("T_W, of the gradients of weights")] = "1",
    transfer: Annotated[float, typer.Option(help="From the end of an action until another device has it.")] = 0.0,
    overlap: Annotated[float | None, typer.Option(help="What a pair takes over its two actions one by one.")] = None,
    out: Annotated[Path | None, typer.Option(help="CSV file for the start and end of each action.")] = None,
) -> None:
    """Compute when each action runs, without simulation; print the makespan, the spans and both bubbles."""
    check_writable(out, inputs=[source])
    schedule = checked(schedule_of(source, devices, microbatches, per_device)).schedule
    times = [
        _each(name, text, schedule.partitions)
        for name, text in (("--forward", forward), ("--inputs", inputs), ("--weights", weights))
    ]
    if overlap is not None and not schedule.pairs:
        tell(f"overlap: {source} has no pairs of a forward and a backward pass")
    found = timing(schedule, [Durations(*own) for own in zip(*times, strict=True)], transfer, overlap)
    typer.echo(f"makespan {found.makespan:g}")
    typer.echo(f"span of each device: {_numbers(found.spans)}; busy: {_numbers(found.busy)}")
    typer.echo(f"bubble of all devices, until the end: {found.bubble:.2%}")
    typer.echo(f"bubble of the device with the longest span, within it: {found.span_bubble:.2%}")
    if out is not None:
        rows = [
            [device, *action, f"{found.start[action]:.9g}", f"{found.end[action]:.9g}"]
            for device, row in enumerate(schedule.devices)
            for action in row
        ]
        write_files({out: lines_text([["device", "kind", "microbatch", "partition", "start", "end"], *rows])})
        typer.echo(f"wrote {out}")


@app.command("write")
def write(  # noqa: PLR0917 - options, which have names on the command line
    source: Source,
    out: Annotated[Path, typer.Option(help="CSV file, in the form that torch.distributed.pipelining reads.")],
    devices: Devices = 4,
    microbatches: Microbatches = 8,
    per_device: PerDevice = 2,
    messages: Annotated[
        bool,
        typer.Option(
            help="Add a RECV before and a SEND after each action, as PyTorch's GPipe has them.", show_default=False
        ),
    ] = False,
) -> None:
    """Write a schedule as CSV, to change it, or to train with it in PyTorch, torchtitan or NeMo Automodel."""
    check_writable(out, inputs=[source])
    schedule = checked(schedule_of(source, devices, microbatches, per_device)).schedule
    write_files({out: to_csv(with_messages(schedule) if messages else schedule)})
    typer.echo(f"wrote {out}")


def _text(source: str) -> str:
    """The lists of a file, or of the files of a recording.

    Raises:
        ScheduleError: there is no such file or folder.
    """
    path = Path(source)
    if path.is_dir():
        files = [path / f"rank{rank}.csv" for rank in range(len([*path.glob("rank*.csv")]))]
        if files and all(file.exists() for file in files):
            return "".join(file.read_text(encoding="utf-8").strip() + "\n" for file in files)
        raise ScheduleError([f"a recording must have rank0.csv and those of all other ranks, got {source!r}; add them"])
    if not path.exists():
        raise ScheduleError([f"lists of messages must be a name, a file or a folder, got {source!r}; correct the path"])
    return path.read_text(encoding="utf-8", errors="replace")


def _ends(text: str) -> tuple[int, int]:
    """The partitions of a skip.

    Raises:
        ScheduleError: the text does not name two.
    """
    ends = text.split("-")
    if len(ends) == 2 and all(map(str.isdecimal, ends)):
        return int(ends[0]), int(ends[1])
    raise ScheduleError([f"a skip must be two partitions, got {text!r}; write it as in --skip 0-3"])


def _each(name: str, text: str, partitions: int) -> list[float]:
    """A time for each partition, of an option.

    Raises:
        ScheduleError: the text is not one number, or one for each.
    """
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = []
    if len(values) not in (1, partitions):
        rule = f"{name} must be one number, or one for each of the {partitions} partitions"
        raise ScheduleError([f"{rule}, got {text!r}; write them as in {name} 2,2,3"])
    return values * partitions if len(values) == 1 else values


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:g}" for value in values)
