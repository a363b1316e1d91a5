"""``run`` and ``profile``: what measures."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gpipe_bench.bench.running.ranks import rank_here
from gpipe_bench.bench.spec.cells import Cell
from gpipe_bench.bench.spec.validation import validated
from gpipe_bench.cli.options import (
    check_device,
    named,
    order_of,
    running,
    settings_of,
    tell,
    tell_layers,
    tell_loss,
    tell_microbatches,
)
from gpipe_bench.cli.progress import Task, progress
from gpipe_bench.errors import BalanceError, ConfigError
from gpipe_bench.schedules.table import partition_count
from gpipe_bench.simulator.hardware.constants import CONSTANTS
from gpipe_bench.util.files import check_writable, write_files

if TYPE_CHECKING:
    from gpipe_bench.bench.storage.raw import RawResult

_DEFAULT: Final = Cell()
_BALANCE: Final = "-".join(map(str, _DEFAULT.balance))
_setting: Final = settings_of(Cell)
_MOST_REPEATS: Final = 10_000


def run(
    *,
    out: Annotated[Path, typer.Option(help="The raw result to write, a JSON file.")],
    repeat: Annotated[int, typer.Option(min=0, max=_MOST_REPEATS, help="Number of this repeat, 0-based.")] = 0,
    repeats: Annotated[
        int, typer.Option(min=0, max=_MOST_REPEATS, help="Run so many, each in a fresh process; 0: one in this.")
    ] = 0,
    key: Annotated[
        str, typer.Option(help="Repeats that an interrupted call left are kept if theirs is the same.")
    ] = "",
    model: Annotated[str, _setting("model")] = _DEFAULT.model,
    model_args: Annotated[
        str, typer.Option(help=f"Its arguments, 'key=value' joined by ';'.  [{_DEFAULT.model}: {_DEFAULT.model_args}]")
    ] = "",
    batch_size: Annotated[int, _setting("batch_size")] = _DEFAULT.batch_size,
    chunks: Annotated[int, _setting("chunks")] = _DEFAULT.chunks,
    partitions: Annotated[
        int | None, _setting("partitions", default=f"{_DEFAULT.partitions}, or what --processes needs")
    ] = None,
    balance: Annotated[
        str, typer.Option(help="Layers per partition, joined by '-'; auto: even in time.  [default: even in size]")
    ] = "",
    checkpoint: Annotated[str, _setting("checkpoint")] = _DEFAULT.checkpoint,
    backward: Annotated[str | None, _setting("backward", default="scheduled with --schedule or --processes")] = None,
    schedule: Annotated[str | None, _setting("schedule", default="gpipe")] = None,
    threads: Annotated[int, _setting("threads")] = _DEFAULT.threads,
    tf32: Annotated[bool, _setting("tf32")] = _DEFAULT.tf32,
    warmup: Annotated[int, _setting("warmup")] = _DEFAULT.warmup,
    steps: Annotated[int, _setting("steps")] = _DEFAULT.steps,
    seed: Annotated[int, _setting("seed")] = _DEFAULT.seed,
    variant: Annotated[str, _setting("variant")] = _DEFAULT.variant,
    transfer: Annotated[str, _setting("transfer")] = _DEFAULT.transfer,
    device: Annotated[str, _setting("device")] = _DEFAULT.device,
    devices: Annotated[int, _setting("devices")] = _DEFAULT.devices,
    processes: Annotated[int, _setting("processes")] = _DEFAULT.processes,
    hosts: Annotated[int, _setting("hosts")] = _DEFAULT.hosts,
) -> None:
    """Measure one cell and write its raw result: one repeat in this process, or several in processes of their own.

    With --processes torchrun starts a process for each device of the schedule. If torchrun has started this command
    itself, on one host or several, it measures with the others, and rank 0 writes the result.

    Out of memory, a switch that the device does not support and any other failure of the run are results: a row with a
    status and a reason, and exit status 0, so that one failed cell does not end an experiment. Bad arguments are one
    line on stderr, exit status 2 and no file.
    """
    given = {name: value for name, value in locals().items() if name in Cell.model_fields}
    given["partitions"] = partitions or _partitions(processes, schedule)
    cell = _cell({**given, **order_of(backward, schedule, processes)})
    rank = rank_here(cell)
    if rank is not None:
        _run_rank(cell, repeat, repeats, out, rank)
        return
    check_writable(out)
    _tell(cell, repeat, repeats)
    if repeats:
        _run_repeats(cell, repeats, out, key)
    else:
        _run_once(cell, repeat, out)


def _partitions(processes: int, schedule: str | None) -> int:
    """How many there are where none are asked for."""
    return _DEFAULT.partitions if processes == 1 else partition_count(schedule, processes)


def _cell(given: dict[str, Any]) -> Cell:
    """The cell of these options; model arguments and balance may be empty.

    Raises:
        ConfigError, BalanceError: options are wrong.
    """
    if not given["model_args"] and given["model"] == _DEFAULT.model:
        given["model_args"] = _DEFAULT.model_args
    missing = None
    try:
        given["balance"] = given["balance"] or _balance(given["model"], given["model_args"], given["partitions"])
    except (ConfigError, BalanceError) as error:
        missing, given["balance"] = error, "1"
    try:
        cell = validated(Cell, given, lambda path: f"--{path[0].replace('_', '-')}")
    except ConfigError as error:
        # Of a balance that could not be found nothing is to be said, but why that is.
        problems = [text for text in error.problems if missing is None or not text.startswith("--balance")]
        raise ConfigError(["; ".join(problems or [str(missing)])]) from error
    if missing is not None:
        raise missing
    return cell


def _tell(cell: Cell, repeat: int, repeats: int) -> None:
    """Say which wishes were changed."""
    tell_layers(cell.model, cell.model_args)
    tell_loss(cell.model)
    tell_microbatches([cell])
    if repeats and repeat:
        tell(f"repeat: {repeat} is not used, since --repeats {repeats} numbers its own")


def _run_once(cell: Cell, repeat: int, out: Path) -> None:
    from gpipe_bench.bench.running.run import run_cell

    with progress(f"measuring {cell.variant}") as task:
        result = run_cell(cell, repeat)
        write_files({out: result.to_json()})
        _say(result, task)


def _run_rank(cell: Cell, repeat: int, repeats: int, out: Path, rank: int) -> None:
    from gpipe_bench.bench.running.run import run_cell

    if repeats:
        rule = "--repeats must be 0 where torchrun has started the processes of one repeat"
        raise ConfigError([f"{rule}, got {repeats}; say with --repeat which one it is"])
    result = run_cell(cell, repeat)
    if rank == 0:
        write_files({out: result.to_json()})
        typer.echo(_words(result))


def _run_repeats(cell: Cell, repeats: int, out: Path, key: str) -> None:
    from gpipe_bench.bench.running.repeats import run_repeats
    from gpipe_bench.bench.storage.kept import KeptParts
    from gpipe_bench.bench.storage.raw import results_json

    kept, steps = KeptParts.beside(out, key), count(1)
    with progress(f"measuring {cell.variant}") as task:

        def report(result: RawResult) -> None:
            _say(result, task)
            task.step(next(steps), repeats)

        results = run_repeats(cell, repeats, kept, report)
    write_files({out: results_json(results)})
    kept.remove()


def _say(result: RawResult, task: Task) -> None:
    task.line(_words(result), err=result.row.status in ("oom", "error"))


def _words(result: RawResult) -> str:
    row = result.row
    value = f"{row.throughput_samples_per_s:.2f} samples/s" if row.throughput_samples_per_s else row.reason
    return f"{row.status}: {row.variant} repeat {row.repeat}: {value}"


def _balance(model: str, model_args: str, partitions: int) -> str:
    """The balance where none is given: as even in size as can be.

    Raises:
        ConfigError: unknown model or arguments.
        BalanceError: more partitions than layers.
    """
    if (model, model_args, partitions) == (_DEFAULT.model, _DEFAULT.model_args, _DEFAULT.partitions):
        return _BALANCE
    import torch

    from gpipe_bench.balance import balance_by_size
    from gpipe_bench.models.table import model_spec, parse_arguments

    spec, arguments = model_spec(model), parse_arguments(model, model_args)
    if partitions == 1:
        # Nothing to weigh: layers that need values, which have none on meta, run as well.
        return str(spec.layers(arguments))
    with running(model), torch.device("meta"):
        sample, _ = spec.make_batch(2, arguments, device="meta")
        return "-".join(map(str, balance_by_size(partitions, spec.build(**arguments), sample)))


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
    from gpipe_bench.bench.running.device_profile import measure_profile

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
    typer.echo(f"wrote {out}")
