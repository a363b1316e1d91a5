"""``simulate``: one pipeline in virtual time, beside its published values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gpipe_bench.bench.spec.settings import AUTO
from gpipe_bench.bench.spec.simulated_cells import SimulatedCell
from gpipe_bench.bench.spec.validation import validated
from gpipe_bench.bench.storage.tables import configurations_beside
from gpipe_bench.cli.options import named, order_of, settings_of, tell_layers, tell_loss, tell_microbatches
from gpipe_bench.cli.progress import progress
from gpipe_bench.errors import ConfigError
from gpipe_bench.models.table import MODELS, parse_arguments
from gpipe_bench.results.rows import Row
from gpipe_bench.results.tables import csv_text
from gpipe_bench.schedules.table import TWO_PER_DEVICE
from gpipe_bench.util.files import check_writable, write_files

if TYPE_CHECKING:
    from gpipe_bench.bench.storage.raw import RawResult

_DEFAULT: Final = SimulatedCell()
_setting: Final = settings_of(SimulatedCell)


def simulate(
    *,
    model: Annotated[str, _setting("model")] = _DEFAULT.model,
    model_args: Annotated[str, typer.Option(help="'key=value' joined by ';'; published ones else.")] = "",
    batch_size: Annotated[int, _setting("batch_size")] = 128,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Devices.  [default: those of --balance, else one]", show_default=False)
    ] = None,
    balance: Annotated[
        str,
        typer.Option(help="Layers per partition, joined by '-'.  [default: even in simulated time on --devices]"),
    ] = "",
    chunks: Annotated[int, _setting("chunks")] = 8,
    checkpoint: Annotated[str, _setting("checkpoint")] = _DEFAULT.checkpoint,
    components: Annotated[str, named("variant", "Label of the components that are on.")] = _DEFAULT.variant,
    backward: Annotated[str | None, _setting("backward", default="scheduled with --schedule, else autograd")] = None,
    schedule: Annotated[str | None, _setting("schedule", default="gpipe")] = None,
    transfer: Annotated[str, _setting("transfer")] = _DEFAULT.transfer,
    optimizer: Annotated[str, _setting("optimizer")] = _DEFAULT.optimizer,
    profile: Annotated[str, _setting("profile")] = _DEFAULT.profile,
    precision: Annotated[str, _setting("precision")] = _DEFAULT.precision,
    masters: Annotated[bool, _setting("masters")] = _DEFAULT.masters,
    hosts: Annotated[int, _setting("hosts")] = _DEFAULT.hosts,
    network: Annotated[str, _setting("network")] = _DEFAULT.network,
    flavour: Annotated[str, _setting("flavour")] = "current",
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace for Perfetto (ui.perfetto.dev).")] = None,
    rows: Annotated[
        Path | None, typer.Option(help="Write the row as a table, a CSV file, and beside it its configuration.")
    ] = None,
) -> None:
    """Simulate one training step of a pipeline on hardware that need not be here.

    Prints throughput, memory and the split of each device's time, and, where somebody published a cell of the same
    settings, published and simulated value with the error. A pipeline that does not fit the memory is a result too: the
    row says how much which device needs, and the exit status is 0.
    """
    given = {name: value for name, value in locals().items() if name in SimulatedCell.model_fields}
    given |= {"variant": components, **order_of(backward, schedule)}
    if devices is None:
        layers = balance or str(_layers(model, model_args))
        given |= {"balance": layers, "partitions": len(layers.split("-"))}
    else:
        given |= _on_devices(devices, balance, schedule)
    names = {"variant": "--components", "partitions": "--balance" if devices is None else "partitions on --devices"}
    cell = validated(SimulatedCell, given, lambda path: names.get(path[0], f"--{path[0].replace('_', '-')}"))
    tell_layers(cell.model, cell.model_args)
    tell_loss(cell.model)
    for path in filter(None, (trace, rows)):
        check_writable(path)
    from gpipe_bench.bench.published.values import published_for
    from gpipe_bench.bench.running.simulated import simulate_cells
    from gpipe_bench.cli.simulated_table import print_simulation

    tell_microbatches([cell])
    with progress(f"simulating {cell.model} on {cell.partitions} devices"):
        result = simulate_cells([cell])[0]
    # Published runs trained in float32, on one host.
    print_simulation(result, published_for([result.row]) if (cell.precision, cell.hosts) == ("float32", 1) else [])
    _write(result, trace, rows)


def _on_devices(devices: int, balance: str, schedule: str | None) -> dict[str, Any]:
    """Partitions for so many devices, and a balance that has as many, or is found.

    Raises:
        ConfigError: ``balance`` is one for other devices.
    """
    partitions = devices * (2 if schedule in TWO_PER_DEVICE else 1)
    sizes = balance.split("-")
    if balance not in ("", AUTO) and len(sizes) != partitions:
        rule = f"--balance must have {partitions} entries for --devices {devices}"
        rule += f" and --schedule {schedule}" if partitions > devices else ""
        raise ConfigError([f"{rule}, got {len(sizes)} in {balance}; change it, or leave one of them out"])
    return {"partitions": partitions, "balance": balance or AUTO}


def _layers(model: str, model_args: str) -> int:
    """Layers of the model; 1 for one that is wrong, of which the validation then says what."""
    try:
        return MODELS[model].layers(parse_arguments(model, model_args))
    except (ConfigError, KeyError):
        return 1


def _write(result: RawResult, trace: Path | None, rows: Path | None) -> None:
    from gpipe_bench.results.timeline import TimelineEvent, write_trace

    row = result.row
    if trace is not None:
        write_trace(trace, row.variant, row, [TimelineEvent(**event) for event in result.events], row.reason)
        typer.echo(f"wrote {trace}")
    if rows is not None:
        texts = {rows: csv_text(Row.columns(), [row.to_dict()])}
        write_files({**texts, **configurations_beside(rows, [result.configuration])})
        typer.echo(f"wrote {rows}")
