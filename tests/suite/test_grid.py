"""An experiment is blocks of data: which cells a few lines of configuration ask for, and what is wrong with them."""

from __future__ import annotations

import os
from collections import Counter
from itertools import product

import pytest

from gpipe_bench.components import PUBLISHED, Components
from gpipe_bench.errors import ConfigError
from gpipe_bench.models.table import format_arguments, parse_arguments
from gpipe_bench.schedules import SCHEDULES
from gpipe_bench.suite.cells import MeasuredCell
from gpipe_bench.suite.experiments.config import load_config
from gpipe_bench.suite.experiments.grid import points, read_experiment
from gpipe_bench.suite.machine import Machine

CPU = Machine("cpu", 1)
NET = {"model": "unet", "model_args": "depth=1;B=1;C=2;size=4"}  # 17 layers
SMALL = {"run": "simulated", **NET, "batch_size": 8, "chunks": 2, "partitions": 2}
MEASURED = {**SMALL, "run": "measured"}


def experiment(**blocks):
    return read_experiment(blocks, ".".join)


def simulated(**settings):
    return experiment(a={**SMALL, **settings}).simulated


def runs(machine=CPU, **settings):
    return experiment(a={**MEASURED, **settings}).runs(machine)


def problems(**settings):
    with pytest.raises(ConfigError) as caught:
        experiment(a={"run": "simulated", **NET, **settings})
    return list(caught.value.problems)


def test_every_list_is_an_axis_and_the_last_one_varies_fastest():
    cells = simulated(partitions=[1, 2], checkpoint=["always", "never"], chunks=4)
    assert [(cell.partitions, cell.checkpoint, cell.chunks) for cell in cells] == [
        (1, "always", 4), (1, "never", 4), (2, "always", 4), (2, "never", 4),
    ]  # fmt: skip


def test_each_is_an_axis_of_points_where_it_stands_and_points_may_hold_lists_and_points():
    found = points({"a": [1, 2], "each": [{"b": 3, "c": [4, 5]}, {"each": [{"d": 6}]}], "e": [7, 8]})
    assert [tuple(point.items()) for point in found] == [
        (("a", a), *own, ("e", e))
        for a in (1, 2)
        for own in [(("b", 3), ("c", 4)), (("b", 3), ("c", 5)), (("d", 6),)]
        for e in (7, 8)
    ]


def test_a_cell_that_is_asked_for_twice_comes_once():
    block = {"run": "simulated", **NET, "partitions": 2, "chunks": [1, 2, 4]}
    cells = experiment(a={**block, "each": [{"batch_size": 8}, {"microbatch_size": 2}]}).simulated
    assert [(cell.chunks, cell.batch_size) for cell in cells] == [(1, 8), (1, 2), (2, 8), (2, 4), (4, 8)]
    both = experiment(a=SMALL, b={**SMALL, "chunks": [2, 4]}).simulated
    assert [cell.chunks for cell in both] == [2, 4]


def test_words_stand_for_several_values():
    assert [cell.variant for cell in simulated(variant="published")] == list(PUBLISHED)
    factorial = [cell.variant for cell in simulated(variant=["published", "factorial", "baseline"])]
    assert factorial[:4] == list(PUBLISHED)
    assert sorted(factorial) == sorted(components.label for components in Components.factorial())
    assert [cell.schedule for cell in simulated(schedule="all")] == list(SCHEDULES)
    assert [cell.schedule for cell in simulated(schedule=[None, "1f1b"])] == [None, "1f1b"]


def test_workers_are_devices_of_the_schedule():
    block = {key: value for key, value in SMALL.items() if key != "partitions"}
    cells = experiment(a={**block, "workers": [2, 4], "schedule": "all"}).simulated
    assert Counter((cell.schedule, cell.schedule_devices) for cell in cells) == dict.fromkeys(
        product(SCHEDULES, (2, 4)), 1
    )


def test_what_is_left_out_is_that_of_a_cell_but_balance_and_autograd_engine():
    (cell,) = experiment(a={"run": "simulated", "model": "vit", "chunks": 2}).simulated
    assert (cell.balance, cell.flavour, cell.checkpoint, cell.profile) == ((), "current", "except_last", "p40")
    assert cell.settings()["model_args"] == format_arguments(parse_arguments("vit", ""))
    assert [cell.partitions for cell in experiment(a={**NET, "run": "emulated", "balance": "8-9"}).emulated] == [2]


def test_a_balance_may_be_a_list_in_an_axis_or_text():
    block = {key: value for key, value in SMALL.items() if key != "partitions"}
    cells = experiment(a={**block, "balance": [17, "8-9", [5, 6, 6]]}).simulated
    assert [cell.balance for cell in cells] == [(17,), (8, 9), (5, 6, 6)]


def test_a_block_or_a_setting_that_is_null_is_left_out():
    assert experiment(a=SMALL, b=None) == experiment(a={**SMALL, "each": None, "profile": None, "timelines": None})


def test_timelines_are_those_of_their_blocks():
    made = experiment(a={**SMALL, "timelines": True}, b={**SMALL, "chunks": 4}, c={**SMALL, "run": "emulated"})
    assert made.timelines == {made.simulated[0].id}


def test_a_block_of_published_tables_has_their_rows_as_points():
    made = experiment(
        a={"run": "published", "table": ["unet-speed"]},
        b={"run": "emulated", "table": "unet-speed"},
        c={"run": "measured", "where": "gpu", "table": "unet-speed", "steps": 2, "repeats": 3},
    )
    assert made.tables == ["unet-speed"]
    assert sorted(cell.partitions for cell in made.emulated) == [1, 1, 2, 4, 8]
    found = made.runs(Machine("cuda", 4))
    assert Counter((run.cell.partitions, run.cell.devices) for run in found) == {(1, 1): 6, (2, 2): 3, (4, 4): 3}
    assert made.runs(CPU) == []


# --- what is measured where ------------------------------------------------------------------------------------------


def test_gpus_that_do_not_suffice_leave_a_cell_out_unless_partitions_share_them():
    found = runs(Machine("cuda", 2), partitions=[1, 2, 4])
    assert [(run.cell.partitions, run.cell.devices, run.cell.transfer) for run in found] == [
        (1, 1, "direct"), (2, 2, "direct"),
    ]  # fmt: skip
    (run,) = runs(Machine("cuda", 2), partitions=4, share_devices=True)
    assert (run.cell.devices, run.cell.transfer) == (2, "host")
    (run,) = runs(Machine("cuda", 2), partitions=4, share_devices=True, transfer="direct")
    assert run.cell.transfer == "direct"
    assert runs(Machine("cuda", 1), processes=2, schedule="1f1b", share_devices=True) == []


def test_a_cpu_is_one_device():
    (run,) = runs(partitions=4)
    assert (run.cell.device, run.cell.devices, run.cell.transfer) == ("cpu", 1, "direct")


def test_a_block_may_be_for_one_kind_of_machine():
    assert [len(runs(machine, where="gpu")) for machine in (CPU, Machine("cuda", 2))] == [0, 1]
    assert [len(runs(machine, where="cpu")) for machine in (CPU, Machine("cuda", 2))] == [1, 0]


def test_a_variant_that_cannot_run_is_asked_for_once_and_others_may_have_fewer_repeats():
    found = runs(variant=["published", "dep-x-x-clk-x"], repeats=3, other_repeats=2)
    assert Counter(run.cell.variant for run in found) == {
        "baseline": 3, "dep-x-x": 3, "dep-str-x": 1, "dep-str-ptl": 1, "dep-x-x-clk-x": 2,
    }  # fmt: skip


def test_cells_in_turns_are_one_job_whose_name_changes_with_any_of_them():
    names = {run.turns for run in runs(turns=True, chunks=[1, 2], repeats=2)}
    assert len(names) == 1
    assert names != {run.turns for run in runs(turns=True, chunks=[1, 4], repeats=2)}
    assert {run.turns for run in runs(chunks=[1, 2])} == {""}


@pytest.mark.parametrize(("cores", "workers"), [(1, []), (2, [2]), (5, [5]), (64, [8])])
def test_workers_may_be_a_core_for_each_up_to_a_limit(monkeypatch, cores, workers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    block = {key: value for key, value in MEASURED.items() if key != "partitions"}
    found = experiment(a={**block, "workers": "cores"}).runs(CPU)
    assert [run.cell.partitions for run in found] == workers, "on one core the paper's executor is a loop"
    found = experiment(a={**block, "workers": "cores", "schedule": ["1f1b", "zb_v"]}).runs(CPU)
    assert [run.cell.partitions for run in found] == [
        n for n in ((workers or [1])[0], 2 * (workers or [1])[0]) if n <= 17
    ]


def test_a_whole_model_is_one_partition():
    block = {key: value for key, value in MEASURED.items() if key != "partitions"}
    (run,) = experiment(a={**block, "balance": "whole"}).runs(CPU)
    assert (run.cell.partitions, run.cell.balance) == (1, (17,))


@pytest.mark.parametrize("settings", [{}, {"model": "unet"}, {"model": "gpt2"}])
def test_a_whole_model_without_arguments_has_those_of_a_cell(settings):
    (run,) = experiment(a={"run": "measured", "balance": "whole", **settings}).runs(CPU)
    assert run.cell.partitions == 1
    assert run.cell.model_args == MeasuredCell(**settings).model_args


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"chunsk": 2}, "a.chunsk must be a known key, got 'chunsk'; use 'chunks'"),
        ({"each": [{"chunsk": 2}]}, "a.chunsk must be a known key, got 'chunsk'; use 'chunks'"),
        ({"seed": 1}, "a.seed must be a known key, got 'seed'; use one of "),
        ({"device": "cuda"}, "a.device must be a known key, got 'device'; use 'devices'"),
        ({"chunks": []}, "a.chunks must have at least one value, got []; add one"),
        ({"each": []}, "a.each must be a list of points like [{chunks: 4}, {chunks: 8}], got []; write one"),
        ({"each": {"chunks": 2}}, "a.each must be a list of points like "),
        (
            {"chunks": 2, "each": [{"chunks": 4}]},
            "a.chunks must stand in a block or in its points, got it in both; leave one of them out",
        ),
        ({"chunks": 16}, "a.chunks must be at most batch_size = 8, got 16; lower it or raise that"),
        ({"partitions": 18}, "a.partitions must be at most the 17 layers of unet, got 18; lower it"),
        ({"partitions": 2, "workers": 2}, "a.workers must be left out where partitions are given, got both"),
        ({"workers": 0}, "a.workers must be a whole number of at least 1, got 0; use 1 or more"),
        ({"microbatch_size": "few"}, "a.microbatch_size must be a whole number of at least 1, got 'few'"),
        ({"model": "unit"}, "a.model must be "),
        ({"schedule": "zb-v"}, f"a.schedule must be one of {', '.join(SCHEDULES)}, or a CSV file, got 'zb-v'"),
        ({"schedule": "none.csv", "workers": 2}, "a.schedule must be one of "),
        ({"schedule": "none.csv", "run": "measured"}, "a.schedule must be one of "),
        ({"balance": ["8-9", "3-4"]}, "a.balance must sum to the 17 layers of unet, got 3-4, which sums to 7"),
        ({"repeats": 2}, "a.repeats must be left out where run is simulated, got 2; leave it out"),
        ({"run": "measured", "timelines": True}, "a.timelines must be left out where run is measured, got True"),
        ({"run": "measured", "repeats": 0}, "a.repeats must be a whole number of at least 1, got 0; use 1 or more"),
        ({"run": "emulated", "partitions": 17}, "a.partitions must be at most 16 where they are emulated"),
        ({"run": "emulated", "precision": "bfloat16"}, "a.precision must be a known key, got 'precision'; use "),
        ({"run": "simulatd"}, "a.run must be one of simulated, emulated, measured, published, got "),
        ({"where": "gpu", "run": "measured", "chunks": 0}, "a.chunks must be a whole number of at least 1, got 0"),
        ({"chunks": [*range(1, 200)], "partitions": [*range(1, 200)]}, "a must have at most 20000 cells, got more"),
    ],
)  # fmt: skip
def test_what_is_wrong_names_its_key(settings, said):
    (found,) = problems(**settings)
    assert found.startswith(said)


def test_every_bad_value_of_an_axis_is_named():
    assert problems(chunks=[0, -1, 4.5, "a", 2], batch_size=2) == [
        "a.chunks must be a whole number of at least 1, got 0; use 1 or more",
        "a.chunks must be a whole number of at least 1, got -1; use 1 or more",
        "a.chunks must be a whole number of at least 1, got 4.5; use 1 or more",
        "a.chunks must be a whole number of at least 1, got 'a'; use 1 or more",
    ]


def test_a_problem_of_many_cells_is_said_once():
    assert len(problems(partitions=[1, 2], checkpoint=["always", "never"], profile="p41")) == 1


def test_a_table_brings_its_models_along():
    found = problems(run="emulated", table="unet-speed")
    rule = "must be left out beside a table, whose rows have it; leave one of them out"
    assert found == [f"a.model {rule}", f"a.model_args {rule}"]
    found = problems(run="published", table="unet-sped")
    rule = "must be a known key, got"
    assert [text.partition("; ")[0] for text in found[:2]] == [
        f"a.{key} {rule} '{key}'" for key in ("model", "model_args")
    ]
    assert found[2].startswith("a.table must be one of unet-speed, amoebanet-d-speed, ")


# --- the default configuration ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def default():
    return load_config().experiments


def test_every_emulated_cell_has_a_simulated_twin_in_its_table(default):
    for name, one in default.items():
        assert {cell.twin.id for cell in one.emulated} <= {cell.id for cell in one.simulated}, name


@pytest.mark.parametrize("machine", [CPU, Machine("cuda", 1), Machine("cuda", 8)])
def test_every_cell_of_a_sweep_can_run(default, machine):
    cells = [
        run.cell for name in ("sweep_measured", "sweep_processes", "schedules") for run in default[name].runs(machine)
    ]
    assert cells
    assert [cell.unsupported() for cell in cells if cell.unsupported()] == []


def test_the_cells_in_half_precision_stand_beside_the_same_ones_in_single(default):
    cells = default["schedules"].simulated
    half = [cell for cell in cells if cell.precision == "bfloat16"]
    assert {(cell.model, cell.schedule_devices, cell.chunks) for cell in half} == set(
        product(("gpt2-xl", "vit"), (8, 32), (16,))
    )
    known = {cell.id for cell in cells}
    assert all(cell.changed(precision="float32", optimizer="sgd").id in known for cell in half)


def test_the_ablation_on_a_cpu_has_the_papers_executor_two_loops_and_schedules(default, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    cells = {run.cell.id: run.cell for run in default["ablation"].runs(CPU)}.values()
    assert [(cell.backward, cell.schedule, cell.partitions, cell.chunks, cell.checkpoint) for cell in cells] == [
        ("autograd", None, 3, 8, "never"),
        ("autograd", None, 1, 1, "never"),
        ("autograd", None, 1, 8, "never"),
        ("scheduled", "gpipe", 3, 8, "never"),
        ("scheduled", "1f1b", 3, 8, "never"),
        ("scheduled", "zb_h1", 3, 8, "never"),
        ("scheduled", "interleaved", 6, 8, "never"),
        ("scheduled", "zb_v", 6, 8, "never"),
        ("scheduled", "v_half", 6, 8, "never"),
    ]


@pytest.mark.parametrize(("gpus", "devices", "transfer"), [(1, 1, "host"), (2, 2, "host"), (8, 4, "direct")])
def test_the_ablation_on_gpus_is_the_published_one(default, gpus, devices, transfer):
    cells = [run.cell for run in default["ablation"].runs(Machine("cuda", gpus)) if run.repeat == 0]
    assert [cell.variant for cell in cells[:4]] == list(PUBLISHED)
    assert len(cells) == 32
    assert {(cell.devices, cell.transfer) for cell in cells} == {(devices, transfer)}
    assert {(cell.batch_size, cell.chunks, cell.balance, cell.tf32) for cell in cells} == {
        (128, 8, (34, 76, 70, 61), False)
    }
