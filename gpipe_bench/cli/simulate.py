"""``simulate``: one pipeline in virtual time, beside its published values, or the cells of a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
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
    teller,
    with_settings,
)
from gpipe_bench.cli.options import Processes, model_file, tell_layers, tell_loss, tell_microbatches
from gpipe_bench.cli.progress import progress
from gpipe_bench.cli.simulated_table import print_simulation
from gpipe_bench.errors import ConfigError
from gpipe_bench.machine.trace_file import write_trace as write_rows
from gpipe_bench.models.measured import is_layers_file, read_layers
from gpipe_bench.results.configurations import configurations_beside
from gpipe_bench.results.labels import rows_text
from gpipe_bench.results.timeline import TimelineEvent, write_trace
from gpipe_bench.schedules.table import is_schedule_file, partition_count
from gpipe_bench.suite.settings import AUTO
from gpipe_bench.suite.simulated_cells import SimulatedCell
from gpipe_bench.suite.storage.raw import RawResult, results_json
from gpipe_bench.util.files import check_writable, write_files

if TYPE_CHECKING:
    from gpipe_bench.step.result import Step

TRACE_HELP: Final = (
    "Write a Chrome trace for Perfetto (ui.perfetto.dev); as FILE.jsonl or FILE.jsonl.gz, what host threads issue, row "
    "by row."
)

_START: Final = {"model_args": "", "batch_size": 128, "chunks": 8, "balance": AUTO, "flavour": "current"}
_SHOWN: Final = {
    **_START,
    "model_args": "published ones",
    "partitions": "those of --balance or of a schedule's file, else 1",
}


@with_settings(SimulatedCell, start=_SHOWN, without=("evidence", "devices"))
def simulate(
    *,
    options: dict[str, Any],
    cells: CellFile = None,
    only: Only = "",
    timelines: Timelines = "",
    layers: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Take the measured times of layers, a CSV file, in place of a model; the batch is --chunks times "
            "what its column samples says.",
        ),
    ] = None,
    out: RawOut = None,
    processes: Processes = 1,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="Devices: those of as many partitions as fit them, or fewer, which partitions share."),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help=TRACE_HELP)] = None,
    rows: Annotated[
        Path | None, typer.Option(help="Write the row as a table, a CSV file, and beside it its configuration.")
    ] = None,
) -> None:
    """Simulate one training step of a pipeline on hardware that need not be here, or of each one in a file of cells.

    Prints throughput, memory and the split of each device's time, and, where somebody published a cell of the same
    settings, published and simulated value with the error. A pipeline that does not fit the memory is a result too: the
    row says how much which device needs, and the exit status is 0.
    """
    if layers is not None:
        options = {**_of_layers(layers, options, cells), **options}
    if cells is not None:
        check_unused("with --cells", trace=trace, rows=rows, devices=devices)
        check_writable(out, inputs=[cells])
        simulate_file(from_file(SimulatedCell, cells, only, options), names_in(timelines), needed_out(out), processes)
        return
    check_unused("without --cells", only=only, timelines=timelines, processes=processes > 1)
    cut, schedule = dict(_START), options.get("schedule")
    if is_schedule_file(schedule):
        del cut["chunks"]
    elif "balance" not in options:
        cut["partitions"] = partition_count(schedule, devices or 1)
    shared = {"devices": devices} if devices else {}
    cell = from_options(SimulatedCell, {**cut, **options, **shared})
    tell_layers(cell.model, cell.model_args)
    tell_loss(cell.model)
    check_writable(trace, rows, out, inputs=[model_file(cell.model), cell.profile, cell.schedule])
    from gpipe_bench.suite.published.values import published_for
    from gpipe_bench.suite.running.simulated import simulate_cells

    tell_microbatches([cell])
    steps: list[Step] = []
    with progress(f"simulating {cell.model} on {cell.partitions} devices"):
        result = simulate_cells([cell], steps=steps)[0]
    # Published runs trained in float32, on one host.
    print_simulation(result, published_for([result.row]) if (cell.precision, cell.hosts) == ("float32", 1) else [])
    write_results([result], steps, trace, rows, out)


def _of_layers(file: Path, options: dict[str, Any], cells: Path | None) -> dict[str, Any]:
    """The settings that a file of layers decides; ``options``: those of the command line.

    Raises:
        ConfigError: the file is wrong, or options name another model, or no batch is known.
    """
    if cells is not None or options.keys() & {"model", "model_args"}:
        raise ConfigError([f"--layers must be the only model, got {file} and another; leave out --model or --cells"])
    if not is_layers_file(str(file)):
        raise ConfigError([f"--layers must be a file whose name ends in .csv, got {file}; rename it"])
    samples = read_layers(file)[0].samples
    if samples is None and "batch_size" not in options:
        rule = "--batch-size must be given where --layers has no column samples"
        raise ConfigError([f"{rule}, got none; give --chunks times the samples of the micro-batch that was measured"])
    size = {} if samples is None else {"batch_size": samples * options.get("chunks", _START["chunks"])}
    return {"model": str(file), **size}


def simulate_file(cells: Sequence[SimulatedCell], timelines: Sequence[str], out: Path, processes: int) -> None:
    """Simulate cells in this process and others, and write their raw results into one file."""
    from gpipe_bench.suite.running.simulated import simulate_cells

    tell_microbatches(cells)
    with progress("simulating") as task:
        results = simulate_cells(cells, teller(task, len(cells)), timelines, processes=processes)
    write_files({out: results_json(results)})
    typer.echo(f"wrote {out} with {len(results)} simulated cells{bound_words(results)}")


def bound_words(results: Sequence[RawResult]) -> str:
    """How many are bound by the host, if any."""
    bound = sum(result.bound_by_host for result in results)
    return f", {bound} of them bound by the host" if bound else ""


def has_rows(trace: Path) -> bool:
    """Whether a path is that of a trace row by row."""
    return trace.name.endswith((".jsonl", ".jsonl.gz"))


def write_results(
    results: Sequence[RawResult], steps: Sequence[Step], trace: Path | None, rows: Path | None, out: Path | None
) -> None:
    """Write the files that were asked for; trace and table have the last result."""
    result, row = results[-1], results[-1].row
    replay = steps[-1].replay if steps else None
    if trace is not None and replay is None:
        typer.echo(f"{trace} is not written, as there is no step: {row.reason}", err=True)
        trace = None
    elif trace is not None and replay is not None and has_rows(trace):
        step_ns = round((row.step_time_ms or 0) * 1e6)
        write_rows(trace, replay.trace, replay.rows(), step_ns=step_ns, memory=steps[-1].memory)
    elif trace is not None:
        write_trace(trace, row.variant, row, [TimelineEvent(**event) for event in result.events], row.reason)
    texts = {out: results_json(results)} if out is not None else {}
    if rows is not None:
        table = rows_text([row])
        texts |= {rows: table, **configurations_beside(rows, [result.configuration])}
    write_files(texts)
    for path in filter(None, (trace, rows, out)):
        typer.echo(f"wrote {path}")
