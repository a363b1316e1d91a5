"""From the outcomes of a race to its tables: rows, timed steps, ratios of every pair.

A ratio pairs by round: in each round all contenders run within seconds of each other, so what else the machine does
falls on both sides of the ratio of that round. The median of those ratios and its bootstrap interval is what counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Final

from gpipe_bench.bench.peers.cases import PeerCase
from gpipe_bench.bench.peers.contenders import BASELINES
from gpipe_bench.bench.peers.race import Outcome, Raced
from gpipe_bench.bench.peers.split import limit_s, split_gap
from gpipe_bench.bench.storage.tables import companion_path, configurations_beside
from gpipe_bench.components import Components
from gpipe_bench.results.configurations import digest
from gpipe_bench.results.intervals import Interval, median_interval
from gpipe_bench.results.peer_rows import RATIO_COLUMNS, STEP_COLUMNS, PeerRow
from gpipe_bench.results.tables import csv_text
from gpipe_bench.util.files import write_files

_MIB: Final = 2**20
_PLAIN: Final = "loop"
_TOGETHER: Final = "loop-processes"
_ALL_ON: Final = Components().label


def write_race(
    raced: Sequence[Raced], common: dict[str, Any], tolerance: float, out: Path, configuration: str
) -> list[PeerRow]:
    """Write ``out`` and its companions ``_steps``, ``_ratios`` and ``_configurations``: all or none.

    Args:
        raced: the cases.
        common: columns that all rows share.
        tolerance: gradients that differ by less are equal.
        out: the table of rows.
        configuration: the settings of the race; see :mod:`gpipe_bench.results.configurations`.

    Raises:
        OutputError: a table cannot be written.
    """
    rows = peer_rows(raced, {**common, "config_sha256": digest(configuration)}, tolerance)
    write_files(
        {
            out: csv_text(PeerRow.columns(), [row.to_dict() for row in rows]),
            companion_path(out, "steps"): csv_text(STEP_COLUMNS, step_records(raced)),
            companion_path(out, "ratios"): csv_text(RATIO_COLUMNS, ratio_records(raced)),
            **configurations_beside(out, [configuration]),
        }
    )
    return rows


def peer_rows(raced: Sequence[Raced], common: dict[str, Any], tolerance: float) -> list[PeerRow]:
    """A row per contender and case."""
    return [
        PeerRow(**common, **_setting(outcome), **_results(outcome, one, raced, tolerance))
        for one in raced
        for outcome in one.outcomes
    ]


def step_records(raced: Sequence[Raced]) -> list[dict[str, Any]]:
    """A record per timed step."""
    return [
        {
            "evidence": "measured",
            "case": outcome.case.id,
            "contender": outcome.contender.name,
            "round": visit.round,
            "position": visit.position,
            "step": step,
            "step_time_ms": 1e3 * wall,
            "cpu_time_ms": 1e3 * cpu,
        }
        for one in raced
        for outcome in one.outcomes
        for visit in outcome.visits
        for step, (wall, cpu) in enumerate(zip(visit.wall_s, visit.cpu_s, strict=True))
    ]


def ratio_records(raced: Sequence[Raced]) -> list[dict[str, Any]]:
    """A record per contender and baseline that both finished a case."""
    records = []
    for one in raced:
        for outcome in one.outcomes:
            for name in BASELINES:
                interval = round_ratios(outcome, _of(one, name))
                if interval is not None:
                    bounds = {"low": _known(interval.low), "high": _known(interval.high)}
                    records.append(
                        {
                            **_keys(outcome),
                            "baseline": name,
                            "rounds": interval.n,
                            "time_ratio": interval.median,
                            **bounds,
                            "case": outcome.case.id,
                        }
                    )
    return records


def round_ratios(outcome: Outcome | None, baseline: Outcome | None, *, inverse: bool = False) -> Interval | None:
    """Step time over the baseline's, round by round; ``inverse``: the other way round."""
    if outcome is None or baseline is None or outcome.status != "ok" or baseline.status != "ok":
        return None
    base = _round_medians(baseline)
    ratios = [seconds / base[number] for number, seconds in _round_medians(outcome).items() if number in base]
    return median_interval([1 / ratio for ratio in ratios] if inverse else ratios) if ratios else None


def _round_medians(outcome: Outcome) -> dict[int, float]:
    return {visit.round: median(visit.wall_s) for visit in outcome.visits}


def _seconds(outcome: Outcome | None) -> float | None:
    return median(_round_medians(outcome).values()) if outcome is not None and outcome.status == "ok" else None


def _keys(outcome: Outcome) -> dict[str, Any]:
    case = outcome.case
    return {
        "evidence": "measured",
        "workload": case.workload,
        "partitions": len(case.balance),
        "chunks": case.chunks,
        "checkpoint": case.checkpoint,
        "variant": (case.variant or _ALL_ON) if outcome.contender.kind == "engine" else "",
        "contender": outcome.contender.name,
    }


def _setting(outcome: Outcome) -> dict[str, Any]:
    """Columns that describe the case and the contender."""
    case, contender = outcome.case, outcome.contender
    return {
        **_keys(outcome),
        **{name: getattr(case, name) for name in ("model", "model_args", "batch_size", "rounds", "seed")},
        "package": contender.package,
        "package_version": outcome.version,
        "case": case.id,
        "cores": case.cores,
        "threads": case.cores if contender.all_threads else 1,
        "microbatches": case.chunks,
        "processes": _processes(outcome),
        "balance": "-".join(map(str, case.balance)),
        "steps": sum(len(visit.wall_s) for visit in outcome.visits) or None,
        "status": outcome.status,
        "reason": outcome.reason,
    }


def _processes(outcome: Outcome) -> int:
    if outcome.contender.process_per_device:
        return outcome.case.partitions
    return outcome.case.loops if outcome.contender.kind == "loops" else 1


def _results(outcome: Outcome, one: Raced, raced: Sequence[Raced], tolerance: float) -> dict[str, Any]:
    """Columns that say what came out."""
    seconds = _seconds(outcome)
    if seconds is None:
        return {}
    case, tiny = outcome.case, outcome.case.tiny
    baseline = "torchgpipe" if tiny else _PLAIN
    interval = round_ratios(outcome, _of(one, baseline), inverse=not tiny)
    found: dict[str, Any] = {
        "step_time_ms": 1e3 * seconds,
        "cpu_time_ms": 1e3 * median(median(visit.cpu_s) for visit in outcome.visits),
        "host_time_per_cell_us": 1e6 * seconds / case.cells if tiny else None,
        "throughput_samples_per_s": None if tiny else case.batch_size / seconds,
        "peak_live_mib": None if outcome.peak_bytes is None else outcome.peak_bytes / _MIB,
        "forward_passes": outcome.forward_passes,
        **_gradients(outcome, tolerance),
        **_limit(outcome, one, raced, seconds),
    }
    if interval is not None:
        found |= {"baseline": baseline, "ratio": interval.median}
        found |= {"ratio_low": _known(interval.low), "ratio_high": _known(interval.high)}
    return found


def _gradients(outcome: Outcome, tolerance: float) -> dict[str, Any]:
    difference = outcome.gradient_difference
    if difference is None:
        return {}
    verdict = "equal" if difference <= tolerance else "differ"
    # Of gradients of other shapes, or that are no numbers, nobody can say how far off they are.
    known = difference if math.isfinite(difference) else None
    return {"gradients": verdict, "gradient_difference": known, "gradient_tolerance": tolerance}


def _limit(outcome: Outcome, one: Raced, raced: Sequence[Raced], seconds: float) -> dict[str, Any]:
    """The limit beside the measured step, and for pipelines the split of the gap."""
    plain, case = _seconds(_of(one, _PLAIN)), outcome.case
    if plain is None:
        return {}
    least = limit_s(plain, case.chunks, case.partitions, case.parallel)
    found: dict[str, Any] = {"limit_ms": 1e3 * least, "gap_ms": 1e3 * (seconds - least)}
    if case.workload != "cells":
        found["limit_samples_per_s"] = case.batch_size / least
    split = outcome.contender.pipeline and not outcome.contender.only
    if split and one.alone is not None and case.parallel == case.partitions:
        host, copies = _host_s(outcome, raced), _copies_s(outcome, one)
        gap = split_gap(
            seconds - least,
            plain,
            case.chunks,
            alone=one.alone,
            contention_s=_contention_s(one, least),
            host_s=host,
            copies_s=copies,
        )
        parts = asdict(gap).items()
        found |= {f"gap_{name}_ms": None if part is None else 1e3 * part for name, part in parts}
    return found


def _contention_s(one: Raced, least: float) -> float | None:
    """What the limit grows by where cores that work together are slower than one alone, in the rounds of the race."""
    interval = round_ratios(_of(one, _TOGETHER), _of(one, _PLAIN))
    if interval is None:
        return None
    case = one.case
    # The share of the micro-batches that the longest loop has.
    share = -(-case.chunks // case.loops) / case.chunks
    return least * (interval.median / share - 1)


def _host_s(outcome: Outcome, raced: Sequence[Raced]) -> float | None:
    """What a step of the same n, m and mode costs the contender with nothing to compute, beyond the plain loop."""
    case = outcome.case
    for other in raced:
        if other.case.workload == "cells" and _shape(other.case) == _shape(case):
            own, plain = _seconds(_of(other, outcome.contender.name)), _seconds(_of(other, _PLAIN))
            return None if own is None or plain is None else max(own - plain, 0.0)
    return None


def _shape(case: PeerCase) -> tuple[int, int, str]:
    return case.partitions, case.chunks, case.checkpoint


def _copies_s(outcome: Outcome, one: Raced) -> float | None:
    """Threads of one CPU share memory; between processes every micro-batch crosses each boundary, there and back."""
    if outcome.case.device != "cpu":
        return None
    if not outcome.contender.process_per_device:
        return 0.0
    if one.one_way_s is None:
        return None
    return 2 * outcome.case.chunks * sum(one.one_way_s) / outcome.case.parallel


def _of(one: Raced, name: str) -> Outcome | None:
    return next((outcome for outcome in one.outcomes if outcome.contender.name == name), None)


def _known(bound: float) -> float | None:
    return None if math.isnan(bound) else bound
