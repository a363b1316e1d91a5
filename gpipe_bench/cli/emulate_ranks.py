"""``emulate --nproc``: a script of ``torchrun``, a process for each rank, in one virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import typer

from gpipe_bench.errors import TraceError
from gpipe_bench.util.console import Column, Grid, output

if TYPE_CHECKING:
    from gpipe_bench.emulator.torchrun import RanksRun
    from gpipe_bench.machine.profile import Profile

_GIB = 2**30


def run_on_ranks(
    script: Path,
    arguments: Sequence[str],
    profile: Profile,
    *,
    ranks: int,
    hosts: int,
    network: str,
    races: bool,
    host_time: bool,
) -> RanksRun:
    """Run a script on ranks, and say where it would hang; ends with status 1 where it fails."""
    from gpipe_bench.emulator.torchrun import run_ranks

    try:
        run = run_ranks(
            script, arguments, ranks=ranks, profile=profile, races=races, host_time=host_time, hosts=hosts,
            network=network,
        )  # fmt: skip
    except TraceError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    if run.hangs:
        typer.echo("error: all messages of a script must end, but on GPUs this one would hang:", err=True)
        for text in run.hangs:
            typer.echo(f"  {text}", err=True)
    return run


def print_ranks(run: RanksRun) -> None:
    """The steps of each rank and of all together, and the memory of each."""
    from gpipe_bench.emulator.device_times import device_times

    console = output()
    if not any(record.kind in {"kernel", "copy", "meet"} for record in run.records):
        console.print("no virtual device was used, and tensors of the CPU take no virtual time: put some on cuda")
        return
    common = run.common_ends_ns
    steps = run.step_times_ms
    if not steps:
        console.print("no second step: each rank must make two steps, of an optimizer or a backward pass, to time one")
    else:
        spread = "" if min(steps) == max(steps) else f" ({min(steps):.3f} to {max(steps):.3f})"
        count = "1 step" if len(steps) == 1 else f"{len(steps)} steps"
        console.print(f"{count} after the first, until all ranks end it: {median(steps):.3f} ms per step{spread}")
    window = (common[0], common[-1]) if steps else (0, max(run.replayed.makespan_ns, 1))
    names = ("rank", "ms per\nstep", "kernels", "messages\nand copies", "idle", "allocated\nGiB", "reserved\nGiB")
    grid = Grid([Column(name) for name in names])
    times = device_times(run.records, run.replayed.begin_ns, run.replayed.end_ns, window, run.ranks)
    memory = run.replayed.memory
    for rank, (time, ends) in enumerate(zip(times, run.step_ends_ns, strict=True)):
        own = [(end - begin) / 1e6 for begin, end in pairwise(ends)]
        shares = (f"{share:.1%}" for share in (time.kernel_fraction, time.copy_fraction, time.idle_fraction))
        peaks = memory[rank] if rank < len(memory) else None
        sizes = (peaks.peak_allocated, peaks.peak_reserved) if peaks else (0, 0)
        grid.add(str(rank), f"{median(own):.3f}" if own else "-", *shares, *(f"{size / _GIB:.3f}" for size in sizes))
    console.print(grid)


def print_memory(run: RanksRun) -> None:
    """Print the memory blocks that each rank holds when its tensors take the most memory.

    Blocks are added up by the operator or message that first wrote to them: it says what they are for.
    """
    from gpipe_bench.emulator.peaks import held_at_peak

    console = output()
    console.print("blocks that each rank holds at its peak of allocated memory, by what first wrote to them:")
    grid = Grid([Column("rank"), Column("operator or message", text=True), Column("blocks"), Column("MiB")])
    for rank in range(run.ranks):
        for held in held_at_peak(run.records, run.replayed, rank):
            grid.add(str(rank), held.source, str(held.blocks), f"{held.nbytes / 2**20:.4f}")
    console.print(grid)
