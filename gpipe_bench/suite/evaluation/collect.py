"""Raw results of an experiment, checked and joined into one tidy table and its companions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from gpipe_bench.errors import ConfigError
from gpipe_bench.results.configurations import configurations_beside, digest
from gpipe_bench.results.labels import labelled, rows_text
from gpipe_bench.results.rows import Row
from gpipe_bench.results.schema import raw_problems
from gpipe_bench.results.tables import COMPANIONS, companion_path, csv_text
from gpipe_bench.suite.published.values import published_for
from gpipe_bench.suite.storage.raw import RawResult, read_results
from gpipe_bench.util.files import write_files

_SHARED: Final = ("simulated-", "emulated-")
"""Starts of the names of cells that several experiments take from one file."""

_MEASURED: Final = ("throughput_samples_per_s", "step_time_ms")


def collect(
    paths: Iterable[Path], experiment: str, out: Path, published: Path | None = None, cells: Sequence[str] = ()
) -> list[Row]:
    """Join raw results into ``out`` and its companions; either all of these files are written or none.

    Args:
        paths: raw results, in the order that the tables keep.
        experiment: name for the column of that name; raw results may be shared by several experiments.
        out: the table of rows; companions lie beside it.
        published: folder of published values; those of the same settings go before the other rows.
        cells: digests that the names of simulated and emulated cells end with, in the order that the tables keep; other
            cells of these kinds are left out. Empty: all are taken as they come.

    Returns:
        The rows written.

    Raises:
        ConfigError: files that are no raw results, two of one run, or none of a cell that was asked for; all of them.
            Or no published values there.
        OutputError: a table cannot be written.
    """
    results = _chosen(read_raw(paths), cells) if cells else read_raw(paths)
    printed = published_for([result.row for result in results], published) if published else []
    return write_tables(results, experiment, out, printed)


def _chosen(results: Sequence[RawResult], cells: Sequence[str]) -> list[RawResult]:
    """The simulations and emulations of some cells in their order, then everything else."""
    own: dict[str, list[RawResult]] = {}
    for result in results:
        if result.cell.startswith(_SHARED):
            own.setdefault(result.cell.rpartition("-")[2], []).append(result)
    missing = [cell for cell in cells if cell not in own]
    if missing:
        rule = "raw results must hold every simulated and emulated cell that was asked for"
        raise ConfigError([f"{rule}, got none that ends in {cell}; simulate or emulate it" for cell in missing])
    others = [result for result in results if not result.cell.startswith(_SHARED)]
    return [*(result for cell in cells for result in own[cell]), *others]


def read_raw(paths: Iterable[Path]) -> list[RawResult]:
    """The raw results in ``paths``.

    Raises:
        ConfigError: files that are no raw results, or two of one run; all of them.
    """
    results: list[RawResult] = []
    problems: list[str] = []
    origins: dict[tuple[str, int | None], Path] = {}
    for path in paths:
        try:
            found = read_results(path)
        except ConfigError as error:
            problems += error.problems
            continue
        problems += _wrong_values(path, found)
        for result in found:
            key = (result.cell, result.row.repeat)
            if key in origins:
                run = f"repeat {result.row.repeat} of {result.cell}"
                problems.append(f"every run must be given once, got {run} in {origins[key]} and {path}; drop one")
            origins.setdefault(key, path)
        results += found
    if problems:
        raise ConfigError(problems)
    return results


def _wrong_values(path: Path, results: Iterable[RawResult]) -> list[str]:
    """Values that their columns may not hold."""
    problems = []
    for result in results:
        companions = {name: _keyed(result, getattr(result, name), columns) for name, columns in COMPANIONS.items()}
        problems += raw_problems(path, {"rows": [result.row.to_dict()], **companions})
        missing = [name for name in _MEASURED if result.row.status == "ok" and getattr(result.row, name) is None]
        rule = f"raw result must hold {', '.join(missing)} of a run that is ok, got none"
        problems += [f"{rule} in {path}, {result.cell}; delete it, then run it again"] if missing else []
    return problems


def write_tables(results: Sequence[RawResult], experiment: str, out: Path, published: Iterable[Row] = ()) -> list[Row]:
    """Write the tables of ``results``, with published rows before them; see :func:`collect`.

    Raises:
        ConfigError: rows whose configuration is not there; all of them.
        OutputError: a table cannot be written.
    """
    configurations = _configurations(results)
    rows = labelled([replace(row, experiment=experiment) for row in (*published, *(one.row for one in results))])
    texts = {out: rows_text(rows)}
    for name, columns in COMPANIONS.items():
        records = [record for result in results for record in _keyed(result, getattr(result, name), columns)]
        texts[companion_path(out, name)] = csv_text(columns, records)
    write_files({**texts, **configurations_beside(out, configurations)})
    return rows


def _configurations(results: Iterable[RawResult]) -> list[str]:
    """What the digests of the rows lead to."""
    known, problems = [], []
    for result in results:
        if digest(result.configuration) == result.row.config_sha256:
            known.append(result.configuration)
            continue
        found = f"got {'another' if result.configuration else 'none'} in {result.cell}"
        rule = "raw result must hold the configuration that its row has the digest of"
        problems.append(f"{rule}, {found}; delete it, then run it again")
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return known


def _keyed(result: RawResult, records: Iterable[dict[str, Any]], columns: Sequence[str]) -> list[dict[str, Any]]:
    row = result.row
    keys = {"cell": result.cell, "variant": row.variant, "repeat": row.repeat, "evidence": row.evidence}
    known = {name: value for name, value in keys.items() if name in columns}
    return [{**record, **known} for record in records]
