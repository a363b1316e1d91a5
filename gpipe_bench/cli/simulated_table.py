"""The table of one simulation in the terminal: devices, totals, and the published values for the same settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from gpipe_bench.cli.options import HOST_BOUND, use_words
from gpipe_bench.results.labels import training_words
from gpipe_bench.results.rows import Row
from gpipe_bench.suite.published.known_errors import error_words, speed_error_words
from gpipe_bench.suite.storage.raw import RawResult
from gpipe_bench.util.console import Column, Grid, counted, output

_SHARES: Final = {
    "busy": "utilization",
    "comp.": "compute",
    "recomp.": "recompute",
    "copy": "copy",
    "bubble": "bubble",
    "imbal.": "imbalance",
}
_COMPARED: Final = {
    "throughput_samples_per_s": "throughput, samples/s",
    "peak_reserved_gib": "memory, GiB reserved",
    "utilization_fraction": "utilization",
}


def print_simulation(result: RawResult, published: Sequence[Row], console: Console | None = None) -> None:
    """Print one simulation.

    Args:
        result: row and devices.
        published: rows of the same settings.
        console: where to print; by default standard output.
    """
    console = console or output()
    row, settings = result.row, json.loads(result.configuration)
    console.print(Text(_title(row, settings), style="bold"))
    if row.status == "ok":
        console.print(_devices(result.devices))
        console.print(Text(_totals(row)))
        if row.evidence == "simulated":
            console.print(Text(error_words(settings["profile"])))
        elif error := speed_error_words(settings["profile"]):
            console.print(Text(error))
        if result.bound_by_host:
            console.print(Text(HOST_BOUND))
        for caveat in result.caveats:
            console.print(Text(caveat))
    else:
        console.print(Text(f"{row.status}: {row.reason}", style="bold red"))
    if published:
        table = Grid([Column("", text=True), *map(Column, ("published", "simulated", "error"))])
        for line in (line for printed in published for line in _lines(row, printed)):
            table.add(*line)
        console.print(table)
        caveat = "Published throughput is that of whole epochs, whose last mini-batch may be smaller."
        other = "" if row.flavour == "published" else " The published runs used PyTorch 1.3: --flavour published."
        console.print(Text(f"{caveat}{other}"))


def _title(row: Row, settings: Mapping[str, Any]) -> str:
    sizes = f"{counted(row.partitions, 'partition')} ({row.balance}), {row.microbatches} micro-batches"
    pipeline = f"{sizes}, batch {row.batch_size}"
    order = f"schedule {row.schedule}, autograd" if row.backward == "scheduled" else "autograd"
    order += f" {row.flavour}" if row.flavour else ""
    how = f"{row.variant}, checkpoint {row.checkpoint}, {row.transfer} transfer, {order}"
    how += f", {training_words(row)}" if training_words(row) else ""
    how += use_words(settings.get("tf32"), settings.get("launch_us"))
    where = f"{row.evidence} on {row.device_count} x {row.device} ({row.profile})"
    where += f" in {settings['hosts']} hosts over {settings['network']}" if "hosts" in settings else ""
    arguments = f" ({row.model_args})" if row.model_args else ""
    return f"{row.model}{arguments}\n{pipeline}; {how}\n{where}"


def _devices(devices: Sequence[Mapping[str, Any]]) -> Grid:
    table = Grid([Column(name) for name in ("device", "layers", "allocated\nGiB", "reserved\nGiB", *_SHARES)])
    for use in devices:
        memory = [_number(use[f"peak_{name}_gib"]) for name in ("allocated", "reserved")]
        shares = [f"{use[f'{name}_fraction']:.1%}" for name in _SHARES.values()]
        table.add(str(use["device"]), str(use["layers"]), *memory, *shares)
    return table


def _totals(row: Row) -> str:
    memory = ""
    if row.peak_allocated_gib is not None:
        peaks = f"{_number(row.peak_allocated_gib)} GiB allocated, {_number(row.peak_reserved_gib)} GiB reserved"
        memory = f"; {peaks} over all"
    throughput, step = row.throughput_samples_per_s or 0.0, row.step_time_ms or 0.0
    speed = f"{throughput:.2f} samples/s {row.evidence} on {counted(row.device_count, 'device')}"
    return f"{speed}, {step:.2f} ms per step{memory}"


def _lines(row: Row, printed: Row) -> Iterator[tuple[str, str, str, str]]:
    """(what, published, simulated, error) for each value that somebody printed."""
    if printed.status != "ok" or row.status != "ok":
        yield f"{printed.experiment}: status", printed.status, row.status, ""
    for column, name in _COMPARED.items():
        theirs, ours = getattr(printed, column), getattr(row, column)
        if theirs is not None:
            shown = ("", "") if ours is None else (_number(ours), f"{ours / theirs - 1:+.1%}")
            yield f"{printed.experiment}: {name}", _number(theirs), *shown


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"
