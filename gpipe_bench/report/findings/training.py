"""Findings of the transparency experiment: whether training in a pipeline gives what training without it gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pandas as pd

from gpipe_bench.report.findings.finding import Finding, plural

_COLUMNS: Final = ("evidence", "model", "arm", "reference", "quantity", "verdict", "device")
_PIPELINE: Final = "pipeline"
_REFERENCES: Final = {
    "accumulated": "the same micro-batches without a pipeline",
    "plain": "the plain model on the whole batch",
}
_QUANTITIES: Final = {
    "accuracy_fraction": "accuracy",
    "accuracy_batch_fraction": "accuracy with normalisation by the held-out batch",
    "iou_fraction": "intersection over union",
    "loss_last_to_plain": "last training loss",
    "loss_last_to_accumulated": "last training loss",
    "gradient_difference_plain_first": "gradients of the first step",
    "gradient_difference_plain_largest": "gradients of some step",
    "gradient_difference_accumulated_largest": "gradients of some step",
    "loss_difference_accumulated_largest": "loss of some step",
    "statistics_difference_entry": "running statistics of the first layer",
    "statistics_difference_first": "running statistics after the first step",
    "statistics_difference_last": "running statistics after the last step",
}
_VERDICTS: Final = {
    "exact": "exactly equal",
    "rounding": "equal but for rounding",
    "equivalent": "equivalent within the margin",
    "not established": "not established",
    "differs": "different",
}


def training_findings(table: pd.DataFrame, section: str) -> Iterator[Finding]:
    """A finding per model and device: the verdicts on the pipeline, beside each reference."""
    if not set(_COLUMNS) <= set(table.columns):
        return
    claims = table[(table["arm"] == _PIPELINE) & table["verdict"].isin([*_VERDICTS])]
    for (evidence, model, device), members in claims.groupby(["evidence", "model", "device"], sort=False):
        sentences = [
            _sentence(words, members[members["reference"] == name])
            for name, words in _REFERENCES.items()
            if (members["reference"] == name).any()
        ]
        yield Finding("Training", (str(evidence),), f"{model}; {device}", tuple(sentences), section)


def _sentence(words: str, claims: pd.DataFrame) -> str:
    counts = claims["verdict"].value_counts()
    parts = [f"{counts[verdict]} {text}" for verdict, text in _VERDICTS.items() if verdict in counts]
    what = f"{plural(len(claims), 'comparison')} with {words}: {', '.join(parts)}."
    if len(counts) == 1:
        what = f"All {plural(len(claims), 'comparison')} with {words}: {_VERDICTS[str(counts.index[0])]}."
    different = claims[claims["verdict"] == "differs"]
    if different.empty:
        return what
    names = dict.fromkeys(_QUANTITIES.get(name, name.replace("_", " ")) for name in different["quantity"])
    by_batch = "" if not _by_batch(different) else " All of these runs normalise by the statistics of the micro-batch."
    return f"{what} Different: {', '.join(names)}.{by_batch}"


def _by_batch(claims: pd.DataFrame) -> bool:
    """Whether all are of models with batch normalisation that is not frozen."""
    if not {"normalisation", "batch_norms"} <= set(claims.columns):
        return False
    return bool(((claims["normalisation"] == "batch") & ~claims["batch_norms"].isin(["", "0"])).all())
