"""The race of peers: a tiny real one with every contender that is installed, and its statistics."""

from __future__ import annotations

import json
import tomllib
from importlib.util import find_spec

import numpy as np
import pandas as pd
import pytest

from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.style import drawing
from gpipe_bench.suite.datapackage.check import check_folder
from gpipe_bench.suite.datapackage.descriptor import write_descriptor
from gpipe_bench.suite.datapackage.take import take_reference
from gpipe_bench.suite.machine import Machine
from studies.command import draw_reference
from studies.peers import race
from studies.peers.cases import PeerCase
from studies.peers.contenders import CONTENDERS, REFERENCE, Contender, contenders_of
from studies.peers.figure import FIGURE as PEERS
from studies.peers.figure import LOOKS, limit
from studies.peers.race import ContenderTimes, PeerError, Visit, race_case
from studies.peers.settings import Settings, read_settings
from studies.peers.table import write_race
from tests.figures.marks import cut, noting_cuts
from tests.project.tree import ROOT

# Each contender has processes of its own.
pytestmark = pytest.mark.timeout(600)
CPU = Machine("cpu", 1)
NAMES = ("engine-scheduled", "torchgpipe", "plain", "loop")
# On a machine that does other things too, threads inside tiny operators wait for each other.
FEW = [name for name in CONTENDERS if not name.endswith("-threads")]


def case(workload="cells", **changes):
    model, arguments = {"cells": ("tiny", "L=2;width=4")}.get(workload, ("unet", "depth=2;B=1;C=4;size=16;dropout=0"))
    settings = {"model": model, "model_args": arguments, "partitions": 2, "chunks": 4, "checkpoint": "always"}
    settings |= {"batch_size": 8, "balance": (1, 1) if model == "tiny" else (14, 15), "rounds": 2, "cores": 2}
    return PeerCase(workload=workload, **{**settings, **changes})


# --- a real race -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """The rows of a race of all contenders on a network with skips."""
    folder = tmp_path_factory.mktemp("race")
    settings = read_settings({"contenders": FEW, "unet": {"rounds": 1}}, "quick")
    cases = [one for one in settings.cases(CPU) if one.workload == "unet"]
    facts, raced = race.run_race(cases, contenders_of(FEW), timeout_s=60, balance_s=0.1, report=lambda line: None)
    write_race(raced, facts, 1e-9, folder / "peers.csv", settings.configuration)
    return folder / "peers.csv"


def test_every_contender_ran_or_says_why_not_and_has_the_gradients_of_the_plain_module(table):
    rows = pd.read_csv(table, keep_default_na=False)
    assert len(rows) == sum(CONTENDERS[name].runs("unet") for name in FEW)
    for row in rows.to_dict("records"):
        installed = find_spec(row["package"]) is not None
        assert row["status"] == ("ok" if installed else "skipped"), row["reason"]
        assert row["gradients"] == "equal" if installed else "make peers" in row["reason"]


def test_checkpoints_run_each_layer_twice_and_pytorchs_zero_bubble_more_often(table):
    rows = pd.read_csv(table).query("status == 'ok'")
    for name, found in zip(rows["contender"], rows["forward_passes"], strict=True):
        if name in {"pipelining-zero-bubble", "pipelining-zb-v"}:
            assert found > 2
        else:
            assert found == (1 if name == "plain" else 2), name


def test_pipelines_of_processes_have_one_for_each_device(table):
    rows = pd.read_csv(table)
    several = rows["contender"].str.startswith(("distributed", "pipelining"))
    assert set(rows[several]["processes"]) == {2}
    assert set(rows[~several & (rows["contender"] != "loop-processes")]["processes"]) == {1}


def test_a_race_is_drawn_and_taken_into_the_reference_results(table, tmp_path):
    assert len(PEERS.draw(table, tmp_path / "peers")) == 3
    take_reference(table, tmp_path / "reference")
    write_descriptor(tmp_path / "reference")
    assert check_folder(tmp_path / "reference") == []


@pytest.mark.parametrize(("model_args", "said"), [("L=0;width=4", "L of tiny must be an integer, at least 1")])
def test_a_failure_in_a_process_is_the_reason_of_the_row(model_args, said):
    with pytest.raises(PeerError, match=said) as caught:
        race.Entrant(CONTENDERS["plain"], case(model_args=model_args), 60)
    assert caught.value.status == "error"


def test_a_package_that_is_not_installed_is_skipped_with_the_way_to_install_it():
    absent = Contender("absent", "torchgpipe", package="no_such_package", version="1.2")
    with pytest.raises(PeerError, match=r"no_such_package is not installed; make peers, .*no_such_package==1\.2"):
        race.Entrant(absent, case(), 60)


# --- turns -----------------------------------------------------------------------------------------------------------


class Stub:
    """Answers like a contender's processes, and writes down in which order everybody was asked."""

    version, step_s = "1.0", 0.1

    def __init__(self, contender, case, diary, fails=""):
        self.name, self._diary, self._fails = contender.name, diary, fails
        self._note(f"open {case.precision}")

    def _note(self, what):
        self._diary.append((self.name, what))
        if self._fails and what.startswith(self._fails):
            raise PeerError("error", f"{what} failed")

    def visit(self, warmup, steps):
        self._note(f"visit {warmup} {steps}")
        return [0.1] * steps, [0.1] * steps

    def gradients(self):
        self._note("gradients")
        return [np.full(3, 2.0), np.array([1.0 if self.name == "plain" else 1.5])], 2.0

    def close(self):
        self._note("close")


def ran(fails=None, **changes):
    diary = []
    enter = lambda who, what: Stub(who, what, diary, (fails or {}).get(who.name, ""))  # noqa: E731
    done = race_case(case(rounds=6, visit_s=0.25, **changes), contenders_of(NAMES), enter)
    return {outcome.contender.name: outcome for outcome in done}, diary


def turns(diary):
    return [name for name, what in diary if what.startswith("visit")]


def test_in_every_round_everybody_runs_once_in_an_order_that_is_drawn_anew():
    outcomes, diary = ran()
    rounds = [turns(diary)[k : k + 4] for k in range(0, 24, 4)]
    assert len(turns(diary)) == 24
    assert all(sorted(names) == sorted(NAMES) for names in rounds)
    assert len({tuple(names) for names in rounds}) > 1
    for name, outcome in outcomes.items():
        assert [(visit.round, visit.position) for visit in outcome.visits] == [
            (number, names.index(name)) for number, names in enumerate(rounds)
        ]


def test_the_order_follows_from_the_seed():
    assert turns(ran()[1]) == turns(ran()[1]) != turns(ran(seed=1)[1])


def test_all_are_open_before_anybody_is_timed_and_gradients_come_last_in_fresh_processes():
    _, diary = ran()
    words = [what.split()[0] for _, what in diary]
    assert words == ["open"] * 4 + ["visit"] * 24 + ["close"] * 4 + ["open", "gradients", "close"] * 4
    assert [what for _, what in diary if what.startswith("open")] == ["open float32"] * 4 + ["open float64"] * 4


@pytest.mark.parametrize(("visit_s", "steps"), [(0.25, 2), (0.1, 1), (0.05, 1), (99.0, 50)])
def test_a_visit_has_an_untimed_step_and_as_many_steps_as_fit(visit_s, steps):
    diary = []
    race_case(case(rounds=1, visit_s=visit_s), contenders_of(["loop"]), lambda who, what: Stub(who, what, diary))
    assert ("loop", f"visit 1 {steps}") in diary


@pytest.mark.parametrize("where", ["open", "visit", "gradients"])
def test_one_that_fails_is_out_and_the_others_go_on(where):
    outcomes, diary = ran({"torchgpipe": where})
    assert outcomes["torchgpipe"].status == "error"
    assert [outcomes[name].status for name in NAMES if name != "torchgpipe"] == ["ok"] * 3
    assert turns(diary).count("torchgpipe") == {"open": 0, "visit": 1, "gradients": 6}[where]
    assert outcomes["loop"].gradient_difference == 0.25, "largest difference 0.5 over largest value 2"


def test_contenders_with_two_partitions_per_device_have_a_balance_of_their_own():
    names = ("pipelining-gpipe", "pipelining-interleaved", "plain")
    done = race_case(
        case("unet", fine_balance=(7, 7, 7, 8)), contenders_of(names), lambda who, what: Stub(who, what, [])
    )
    balances = {outcome.contender.name: outcome.case.balance for outcome in done}
    assert balances == {"plain": (14, 15), "pipelining-gpipe": (14, 15), "pipelining-interleaved": (7, 7, 7, 8)}


def test_gradients_of_other_shapes_or_that_are_no_numbers_are_no_match():
    assert race.difference([np.ones(2)], [np.ones(3)]) == np.inf
    assert race.difference([np.array([np.nan])], [np.ones(1)]) == np.inf
    assert race.difference([np.ones(1)], [np.zeros(1)]) == np.inf
    assert race.difference([np.zeros(1)], [np.zeros(1)]) == 0


# --- statistics ------------------------------------------------------------------------------------------------------

# The machine gets slower by half from round to round; the ratio stays.
SLOWING = [1.0, 1.5, 2.25, 3.4]


def raced(workload, shares, **changes):
    """A race whose steps took some share of the times of a machine that slows down."""
    one = case(workload, **changes)
    return [
        ContenderTimes(
            one, CONTENDERS[name], "1.0", visits=[Visit(k, 0, [share * s], [s]) for k, s in enumerate(SLOWING)]
        )
        for name, share in shares.items()
    ]


CELLS = raced("cells", {"engine-scheduled": 0.5, "torchgpipe": 1, "loop": 0.1})
UNET = raced("unet", {"engine-scheduled": 0.6, "pipelining-gpipe": 0.8, "loop": 1, "loop-processes": 0.55})


def rows_of(tmp_path, *races):
    rows = write_race(races, {"device": "cpu Some CPU", "torch": "2.13.0"}, 1e-4, tmp_path / "p.csv", "{}")
    return {(row.workload, row.contender): row for row in rows}


def test_a_drift_of_the_machine_does_not_widen_a_ratio(tmp_path):
    row = rows_of(tmp_path, CELLS)["cells", "engine-scheduled"]
    assert (row.baseline, row.ratio, row.ratio_low, row.ratio_high) == ("torchgpipe", 0.5, 0.5, 0.5)
    assert row.host_time_per_cell_us == pytest.approx(1e3 * row.step_time_ms / 8)


def test_networks_are_held_to_the_plain_loop_in_throughput_and_to_its_limit(tmp_path):
    rows = rows_of(tmp_path, UNET)
    row = rows["unet", "engine-scheduled"]
    assert (row.baseline, row.ratio) == ("loop", pytest.approx(1 / 0.6))
    assert row.throughput_samples_per_s == pytest.approx(8 / row.step_time_ms * 1e3)
    assert row.limit_ms == pytest.approx(rows["unet", "loop"].step_time_ms * 5 / 8)


def test_cores_that_are_slower_together_make_the_limit_longer_by_as_much(tmp_path):
    """Two loops, each over half the micro-batches, take 0.55 of the whole loop's time: each core is a tenth slower."""
    rows = rows_of(tmp_path, UNET)
    for name in ("engine-scheduled", "pipelining-gpipe"):
        assert rows["unet", name].gap_contention_ms == pytest.approx(0.1 * rows["unet", name].limit_ms)
    assert rows["unet", "loop-processes"].gap_contention_ms is None, "it is no pipeline"


def test_without_the_baseline_there_is_no_ratio_and_one_round_has_no_interval(tmp_path):
    one = case()
    once = ContenderTimes(one, CONTENDERS["torchgpipe"], visits=[Visit(0, 0, [1.0], [1.0])])
    absent = ContenderTimes(one, CONTENDERS["torchgpipe"], status="skipped", reason="not installed")
    engine = ContenderTimes(one, CONTENDERS["engine-scheduled"], visits=once.visits)
    rows = rows_of(tmp_path, [engine, absent])
    assert rows["cells", "engine-scheduled"].ratio is None
    assert (rows["cells", "torchgpipe"].status, rows["cells", "torchgpipe"].step_time_ms) == ("skipped", None)
    row = rows_of(tmp_path, [once])["cells", "torchgpipe"]
    assert (row.ratio, row.ratio_low, row.ratio_high) == (1.0, None, None)


@pytest.mark.parametrize(("found", "verdict"), [(1e-6, "equal"), (1e-3, "differ"), (float("inf"), "differ")])
def test_the_verdict_on_gradients(tmp_path, found, verdict):
    one = raced("cells", {"loop": 1})
    one[0].gradient_difference = found
    assert rows_of(tmp_path, one)["cells", "loop"].gradients == verdict


def test_every_step_is_in_the_companion(tmp_path):
    rows_of(tmp_path, CELLS)
    assert len(pd.read_csv(tmp_path / "p_steps.csv")) == 3 * len(SLOWING)


# --- settings and figures --------------------------------------------------------------------------------------------


def test_the_defaults_are_the_race_that_the_page_describes():
    cases = Settings().cases(CPU)
    assert len([one for one in cases if one.workload == "cells"]) == 36
    assert [one.workload for one in cases[36:]] == ["convnet"] * 2 + ["unet"] * 2 + ["decoder"] * 2
    assert len({one.id for one in cases}) == len(cases)


def test_settings_lie_over_a_preset_and_every_problem_is_said():
    assert read_settings({"cells": {"rounds": 4}}, "quick").cells.partitions == (2,)
    with pytest.raises(ConfigError) as caught:
        read_settings({"cells": {"rounds": 0}, "contenders": ["nobody"], "unet": {"batch_size": 7}})
    said = sorted(problem.partition(" must")[0] for problem in caught.value.problems)
    assert said == ["peers: cells.rounds", "peers: contenders", "peers: unet.batch_size"]


def test_neighbours_share_devices_that_are_too_few():
    wide = Settings().cases(Machine("cuda", 2))[9]
    assert (wide.partitions, wide.partition_devices()) == (8, ["cuda:0"] * 4 + ["cuda:1"] * 4)


def test_who_takes_part_in_what():
    assert [name for name, one in CONTENDERS.items() if not one.runs("unet")] == [
        "engine-autograd-one-thread", "engine-scheduled-one-thread",
    ]  # fmt: skip
    assert REFERENCE in CONTENDERS


def test_the_pins_of_optional_peers_are_said_once_each():
    pins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["peers"]
    assert pins == [f"{one.package}=={one.version}" for one in CONTENDERS.values() if one.version]


def test_everybody_looks_different():
    assert set(LOOKS) == set(CONTENDERS)
    assert len({(colour, marker) for colour, _, marker in LOOKS.values()}) == len(LOOKS)
    # Text is drawn as it is, also that of a marker: "$G$" would be three letters on one another.
    assert [marker for _, _, marker in LOOKS.values() if str(marker).startswith("$")] == []


def test_the_figure_has_the_limit_and_tables_without_networks_or_cells_are_drawn(tmp_path):
    rows_of(tmp_path, CELLS, UNET)
    rows = pd.read_csv(tmp_path / "p.csv", keep_default_na=True)
    rows = rows.astype(object).where(rows.notna(), None)
    with drawing():
        assert limit(rows[(rows["workload"] == "unet") & (rows["checkpoint"] == "always")]) == pytest.approx(8 / 5)
        for part in ("cells", "unet"):
            assert cut(PEERS.canvas(rows[rows["workload"] == part])) == []


def test_a_mark_at_the_left_end_of_the_axis_is_whole_and_marks_are_explained(tmp_path):
    rows_of(tmp_path, raced("cells", {"engine-scheduled": 0.5, "torchgpipe": 1, "plain": 0.001}))
    rows = pd.read_csv(tmp_path / "p.csv", keep_default_na=True)
    with drawing():
        figure = PEERS.canvas(rows.astype(object).where(rows.notna(), None))
        assert cut(figure) == []
    texts = " ".join(text.get_text() for axes in figure.axes for text in axes.texts)
    assert "bars: 95 % intervals" in texts
    assert "Host time is per micro-batch and partition; less is better." in texts


def test_the_committed_figures_are_those_of_the_committed_tables(tmp_path, monkeypatch):
    monkeypatch.setattr("gpipe_bench.figures.style.SUFFIXES", (".svg",))
    cuts = noting_cuts(monkeypatch)
    drawn = [path for paths in draw_reference(PEERS, [""], tmp_path) for path in paths]
    assert len(drawn) == 4
    assert cuts == []
    for path in drawn:
        assert path.read_bytes() == (ROOT / "figures/reference" / path.relative_to(tmp_path)).read_bytes()


def test_settings_are_plain_data():
    assert read_settings(json.loads(json.dumps(Settings().model_dump(mode="json")))) == Settings()
