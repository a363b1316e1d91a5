"""Findings on predictions: how far the simulator is from published values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pandas as pd

from gpipe_bench.figures.text import significant
from gpipe_bench.report.findings.finding import NBSP, Finding, percent, plural

_COLUMNS: Final = ("table", "experiment", "metric", "published", "simulated", "error_fraction", "role")
_METRICS: Final = {
    "throughput_samples_per_s": "throughput",
    "utilization_fraction": "utilisation",
    "peak_reserved_gib": "peak memory",
    "activation_memory_gib": "memory of activations",
    "model_memory_gib": "memory of parameters",
}


def prediction_findings(table: pd.DataFrame, section: str) -> Iterator[Finding]:
    """A finding on the errors of predicted values; fitted ones are left out and counted."""
    if not set(_COLUMNS) <= set(table.columns):
        return
    known = table.assign(error=pd.to_numeric(table["error_fraction"], errors="coerce"))
    known = known[known["error"].notna()]
    predicted = known[known["role"] == "predicted"]
    if predicted.empty:
        return
    profiles = [name for name in dict.fromkeys(table.get("profile", [])) if name]
    where = f"profile {', '.join(profiles)}" if profiles else ""
    sentences = (
        f"The mean absolute error of {plural(len(predicted), 'predicted value')} is {_mean(predicted)}.",
        *_details(predicted),
        *_not_counted(table, int((known["role"] == "fitted").sum())),
    )
    yield Finding("Predictions", ("published", "simulated"), where, sentences, section)


def _details(predicted: pd.DataFrame) -> Iterator[str]:
    metrics = predicted.groupby("metric", sort=False)
    parts = [f"{_METRICS.get(str(name), str(name))} {_mean(rows)} ({len(rows)})" for name, rows in metrics]
    yield f"By quantity, with the number of values: {', '.join(parts)}."
    worst = max(predicted.to_dict("records"), key=lambda row: abs(row["error"]))
    values = f"{_number(worst['simulated'])} simulated, {_number(worst['published'])} published"
    what = f"{_METRICS.get(worst['metric'], worst['metric'])} of {worst['experiment']} in {worst['table']}"
    yield f"The largest error is {percent(1 + worst['error'])}, {what}: {values}."


def _mean(rows: pd.DataFrame) -> str:
    return f"{100 * rows['error'].abs().mean():.1f}{NBSP}%"


def _number(text: str) -> str:
    return significant(float(text))


def _not_counted(table: pd.DataFrame, fitted: int) -> Iterator[str]:
    """Values that constants were fitted to, and cells that ran out of memory in print or in the simulation."""
    if fitted:
        yield f"Constants were fitted to {plural(fitted, 'more value')}, which do not count."
    printed, simulated = table["published"] != "", table["simulated"] != ""
    both, one = int((~printed & ~simulated).sum()), int((printed != simulated).sum())
    if both:
        yield f"{plural(both, 'value')} ran out of memory both in print and in the simulation."
    if one:
        yield f"{plural(one, 'value')} ran out of memory in print or in the simulation alone: the simulator is wrong."
