"""From the outcomes of a race to its tables: rows and timed steps.

A ratio pairs by round: in each round all contenders run within seconds of each other, so what else the machine does
falls on both sides of the ratio of that round. The median of those ratios and its bootstrap interval is what counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from gpipe_bench.components import Components
from gpipe_bench.results.configurations import configurations_beside, digest
from gpipe_bench.results.intervals import Interval, median_interval, paired_ratios
from gpipe_bench.results.rows import PeerRow
from gpipe_bench.results.schema import TABLES
from gpipe_bench.results.tables import companion_path, csv_text
from gpipe_bench.util.files import write_files
from studies.peers.race import ContenderTimes, Raced

_PLAIN: Final = "loop"
_PAPERS: Final = "torchgpipe"
"""What host times of tiny layers refer to; throughputs refer to the plain loop."""

_TOGETHER: Final = "loop-processes"
_OF_CASE: Final = (
    *("workload", "model", "model_args", "chunks", "checkpoint", "batch_size", "rounds", "seed", "cores"),
)


def write_race(
    raced: Sequence[Raced], common: dict[str, Any], tolerance: float, out: Path, configuration: str
) -> list[PeerRow]:
    """Write ``out`` and its companions ``_steps`` and ``_configurations``: all or none.

    Args:
        raced: the cases.
        common: columns that all rows share.
        tolerance: gradients that differ by less are equal.
        out: the table of rows.
        configuration: the settings of the race; see :mod:`gpipe_bench.results.configurations`.

    Raises:
        OutputError: a table cannot be written.
    """
    shared = {**common, "config_sha256": digest(configuration)}
    rows = [PeerRow(**shared, **_row(outcome, one, tolerance)) for one in raced for outcome in one]
    write_files(
        {
            out: csv_text(PeerRow.columns(), [row.to_dict() for row in rows]),
            companion_path(out, "steps"): csv_text(TABLES["peers-steps"].columns, step_records(raced)),
            **configurations_beside(out, [configuration]),
        }
    )
    return rows


def step_records(raced: Sequence[Raced]) -> list[dict[str, Any]]:
    """A record per timed step: its round, the place of its contender in the order of that round, its number there."""
    found = []
    for outcome in (outcome for one in raced for outcome in one):
        head = {"evidence": "measured", "case": outcome.case.id, "contender": outcome.contender.name}
        for visit in outcome.visits:
            for step, (wall, cpu) in enumerate(zip(visit.wall_s, visit.cpu_s, strict=True)):
                times = {"step_time_ms": 1e3 * wall, "cpu_time_ms": 1e3 * cpu}
                found.append({**head, "round": visit.round, "position": visit.position, "step": step, **times})
    return found


def round_ratios(
    outcome: ContenderTimes | None, baseline: ContenderTimes | None, *, inverse: bool = False
) -> Interval | None:
    """Step time over the baseline's, round by round; ``inverse``: the other way round."""
    if outcome is None or baseline is None or outcome.status != "ok" or baseline.status != "ok":
        return None
    ours, base = _round_medians(outcome), _round_medians(baseline)
    ratios = paired_ratios(base, ours) if inverse else paired_ratios(ours, base)
    return median_interval(ratios) if ratios else None


def _round_medians(outcome: ContenderTimes) -> dict[int, float]:
    return {visit.round: median(visit.wall_s) for visit in outcome.visits}


def _seconds(outcome: ContenderTimes | None) -> float | None:
    return median(_round_medians(outcome).values()) if outcome is not None and outcome.status == "ok" else None


def _row(outcome: ContenderTimes, one: Raced, tolerance: float) -> dict[str, Any]:
    """Columns that describe the case and the contender, and those that say what came out."""
    case, contender, seconds = outcome.case, outcome.contender, _seconds(outcome)
    found = {
        **{name: getattr(case, name) for name in _OF_CASE},
        "partitions": len(case.balance),
        "variant": Components().label if contender.kind == "gpipe_bench" else "",
        "contender": contender.name,
        "package": contender.package,
        "package_version": outcome.version,
        "case": case.id,
        "threads": case.cores if contender.all_threads else 1,
        "microbatches": case.chunks,
        "processes": case.processes(contender),
        "balance": "-".join(map(str, case.balance)),
        "steps": sum(len(visit.wall_s) for visit in outcome.visits) or None,
        "status": outcome.status,
        "reason": outcome.reason,
    }
    if seconds is None:
        return found
    return {**found, **_times(outcome, one, seconds), **_gradients(outcome, tolerance), **_limit(outcome, one, seconds)}


def _times(outcome: ContenderTimes, one: Raced, seconds: float) -> dict[str, Any]:
    case, tiny = outcome.case, outcome.case.workload == "cells"
    baseline = _PAPERS if tiny else _PLAIN
    ratio = round_ratios(outcome, _of(one, baseline), inverse=not tiny)
    found: dict[str, Any] = {
        "step_time_ms": 1e3 * seconds,
        "cpu_time_ms": 1e3 * median(median(visit.cpu_s) for visit in outcome.visits),
        "host_time_per_cell_us": 1e6 * seconds / case.cells if tiny else None,
        "throughput_samples_per_s": None if tiny else case.batch_size / seconds,
        "forward_passes": outcome.forward_passes,
    }
    if ratio is not None:
        found |= {"baseline": baseline, "ratio": ratio.median}
        found |= {"ratio_low": _known(ratio.low), "ratio_high": _known(ratio.high)}
    return found


def _gradients(outcome: ContenderTimes, tolerance: float) -> dict[str, Any]:
    difference = outcome.gradient_difference
    if difference is None:
        return {}
    verdict = "equal" if difference <= tolerance else "differ"
    # Of gradients of other shapes, or that are no numbers, nobody can say how far off they are.
    known = difference if math.isfinite(difference) else None
    return {"gradients": verdict, "gradient_difference": known, "gradient_tolerance": tolerance}


def _limit(outcome: ContenderTimes, one: Raced, seconds: float) -> dict[str, Any]:
    """The limit beside the measured step, and for pipelines what cores that work together add to it."""
    plain, case = _seconds(_of(one, _PLAIN)), outcome.case
    if plain is None:
        return {}
    least = limit_s(plain, case.chunks, case.partitions, case.parallel)
    found: dict[str, Any] = {"limit_ms": 1e3 * least, "gap_ms": 1e3 * (seconds - least)}
    if case.workload != "cells":
        found["limit_samples_per_s"] = case.batch_size / least
    together = round_ratios(_of(one, _TOGETHER), _of(one, _PLAIN))
    if together is not None and outcome.contender.pipeline:
        # The share of the micro-batches that the longest loop has.
        share = -(-case.chunks // case.loops) / case.chunks
        found["gap_contention_ms"] = 1e3 * least * (together.median / share - 1)
    return found


def limit_s(plain_s: float, m: int, n: int, parallel: int) -> float:
    """Seconds of a step at the limit: the plain loop cut into equal partitions that wait for nothing but each other.

    Args:
        plain_s: of the plain loop.
        m: micro-batches.
        n: partitions.
        parallel: partitions that can compute at once; no step takes less than their share of the loop.
    """
    return plain_s * max((m + n - 1) / (m * n), 1 / parallel)


def _of(one: Raced, name: str) -> ContenderTimes | None:
    return next((outcome for outcome in one if outcome.contender.name == name), None)


def _known(bound: float) -> float | None:
    return None if math.isnan(bound) else bound
