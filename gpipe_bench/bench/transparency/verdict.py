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
_GROUP: Final = ("evidence", "model", "precision", "normalisation", "checkpoint", "deferred_batch_norm")

Rows = Sequence[Mapping[str, Any]]


def verdicts(rows: Iterable[Mapping[str, Any]], margin: float) -> list[dict[str, Any]]:
    """A record of :data:`gpipe_bench.transparency_rows.VERDICT_COLUMNS` per setting of the pipeline and quantity."""
    good = [row for row in rows if row["status"] == "ok"]
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in good:
        if row["arm"] == "pipeline":
            groups.setdefault(tuple(row[name] for name in _GROUP), []).append(row)
    found = []
    for key, group in groups.items():
        head = dict(zip(_GROUP, key, strict=True))
        plain = {r["seed"]: r for r in good if r["arm"] == "plain" and all(r[n] == head[n] for n in _GROUP[:4])}
        found += [{**head, **record} for record in _claims(group, plain, margin)]
    return found


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
