"""An experiment is blocks of data: settings of cells, in which every list is an axis.

    sweep_mine:                     the name of its table of results
      grid:                         a block, by a name of your choice
        run: simulated
        model: unet
        chunks: [1, 4, 16]          an axis
        each:                       an axis, too: its values are points, settings that belong together
          - {partitions: 1}
          - {partitions: [2, 4], checkpoint: always}

A block has a cell for each combination of values; the last axis varies fastest. Settings that are left out are those of
:mod:`gpipe_bench.suite`, but the balance is ``auto`` and the autograd engine ``current``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import islice, product
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import Field, ValidationError

from gpipe_bench.components import PUBLISHED, Components
from gpipe_bench.errors import ConfigError, ScheduleError
from gpipe_bench.models.table import MODELS, model_spec, parse_arguments
from gpipe_bench.results.rows import Row
from gpipe_bench.schedules.table import (
    SCHEDULES,
    device_count,
    file_schedule,
    is_schedule_file,
    partition_count,
)
from gpipe_bench.settings import Setting, choice, switch, whole
from gpipe_bench.simulator.published.settings import published_settings
from gpipe_bench.suite.cells import CellRun, MeasuredCell
from gpipe_bench.suite.emulated_cells import EmulatedCell
from gpipe_bench.suite.machine import Machine
from gpipe_bench.suite.names import model_word
from gpipe_bench.suite.published.values import published_rows
from gpipe_bench.suite.settings import AUTO, Problem, Section
from gpipe_bench.suite.simulated_cells import SimulatedCell
from gpipe_bench.suite.validation import validated
from gpipe_bench.util.nearest import nearest
from gpipe_bench.util.processes import usable_processes

Cell = MeasuredCell | SimulatedCell | EmulatedCell
CellT = TypeVar("CellT", SimulatedCell, EmulatedCell)
Settings = Mapping[str, Any]
Name = Callable[[tuple[str, ...]], str]
"""What to call the setting at a path in a message."""

KINDS: Final[Mapping[str, type[Cell]]] = {
    "simulated": SimulatedCell,
    "emulated": EmulatedCell,
    "measured": MeasuredCell,
}
TABLES: Final = ("unet-speed", "amoebanet-d-speed", "resnet101-speed", "unet-memory", "amoebanet-d-memory")
Repeats = Annotated[int, whole("measured runs of each cell, each in a fresh process", most=1000)]

CORES: Final = "cores"
WHOLE: Final = "whole"
WORDS: Final[Mapping[str, Mapping[str, Sequence[str]]]] = {
    "variant": {
        "published": PUBLISHED,
        "factorial": [components.label for components in Components.factorial()],
        "factorial-shared": [components.label for components in Components.factorial(shared=True)],
    },
    "schedule": {"all": SCHEDULES},
}
"""Words that stand for several values of a setting."""

_MOST: Final = 10**6
_WORKERS: Final = whole(
    "devices or threads of the schedule, in place of partitions; cores: a core for each, at most 8", most=_MOST
)
DERIVED: Final[Mapping[str, Setting]] = {
    "microbatch_size": whole("samples of a micro-batch, in place of batch_size", most=_MOST),
    "workers": replace(_WORKERS, schema={"anyOf": [_WORKERS.schema, {"const": CORES}]}),
    "table": choice("published table, whose rows are points of model, batch, pipeline and variant", TABLES),
}
"""What an axis of a block may be beside settings of cells."""
EACH: Final = "points: settings that belong together, as a list of sections"

OF_THE_MACHINE: Final = ("evidence", "device")
_OF_A_ROW: Final = ("model", "model_args", "batch_size", "chunks", "partitions", "balance", "checkpoint", "variant")
_MOST_CELLS: Final = 20_000
_MOST_WORKERS: Final = 8


class Block(Section):
    """What a block says of its cells as a whole."""

    run: Annotated[
        Literal["simulated", "emulated", "measured", "published"],
        Field(description="the kind of evidence; published: the rows of tables, simulated as they were run"),
    ]
    where: Annotated[
        Literal["cpu", "gpu"] | None, Field(description="measure on this kind of machine only; null: on both")
    ] = None
    repeats: Repeats = 1
    other_repeats: Annotated[
        int | None, whole("of cells whose variant is not published; null: as many as of the others", most=1000)
    ] = None
    turns: Annotated[bool, switch("measure all cells in turns, in one job")] = False
    share_devices: Annotated[bool, switch("let partitions share GPUs that are too few; false: leave the cell out")] = (
        False
    )
    timelines: Annotated[bool, switch("write a timeline of each simulated or emulated cell")] = False

    def problems(self) -> Iterator[Problem]:
        """Some words are for what is measured, one for what is not."""
        others = (
            ("timelines",)
            if self.run == "measured"
            else ("where", "repeats", "other_repeats", "turns", "share_devices")
        )
        for name in others:
            if getattr(self, name) != type(self).model_fields[name].default:
                rule = f"must be left out where run is {self.run}, got {getattr(self, name)!r}"
                yield Problem((name, "run"), f"{rule}; leave it out")


@dataclass(frozen=True)
class Grid:
    """A block with its points.

    Attributes:
        block: what it says of its cells.
        points: the settings of each point; of a published table its name alone.
    """

    block: Block
    points: Sequence[Settings]

    def settings(self, machine: Machine) -> Iterator[dict[str, Any]]:
        """The settings of each cell on ``machine``."""
        for point in self.points:
            settings = _cell_settings(self.block, point, machine)
            if settings is not None:
                yield settings

    @cached_property
    def virtual(self) -> list[SimulatedCell | EmulatedCell]:
        """The cells that are simulated or emulated, whatever this machine has."""
        if self.block.run not in ("simulated", "emulated"):
            return []
        kind = SimulatedCell if self.block.run == "simulated" else EmulatedCell
        return [kind.model_validate(settings) for settings in self.settings(Machine("cpu", 1))]

    def runs(self, machine: Machine) -> list[CellRun]:
        """The measured runs on ``machine``; a cell that cannot run is asked for once, as a row that says so.

        What stands in for a published variant that cannot run is repeated as often as a published one.
        """
        block, here = self.block, "cpu" if machine.device == "cpu" else "gpu"
        if block.run != "measured" or block.where not in (None, here):
            return []
        cells = [MeasuredCell.model_validate(settings) for settings in self.settings(machine)]
        digest = hashlib.sha256(",".join(cell.id for cell in cells).encode()).hexdigest()[:8]
        turns = f"turns-{model_word(cells[0].model)}-{machine.device}-{digest}" if block.turns and cells else ""
        first = {cell.stand_in for cell in cells if cell.variant in PUBLISHED}
        runs: list[CellRun] = []
        for cell in cells:
            repeats = block.repeats if cell.variant in first or block.other_repeats is None else block.other_repeats
            runs += [CellRun(cell, repeat, turns) for repeat in range(1 if cell.unsupported() else repeats)]
        return runs


@dataclass(frozen=True)
class Experiment:
    """Blocks that give one table of results.

    Attributes:
        blocks: by their names.
    """

    blocks: Mapping[str, Grid]

    def runs(self, machine: Machine) -> list[CellRun]:
        """The measured runs on ``machine``, none twice; what it cannot run is among them, as a row that says so."""
        runs = [run for grid in self.blocks.values() for run in grid.runs(machine)]
        return list({(run.cell.id, run.repeat): run for run in runs}.values())

    @cached_property
    def simulated(self) -> list[SimulatedCell]:
        """What is simulated, whatever this machine has, none twice."""
        return self._virtual(SimulatedCell)

    @cached_property
    def emulated(self) -> list[EmulatedCell]:
        """What is emulated, wherever there is a C++ compiler, none twice."""
        return self._virtual(EmulatedCell)

    @property
    def tables(self) -> list[str]:
        """Published tables that are simulated as they were run."""
        return [
            point["table"] for grid in self.blocks.values() if grid.block.run == "published" for point in grid.points
        ]

    @cached_property
    def timelines(self) -> set[str]:
        """The keys of the cells whose timelines are kept."""
        return {cell.id for grid in self.blocks.values() if grid.block.timelines for cell in grid.virtual}

    def _virtual(self, kind: type[CellT]) -> list[CellT]:
        cells = (cell for grid in self.blocks.values() for cell in grid.virtual if isinstance(cell, kind))
        return list({cell.id: cell for cell in cells}.values())


def read_experiment(blocks: Mapping[str, Any], name: Name) -> Experiment:
    """The experiment that blocks of data ask for; a block that is null is left out, as is a setting that is null.

    Args:
        blocks: by their names.
        name: what to call the setting at a path, such as ``("grid", "chunks")``.

    Raises:
        ConfigError: settings are wrong; carries all problems.
    """
    found: dict[str, Grid] = {}
    problems: list[str] = []
    for key, data in blocks.items():
        try:
            if data is not None:
                found[key] = _read_block(data, partial(below, name, key))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return Experiment(found)


def below(name: Name, *path: Any) -> str:
    """What ``name`` calls the setting at a path, the end of which is a tuple."""
    return name((*path[:-1], *path[-1]))


def _read_block(data: Any, name: Name) -> Grid:
    if not isinstance(data, Mapping):
        raise ConfigError([f"{name(())} must be a block of settings, got {data!r}; write its keys below it, indented"])
    given = {key: value for key, value in data.items() if value is not None}
    own = {key: value for key, value in given.items() if key in Block.model_fields}
    rest = {key: value for key, value in given.items() if key not in own}
    problems: list[str] = []
    try:
        block = validated(Block, own, name)
    except ConfigError as error:
        problems += error.problems
        block = Block(run=own["run"] if own.get("run") in (*KINDS, "published") else "simulated")
    problems += [f"{name((key,))} {text}" for key, text in _wrong_lines(rest, _known(block))]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    if block.run == "published":
        tables = rest.get("table", [])
        return Grid(block, [{"table": table} for table in (tables if isinstance(tables, list) else [tables])])
    found = list(islice(points(rest), _MOST_CELLS + 1))
    if len(found) > _MOST_CELLS:
        raise ConfigError([f"{name(())} must have at most {_MOST_CELLS} cells, got more; give some axes fewer values"])
    grid = Grid(block, found)
    _check(grid, name, printed="table" in rest)
    return grid


def _known(block: Block) -> list[str]:
    """The keys that a block of this kind may have."""
    if block.run == "published":
        return ["table"]
    settings = [key for key in KINDS[block.run].model_fields if key not in OF_THE_MACHINE]
    return [*(key for key in settings if (block.run, key) != ("measured", "devices")), *DERIVED, "each"]


def _wrong_lines(settings: Settings, known: Sequence[str], above: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Lines of a block or of a point that are wrong by themselves: the key of each, and what is wrong."""
    for key, value in settings.items():
        if key not in known:
            yield key, f"must be a known key, got {key!r}; {nearest(key, [*known, *Block.model_fields])}"
        elif key in above:
            yield key, "must stand in a block or in its points, got it in both; leave one of them out"
        elif key == "each":
            if not isinstance(value, list) or not value or not all(isinstance(point, Mapping) for point in value):
                yield key, f"must be a list of points like [{{chunks: 4}}, {{chunks: 8}}], got {value!r}; write one"
                continue
            for point in value:
                yield from _wrong_lines(point, known, [*above, *(other for other in settings if other != "each")])
        elif value == []:
            yield key, "must have at least one value, got []; add one"
        elif key == "table":
            for other in (*settings, *above):
                if other in _OF_A_ROW and other in known:
                    yield other, "must be left out beside a table, whose rows have it; leave one of them out"
            for word in value if isinstance(value, list) else [value]:
                try:
                    DERIVED[key].plain(word)
                except ValueError as error:
                    yield key, str(error)


def points(settings: Settings) -> Iterator[dict[str, Any]]:
    """Every combination of the values of a block, or of a point of it; the last axis varies fastest."""
    axes = [list(_axis(key, value)) for key, value in settings.items()]
    for parts in product(*axes):
        yield {key: value for part in parts for key, value in part.items()}


def _axis(key: str, value: Any) -> Iterator[Settings]:
    """The values of a line of a block, each as the settings that it gives; a setting with one value is an axis, too."""
    if key == "each":
        for point in value:
            yield from islice(points(point), _MOST_CELLS + 1)
        return
    if key == "table":
        for table in value if isinstance(value, list) else [value]:
            yield from _table_rows(table)
        return
    known, given = WORDS.get(key, {}), value if isinstance(value, list) else [value]
    values: list[Any] = []
    for word in given:
        values += [one for one in (known.get(word, [word]) if isinstance(word, str) else [word]) if one not in values]
    yield from ({key: one} for one in values)


def _check(grid: Grid, name: Name, *, printed: bool) -> None:
    """Make every cell of a block once, on a machine that has what it takes.

    Args:
        grid: the block with its points.
        name: what to call a setting.
        printed: whether they are those of a published table, in which batches may be smaller than ``chunks``.

    Raises:
        ConfigError: some cannot be made; carries all problems.
    """
    kind, where = KINDS[grid.block.run], grid.block.where
    machines = [Machine("cpu", 1)] if where != "gpu" else []
    machines += [Machine("cuda", 4096)] if where != "cpu" and kind is MeasuredCell else []
    problems: dict[str, None] = {}
    for machine in machines:
        try:
            virtual = kind is not MeasuredCell
            cells = grid.virtual if virtual else [MeasuredCell.model_validate(one) for one in grid.settings(machine)]
            if not any(_wrong(cell, printed=printed) for cell in cells):
                continue
        except ValidationError:
            pass
        except _WrongValueError as error:
            problems[f"{name((error.key,))} {error.text}"] = None
            continue
        for settings in grid.settings(machine):
            problems |= dict.fromkeys(_problems_of(kind, settings, name, printed=printed))
    if problems:
        raise ConfigError(list(problems))


def _wrong(cell: Cell, *, printed: bool) -> bool:
    return any(cell.problems()) or (cell.chunks > cell.batch_size and not printed)


def _problems_of(kind: type[Cell], settings: Settings, name: Name, *, printed: bool) -> Sequence[str]:
    try:
        cell = validated(kind, settings, name)
    except ConfigError as error:
        return error.problems
    rule = f"must be at most batch_size = {cell.batch_size}, got {cell.chunks}"
    return [f"{name(('chunks',))} {rule}; lower it or raise that"] if _wrong(cell, printed=printed) else []


class _WrongValueError(Exception):
    """A word that settings follow from is wrong."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key, self.text = key, text


def _cell_settings(block: Block, point: Settings, machine: Machine) -> dict[str, Any] | None:
    """The settings of the cell at a point, those filled in that follow from others; None where it is left out here."""
    kind = KINDS[block.run]
    defaults = {name: kind.model_fields[name].default for name in ("model", "chunks", "partitions")}
    settings = {"balance": AUTO, **({"flavour": "current"} if kind is SimulatedCell else {}), **point}
    if is_schedule_file(settings.get("schedule")):
        try:
            file_schedule(settings["schedule"])
        except ScheduleError as error:
            raise _WrongValueError("schedule", str(error).removeprefix("schedule ")) from error
    if "microbatch_size" in settings:
        size = _whole(settings, "microbatch_size")
        if isinstance(chunks := settings.get("chunks", defaults["chunks"]), int):
            settings["batch_size"] = size * chunks
    if "workers" in settings:
        if "partitions" in settings:
            raise _WrongValueError("workers", "must be left out where partitions are given, got both; leave one out")
        schedule, layers = settings.get("schedule"), _layers(settings)
        cores = settings["workers"] == CORES
        workers = min(usable_processes(1), layers, _MOST_WORKERS) if cores else settings["workers"]
        settings["workers"] = workers
        settings["partitions"] = partition_count(schedule, _whole(settings, "workers"))
        # On one core the paper's executor is the loop over micro-batches.
        if cores and (settings["partitions"] > layers or (workers == 1 and schedule is None)):
            return None
    if settings["balance"] == WHOLE:
        settings |= {"balance": _layers(settings), "partitions": 1}
    if block.run == "measured":
        balance = settings["balance"]
        known = defaults["partitions"] if balance == AUTO else str(balance).count("-") + 1
        n = settings.get("partitions", len(balance) if isinstance(balance, list) else known)
        ranks = device_count(settings.get("schedule"), n) if isinstance(n, int) else 1
        few = machine.device != "cpu" and ranks > machine.count
        if few and (not block.share_devices or settings.get("processes", 1) != 1):
            return None
        settings |= {"device": machine.device, "devices": 1 if machine.device == "cpu" else min(ranks, machine.count)}
        # Within one device nothing would have to move, and what portals and copy streams do would not show.
        settings.setdefault("transfer", "host" if few else "direct")
    return {key: value for key, value in settings.items() if key in kind.model_fields}


def _whole(settings: Settings, key: str) -> int:
    try:
        number: int = DERIVED[key].plain(settings[key])
    except ValueError as error:
        raise _WrongValueError(key, str(error)) from error
    return number


def _layers(settings: Settings) -> int:
    """The layers of the model; of one that cannot be made, which is said elsewhere, as many as one wants."""
    default = SimulatedCell()
    model = settings.get("model", default.model)
    arguments = settings.get("model_args", default.model_args if model == default.model else "")
    try:
        return model_spec(model).layers(parse_arguments(model, arguments))
    except (ConfigError, AttributeError, TypeError):
        return _MOST


@cache
def _table_rows(table: str) -> list[dict[str, Any]]:
    """The settings of the rows of a published table, as far as they are of models of the suite."""
    optimizer = {row.table: row.optimizer for row in published_settings()}[table]
    rows: list[Row] = [row for row in published_rows() if row.experiment == table and row.model in MODELS]
    return [{**{name: getattr(row, name) for name in _OF_A_ROW}, "optimizer": optimizer} for row in rows]
