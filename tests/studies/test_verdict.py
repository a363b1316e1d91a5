"""What a verdict says of given differences."""

from __future__ import annotations

import pytest

from gpipe_bench.results.configurations import digest
from gpipe_bench.results.transparency_rows import VERDICT_COLUMNS
from studies.training.verdict import (
    Margins,
    claim_configurations,
    paired_verdict,
    size_verdict,
    verdicts,
)

MARGINS = Margins(accuracy=0.05, loss=0.1)


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


def row(arm, seed, accuracy, loss=None):
    return {
        "evidence": "measured", "model": "x", "precision": "float32", "normalisation": "batch", "arm": arm,
        "checkpoint": "never" if arm == "pipeline" else "", "deferred_batch_norm": arm == "pipeline" or None,
        "seed": seed, "status": "ok", "accuracy_fraction": accuracy, "accuracy_batch_fraction": None, "loss_last": loss,
        "iou_fraction": None, "gradient_difference_plain_first": None, "gradient_difference_plain_largest": None,
        "gradient_difference_accumulated_largest": None, "loss_difference_accumulated_largest": None,
        "statistics_difference_entry": None, "statistics_difference_first": None, "statistics_difference_last": None,
        "updates_per_step": None, "batch_norms": 7, "config_sha256": f"{seed}" * 64,
        "device": "cpu Some CPU", "profile": "2x-some-cpu", "torch": "2.13.0",
        "python": "3.12.0", "commit": "a" * 40, "dirty": False, "started_utc": f"2026-01-0{seed + 1}T00:00:00+00:00",
        "schema_version": 2,
    }  # fmt: skip


def test_accuracies_are_paired_by_seed():
    plain = [row("plain", 1, 0.9), row("plain", 0, 0.5)]
    (claim,) = verdicts([*plain, row("pipeline", 0, 0.5), row("pipeline", 1, 0.9)], MARGINS)
    assert (claim["quantity"], claim["n"], claim["verdict"]) == ("accuracy_fraction", 2, "exact")


def test_a_seed_without_plain_run_does_not_count():
    (claim,) = verdicts([row("plain", 0, 0.5), row("pipeline", 0, 0.5), row("pipeline", 7, 0.1)], MARGINS)
    assert claim["n"] == 1


def test_a_claim_names_the_runs_behind_it():
    """Of three runs, one on another commit with changes of its own: both are named, and so is the first start."""
    other = {**row("pipeline", 1, 0.5), "commit": "b" * 40, "dirty": True}
    runs = [row("plain", 0, 0.5), row("pipeline", 0, 0.5), other]
    (claim,) = verdicts(runs, MARGINS)
    assert tuple(claim) == VERDICT_COLUMNS
    (configuration,) = claim_configurations(runs, MARGINS)
    assert claim["config_sha256"] == digest(configuration)
    assert ['"accuracy": 0.05' in configuration, "0" * 64 in configuration, "1" * 64 in configuration] == [True] * 3
    assert claim["batch_norms"] == 7
    assert (claim["commit"], claim["dirty"]) == (f"{'a' * 40} + {'b' * 40}", True)
    assert (claim["profile"], claim["started_utc"]) == ("2x-some-cpu", "2026-01-01T00:00:00+00:00")


def losses(*, micro, plain):
    """Runs whose last losses are given by seed: micro-batches with and without a pipeline, and the whole batch."""
    rows = [row("plain", seed, None, loss) for seed, loss in enumerate(plain)]
    return rows + [row(arm, seed, None, loss) for arm in ("accumulated", "pipeline") for seed, loss in enumerate(micro)]


def test_last_losses_are_held_to_the_whole_batch_and_to_micro_batches_without_a_pipeline():
    found = verdicts(losses(micro=[0.5, 0.7, 0.6], plain=[0.2, 0.3, 0.25]), MARGINS)
    assert [(claim["arm"], claim["quantity"], claim["verdict"]) for claim in found] == [
        ("accumulated", "loss_last_to_plain", "differs"),
        ("pipeline", "loss_last_to_plain", "differs"),
        ("pipeline", "loss_last_to_accumulated", "exact"),
    ]
    assert found[0]["estimate"] == pytest.approx(0.35)
    assert {claim["margin"] for claim in found} == {0.1}


def test_losses_within_their_margin_are_equivalent():
    found = verdicts(losses(micro=[0.21, 0.29, 0.25], plain=[0.2, 0.3, 0.25]), MARGINS)
    assert [claim["verdict"] for claim in found] == ["equivalent", "equivalent", "exact"]
