"""The tables of docs/leaderboard.md and docs/leaderboard.csv: the fastest measured runs of each network and machine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final

from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.models.table import MODELS, format_arguments, parse_arguments
from gpipe_bench.results.configurations import CONFIGURATIONS
from gpipe_bench.results.labels import PAPER, run_as
from gpipe_bench.results.rows import TINY, PeerRow, Row
from gpipe_bench.results.schema import TABLES
from gpipe_bench.results.tables import companion_path, header_of, read_records, read_text

CSV: Final = "docs/leaderboard.csv"
HEADER: Final = (
    *("machine", "network", "devices", "partitions", "run_as", "batch_size", "chunks", "samples_per_s", "repeats"),
    *("torch", "rows"),
)
"""Columns of a line of :func:`leaders`, and of the CSV."""
SHOWN_HEADER: Final = ("machine", "network", "partitions", "run as", "batch / m", "samples/s", "repeats")
_MEASURED: Final = REFERENCE_FOLDER / "measured"
_LOOPS: Final = ("plain", "loop")
"""What contenders of the race are called that are no pipeline."""

_SHOWN: Final = 4
"""Arguments of a network that its line shows."""

_OWN: Final = "gpipe_bench"


def leaders(folder: Path = _MEASURED) -> list[list[str]]:
    """A line per machine, network and number of partitions: the fastest setting by its median, and who ran it.

    Of the race, tiny networks are left out, whose throughput means nothing, and loops, which are no pipelines.
    """
    groups: dict[tuple[Any, ...], dict[tuple[Any, ...], list[Row | PeerRow]]] = {}
    known: dict[Path, dict[str, dict[str, Any]]] = {}
    for path, row in _rows(folder):
        board = (path.parent.name, row.model, _arguments(row), row.device_count, row.partitions)
        settings = known.setdefault(path, _configurations(path)).get(row.config_sha256, {})
        precision = getattr(row, "precision", "") or settings.get("precision", "")
        how = (path.name, _how(row), row.checkpoint, row.batch_size, row.chunks, row.processes, precision)
        # Two settings of one table may differ in nothing else that is shown.
        setting = (*how, row.variant, row.config_sha256)
        groups.setdefault(board, {}).setdefault(setting, []).append(row)
    lines = []
    for board in sorted(groups):
        machine, model, arguments, devices, partitions = board
        how, own = max(groups[board].items(), key=lambda setting: median(_speeds(setting[1])))
        name, label, checkpoint, batch, chunks, processes, precision, *_ = how
        words = label if checkpoint == "never" else f"{label}, {checkpoint}"
        words += f", {processes} processes" if processes and processes > 1 else ""
        words += f", {precision}" if precision not in {"", "float32"} else ""
        speeds = _speeds(own)
        repeats = own[0].rounds if isinstance(own[0], PeerRow) else len(own)
        network = f"{Path(model.partition(':')[0]).stem} {' '.join(arguments.split(';')[:_SHOWN])}"
        speed, torch = f"{median(speeds):.1f}", own[0].torch.partition("+")[0]
        line = [machine, network, devices, partitions, words, batch, chunks, speed, repeats, torch]
        lines.append([*map(str, line), f"results/reference/measured/{machine}/{name}"])
    return lines


def leaders_csv() -> str:
    """The file that the page links: all lines of :func:`leaders`."""
    import pandas as pd

    return pd.DataFrame(leaders(), columns=list(HEADER)).to_csv(index=False, lineterminator="\n")


def shown(lines: Iterable[list[str]]) -> list[list[str]]:
    """The line of each machine and network with the highest throughput, as the page shows it."""
    best: dict[tuple[str, str], dict[str, str]] = {}
    for line in lines:
        one = dict(zip(HEADER, line, strict=True))
        other = best.setdefault((one["machine"], one["network"]), one)
        if float(one["samples_per_s"]) > float(other["samples_per_s"]):
            best[one["machine"], one["network"]] = one
    return [
        [
            *(f"[{one['machine']}](../{one['rows']})", one["network"], one["partitions"], one["run_as"]),
            *(f"{one['batch_size']} / {one['chunks']}", one["samples_per_s"], one["repeats"]),
        ]
        for one in best.values()
    ]


def _rows(folder: Path) -> Iterator[tuple[Path, Row | PeerRow]]:
    """Rows with a throughput, of runs and of races."""
    for path in sorted(folder.glob("*/*.csv")):
        header = tuple(header_of(path))
        found: list[Row] | list[PeerRow] = []
        if header in TABLES["rows"].headers:
            found = read_records(path, (), Row)
        elif header in TABLES["peers"].headers:
            found = read_records(path, (), PeerRow)
        for row in found:
            other = isinstance(row, PeerRow) and (row.workload in TINY or row.contender.startswith(_LOOPS))
            if row.status == "ok" and row.throughput_samples_per_s is not None and not other:
                yield path, row


def _configurations(path: Path) -> dict[str, dict[str, Any]]:
    """The settings of a table's rows by their digests."""
    table = read_text(companion_path(path, CONFIGURATIONS))
    return dict(zip(table["config_sha256"], table["configuration"].map(json.loads), strict=True))


def _arguments(row: Row | PeerRow) -> str:
    """All arguments of a network of the suite in one form: a race states those alone that it sets."""
    if row.model not in MODELS:
        return row.model_args
    return format_arguments(parse_arguments(row.model, row.model_args))


def _how(row: Row | PeerRow) -> str:
    if isinstance(row, PeerRow):
        return f"{row.contender} ({row.package})" if row.package != _OWN else row.contender
    label = run_as(row) or row.source.rpartition(": ")[2]
    return f"{label} {row.variant}" if label == PAPER else label


def _speeds(rows: list[Row | PeerRow]) -> list[float]:
    return [row.throughput_samples_per_s for row in rows if row.throughput_samples_per_s is not None]
