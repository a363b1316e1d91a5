"""Sweeps are data: what a few lines of configuration ask for, and what is wrong with them."""

from __future__ import annotations

from itertools import product

import pytest

from gpipe_bench.bench.experiments.config import SuiteConfig, load_config, parse_config
from gpipe_bench.bench.experiments.sweeps import CudaSweep, SimulatedSweep
from gpipe_bench.bench.spec.machine import Machine
from gpipe_bench.errors import ConfigError
from gpipe_bench.models.table import format_arguments, parse_arguments
from gpipe_bench.schedules.cycles import CHECKPOINT_MODES

CPU = Machine("cpu", 1)
SMALL = {"model_args": "depth=1;B=1;C=2;size=4", "partitions": [1, 2], "chunks": [1, 2, 4], "checkpoints": ["always"]}


def small(**settings):
    return SimulatedSweep.model_validate({**SMALL, "batch_size": 8, "microbatch_size": 2, **settings})


def problems(data):
    with pytest.raises(ConfigError) as caught:
        parse_config(data, source="a.yaml")
    return caught.value.problems


def test_both_kinds_of_batch_are_swept_and_shared_cells_come_once():
    points = [(cell.partitions, cell.chunks, cell.batch_size) for cell in small().simulations()]
    one = [(1, 8), (1, 2), (2, 8), (2, 4), (4, 8)]
    assert points == [(n, *point) for n in (1, 2) for point in one]


@pytest.mark.parametrize(
    ("setting", "left"),
    [("batch_size", {(1, 2), (2, 4), (4, 8)}), ("microbatch_size", {(1, 8), (2, 8), (4, 8)})],
)
def test_a_kind_of_batch_may_be_left_out(setting, left):
    assert {(cell.chunks, cell.batch_size) for cell in small(**{setting: 0}).simulations()} == left


def test_the_balance_is_left_to_the_simulator():
    (cell, *_) = small().simulations()
    assert cell.balance == ()
    assert cell.settings()["balance"] == "auto"


def test_the_default_sweeps_are_those_of_four_models_up_to_64_devices():
    sweeps = SuiteConfig().sweep.simulated
    assert {sweep.model for sweep in sweeps.values()} == {"unet", "amoebanet-d", "vit", "gpt2-xl"}
    for sweep in sweeps.values():
        assert sweep.partitions == tuple(2**k for k in range(7))
        assert sweep.chunks == tuple(2**k for k in range(8))
        assert len(sweep.checkpoints) == 3
        assert sweep.batch_size
        assert sweep.microbatch_size


def test_a_new_sweep_is_a_key_with_what_differs(tmp_path):
    (tmp_path / "a.yaml").write_text("sweep: {simulated: {mine: {model: unet, partitions: [2], profile: v100}}}")
    config = load_config([tmp_path / "a.yaml"])
    assert "sweep_mine" in config.experiments()
    assert {cell.profile for cell in config.experiment("sweep_mine").simulations()} == {"v100"}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"batch_size": 0, "microbatch_size": 0}, "mine.batch_size must be at least 1 where microbatch_size is 0"),
        ({"batch_size": 8}, "mine.chunks must be at most batch_size = 8, got 128"),
        ({"partitions": [1000]}, "mine.partitions must be at most the 241 layers of unet, got 1000"),
        ({"model": "unit"}, "<module>:<function>, got 'unit'; use 'unet'"),
    ],
)
def test_rules_between_settings(settings, problem):
    assert any(problem in text for text in problems({"sweep": {"simulated": {"mine": settings}}}))


@pytest.mark.parametrize("name", ["Mine", "a_b", "measured"])
def test_a_name_that_is_no_name_of_a_file(name):
    (found,) = problems({"sweep": {"simulated": {name: {}}}})
    assert "sweep.simulated must have names of lower-case letters" in found


def test_measured_cells_go_as_far_as_the_devices():
    sizes = {len(sizes) for sizes in CudaSweep().balances}
    assert max(sizes) == 8
    runs = CudaSweep().runs(Machine("cuda", 2))
    assert {run.cell.partitions for run in runs} == {1, 2}
    assert all(run.cell.devices == run.cell.partitions for run in runs)


def test_every_measured_cell_on_a_cpu_can_run():
    runs = SuiteConfig().runs("sweep_measured", CPU)
    points = {(run.cell.partitions, run.cell.chunks, run.cell.batch_size, run.cell.checkpoint) for run in runs}
    fixed_batch = set(product((1, 2, 4), (1, 4), (8,), CHECKPOINT_MODES))
    fixed_microbatch = {(n, m, 2 * m, mode) for n, m, mode in product((1, 2, 4), (1, 4), CHECKPOINT_MODES)}
    assert points == fixed_batch | fixed_microbatch
    assert len(runs) == 2 * len(points)
    assert not any(run.cell.unsupported() for run in runs)


@pytest.mark.parametrize(("schedule", "processes"), [("1f1b", {1, 2, 4}), ("zb_v", {1, 2})])
def test_a_process_for_each_device_of_the_schedule(schedule, processes):
    balances = ["14", "7-7", "4-3-3-4"] if schedule == "1f1b" else ["7-7", "4-3-3-4"]
    asked = {"processes": {"schedule": schedule, "balances": balances, "hosts": 2}}
    cells = [run.cell for run in parse_config({"sweep": asked}).runs("sweep_processes", CPU)]
    assert {made.processes for made in cells} == processes
    assert {(made.hosts, made.devices) for made in cells if made.processes > 1} == {(2, 1)}
    assert not any(made.unsupported() for made in cells)


def test_hosts_share_out_the_processes_evenly():
    (found,) = problems({"sweep": {"processes": {"hosts": 2}}})
    assert "sweep.processes.balances must give one process, or as many on each of 2 hosts, got 3;" in found


def test_a_balance_that_does_not_fit_the_model():
    found = problems({"sweep": {"measured": {"cpu": {"balances": [53, "3-4"]}}}})
    (problem,) = found
    assert problem.startswith("a.yaml: sweep.measured.cpu.balances must sum to the 53 layers of unet, got 3-4, which")


def test_every_bad_entry_of_a_list_is_named():
    found = problems({"sweep": {"simulated": {"mine": {"chunks": [0, -1, 4.5, "a", 2]}}}})
    assert found == tuple(
        f"a.yaml: sweep.simulated.mine.chunks {text}"
        for text in (
            "must be at least 1, got 0; raise it",
            "must be at least 1, got -1; raise it",
            "must be a whole number, got 4.5; write it without quotes or decimals",
            "must be a whole number, got 'a'; write it without quotes or decimals",
        )
    )


@pytest.mark.parametrize("model", ["unet", "amoebanet-d", "vit"])
def test_the_shortest_sweep_takes_the_arguments_of_its_model(model):
    config = parse_config({"sweep": {"simulated": {"mine": {"model": model, "partitions": [1, 2]}}}})
    cells = config.experiment("sweep_mine").simulations()
    expected = format_arguments(parse_arguments(model, ""))
    assert {cell.settings()["model_args"] for cell in cells} == {expected}
