"""The whole path in seconds, from configuration to figure; peers that are not installed are skipped rows."""

from __future__ import annotations

import csv
import importlib.util
import json

import pytest

from gpipe_bench.bench.peers.contenders import CONTENDERS
from gpipe_bench.bench.peers.settings import QUICK
from gpipe_bench.measure.host import cpu_count
from tests.workflow.checkouts import checkout, snakemake_in

# On a machine that does other things too, threads inside tiny operators wait for each other.
FEW = [name for name in CONTENDERS if not name.endswith("-threads")]
OUTPUTS = [
    *(f"results/peers{name}.csv" for name in ("", "_ratios", "_steps")),
    *(f"figures/peers_measured.{suffix}" for suffix in ("pdf", "png", "svg")),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A checkout in which the target ``peers`` has run with the quick settings."""
    place = checkout(tmp_path_factory.mktemp("race"))
    peers = {**QUICK.model_dump(mode="json"), "contenders": FEW}
    (place / "quick.yaml").write_text(json.dumps({"device": "cpu", "peers": peers}))
    done = snakemake_in(place)("peers", "--configfile", "quick.yaml")
    assert done.returncode == 0, done.stdout
    return place


@pytest.fixture(scope="module")
def table(place):
    return place / "results" / "peers.csv"


def test_everything_promised_is_there_and_is_made_once(place):
    assert [name for name in OUTPUTS if not (place / name).stat().st_size] == []
    again = snakemake_in(place)("peers", "--configfile", "quick.yaml")
    assert "Nothing to be done" in again.stdout


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_contender_ran_or_says_why_not(table):
    rows = rows_of(table)
    assert {row["workload"] for row in rows} == {"cells", "combinations", "convnet", "unet", "decoder"}
    asked = [name for workload in {row["workload"] for row in rows} for name in FEW if CONTENDERS[name].runs(workload)]
    assert sorted(row["contender"] for row in rows) == sorted(asked)
    for row in rows:
        optional = CONTENDERS[row["contender"]].kind == "rival"
        installed = not optional or importlib.util.find_spec(row["package"]) is not None
        assert row["status"] == ("ok" if installed else "skipped"), row["reason"]
        assert installed or "make peers" in row["reason"]


def test_all_gradients_are_those_of_the_plain_module(table):
    good = [row for row in rows_of(table) if row["status"] == "ok"]
    assert good
    assert [row["contender"] for row in good if row["gradients"] != "equal"] == []
    assert max(float(row["gradient_difference"]) for row in good) < 1e-12


def test_rows_are_complete(table):
    for row in rows_of(table):
        if row["status"] != "ok":
            continue
        names = ["step_time_ms", "cpu_time_ms", "balance", "config_sha256"]
        names += [] if row["workload"] == "combinations" else ["peak_live_mib", "limit_ms", "gap_ms"]
        assert [name for name in names if not row[name]] == []
        tiny = row["workload"] in {"cells", "combinations"}
        assert bool(row["host_time_per_cell_us"]) == tiny
        assert bool(row["throughput_samples_per_s"]) != tiny
        pipeline = CONTENDERS[row["contender"]].pipeline
        assert bool(row["gap_other_ms"]) <= (pipeline and not tiny)
        assert len(row["balance"].split("-")) == int(row["partitions"])
        assert row["partitions"] == ("4" if CONTENDERS[row["contender"]].two_per_device else "2")


def test_the_engine_says_which_components_were_on(table):
    variants = {(row["contender"][:6], row["workload"] == "combinations", row["variant"]) for row in rows_of(table)}
    expected = {("engine", False, "dep-str-ptl"), ("engine", True, "baseline")}
    assert {(name, other, label) for name, other, label in variants if name == "engine"} == expected
    assert {label for name, _, label in variants if name != "engine"} == {""}


def test_processes_of_a_contender(table):
    processes = {(row["contender"], row["processes"]) for row in rows_of(table)}
    several = {name for name, _ in processes if name.startswith(("distributed", "pipelining"))} | {"loop-processes"}
    counts = {name: {count for other, count in processes if other == name} for name, _ in processes}
    loops = str(min(2, cpu_count()))
    assert counts == {name: {"1" if name not in several else loops if name[0] == "l" else "2"} for name in counts}


def test_peaks_differ_where_the_schedule_does(table):
    peaks = {row["contender"]: float(row["peak_live_mib"]) for row in rows_of(table) if row["workload"] == "unet"
             if row["status"] == "ok"}  # fmt: skip
    # Checkpoints in the one, none in the other.
    assert peaks["loop"] < peaks["engine-autograd"] < peaks["plain"]


def test_checkpoints_run_each_layer_twice_and_pytorchs_zero_bubble_more_often(table):
    passes = {(row["checkpoint"], row["contender"]): float(row["forward_passes"]) for row in rows_of(table)
              if row["workload"] in {"convnet", "unet", "decoder"} if row["status"] == "ok"}  # fmt: skip
    for (mode, name), found in passes.items():
        recomputes = mode == "always" and not name.startswith("plain")
        if recomputes and name in {"pipelining-zero-bubble", "pipelining-zb-v"}:
            assert found > 2
        else:
            assert found == (2 if recomputes else 1), name
