"""One cell of the transparency experiment: a raw result comes back whatever happens."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from gpipe_bench.bench.running.failures import status_of
from gpipe_bench.bench.storage.kept import KeptParts
from gpipe_bench.bench.storage.tables import companion_path, configurations_beside
from gpipe_bench.bench.transparency.settings import TransparencyCell
from gpipe_bench.bench.transparency.verdict import Margins, claim_configurations, verdicts
from gpipe_bench.errors import ConfigError
from gpipe_bench.measure.host import host_facts
from gpipe_bench.results.configurations import CONFIGURATIONS, configuration_records, digest
from gpipe_bench.results.schema import raw_problems
from gpipe_bench.results.tables import csv_text
from gpipe_bench.results.transparency_rows import LAYER_COLUMNS, STEP_COLUMNS, VERDICT_COLUMNS, TransparencyRow
from gpipe_bench.util.files import write_files

Raw = dict[str, list[dict[str, Any]]]
_KINDS: Final = {
    "rows": "transparency",
    "steps": "transparency-steps",
    "layers": "transparency-layers",
    CONFIGURATIONS: "configurations",
}
_TABLES: Final = tuple(_KINDS)


def run_seeds(
    cells: Iterable[TransparencyCell],
    kept: KeptParts,
    processes: int = 1,
    report: Callable[[int], None] | None = None,
) -> Raw:
    """The raw results of several cells, joined into one; PyTorch and the images are loaded once for all of them.

    Args:
        cells: what to train, one after the other.
        kept: where finished ones are, and go.
        processes: see :func:`run_transparency`.
        report: takes how many are done.
    """
    joined: Raw = {name: [] for name in _TABLES}
    for done, cell in enumerate(cells):
        if report:
            report(done)
        raw = kept.get(cell.id)
        if raw is None:
            raw = run_transparency(cell, processes)
            kept.add(cell.id, raw)
        for name in _TABLES:
            joined[name] += raw[name]
    return joined


def run_transparency(cell: TransparencyCell, processes: int = 1) -> Raw:
    """Train all arms of ``cell``; its raw result: rows, steps, layers and configurations, a list of records each.

    A failure is a row with status ``error`` and the reason.

    Args:
        cell: what to train.
        processes: how many arms are trained at once, if an operator has one thread; values are the same.
    """
    common: dict[str, Any] = {
        **{name: getattr(cell, name) for name in ("model", "model_args", "partitions", "chunks", "batch_size")},
        **{name: getattr(cell, name) for name in ("learning_rate", "held_out", "seed", "config_sha256")},
        "balance": "-".join(map(str, cell.balance)),
    }
    try:
        raw = _trained(cell, common, max(1, processes // cell.threads))
    except Exception as error:  # noqa: BLE001 - whatever a model or PyTorch raises becomes a row
        traceback.print_exc()
        status, reason = status_of(error)
        row = TransparencyRow(**common, **host_facts(), status=status, reason=reason)
        raw = {"rows": [row.to_dict()], "steps": [], "layers": []}
    return {**raw, CONFIGURATIONS: configuration_records([cell.configuration])}


def _trained(cell: TransparencyCell, common: dict[str, Any], processes: int) -> Raw:
    # Here and not above: these load PyTorch.
    import torch

    from gpipe_bench.bench.transparency.arms import ARMS
    from gpipe_bench.bench.transparency.course import Training
    from gpipe_bench.bench.transparency.data import load_images
    from gpipe_bench.bench.transparency.lockstep import train_arms
    from gpipe_bench.measure.environment import environment_facts

    torch.set_num_threads(cell.threads)
    images, facts = load_images(cell), environment_facts(["cpu"])
    deferred = [arm for arm in ARMS if arm.deferred_batch_norm]
    exact = [Training("float64", frozen, cell.exact_steps, deferred) for frozen in (False, True)]
    runs = train_arms(cell, images, [Training("float32", False, cell.steps, ARMS), *exact], processes)
    m = len(torch.empty(cell.batch_size).chunk(cell.chunks))
    given = {**common, **facts, "data": images.name}
    rows = []
    for run in runs:
        split = {"microbatches": 1 if run.key["arm"] == "plain" else m, "steps": len(run.steps)}
        rows.append(TransparencyRow(**{**given, **split, **run.key, **run.values}).to_dict())
    return {
        "rows": rows,
        "steps": [{**run.key, **step} for run in runs for step in run.steps],
        "layers": [{**run.key, **layer} for run in runs for layer in run.layers],
    }


def collect_transparency(paths: Iterable[Path], out: Path, margins: Margins) -> list[dict[str, Any]]:
    """Join raw results into ``out`` and its companions, ``_verdict`` among them: all or none.

    Args:
        paths: raw results.
        out: the table of rows.
        margins: differences that count as none.

    Returns:
        The verdicts.

    Raises:
        ConfigError: files that are no raw results; all of them.
        OutputError: a table cannot be written.
    """
    raws = _read(paths)
    rows, steps, layers, given = ([record for raw in raws for record in raw[name]] for name in _TABLES)
    found = verdicts(rows, margins)
    settings = [*(record["configuration"] for record in given), *claim_configurations(rows, margins)]
    texts = {out: csv_text(TransparencyRow.columns(), rows)}
    for name, columns, records in (
        ("steps", STEP_COLUMNS, steps),
        ("layers", LAYER_COLUMNS, layers),
        ("verdict", VERDICT_COLUMNS, found),
    ):
        texts[companion_path(out, name)] = csv_text(columns, records)
    write_files({**texts, **configurations_beside(out, settings)})
    return found


def _without_configuration(path: Path, raw: Raw) -> list[str]:
    """Rows whose configuration is not there."""
    known = {digest(str(record.get("configuration"))) for record in raw[CONFIGURATIONS]}
    lost = {str(row["config_sha256"]) for row in raw["rows"]} - known
    rule = "raw result must hold the configuration that its row has the digest of"
    return [f"{rule}, got another or none in {path}; run it again"] if lost else []


def _read(paths: Iterable[Path]) -> Sequence[Raw]:
    raws: list[Raw] = []
    problems: list[str] = []
    for path in paths:
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            raw["rows"] = [TransparencyRow(**row).to_dict() for row in raw["rows"]]
            raw = {name: [dict(record) for record in raw[name]] for name in _TABLES}
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            problems.append(
                f"raw result must be a file that transparency run wrote, got {path} ({reason}); run it again"
            )
            continue
        problems += raw_problems(path, {_KINDS[name]: raw[name] for name in _TABLES})
        problems += _without_configuration(path, raw)
        raws.append(raw)
    if problems:
        raise ConfigError(problems)
    return raws
