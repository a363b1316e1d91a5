"""What the runs show over seeds: what is exactly equal, what rounding, what the statistics of micro-batches.

Differences of accuracy are paired by seed; they are equivalent when the 95 % interval of Student's t lies inside the
margin, which is stricter than two one-sided tests at 5 % (Schuirmann 1987). Other quantities are medians over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any, Final

from gpipe_bench.intervals import median_interval
from gpipe_bench.rows import SCHEMA_VERSION
from gpipe_bench.transparency_rows import CLAIM_COLUMNS, GROUP, VERDICT_COLUMNS

__all__ = ["paired_verdict", "size_verdict", "verdicts"]

# Sums over thousands of elements, in another order, through tens of layers.
_ROUNDING: Final = {"float32": 1e-5, "float64": 1e-11}
_OPEN: Final = "not established"
"""Neither equivalent nor different: the interval has room for both."""
_ACCURACIES: Final = ("accuracy_fraction", "accuracy_batch_fraction", "iou_fraction")
_SIZES: Final = {
    "gradient_difference_plain_first": "plain",
    "gradient_difference_plain_largest": "plain",
    "gradient_difference_accumulated_largest": "accumulated",
    "loss_difference_accumulated_largest": "accumulated",
    "statistics_difference_entry": "plain",
    "statistics_difference_first": "plain",
    "statistics_difference_last": "plain",
}
_PROVENANCE: Final = VERDICT_COLUMNS[len(CLAIM_COLUMNS) :]

Rows = Sequence[Mapping[str, Any]]


def verdicts(rows: Iterable[Mapping[str, Any]], margin: float) -> list[dict[str, Any]]:
    """A record of :data:`gpipe_bench.transparency_rows.VERDICT_COLUMNS` per setting of the pipeline and quantity."""
    good = [row for row in rows if row["status"] == "ok"]
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in good:
        if row["arm"] == "pipeline":
            groups.setdefault(tuple(row[name] for name in GROUP), []).append(row)
    found = []
    for key, group in groups.items():
        head = dict(zip(GROUP, key, strict=True))
        plain = {r["seed"]: r for r in good if r["arm"] == "plain" and all(r[n] == head[n] for n in GROUP[:4])}
        origin = _origin([*group, *plain.values()])
        found += [{**head, **record, **origin} for record in _claims(group, plain, margin)]
    return found


def _origin(rows: Rows) -> dict[str, Any]:
    """The columns of provenance of some runs together: what all have, else each value that occurs; the first start."""
    values = {name: list(dict.fromkeys(row[name] for row in rows)) for name in _PROVENANCE}
    joined = {name: some[0] if len(some) == 1 else " + ".join(map(str, some)) for name, some in values.items()}
    known = [dirty for dirty in values["dirty"] if dirty is not None]
    starts = [start for start in values["started_utc"] if start]
    return {
        **joined,
        "dirty": any(known) if known else None,
        "started_utc": min(starts, default=""),
        "schema_version": SCHEMA_VERSION,
    }


def _claims(group: Rows, plain: Mapping[int, Mapping[str, Any]], margin: float) -> list[dict[str, Any]]:
    claims: list[dict[str, Any]] = []
    for name in _ACCURACIES:
        pairs = [(row[name], plain[row["seed"]][name]) for row in group if row["seed"] in plain]
        values = [ours - theirs for ours, theirs in pairs if ours is not None and theirs is not None]
        if values:
            claims.append({"quantity": name, "reference": "plain", **paired_verdict(values, margin)})
    for name, reference in _SIZES.items():
        values = [row[name] for row in group if row[name] is not None]
        if values:
            bound = _ROUNDING[group[0]["precision"]]
            claims.append({"quantity": name, "reference": reference, **size_verdict(values, bound)})
    updates = [row["updates_per_step"] for row in group if row["updates_per_step"] is not None]
    if updates:
        counted = {"n": len(updates), "estimate": mean(updates), "low": min(updates), "high": max(updates)}
        claims.append({"quantity": "updates_per_step", "reference": "", **counted, "verdict": "counted"})
    return claims


def paired_verdict(differences: Sequence[float], margin: float) -> dict[str, Any]:
    """Mean difference with its 95 % interval: ``exact``, ``equivalent``, ``differs``, ``not established``."""
    n, middle = len(differences), mean(differences)
    if n == 1:
        return {"n": 1, "estimate": middle, "low": None, "high": None, "margin": margin, "verdict": _OPEN}
    from scipy.stats import t

    half = float(t.ppf(0.975, n - 1)) * stdev(differences) / math.sqrt(n)
    low, high = middle - half, middle + half
    if not any(differences):
        verdict = "exact"
    elif -margin < low and high < margin:
        verdict = "equivalent"
    else:
        verdict = "differs" if low > 0 or high < 0 else _OPEN
    return {"n": n, "estimate": middle, "low": low, "high": high, "margin": margin, "verdict": verdict}


def size_verdict(values: Sequence[float], bound: float) -> dict[str, Any]:
    """Median with its interval: ``exact`` (zero in all seeds), ``rounding`` (all below ``bound``) or ``differs``."""
    interval = median_interval(values)
    verdict = "exact" if not any(values) else "rounding" if max(values) < bound else "differs"
    low, high = (None if math.isnan(end) else end for end in (interval.low, interval.high))
    return {
        "n": len(values),
        "estimate": interval.median,
        "low": low,
        "high": high,
        "margin": bound,
        "verdict": verdict,
    }
