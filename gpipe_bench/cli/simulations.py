"""``simulate-cells``, ``simulate-published``, ``emulate-cells``: many cells in one process, for the workflow."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from gpipe_bench.bench.running.simulation_groups import OWN
from gpipe_bench.bench.spec.emulated_cells import EmulatedCell
from gpipe_bench.bench.spec.simulated_cells import SimulatedCell
from gpipe_bench.bench.spec.validation import validated
from gpipe_bench.bench.storage.raw import results_json
from gpipe_bench.cli.options import Processes, settings_of, tell_microbatches
from gpipe_bench.cli.progress import Task, progress
from gpipe_bench.errors import ConfigError
from gpipe_bench.models.arguments import nearest
from gpipe_bench.util.files import check_writable, write_files

if TYPE_CHECKING:
    from gpipe_bench.results.rows import Row

_DEFAULT: Final = SimulatedCell()
_LONGEST: Final = 200
_NUMBERS: Final = ("partitions", "chunks", "batch_size")
_setting: Final = settings_of(SimulatedCell)
_EMULATED: Final = EmulatedCell()
_emulated: Final = settings_of(EmulatedCell)


def simulate_cells(
    *,
    out: Annotated[Path, typer.Option(help="The raw results to write, one JSON file.")],
    cell: Annotated[
        list[str],
        typer.Option(help="A cell, 'key=value' joined by ',': partitions, chunks, batch_size, checkpoint, variant, "
                          "balance, schedule; 'timeline' at its end keeps its timeline. May be repeated."),
    ],
    model: Annotated[str, _setting("model")] = _DEFAULT.model,
    model_args: Annotated[str, _setting("model_args")] = _DEFAULT.model_args,
    backward: Annotated[str, _setting("backward")] = _DEFAULT.backward,
    transfer: Annotated[str, _setting("transfer")] = _DEFAULT.transfer,
    optimizer: Annotated[str, _setting("optimizer")] = _DEFAULT.optimizer,
    profile: Annotated[str, _setting("profile")] = _DEFAULT.profile,
    flavour: Annotated[str, _setting("flavour")] = _DEFAULT.flavour,
    processes: Processes = 1,
) -> None:  # fmt: skip
    """Simulate cells of one model in this process and write their raw results into one file.

    A cell that does not fit the memory of its devices is a result: a row with status oom that says how much it needs,
    and exit status 0.
    """
    shared = {name: value for name, value in locals().items() if name in SimulatedCell.model_fields}
    cells, timelines = cells_of(SimulatedCell, cell, shared)
    check_writable(out)
    from gpipe_bench.bench.running.simulated import simulate_cells as simulate

    tell_microbatches(cells)
    with progress("simulating") as task:
        results = simulate(cells, teller(task, len(cells)), timelines, processes=processes)
    write_files({out: results_json(results)})
    typer.echo(f"wrote {out} with {len(results)} simulated cells")


def simulate_published(
    table: Annotated[str, typer.Argument(help="A published table, such as unet-speed.")],
    out: Annotated[Path, typer.Option(help="The raw results to write, one JSON file.")],
) -> None:
    """Simulate the rows of a published table on the hardware and with the settings that they were run with."""
    from gpipe_bench.bench.published.simulations import simulate_table

    check_writable(out)
    with progress(f"simulating {table}") as task:
        results = simulate_table(table, lambda row: task.line(_words(row)))
    write_files({out: results_json(results)})
    typer.echo(f"wrote {out} with {len(results)} simulated rows")


def emulate_cells(
    *,
    out: Annotated[Path, typer.Option(help="The raw results to write, one JSON file.")],
    cell: Annotated[list[str], typer.Option(help="A cell, as simulate-cells takes it. May be repeated.")],
    model: Annotated[str, _emulated("model")] = _EMULATED.model,
    model_args: Annotated[str, _emulated("model_args")] = _EMULATED.model_args,
    backward: Annotated[str, _emulated("backward")] = _EMULATED.backward,
    transfer: Annotated[str, _emulated("transfer")] = _EMULATED.transfer,
    optimizer: Annotated[str, _emulated("optimizer")] = _EMULATED.optimizer,
    profile: Annotated[str, _emulated("profile")] = _EMULATED.profile,
    host_time: Annotated[bool, _emulated("host_time")] = _EMULATED.host_time,
    steps: Annotated[int, _emulated("steps")] = _EMULATED.steps,
) -> None:
    """Emulate cells of one model in this process and write their raw results into one file.

    Without a C++ compiler each cell is a result with status skipped, and exit status 0.
    """
    shared = {name: value for name, value in locals().items() if name in EmulatedCell.model_fields}
    cells, timelines = cells_of(EmulatedCell, cell, shared)
    check_writable(out)
    # A process has accelerators of one kind, and here they are virtual.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from gpipe_bench.bench.running.emulated import emulate_cells as emulate

    tell_microbatches(cells)
    with progress("emulating") as task:
        results = emulate(cells, teller(task, sum(one.steps - 1 for one in cells)), timelines)
    write_files({out: results_json(results)})
    if all(result.row.status == "skipped" for result in results):
        typer.echo(f"wrote {out}: 0 cells emulated, {len(cells)} skipped")
        return
    typer.echo(f"wrote {out} with {len(results)} steps of {len(cells)} emulated cells")
    from gpipe_bench.emulator.library import leave

    leave(0)


CellT = TypeVar("CellT", SimulatedCell, EmulatedCell)


def cells_of(kind: type[CellT], words: list[str], shared: dict[str, Any]) -> tuple[list[CellT], set[str]]:
    """The cells in the words of a command line, and the ids of those whose timeline is kept.

    Args:
        kind: of the cells.
        words: what each cell has of its own.
        shared: what all have.

    Raises:
        ConfigError: some words are wrong; all problems.
    """
    cells: list[CellT] = []
    timelines: set[str] = set()
    problems: list[str] = []
    for word in words:
        parts = word.split(",")
        given = dict(part.partition("=")[::2] for part in parts if part != "timeline")
        problems += [
            f"--cell must have keys of a cell, got {key!r} in {word}; {nearest(key, OWN)}"
            for key in given
            if key not in OWN
        ]
        numbers = {key: int(given[key]) for key in _NUMBERS if re.fullmatch(r"[0-9]{1,18}", given.get(key, ""))}
        try:
            known = {key: value for key, value in given.items() if key in OWN}
            cells.append(validated(kind, {**shared, **known, **numbers}, lambda path: _name(path[0])))
        except ConfigError as error:
            shown = word if len(word) <= _LONGEST else f"{word[:_LONGEST]}..."
            problems += [f"{problem} (in {shown})" for problem in error.problems]
            continue
        if "timeline" in parts:
            timelines.add(cells[-1].id)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return cells, timelines


def _name(setting: str) -> str:
    return f"{setting} of --cell" if setting in OWN else f"--{setting.replace('_', '-')}"


def teller(task: Task, total: int) -> Callable[[Row], None]:
    """Prints each row as it is made."""
    steps = count(1)

    def say(row: Row) -> None:
        task.line(_words(row))
        task.step(next(steps), total)

    return say


def _words(row: Row) -> str:
    what = f"n={row.partitions} m={row.chunks} batch={row.batch_size} {row.checkpoint} {row.variant} {row.schedule}"
    value = f"{row.throughput_samples_per_s:.2f} samples/s" if row.throughput_samples_per_s else row.reason
    return f"{row.evidence}, {row.status}: {what}: {value}"
