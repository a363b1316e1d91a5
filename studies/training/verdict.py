"""What the runs show over seeds: what is exactly equal, what rounding, what the statistics of micro-batches.

Differences of accuracies and of last losses are paired by seed; they are equivalent when the 95 % interval of Student's
t lies inside a margin that the configuration names, which is stricter than two one-sided tests at 5 % (Schuirmann
1987). Other quantities are medians over seeds.

A pipeline computes what accumulated micro-batches compute, to the bit. Both may learn more slowly than the plain model
on the whole batch, and for one reason: in training a batch normalisation takes mean and variance of the micro-batch
that it sees, as GPipe does (Huang et al. 2019, section 2.2), and fewer samples give noisier ones. Deferring changes
only the running statistics, which evaluation uses. The claims on accumulated micro-batches, without any pipeline,
stand beside those on the pipeline to show that. A model without batch normalisation has nothing to defer:
``batch_norms`` is 0, and its claims say nothing for or against deferring.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, stdev
from typing import Any, Final

from gpipe_bench.results.configurations import canonical, digest
from gpipe_bench.results.intervals import median_interval
from gpipe_bench.results.rows import SCHEMA_VERSION
from gpipe_bench.results.transparency_rows import CLAIM_COLUMNS, GROUP, VERDICT_COLUMNS

# Sums over thousands of elements, in another order, through tens of layers.
_ROUNDING: Final = {"float32": 1e-5, "float64": 1e-11}
_OPEN: Final = "not established"
"""Neither equivalent nor different: the interval has room for both."""
_ACCURACIES: Final = ("accuracy_fraction", "accuracy_batch_fraction", "iou_fraction")
_LOSS: Final = "loss_last"
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


@dataclass(frozen=True, slots=True)
class Margins:
    """Differences that count as none, named before anything is run.

    Attributes:
        accuracy: of accuracies.
        loss: of training losses.
    """

    accuracy: float
    loss: float


@dataclass(frozen=True, slots=True)
class _Group:
    """The runs of one arm in one setting, and those of the same setting that they are compared with, by arm."""

    head: dict[str, Any]
    runs: Rows
    references: Mapping[str, Rows]

    @property
    def all(self) -> Rows:
        """Every run that a claim on this arm rests on."""
        return [*self.runs, *(run for name, runs in self.references.items() if name != self.arm for run in runs)]

    @property
    def arm(self) -> str:
        """The arm."""
        return str(self.head["arm"])


def verdicts(rows: Iterable[Mapping[str, Any]], margins: Margins) -> list[dict[str, Any]]:
    """A record of :data:`gpipe_bench.results.transparency_rows.VERDICT_COLUMNS` per arm, setting and quantity."""
    found = []
    for group in _groups(rows):
        origin = _origin(group.all, digest(_configuration(group, margins)))
        found += [{**group.head, **claim, **origin} for claim in _claims(group, margins)]
    return found


def claim_configurations(rows: Iterable[Mapping[str, Any]], margins: Margins) -> list[str]:
    """The configurations of all claims, none twice; see :mod:`gpipe_bench.results.configurations`."""
    return list(dict.fromkeys(_configuration(group, margins) for group in _groups(rows)))


def _configuration(group: _Group, margins: Margins) -> str:
    """What decides a claim: margins, and the configurations of the runs that it rests on."""
    runs = sorted({run["config_sha256"] for run in group.all})
    return canonical({"margins": asdict(margins), "rounding": _ROUNDING, "runs": runs})


def _groups(rows: Iterable[Mapping[str, Any]]) -> Iterator[_Group]:
    good = [row for row in rows if row["status"] == "ok"]
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in good:
        if row["arm"] != "plain":
            groups.setdefault(tuple(row[name] for name in GROUP), []).append(row)
    setting = GROUP[: GROUP.index("arm")]
    for key, runs in groups.items():
        head = dict(zip(GROUP, key, strict=True))
        alike = [row for row in good if all(row[name] == head[name] for name in setting)]
        references = {arm: [row for row in alike if row["arm"] == arm] for arm in ("plain", "accumulated")}
        yield _Group(head, runs, references)


def _origin(rows: Rows, config_sha256: str) -> dict[str, Any]:
    """The columns of provenance of some runs together: what all have, else each value that occurs; the first start."""
    values = {name: list(dict.fromkeys(row[name] for row in rows)) for name in _PROVENANCE}
    joined = {name: some[0] if len(some) == 1 else " + ".join(map(str, some)) for name, some in values.items()}
    known = [dirty for dirty in values["dirty"] if dirty is not None]
    starts = [start for start in values["started_utc"] if start]
    return {
        **joined,
        "dirty": any(known) if known else None,
        "config_sha256": config_sha256,
        "started_utc": min(starts, default=""),
        "schema_version": SCHEMA_VERSION,
    }


def _claims(group: _Group, margins: Margins) -> Iterator[dict[str, Any]]:
    for name in _ACCURACIES:
        values = _differences(group, name, "plain")
        if values:
            yield {"quantity": name, "reference": "plain", **paired_verdict(values, margins.accuracy)}
    others = [name for name in group.references if name != group.arm]
    for reference in others:
        values = _differences(group, _LOSS, reference)
        if values:
            quantity = f"{_LOSS}_to_{reference}"
            yield {"quantity": quantity, "reference": reference, **paired_verdict(values, margins.loss)}
    for name, reference in _SIZES.items():
        values = [run[name] for run in group.runs if run[name] is not None]
        if values and reference in others:
            bound = _ROUNDING[str(group.head["precision"])]
            yield {"quantity": name, "reference": reference, **size_verdict(values, bound)}
    updates = [run["updates_per_step"] for run in group.runs if run["updates_per_step"] is not None]
    if updates:
        counted = {"n": len(updates), "estimate": mean(updates), "low": min(updates), "high": max(updates)}
        yield {"quantity": "updates_per_step", "reference": "", **counted, "margin": None, "verdict": "counted"}


def _differences(group: _Group, name: str, reference: str) -> list[float]:
    """A quantity less that of the reference, seed by seed where both have it."""
    theirs = {run["seed"]: run[name] for run in group.references[reference] if run[name] is not None}
    return [run[name] - theirs[run["seed"]] for run in group.runs if run[name] is not None and run["seed"] in theirs]


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
