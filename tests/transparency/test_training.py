"""Tiny real runs: what is exactly equal, and what batch normalisation makes of micro-batches."""

from __future__ import annotations

import csv
import json

import pytest

pytest.importorskip("sklearn")

from gpipe_bench.bench.spec.validation import validated
from gpipe_bench.bench.storage.kept import KeptParts
from gpipe_bench.bench.transparency import run as run_module
from gpipe_bench.bench.transparency.arms import ACCUMULATED, ARMS, PLAIN, Arm
from gpipe_bench.bench.transparency.course import Training
from gpipe_bench.bench.transparency.data import load_images
from gpipe_bench.bench.transparency.lockstep import train_arms
from gpipe_bench.bench.transparency.run import collect_transparency, run_seeds, run_transparency
from gpipe_bench.bench.transparency.settings import TransparencyCell, TransparencySettings
from gpipe_bench.bench.transparency.verdict import Margins
from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.transparency import TRANSPARENCY
from gpipe_bench.util.processes import FORKS
from tests.processes import apart

SMALL = {"batch_size": 8, "chunks": 2, "steps": 2, "held_out": 16}
UNET = TransparencyCell(
    model="unet", model_args="depth=1;B=1;C=2;size=16;in=3;out=1;dropout=0", balance=(8, 9), **SMALL
)
AMOEBANET = TransparencyCell(**SMALL)


@pytest.fixture(scope="module")
def amoebanet():
    runs = train_arms(AMOEBANET, load_images(AMOEBANET), [Training("float32", False, 2, ARMS)])
    return dict(zip((PLAIN, ACCUMULATED, *ARMS), runs, strict=True))


@pytest.fixture(scope="module")
def unet():
    """The raw result of the U-Net."""
    return run_transparency(UNET)


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
    training = Training("float64", True, 1, [Arm("pipeline", "always", True)])
    runs = train_arms(AMOEBANET, load_images(AMOEBANET), [training])
    assert runs[2].values["gradient_difference_plain_first"] < 1e-12


def test_training_and_held_out_images_are_real_and_apart():
    images = load_images(AMOEBANET)
    assert images.train.shape == (16, 3, 64, 64)
    assert images.test.shape == (16, 3, 64, 64)
    assert not any(bool((image == other).all()) for image in images.train for other in images.test)
    again = load_images(AMOEBANET.model_copy(update={"seed": 1}))
    assert not bool((again.train == images.train).all())


def test_from_cell_to_figure(tmp_path, unet):
    (tmp_path / "raw.json").write_text(json.dumps(unet))
    rows = unet["rows"]
    assert {row["status"] for row in rows} == {"ok"}
    assert {row["evidence"] for row in rows} == {"measured"}
    assert all(row["torch"] and row["device"] and row["config_sha256"] for row in rows)
    found = collect_transparency([tmp_path / "raw.json"], tmp_path / "t.csv", Margins(0.05, 0.05))
    exact = [v["verdict"] for v in found if v["quantity"] == "gradient_difference_accumulated_largest"]
    assert exact
    assert set(exact) == {"exact"}
    first = [path.read_bytes() for path in TRANSPARENCY.draw(tmp_path / "t.csv", tmp_path / "f")]
    assert first == [path.read_bytes() for path in TRANSPARENCY.draw(tmp_path / "t.csv", tmp_path / "f")]


def test_a_table_of_another_kind_is_refused(tmp_path):
    (tmp_path / "t.csv").write_text("workload,contender,ratio\nunet,loop,1.0\n")
    with pytest.raises(ConfigError, match=r"columns of .*t\.csv must include .*arm"):
        TRANSPARENCY.draw(tmp_path / "t.csv", tmp_path / "f")


def trained_by_many_and_by_one():
    many, one = (run_transparency(UNET, processes) for processes in (3, 1))
    for row in many["rows"] + one["rows"]:
        del row["started_utc"]
    return many, one


@pytest.mark.skipif(not FORKS, reason="all is done in one process here")
def test_several_processes_train_the_same():
    """In a process of its own, since this one has trained before, and cannot be forked any more."""
    many, one = apart(trained_by_many_and_by_one)
    assert many == one
    assert {row["status"] for row in many["rows"]} == {"ok"}
    # Of one training in float32 and two in float64: 8 arms for 2 steps, and twice 5 arms for 1.
    assert len(many["steps"]) == 26


def test_seeds_that_are_finished_are_not_trained_again(tmp_path, monkeypatch):
    cells = [UNET.model_copy(update={"seed": seed}) for seed in (0, 1)]
    first = run_transparency(cells[0])
    KeptParts.beside(tmp_path / "raw.json", "key").add(cells[0].id, first)
    joined = run_seeds(cells, KeptParts.beside(tmp_path / "raw.json", "key"))
    assert [row["seed"] for row in joined["rows"]] == [0] * 18 + [1] * 18
    assert joined["rows"][:18] == first["rows"]
    assert len(joined["steps"]) == 2 * len(first["steps"])
    monkeypatch.setattr(run_module, "run_transparency", None)
    assert run_seeds(cells, KeptParts.beside(tmp_path / "raw.json", "key")) == joined


def test_a_failure_is_a_row_with_a_reason():
    broken = UNET.model_copy(update={"model_args": "depth=1;B=1;C=2;size=15;in=3;out=1;dropout=0"})
    (row,) = run_transparency(broken)["rows"]
    assert row["status"] == "error"
    assert row["reason"]


def test_all_wrong_settings_are_named():
    with pytest.raises(ConfigError) as error:
        validated(TransparencySettings, {"unet": {"steps": 9999}, "amoebanet": {"balance": "5-5"}}, ".".join)
    assert ["unet.steps" in error.value.problems[1], "amoebanet.balance" in error.value.problems[0]] == [True, True]


def test_a_file_that_is_no_result_is_named(tmp_path):
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"x\.json"):
        collect_transparency([tmp_path / "x.json"], tmp_path / "t.csv", Margins(0.05, 0.05))
    assert not (tmp_path / "t.csv").exists()


@pytest.mark.parametrize(
    ("table", "column", "value", "said"),
    [
        (
            "rows",
            "accuracy_fraction",
            float("inf"),
            "accuracy_fraction must be a finite number, at least 0 and",
        ),
        ("rows", "loss_last", True, "loss_last must be a finite number, got True"),
        ("steps", "loss", float("nan"), "loss must be a finite number, got nan"),
        ("steps", "step", -1, "step must be a whole number, at least 0, got -1"),
        ("layers", "mean_difference", "0", "mean_difference must be a finite number, at least 0, got '0'"),
        ("configurations", "configuration", "{}", "configuration that its row has the digest of"),
    ],
)
def test_a_value_that_its_column_may_not_hold_is_refused(tmp_path, unet, table, column, value, said):
    records = [{**unet[table][0], column: value}, *unet[table][1:]] if unet[table] else [{column: value}]
    (tmp_path / "raw.json").write_text(json.dumps({**unet, table: records}))
    with pytest.raises(ConfigError, match=r"raw\.json") as caught:
        collect_transparency([tmp_path / "raw.json"], tmp_path / "t.csv", Margins(0.05, 0.05))
    assert any(said in problem for problem in caught.value.problems)
    assert not (tmp_path / "t.csv").exists()


def test_every_digest_leads_to_its_settings(tmp_path, unet):
    """Those of the runs to their settings, those of the claims to the runs behind them."""
    (tmp_path / "raw.json").write_text(json.dumps(unet))
    found = collect_transparency([tmp_path / "raw.json"], tmp_path / "t.csv", Margins(0.05, 0.05))
    with (tmp_path / "t_configurations.csv").open(newline="") as file:
        known = {line["config_sha256"]: json.loads(line["configuration"]) for line in csv.DictReader(file)}
    assert known[UNET.config_sha256]["learning_rate"] == UNET.learning_rate
    assert {known[claim["config_sha256"]]["runs"][0] for claim in found} == {UNET.config_sha256}


def test_a_model_without_batch_normalisation_says_that_there_is_nothing_to_defer(amoebanet, unet):
    assert {row["batch_norms"] for row in unet["rows"]} == {0}
    assert {run.values["batch_norms"] for run in amoebanet.values()} == {len(amoebanet[PLAIN].layers) // 2}
