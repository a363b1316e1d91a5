"""The study of training: tiny real runs, and what is exactly equal in them."""

from __future__ import annotations

import csv
import json

import pytest

pytest.importorskip("sklearn")

from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.base import Selection
from gpipe_bench.suite.datapackage.check import check_folder
from gpipe_bench.suite.datapackage.descriptor import write_descriptor
from gpipe_bench.suite.datapackage.take import take_reference
from gpipe_bench.util.processes import FORKS
from studies.command import draw_reference
from studies.training.data import load_images
from studies.training.figure import FIGURE as TRAINING
from studies.training.settings import MODELS, Case, read_settings
from studies.training.tables import collect, run_cases
from studies.training.train import ACCUMULATED, ARMS, PLAIN, Arm, Training, train_arms
from studies.training.verdict import Margins
from tests.figures.marks import noting_cuts
from tests.processes import apart
from tests.project.tree import ROOT

SMALL = {"batch_size": 8, "chunks": 2, "steps": 2, "held_out": 16}
UNET = Case(model="unet", model_args="depth=1;B=1;C=2;size=16;in=3;out=1;dropout=0", balance=(8, 9), **SMALL)
AMOEBANET = Case(**SMALL)


@pytest.fixture(scope="module")
def amoebanet():
    runs = train_arms(AMOEBANET, load_images(AMOEBANET), [Training("float32", False, 2, ARMS)])
    return dict(zip((PLAIN, ACCUMULATED, *ARMS), runs, strict=True))


@pytest.fixture(scope="module")
def unet():
    """The raw result of the U-Net."""
    return run_cases([UNET])


def test_the_pipeline_is_accumulated_microbatches_bit_for_bit(amoebanet):
    for arm, run in amoebanet.items():
        if arm.arm == "pipeline":
            assert run.values["gradient_difference_accumulated_largest"] == 0.0
            assert run.values["loss_difference_accumulated_largest"] == 0.0


def test_microbatches_are_normalised_by_their_own_statistics(amoebanet):
    assert amoebanet[Arm("pipeline", "never", True)].values["gradient_difference_plain_first"] > 1e-2


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
    training = Training("float64", True, 1, [Arm("pipeline", "always", True)])
    runs = train_arms(AMOEBANET, load_images(AMOEBANET), [training])
    assert runs[2].values["gradient_difference_plain_first"] < 1e-12


def test_training_and_held_out_images_are_real_and_apart():
    images = load_images(AMOEBANET)
    assert images.train.shape == images.test.shape == (16, 3, 64, 64)
    assert not any(bool((image == other).all()) for image in images.train for other in images.test)


def test_from_a_case_to_tables_that_the_reference_results_take_and_to_a_figure(tmp_path, unet):
    (tmp_path / "raw.json").write_text(json.dumps(unet))
    assert {(row["status"], row["evidence"]) for row in unet["rows"]} == {("ok", "measured")}
    found = collect([tmp_path / "raw.json"], tmp_path / "transparency.csv", Margins(0.05, 0.05))
    exact = {v["verdict"] for v in found if v["quantity"] == "gradient_difference_accumulated_largest"}
    assert exact == {"exact"}
    paths = TRAINING.draw(tmp_path / "transparency.csv", tmp_path / "f", Selection(model="unet"))
    assert [path.suffix for path in paths] == [".svg", ".pdf", ".png"]
    take_reference(tmp_path / "transparency.csv", tmp_path / "reference")
    write_descriptor(tmp_path / "reference")
    assert check_folder(tmp_path / "reference") == []


def test_every_digest_leads_to_its_settings(tmp_path, unet):
    """Those of the runs to their settings, those of the claims to the runs behind them."""
    (tmp_path / "raw.json").write_text(json.dumps(unet))
    found = collect([tmp_path / "raw.json"], tmp_path / "t.csv", Margins(0.05, 0.05))
    with (tmp_path / "t_configurations.csv").open(newline="") as file:
        known = {line["config_sha256"]: json.loads(line["configuration"]) for line in csv.DictReader(file)}
    assert known[UNET.config_sha256]["learning_rate"] == UNET.learning_rate
    assert {known[claim["config_sha256"]]["runs"][0] for claim in found} == {UNET.config_sha256}


def trained_by_many_and_by_one():
    many, one = (run_cases([UNET], processes) for processes in (3, 1))
    for row in many["rows"] + one["rows"]:
        del row["started_utc"]
    return many, one


@pytest.mark.skipif(not FORKS, reason="all is done in one process here")
def test_several_processes_train_the_same():
    """In a process of its own, since this one has trained before, and cannot be forked any more."""
    many, one = apart(trained_by_many_and_by_one)
    assert many == one
    # Of one training in float32 and two in float64: 8 arms for 2 steps, and twice 5 arms for 1.
    assert len(many["steps"]) == 26


def test_a_failure_is_a_row_with_a_reason():
    broken = UNET.model_copy(update={"model_args": "depth=1;B=1;C=2;size=15;in=3;out=1;dropout=0"})
    (row,) = run_cases([broken])["rows"]
    assert row["status"] == "error"
    assert row["reason"]


def test_all_wrong_settings_are_named():
    with pytest.raises(ConfigError) as error:
        read_settings({"unet": {"steps": 9999}, "amoebanet": {"balance": "5-5"}})
    said = sorted(problem.partition(" must")[0] for problem in error.value.problems)
    assert said == ["transparency: amoebanet.balance", "transparency: unet.steps"]


def test_a_model_without_batch_normalisation_says_that_there_is_nothing_to_defer(amoebanet, unet):
    assert {row["batch_norms"] for row in unet["rows"]} == {0}
    assert {run.values["batch_norms"] for run in amoebanet.values()} == {len(amoebanet[PLAIN].layers) // 2}


def test_the_committed_figures_are_those_of_the_committed_tables(tmp_path, monkeypatch):
    monkeypatch.setattr("gpipe_bench.figures.style.SUFFIXES", (".svg",))
    cuts = noting_cuts(monkeypatch)
    drawn = [path for paths in draw_reference(TRAINING, MODELS, tmp_path) for path in paths]
    assert len(drawn) == 2
    assert cuts == []
    for path in drawn:
        assert path.read_bytes() == (ROOT / "figures/reference" / path.relative_to(tmp_path)).read_bytes()
