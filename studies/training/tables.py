"""From a case to raw results, and from raw results to the tables of the study."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from gpipe_bench.measure.host import host_facts
from gpipe_bench.results.configurations import CONFIGURATIONS, configuration_records, configurations_beside
from gpipe_bench.results.tables import companion_path, csv_text
from gpipe_bench.results.transparency_rows import LAYER_COLUMNS, STEP_COLUMNS, VERDICT_COLUMNS, TransparencyRow
from gpipe_bench.suite.running.failures import status_of
from gpipe_bench.util.files import write_files
from studies.training.settings import Case
from studies.training.verdict import Margins, claim_configurations, verdicts

Raw = dict[str, list[dict[str, Any]]]
_TABLES: Final = ("rows", "steps", "layers", CONFIGURATIONS)


def run_cases(cases: Iterable[Case], processes: int = 1) -> Raw:
    """Train all arms of each case; the raw result: rows, steps, layers and configurations, a list of records each.

    A failure is a row with status ``error`` and the reason.

    Args:
        cases: what to train, one after the other.
        processes: how many arms are trained at once, if an operator has one thread; values are the same.
    """
    return joined(_run(case, processes) for case in cases)


def joined(raws: Iterable[Raw]) -> Raw:
    """Several raw results as one."""
    found: Raw = {name: [] for name in _TABLES}
    for raw in raws:
        for name in _TABLES:
            found[name] += raw[name]
    return found


def _run(case: Case, processes: int) -> Raw:
    names = ("model", "model_args", "partitions", "chunks", "batch_size", "learning_rate", "held_out", "seed")
    common: dict[str, Any] = {name: getattr(case, name) for name in (*names, "config_sha256")}
    common["balance"] = "-".join(map(str, case.balance))
    try:
        raw = _trained(case, common, max(1, processes // case.threads))
    except Exception as error:  # noqa: BLE001 - whatever a model or PyTorch raises becomes a row
        traceback.print_exc()
        status, reason = status_of(error)
        row = TransparencyRow(**common, **host_facts(), status=status, reason=reason)
        raw = {"rows": [row.to_dict()], "steps": [], "layers": []}
    return {**raw, CONFIGURATIONS: configuration_records([case.configuration])}


def _trained(case: Case, common: dict[str, Any], processes: int) -> Raw:
    # Here and not above: these load PyTorch.
    import torch

    from gpipe_bench.measure.environment import environment_facts
    from studies.training.data import load_images
    from studies.training.train import ARMS, Training, train_arms

    torch.set_num_threads(case.threads)
    images, facts = load_images(case), environment_facts(["cpu"])
    deferred = [arm for arm in ARMS if arm.deferred_batch_norm]
    exact = [Training("float64", frozen, case.exact_steps, deferred) for frozen in (False, True)]
    runs = train_arms(case, images, [Training("float32", False, case.steps, ARMS), *exact], processes)
    m = len(torch.empty(case.batch_size).chunk(case.chunks))
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


def collect(paths: Sequence[Path], out: Path, margins: Margins) -> list[dict[str, Any]]:
    """Join raw results into ``out`` and its companions, ``_verdict`` among them: all or none; gives the verdicts.

    Raises:
        OutputError: a table cannot be written.
    """
    raw = joined(json.loads(path.read_text(encoding="utf-8")) for path in paths)
    rows = [TransparencyRow(**row).to_dict() for row in raw["rows"]]
    found = verdicts(rows, margins)
    settings = [record["configuration"] for record in raw[CONFIGURATIONS]]
    write_files(
        {
            out: csv_text(TransparencyRow.columns(), rows),
            companion_path(out, "steps"): csv_text(STEP_COLUMNS, raw["steps"]),
            companion_path(out, "layers"): csv_text(LAYER_COLUMNS, raw["layers"]),
            companion_path(out, "verdict"): csv_text(VERDICT_COLUMNS, found),
            **configurations_beside(out, [*settings, *claim_configurations(rows, margins)]),
        }
    )
    return found
