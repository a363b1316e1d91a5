"""Tiny real runs: what is exactly equal, and what batch normalisation makes of micro-batches."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("sklearn")

from gpipe_bench.bench.transparency.arms import ACCUMULATED, ARMS, PLAIN, Arm
from gpipe_bench.bench.transparency.data import load_images
from gpipe_bench.bench.transparency.lockstep import train_arms
from gpipe_bench.bench.transparency.run import collect_transparency, run_transparency
from gpipe_bench.bench.transparency.settings import TransparencyCell, TransparencySettings
from gpipe_bench.bench.validation import validated
from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.transparency import draw_transparency

SMALL = {"batch_size": 8, "chunks": 2, "steps": 2, "held_out": 16}
UNET = TransparencyCell(
    model="unet", model_args="depth=1;B=1;C=2;size=16;in=3;out=1;dropout=0", balance=(8, 9), **SMALL
)
AMOEBANET = TransparencyCell(**SMALL)


@pytest.fixture(scope="module")
def amoebanet():
    runs = train_arms(AMOEBANET, load_images(AMOEBANET), ARMS, precision="float32", frozen=False, steps=2)
    return dict(zip(ARMS, runs, strict=True))


def test_the_pipeline_is_accumulated_microbatches_bit_for_bit(amoebanet):
    for arm, run in amoebanet.items():
        if arm.arm == "pipeline":
            assert run.values["gradient_difference_accumulated_largest"] == 0.0
            assert run.values["loss_difference_accumulated_largest"] == 0.0


def test_microbatches_are_normalised_by_their_own_statistics(amoebanet):
    deferred = amoebanet[Arm("pipeline", "never", True)]
    assert deferred.values["gradient_difference_plain_first"] > 1e-2


def test_deferral_updates_once_and_without_it_every_pass_does(amoebanet):
    updates = {
        (arm.checkpoint, arm.deferred_batch_norm): run.values["updates_per_step"] for arm, run in amoebanet.items()
    }
    assert [updates[mode, True] for mode in ("always", "except_last", "never")] == [1, 1, 1]
    assert [updates[mode, False] for mode in ("always", "except_last", "never")] == [4, 3, 2]


def test_deferral_repairs_the_first_layer_exactly_but_for_rounding(amoebanet):
    def first(*, deferred):
        layers = amoebanet[Arm("pipeline", "always", deferred)].layers
        return next(layer for layer in layers if layer["step"] == 0)["variance_difference"]

    assert first(deferred=True) < 1e-6
    assert first(deferred=False) > 1e-2


def test_frozen_norms_leave_nothing_but_rounding():
    arms = (PLAIN, ACCUMULATED, Arm("pipeline", "always", True))
    runs = train_arms(AMOEBANET, load_images(AMOEBANET), arms, precision="float64", frozen=True, steps=1)
    assert runs[2].values["gradient_difference_plain_first"] < 1e-12


def test_training_and_held_out_images_are_real_and_apart():
    images = load_images(AMOEBANET)
    assert images.train.shape == (16, 3, 64, 64)
    assert images.test.shape == (16, 3, 64, 64)
    assert not any(bool((image == other).all()) for image in images.train for other in images.test)
    again = load_images(AMOEBANET.model_copy(update={"seed": 1}))
    assert not bool((again.train == images.train).all())


def test_from_cell_to_figure(tmp_path):
    (tmp_path / "raw.json").write_text(run_transparency(UNET))
    rows = json.loads((tmp_path / "raw.json").read_text())["rows"]
    assert {row["status"] for row in rows} == {"ok"}
    assert {row["evidence"] for row in rows} == {"measured"}
    assert all(row["torch"] and row["device"] and row["config_sha256"] for row in rows)
    found = collect_transparency([tmp_path / "raw.json"], tmp_path / "t.csv", 0.05)
    exact = [v["verdict"] for v in found if v["quantity"] == "gradient_difference_accumulated_largest"]
    assert exact
    assert set(exact) == {"exact"}
    first = [path.read_bytes() for path in draw_transparency(tmp_path / "t.csv", tmp_path / "f")]
    assert first == [path.read_bytes() for path in draw_transparency(tmp_path / "t.csv", tmp_path / "f")]


def test_a_failure_is_a_row_with_a_reason():
    broken = UNET.model_copy(update={"model_args": "depth=1;B=1;C=2;size=15;in=3;out=1;dropout=0"})
    (row,) = json.loads(run_transparency(broken))["rows"]
    assert row["status"] == "error"
    assert row["reason"]


def test_all_wrong_settings_are_named():
    with pytest.raises(ConfigError) as error:
        validated(TransparencySettings, {"unet": {"steps": 9999}, "amoebanet": {"balance": "5-5"}}, ".".join)
    assert ["unet.steps" in error.value.problems[1], "amoebanet.balance" in error.value.problems[0]] == [True, True]


def test_a_file_that_is_no_result_is_named(tmp_path):
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"x\.json"):
        collect_transparency([tmp_path / "x.json"], tmp_path / "t.csv", 0.05)
    assert not (tmp_path / "t.csv").exists()
