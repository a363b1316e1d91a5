"""``run`` and ``profile``: what measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gpipe_bench.cli.cells import CellFile, Only, check_unused, from_file, from_options, with_settings
from gpipe_bench.cli.options import (
    check_device,
    model_file,
    named,
    number,
    running,
    tell,
    tell_layers,
    tell_loss,
    tell_microbatches,
)
from gpipe_bench.cli.progress import Progress, progress
from gpipe_bench.errors import ConfigError
from gpipe_bench.machine.constants import CONSTANTS
from gpipe_bench.schedules.table import partition_count
from gpipe_bench.suite.cells import MeasuredCell
from gpipe_bench.suite.running.ranks import rank_here
from gpipe_bench.suite.settings import AUTO
from gpipe_bench.util.files import check_writable, write_files

if TYPE_CHECKING:
    from gpipe_bench.suite.storage.raw import RawResult

_DEFAULT: Final = MeasuredCell()
_MOST_REPEATS: Final = 10_000
_SHOWN: Final = {
    "balance": "even in size",
    "partitions": f"those of --balance, else what --processes needs, else {_DEFAULT.partitions}",
    "schedule": "none, gpipe with --processes",
}


@with_settings(MeasuredCell, start=_SHOWN, without=("evidence",))
def run(
    *,
    options: dict[str, Any],
    cells: CellFile = None,
    only: Only = "",
    out: Annotated[Path, typer.Option(help="The raw results to write, a JSON file.")],
    repeat: Annotated[int, typer.Option(min=0, max=_MOST_REPEATS, help="Number of this repeat, 0-based.")] = 0,
    repeats: Annotated[
        int, typer.Option(min=0, max=_MOST_REPEATS, help="Run so many, each in a fresh process; 0: one in this.")
    ] = 0,
    turns: Annotated[
        bool, typer.Option("--turns", help="Let the cells take turns, a step each, so that other load meets all alike.")
    ] = False,
    budget_s: Annotated[
        float | None, number("Seconds for all runs; what does not fit is a row with status skipped.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a step of the last run as a Chrome trace, for Perfetto and explain.")
    ] = None,
) -> None:
    """Measure a cell, or each one in a file, and write the raw results: a repeat in this process, or several in others.

    With --processes torchrun starts a process for each device of the schedule. If torchrun has started this command
    itself, on one host or several, it measures with the others, and rank 0 writes the result.

    Out of memory, a switch that the device does not support and any other failure of the run are results: a row with a
    status and a reason. The exit status is then 1; with --cells it is 0, so that one failed cell does not end an
    experiment. Bad arguments are a line each on stderr, exit status 2 and no file.
    """
    if cells is None:
        check_unused("without --cells", only=only)
    chosen = from_file(MeasuredCell, cells, only, options) if cells is not None else [_cell(options)]
    rank = rank_here(chosen[0])
    if not rank:  # the only one that writes
        sources = [path for cell in chosen for path in (model_file(cell.model), cell.schedule)]
        check_writable(out, trace, inputs=[cells, *sources])
    if rank is not None:
        check_unused("where torchrun has started the processes", budget_s=budget_s)
        if result := _run_rank(chosen[0], repeat, repeats, out, rank):
            _write_trace(trace, result)
        return
    for cell in chosen:
        tell_layers(cell.model, cell.model_args)
        tell_loss(cell.model)
    tell_microbatches(chosen)
    if repeats and repeat:
        tell(f"repeat: {repeat} is not used, since --repeats {repeats} numbers its own")
    if repeats or len(chosen) > 1 or budget_s is not None:
        results = _run_repeats([chosen] if turns else [[cell] for cell in chosen], repeats or 1, out, budget_s)
    else:
        results = [_run_once(chosen[0], repeat, out)]
    _write_trace(trace, results[-1])
    if cells is None and any(result.row.status != "ok" for result in results):
        raise typer.Exit(1)


def _cell(options: Mapping[str, Any]) -> MeasuredCell:
    """The cell of these options, with as many partitions as there are processes, and a balance that is even in size.

    Raises:
        ConfigError: options are wrong; all problems.
    """
    processes = options.get("processes", 1)
    implied: dict[str, Any] = {"balance": AUTO}
    if processes > 1:
        schedule = options.get("schedule", "gpipe")
        implied |= {"schedule": schedule}
        implied |= {} if "balance" in options else {"partitions": partition_count(schedule, processes)}
    cell = from_options(MeasuredCell, {**implied, **options})
    return cell if "balance" in options else cell.changed(balance=_balance(cell))


def _run_once(cell: MeasuredCell, repeat: int, out: Path) -> RawResult:
    from gpipe_bench.suite.running.run import run_cell

    with progress(f"measuring {cell.variant}") as task:
        result = run_cell(cell, repeat)
        write_files({out: result.to_json()})
        _say(result, task)
    return result


def _run_rank(cell: MeasuredCell, repeat: int, repeats: int, out: Path, rank: int) -> RawResult | None:
    from gpipe_bench.suite.running.run import run_cell

    if repeats:
        rule = "--repeats must be 0 where torchrun has started the processes of one repeat"
        raise ConfigError([f"{rule}, got {repeats}; say with --repeat which one it is"])
    result = run_cell(cell, repeat)
    if rank:
        return None
    write_files({out: result.to_json()})
    typer.echo(_words(result))
    return result


def _run_repeats(
    groups: Sequence[Sequence[MeasuredCell]], repeats: int, out: Path, budget_s: float | None
) -> list[RawResult]:
    """Measure the groups one after the other, round by round; the cells of a group take turns."""
    from gpipe_bench.suite.running.turns import run_repeats
    from gpipe_bench.suite.storage.raw import results_json

    # A turn each to build and to end, and one for each timed step.
    turns, total = count(1), repeats * sum(cell.steps + 2 for cells in groups for cell in cells)
    with progress("measuring, turns") as task:

        def report(result: RawResult | None) -> None:
            if result is not None:
                _say(result, task)
            task.step(next(turns), total)

        results = run_repeats(groups, repeats, report, budget_s=budget_s)
    write_files({out: results_json(results)})
    return results


def _write_trace(trace: Path | None, result: RawResult) -> None:
    if trace is not None:
        from gpipe_bench.results.timeline import TimelineEvent, write_trace

        events = [TimelineEvent(**event) for event in result.events]
        write_trace(trace, result.row.variant, result.row, events, result.row.reason)


def _say(result: RawResult, task: Progress) -> None:
    task.line(_words(result), err=result.row.status != "ok")


def _words(result: RawResult) -> str:
    from gpipe_bench.results.labels import run_as

    row = result.row
    value = f"{row.throughput_samples_per_s:.2f} samples/s" if row.throughput_samples_per_s else row.reason
    return f"{row.status}: {run_as(row)}, {row.variant} repeat {row.repeat}: {value}"


def _balance(cell: MeasuredCell) -> tuple[int, ...]:
    """The balance where none is given: as even in size as can be.

    Raises:
        ConfigError: the model has layers that do not run.
    """
    default = _DEFAULT.model, _DEFAULT.model_args, _DEFAULT.partitions
    if (cell.model, cell.model_args, cell.partitions) == default:
        return _DEFAULT.balance
    import torch

    from gpipe_bench.balance import balance_by_size
    from gpipe_bench.models.table import model_spec, parse_arguments

    spec, arguments = model_spec(cell.model), parse_arguments(cell.model, cell.model_args)
    if cell.partitions == 1:
        # Nothing to weigh: layers that need values, which have none on meta, run as well.
        return (spec.layers(arguments),)
    with running(cell.model), torch.device("meta"):
        sample, _ = spec.make_batch(2, arguments, device="meta")
        return tuple(balance_by_size(cell.partitions, spec.build(**arguments), sample))


def profile(
    out: Annotated[Path, typer.Option(help="The profile to write, a YAML file.")],
    device: Annotated[str, named("device", "Device to profile: cuda, or cpu to rehearse.")] = "cuda",
) -> None:
    """Measure a device and write its hardware profile, in about half a minute on a GPU.

    Each kind of kernel is timed on the device, behind a kernel that sleeps, so that the host is never what is measured;
    the host is timed apart. The profile says how it had each constant, with its spread. It is used by its path:
    simulate --profile FILE.
    """
    check_device(device)
    check_writable(out)
    from gpipe_bench.suite.running.device_profile import measure_profile

    with progress(f"measuring {device}"):
        found = measure_profile(device, out.stem)
    write_files({out: found.text})
    for name, constant in (found.profile.kernels or {}).items():
        unit = CONSTANTS[name].unit
        spread = "" if constant.spread is None else f", spread {constant.spread:.1%}"
        typer.echo(f"{name}: {constant.value:g} {unit} ({constant.origin}{spread})")
    for name, error in found.errors.items():
        typer.echo(f"  {name}: by these constants {error:+.1%}")
    for name, reason in found.failures.items():
        tell(f"{name}: not measured: {reason}")
    if unsteady := found.unsteady:
        tell(f"{', '.join(unsteady)}: repeats are far apart; measure again when nothing else runs")
    typer.echo(f"wrote {out}")
