"""What a verdict says of given differences."""

from __future__ import annotations

import pytest

from gpipe_bench.bench.transparency.verdict import paired_verdict, size_verdict, verdicts
from gpipe_bench.transparency_rows import VERDICT_COLUMNS


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.0] * 5, "exact"),
        ([0.01, -0.01, 0.0, 0.005, -0.005], "equivalent"),
        ([0.2, 0.21, 0.19, 0.2, 0.2], "differs"),
        ([0.3, -0.3, 0.1, -0.1, 0.0], "not established"),
        ([0.0], "not established"),
    ],
)
def test_paired_differences(differences, verdict):
    assert paired_verdict(differences, margin=0.05)["verdict"] == verdict


def test_the_interval_is_that_of_student():
    found = paired_verdict([1.0, 2.0, 3.0], margin=0.05)
    # t(0.975, 2) = 4.3027, standard error 1 / sqrt(3)
    assert (found["estimate"], found["low"], found["high"]) == pytest.approx((2.0, 2 - 2.4841, 2 + 2.4841), abs=1e-3)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [([0.0, 0.0], "exact"), ([0.0, 1e-16], "rounding"), ([1e-16, 0.5], "differs")],
)
def test_sizes(values, verdict):
    assert size_verdict(values, bound=1e-11)["verdict"] == verdict


def row(arm, seed, accuracy):
    return {
        "evidence": "measured", "model": "x", "precision": "float32", "normalisation": "batch", "arm": arm,
        "checkpoint": "never" if arm == "pipeline" else "", "deferred_batch_norm": arm == "pipeline" or None,
        "seed": seed, "status": "ok", "accuracy_fraction": accuracy, "accuracy_batch_fraction": None,
        "iou_fraction": None, "gradient_difference_plain_first": None, "gradient_difference_plain_largest": None,
        "gradient_difference_accumulated_largest": None, "loss_difference_accumulated_largest": None,
        "statistics_difference_entry": None, "statistics_difference_first": None, "statistics_difference_last": None,
        "updates_per_step": None, "device": "cpu Some CPU", "profile": "2x-some-cpu", "torch": "2.13.0",
        "python": "3.12.0", "commit": "a" * 40, "dirty": False, "started_utc": f"2026-01-0{seed + 1}T00:00:00+00:00",
        "schema_version": 2,
    }  # fmt: skip


def test_accuracies_are_paired_by_seed():
    plain = [row("plain", 1, 0.9), row("plain", 0, 0.5)]
    (claim,) = verdicts([*plain, row("pipeline", 0, 0.5), row("pipeline", 1, 0.9)], margin=0.05)
    assert (claim["quantity"], claim["n"], claim["verdict"]) == ("accuracy_fraction", 2, "exact")


def test_a_seed_without_plain_run_does_not_count():
    (claim,) = verdicts([row("plain", 0, 0.5), row("pipeline", 0, 0.5), row("pipeline", 7, 0.1)], margin=0.05)
    assert claim["n"] == 1


def test_a_claim_names_the_runs_behind_it():
    """Of three runs, one on another commit with changes of its own: both are named, and so is the first start."""
    other = {**row("pipeline", 1, 0.5), "commit": "b" * 40, "dirty": True}
    (claim,) = verdicts([row("plain", 0, 0.5), row("pipeline", 0, 0.5), other], margin=0.05)
    assert tuple(claim) == VERDICT_COLUMNS
    assert (claim["commit"], claim["dirty"]) == (f"{'a' * 40} + {'b' * 40}", True)
    assert (claim["profile"], claim["started_utc"]) == ("2x-some-cpu", "2026-01-01T00:00:00+00:00")
