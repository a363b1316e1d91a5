"""``emulate``: somebody's training script on virtual devices, in virtual time; or a cell, or those of a file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gpipe_bench.cli.cells import (
    CellFile,
    Only,
    RawOut,
    Timelines,
    check_unused,
    from_file,
    from_options,
    names_in,
    needed_out,
    option_name,
    teller,
    with_settings,
)
from gpipe_bench.cli.options import HOST_BOUND, model_file, tell_microbatches, use_words
from gpipe_bench.cli.progress import progress
from gpipe_bench.cli.simulate import TRACE_HELP
from gpipe_bench.errors import ConfigError
from gpipe_bench.machine.networks import NETWORK
from gpipe_bench.schedules.table import is_schedule_file
from gpipe_bench.suite.emulated_cells import EmulatedCell
from gpipe_bench.suite.settings import AUTO
from gpipe_bench.suite.storage.raw import results_json
from gpipe_bench.util.console import Column, Grid, output
from gpipe_bench.util.files import check_writable, json_text, write_files

if TYPE_CHECKING:
    from gpipe_bench.emulator.races import Race
    from gpipe_bench.emulator.script import ScriptRun
    from gpipe_bench.emulator.torchrun import RanksRun
    from gpipe_bench.errors import OutOfMemory
    from gpipe_bench.machine.profile import Profile
    from gpipe_bench.machine.replay import DeviceMemory
    from gpipe_bench.step.result import Step

_OF_SCRIPTS: Final = ("profile", "tf32", "launch_us", "host_time")
_GIB: Final = 2**30
_OPERATORS: Final = 8
_RACES: Final = 20
_CUT: Final = frozenset({"model", "model_args", "partitions"})
_SHOWN: Final = {
    "profile": "h100 for a script, else p40",
    "balance": "even in simulated time; without another model or partitions 9-21-13-10",
}
# As PyTorch's errors and the engine's have it. In a path or a key it is small, and says nothing about devices.
_CUDA: Final = re.compile(r"CUDA|NVIDIA|_cuda_|type cuda")


@with_settings(EmulatedCell, start=_SHOWN, without=("evidence", "devices"))
def emulate(
    script: Annotated[
        Path | None,
        typer.Argument(help="A Python file that takes its devices from torch.accelerator; without it, a cell."),
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments, after --.")] = None,
    *,
    options: dict[str, Any],
    cells: CellFile = None,
    only: Only = "",
    timelines: Timelines = "",
    out: RawOut = None,
    devices: Annotated[
        int | None, typer.Option(min=1, max=16, help="Devices that a script finds, or partitions share.  [default: 4]")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help=TRACE_HELP)] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1, max=16, help="Run the script as torchrun does: so many ranks, each with a process and a device."
        ),
    ] = None,
    hosts: Annotated[int | None, typer.Option(min=1, help="With --nproc: hosts of the ranks, as many each.")] = None,
    network: Annotated[
        str | None, typer.Option(help="With --hosts: the link between them, as simulate has it.  [default: ndr400]")
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="With --nproc, list what each rank holds at its peak of memory.")
    ] = False,
    races: Annotated[bool, typer.Option("--races", help="In a script, list accesses to memory in no order.")] = False,
) -> None:
    """Run a training script to its end on virtual devices, and print what its steps would take.

    The script runs for real, with its threads, autograd, streams and allocations, but kernels compute nothing: memory
    reads as zeros, and time is virtual. Printed are the time of a step, memory and use of each device, and the
    operators that take the most time. Without a script, the engine trains a cell: that of the options, or each one in
    a file.
    """
    if not nproc:
        check_unused("without --nproc", hosts=hosts, network=network, memory=memory)
    if script is None and cells is not None:
        check_unused("with --cells", trace=trace, devices=devices, races=races, nproc=nproc)
        check_writable(out, inputs=[cells])
        _emulate_cells(from_file(EmulatedCell, cells, only, options), names_in(timelines), needed_out(out))
    elif script is None:
        check_unused("without --cells", only=only, timelines=timelines)
        check_unused("without a script", races=races, nproc=nproc)
        shared = {"devices": devices} if devices else {}
        cut = {"balance": AUTO} if _CUT & options.keys() or is_schedule_file(options.get("schedule")) else {}
        _emulate_cell(from_options(EmulatedCell, {**cut, **options, **shared}), trace, out)
    elif wrong := [option_name((name,)) for name in options if name not in _OF_SCRIPTS]:
        raise ConfigError([f"options of a cell must be left out with a script, got {', '.join(wrong)}; leave them out"])
    else:
        check_unused("with a script", cells=cells, only=only, timelines=timelines, out=out)
        settings = from_options(EmulatedCell, {"profile": "h100", **options})
        if nproc:
            check_unused("with --nproc", devices=devices)
            machine = {"hosts": hosts or 1, "network": network or NETWORK}
            _emulate_ranks(script, arguments or [], settings, trace, machine, ranks=nproc, races=races, memory=memory)
        else:
            _emulate_script(script, arguments or [], settings, trace, devices=devices or 4, races=races)


def _emulate_cells(cells: Sequence[EmulatedCell], timelines: Sequence[str], out: Path) -> None:
    """Emulate cells in this process and write their raw results; without a C++ compiler each one is skipped."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from gpipe_bench.cli.simulate import bound_words
    from gpipe_bench.suite.running.emulated import emulate_cells

    tell_microbatches(cells)
    with progress("emulating") as task:
        results = emulate_cells(cells, teller(task, sum(one.steps - 1 for one in cells)), timelines)
    write_files({out: results_json(results)})
    if all(result.row.status == "skipped" for result in results):
        typer.echo(f"wrote {out}: 0 cells emulated, {len(cells)} skipped")
        return
    typer.echo(f"wrote {out} with {len(results)} steps of {len(cells)} emulated cells{bound_words(results)}")
    from gpipe_bench.emulator.library import leave

    leave(0)


def _emulate_cell(cell: EmulatedCell, trace: Path | None, out: Path | None) -> None:
    from gpipe_bench.emulator.build import require_virtual_devices

    check_writable(trace, out, inputs=[model_file(cell.model), cell.profile, cell.schedule])
    require_virtual_devices()
    from gpipe_bench.cli.simulate import write_results
    from gpipe_bench.cli.simulated_table import print_simulation
    from gpipe_bench.emulator.library import leave
    from gpipe_bench.suite.running.emulated import emulate_cells

    tell_microbatches([cell])
    steps: list[Step] = []
    with progress(f"emulating {cell.model} on {cell.schedule_devices} devices"):
        results = emulate_cells([cell], steps=steps)
    print_simulation(results[-1], [])
    write_results(results, steps, trace, None, out)
    leave(0)


def _emulate_script(
    script: Path,
    arguments: Sequence[str],
    settings: EmulatedCell,
    trace: Path | None,
    *,
    devices: int,
    races: bool,
) -> None:
    from gpipe_bench.emulator.build import require_virtual_devices
    from gpipe_bench.machine.hardware import HardwareMachine
    from gpipe_bench.machine.profile import load_profile
    from gpipe_bench.step.result import busy_ns, guess_words

    check_writable(trace, inputs=[script, settings.profile])
    hardware = load_profile(settings.profile).adapted(settings.tf32, settings.launch_us)
    require_virtual_devices()
    from gpipe_bench.emulator.library import leave
    from gpipe_bench.emulator.script import run_script, script_traceback

    how: dict[str, Any] = {"devices": devices, "races": races, "host_time": settings.host_time}
    try:
        run = run_script(script, arguments, profile=hardware, **how)
    except Exception as error:
        text = script_traceback(error, script)
        if text is None:
            raise
        typer.echo(text, nl=False, err=True)
        if _CUDA.search(str(error)):
            typer.echo(_no_cuda(devices), err=True)
        leave(1)
    if run.replayed.shortage:
        typer.echo(_shortage(run.replayed.memory, run.replayed.shortage), err=True)
        leave(1)
    output().print(_title(settings, hardware, devices), style="bold")
    _print(run, devices, races=races)
    host_ns, kernels_ns = busy_ns(run.replayed.trace, HardwareMachine(hardware))
    if settings.host_time and host_ns > kernels_ns:
        typer.echo(HOST_BOUND)
        if settings.launch_us is None and not hardware.has_own_host:
            typer.echo(guess_words(hardware.host_us))
    _print_error(run, settings.profile)
    if trace is not None:
        own = {name: value for name in ("tf32", "launch_us") if (value := getattr(settings, name)) is not None}
        _write(trace, run, {"profile": hardware.name, "host_time": settings.host_time, **own})
    leave(0)


def _emulate_ranks(
    script: Path,
    arguments: Sequence[str],
    settings: EmulatedCell,
    trace: Path | None,
    machine: dict[str, Any],
    *,
    ranks: int,
    races: bool,
    memory: bool,
) -> None:
    from gpipe_bench.cli.emulate_ranks import print_memory, print_ranks, run_on_ranks
    from gpipe_bench.emulator.build import require_virtual_devices
    from gpipe_bench.machine.profile import load_profile

    check_writable(trace, inputs=[script, settings.profile])
    hardware = load_profile(settings.profile).adapted(settings.tf32, settings.launch_us)
    require_virtual_devices()
    run = run_on_ranks(script, arguments, hardware, ranks=ranks, races=races, host_time=settings.host_time, **machine)
    if run.hangs:
        if races:
            # Those until there.
            _print_races(run.races, run, "rank")
        raise typer.Exit(3)
    if run.replayed.shortage:
        typer.echo(_shortage(run.replayed.memory, run.replayed.shortage), err=True)
        raise typer.Exit(1)
    output().print(_title(settings, hardware, ranks), style="bold")
    print_ranks(run)
    if memory:
        print_memory(run)
    if races:
        # Each has one device, of the same number.
        _print_races(run.races, run, "rank")
    _print_error(run, settings.profile)
    if trace is not None:
        _write(trace, run, {"profile": hardware.name, "host_time": settings.host_time})


def _print_error(run: ScriptRun | RanksRun, profile: str) -> None:
    from gpipe_bench.suite.published.known_errors import speed_error_words

    if run.step_times_ms and (error := speed_error_words(profile)):
        typer.echo(error)


def _no_cuda(devices: int) -> str:
    """What a script must change that names CUDA."""
    names = f"virtual:0 to virtual:{devices - 1}" if devices > 1 else "virtual:0"
    return (
        f"error: devices of an emulated script must be {names}, got an error about CUDA, which it does not have; write "
        "torch.device(torch.accelerator.current_accelerator().type, 0) for cuda:0, .to(device) for .cuda(), and "
        "torch.accelerator for torch.cuda, which run on GPUs, too"
    )


def _shortage(memory: Sequence[DeviceMemory], shortage: OutOfMemory) -> str:
    from gpipe_bench.step.result import gib_texts

    device = shortage.device
    needed, capacity = gib_texts(memory[device].peak_reserved / _GIB, shortage.capacity / _GIB)
    return (
        f"error: out of memory: device {device} needs {needed} of allocator segments and has {capacity}, which only "
        "the replay finds, so the script could not catch it; use smaller batches, more devices or checkpoints"
    )


def _title(settings: EmulatedCell, profile: Profile, devices: int) -> str:
    where = f"{devices} x {profile.device} ({profile.name}){use_words(settings.tf32, settings.launch_us)}"
    return f"emulated on {where}; values are not computed{'' if settings.host_time else '; launches cost nothing'}"


def _print(run: ScriptRun, devices: int, *, races: bool) -> None:
    from gpipe_bench.emulator.device_times import device_times, operator_times

    console = output()
    if not any(record.kind == "kernel" for record in run.records):
        console.print(
            "no virtual device was used: the script must take its devices from torch.accelerator, not from torch.cuda"
        )
        return
    console.print(_steps(run))
    begin, end, window = run.replayed.begin_ns, run.replayed.end_ns, run.window
    if window[1] <= window[0]:
        return
    grid = Grid([Column(name) for name in ("device", "kernels", "copies", "idle", "allocated\nGiB", "reserved\nGiB")])
    times = device_times(run.records, begin, end, window, devices)
    for device, (time, memory) in enumerate(zip(times, run.replayed.memory, strict=False)):
        shares = (f"{share:.1%}" for share in (time.kernel_fraction, time.copy_fraction, time.idle_fraction))
        peaks = (f"{peak / _GIB:.3f}" for peak in (memory.peak_allocated, memory.peak_reserved))
        grid.add(str(device), *shares, *peaks)
    console.print(grid)
    table = Grid([Column("operator", text=True), Column("ms"), Column("kernels")])
    steps = max(1, len(run.step_times_ms))
    for name, spent, count in operator_times(run.records, begin, end, window)[:_OPERATORS]:
        table.add(name, f"{spent / steps:.3f}", f"{count / steps:.0f}")
    console.print(f"in {'a step' if run.step_times_ms else 'the whole script'}, on all devices together:")
    console.print(table)
    if races:
        _print_races(run.races, run)


def _steps(run: ScriptRun) -> str:
    times = run.step_times_ms
    if not times:
        return "no second step: the script must make two steps, of an optimizer or a backward pass, to time one"
    spread = "" if min(times) == max(times) else f" ({min(times):.3f} to {max(times):.3f})"
    count = "1 step" if len(times) == 1 else f"{len(times)} steps"
    return f"{count} after the first: {median(times):.3f} ms per step{spread}"


def _print_races(races: Iterable[Race], run: ScriptRun | RanksRun, place: str = "device") -> None:
    console = output()
    rows = {id(record): row for row, record in enumerate(run.records)}
    texts = dict.fromkeys(_race(race, rows, run, place) for race in races)
    console.print(f"{len(texts)} {'race' if len(texts) == 1 else 'races'}" if texts else "no races", style="bold")
    for text in list(texts)[:_RACES]:
        console.print(text, soft_wrap=True)
    if len(texts) > _RACES:
        console.print(f"and {len(texts) - _RACES} more")


def _race(race: Race, rows: dict[int, int], run: ScriptRun | RanksRun, place: str) -> str:
    """One race in two lines; the same in every step, so it names no block."""
    before, after = (
        f"{record.name or record.kind} on {place} {record.device} stream {record.stream} {_line(run, rows[id(record)])}"
        for record in (race.before, race.after)
    )
    return f"  {race.kind}: {after}\n    does not wait for {before}"


def _line(run: ScriptRun | RanksRun, row: int) -> str:
    """The line that issued a row; where none did, as for freed memory, the last one of its thread before."""
    if row in run.lines:
        return f"at {run.lines[row]}"
    thread = run.records[row].thread
    before = (place for place in range(row, -1, -1) if place in run.lines and run.records[place].thread == thread)
    place = next(before, None)
    return "at an unknown line" if place is None else f"after {run.lines[place]}"


def _write(path: Path, run: ScriptRun | RanksRun, metadata: Mapping[str, Any]) -> None:
    from gpipe_bench.cli.simulate import has_rows
    from gpipe_bench.emulator.device_times import chrome_trace
    from gpipe_bench.machine.trace_file import write_trace

    if has_rows(path):
        times = run.step_times_ms
        step_ns = round(median(times) * 1e6) if times else None
        write_trace(path, run.replayed.trace, run.replayed, step_ns=step_ns, memory=run.replayed.memory)
    else:
        write_files({path: json_text(chrome_trace(run.records, run.replayed, metadata))})
    typer.echo(f"wrote {path}")
