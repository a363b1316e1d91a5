"""``balance``: how many layers each partition takes, by measured time, by memory, or by the simulator."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from gpipe_bench.cli.options import complete, model_file, named, number, running, tell_layers, tell_microbatches
from gpipe_bench.cli.progress import progress
from gpipe_bench.errors import ConfigError
from gpipe_bench.models.measured import write_layers
from gpipe_bench.models.table import MODELS, format_arguments, model_spec, parse_arguments
from gpipe_bench.suite.simulated_cells import SimulatedCell
from gpipe_bench.util.files import check_writable
from gpipe_bench.util.nearest import nearest

_WAYS: Final = {"time": "s per micro-batch", "size": "GiB", "simulation": "s per step"}


def balance(
    *,
    partitions: Annotated[int, typer.Option(min=1, max=4096, help="Contiguous groups of layers.")],
    model: Annotated[
        str, named("model", "Name in the table of models, timm/<name>, torchvision/<name>, or file.py:function.")
    ] = "unet",
    model_args: Annotated[str, typer.Option(help="Its arguments, 'key=value' joined by ';'.")] = "",
    by: Annotated[
        str, typer.Option(help=f"What to make even: {', '.join(_WAYS)}.", autocompletion=complete(lambda: _WAYS))
    ] = "simulation",
    batch_size: Annotated[int, typer.Option(min=1, max=10**9, help="Samples of a mini-batch.")] = 32,
    chunks: Annotated[int, typer.Option(min=1, max=65_536, help="Micro-batches.")] = 4,
    checkpoint: Annotated[str, typer.Option(help="For simulation: always, except_last or never.")] = "except_last",
    profile: Annotated[
        str, named("profile", "For simulation: file of a profile, or a100, h100, h200, p100, p40, v100.")
    ] = "p40",
    device: Annotated[str, named("device", "For time: where to measure, cpu or cuda.")] = "cpu",
    timeout: Annotated[float, number("For time: seconds to measure.")] = 10.0,
    layers_out: Annotated[
        Path | None, typer.Option(help="For time: write the layers for simulate --layers, a CSV file.")
    ] = None,
    param_scale: Annotated[
        float, number("For size: copies of a parameter: SGD 2-3, RMSprop 3-5, Adam 4-5.", most=1000.0)
    ] = 2.0,
) -> None:
    """Find the balance of a model: no other split has a smaller largest partition, in the cost that was chosen.

    Prints the cost of every partition beside that of the even split; the last line is the balance alone.
    """
    if by not in _WAYS:
        raise ConfigError([f"--by must be one of {', '.join(_WAYS)}, got {by!r}; {nearest(by, _WAYS)}"])
    try:
        model_spec(model)
    except ConfigError as error:
        raise ConfigError([f"--{text}" for text in error.problems]) from None
    layers = MODELS[model].layers(parse_arguments(model, model_args))
    if partitions > layers:
        raise ConfigError([f"--partitions must be at most the {layers} layers of {model}, got {partitions}; lower it"])
    if layers_out is not None:
        if by != "time" or layers_out.suffix != ".csv":
            rule = "--layers-out must name a CSV file, and go with --by time"
            raise ConfigError([f"{rule}, got {layers_out} with {by}; correct them"])
        check_writable(layers_out, inputs=[model_file(model)])
    from gpipe_bench.balance import split_min_max

    options: dict[str, Any]
    if by == "simulation":
        options = {"batch_size": batch_size, "chunks": chunks, "checkpoint": checkpoint, "profile": profile}
    elif by == "size":
        options = {"chunks": chunks, "param_scale": param_scale}
    else:
        options = {"device": device, "timeout": timeout, "layers_out": layers_out}
    cell = SimulatedCell.model_construct(batch_size=batch_size, chunks=chunks)
    tell_layers(model, model_args)
    tell_microbatches([cell])
    with progress(f"finding the cost of {layers} layers by {by}"):
        costs = _costs(model, model_args, by, batch_size=batch_size, chunks=chunks, options=options)
    found = split_min_max(costs, partitions)
    arguments = format_arguments(parse_arguments(model, model_args))
    cut = f"batch {batch_size} in {cell.microbatches} micro-batches"
    typer.echo(f"{model} ({arguments}), {layers} layers by {by}; {cut}")
    even = [layers // partitions + (j < layers % partitions) for j in range(partitions)]
    _print(costs, {"balance": found, "even split": even}, _WAYS[by])
    typer.echo("-".join(map(str, found)))


def _costs(
    model: str, model_args: str, by: str, *, batch_size: int, chunks: int, options: dict[str, Any]
) -> list[float]:
    import torch

    from gpipe_bench.balance import layer_simulated_times, layer_sizes, layer_times, measure_layers

    arguments = parse_arguments(model, model_args)
    if by == "simulation":
        from gpipe_bench.simulator import Model

        try:
            return layer_simulated_times(Model(model, arguments), **options)
        except ValueError as error:
            raise ConfigError([str(error)]) from error
    spec = MODELS[model]
    with running(model), torch.device("meta" if by == "size" else "cpu"):
        module = spec.build(**arguments)
        if by == "size":
            batch, _ = spec.make_batch(batch_size, arguments, device="meta")
            return [size / 2**30 for size in layer_sizes(module, batch, **options)]
        batch, _ = spec.make_batch(-(-batch_size // chunks), arguments)
        layers_out = options.pop("layers_out")
        if layers_out is None:
            return layer_times(module, batch, **options)
        layers = measure_layers(module, batch, **options)
        write_layers(layers_out, layers)
        return [(layer.forward_ms + layer.backward_ms) / 1000 for layer in layers]


def _print(costs: list[float], splits: dict[str, list[int]], unit: str) -> None:
    from rich.text import Text

    from gpipe_bench.util.console import Column, Grid, output

    columns = [Column(heading) for name in splits for heading in (name, unit)]
    table = Grid([Column("partition", text=True), *columns])
    sums = {name: _sums(costs, sizes) for name, sizes in splits.items()}
    for j in range(len(next(iter(splits.values())))):
        table.add(str(j), *(text for name in splits for text in (str(splits[name][j]), f"{sums[name][j]:.4g}")))
    console = output()
    console.print(table)
    largest = {name: max(own) for name, own in sums.items()}
    found, even = largest["balance"], largest["even split"]
    saved = "" if found <= 0 else f", {even / found:.2f} times as much with the even split"
    console.print(Text(f"largest partition {found:.4g} {unit}{saved}"))


def _sums(costs: list[float], sizes: list[int]) -> list[float]:
    return [sum(costs[end - size : end]) for size, end in zip(sizes, accumulate(sizes), strict=True)]
