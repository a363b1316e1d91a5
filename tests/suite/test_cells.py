"""A cell has one key, whatever asks for it."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe_bench.components import Components
from gpipe_bench.errors import ConfigError
from gpipe_bench.schedules import SCHEDULES
from gpipe_bench.schedules.table import TWO_PER_DEVICE
from gpipe_bench.suite.cells import CELL_PATTERN, MeasuredCell
from gpipe_bench.suite.experiments.config import load_config
from gpipe_bench.suite.machine import Machine
from gpipe_bench.suite.validation import validated
from tests.suite.cells_of import TINY, cell, configured

CPU = Machine("cpu", 1)
OTHER_SETTINGS = {
    "model_args": "depth=2;B=1;C=8;size=16",
    "batch_size": 8,
    "chunks": 4,
    "partitions": 1,
    "balance": "15-14",
    "checkpoint": "always",
    "threads": 2,
    "tf32": True,
    "warmup": 3,
    "steps": 9,
    "seed": 1,
    "variant": "baseline",
    "transfer": "direct",
    "device": "cuda",
    "devices": 2,
    "schedule": "1f1b",
    "processes": 2,
    "hosts": 2,
}


def test_the_id_of_a_cell_never_changes():
    """Results of earlier versions would lose their names."""
    assert cell(variant="dep-x-ptl").id == "measured-unet-dep-x-ptl-n2-m2-b4-cpu-c76b8253"


@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_every_setting_has_a_part_in_the_id(name):
    assert cell(**{name: OTHER_SETTINGS[name]}).id != cell().id


def test_the_other_settings_are_all_that_have_another_value():
    # The model needs other arguments too; there is one kind of evidence.
    assert {*OTHER_SETTINGS, "model", "evidence"} == set(MeasuredCell.model_fields)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "gpipe"])
def test_the_id_names_a_schedule_other_than_that_of_gpipe(schedule):
    name = cell(schedule=schedule).id
    assert name.startswith(f"measured-unet-dep-x-ptl-{schedule}-n2-m2-b4-cpu-")
    assert re.fullmatch(CELL_PATTERN, name)


def test_a_schedule_says_what_orders_the_backward_pass():
    assert (cell().backward, cell(schedule="gpipe").backward) == ("autograd", "scheduled")
    assert [cell(schedule=name).settings().get("schedule") for name in (None, "gpipe", "zb_v")] == [None, None, "zb_v"]


@pytest.mark.parametrize(
    ("older", "schedule"),
    [
        ({"backward": "autograd", "schedule": "gpipe"}, None),
        ({"backward": "scheduled", "schedule": "gpipe"}, "gpipe"),
        ({"backward": "scheduled"}, "gpipe"),
        ({"backward": "scheduled", "schedule": "zb_v"}, "zb_v"),
    ],
)
def test_the_older_word_for_a_schedule_is_read(older, schedule):
    assert cell(**older) == cell(schedule=schedule)


def test_a_balance_says_how_many_partitions_there_are():
    assert MeasuredCell(model_args=TINY["model_args"], balance="9-10-10").partitions == 3


def test_one_process_is_not_spelled_out():
    assert not {"processes", "hosts"} & cell(processes=1, hosts=1).settings().keys()
    many = cell(schedule="gpipe", transfer="direct", processes=2, hosts=2)
    assert {"processes": 2, "hosts": 2}.items() <= many.settings().items()
    assert many.id.startswith("measured-unet-dep-x-ptl-n2-m2-b4-p2-cpu-")


@pytest.mark.parametrize(("hosts", "places"), [(1, [0, 1, 2, 3]), (2, [0, 1, 0, 1]), (4, [0, 0, 0, 0])])
def test_a_host_counts_its_own_devices(hosts, places):
    settings = {"partitions": 4, "balance": "7-7-7-8", "device": "cuda", "devices": 4, "processes": 4, "hosts": hosts}
    made = cell(**settings, schedule="gpipe", transfer="direct")
    assert made.torch_devices() == [f"cuda:{place}" for place in places]


@pytest.mark.parametrize(
    ("variant", "instead"),
    [("dep-x-x", "dep-x-ptl"), ("dep-str-ptl-clk-rec-x", "dep-x-ptl-clk-rec-x"), ("dep-x-ptl-clk-rec-x", "")],
)
def test_several_processes_have_one_switch(variant, instead):
    made = cell(variant=variant, schedule="gpipe", transfer="direct", processes=2)
    rule = "processes of one pipeline have no switch but shared, and no copy streams; see variant "
    assert made.unsupported() == (rule + instead if instead else "")


def test_defaults_of_the_model_may_be_spelled_out():
    assert cell(model_args="C=4; size=16;depth=2;B=1;dropout=0.1;in=3").id == cell().id


def test_ids_are_names_of_folders_and_differ():
    runs = load_config().experiment("ablation").runs(Machine("cuda", 1))
    ids = {run.cell.id for run in runs}
    assert len(ids) == 32
    assert all(re.fullmatch(CELL_PATTERN, name) for name in ids)
    assert all(run.cell.id.endswith(run.cell.config_sha256[:8]) for run in runs)


@given(st.integers(1, 300), st.integers(1, 300))
def test_microbatches_are_as_many_as_chunk_gives(batch, chunks):
    made = cell(batch_size=batch, chunks=chunks)
    assert made.microbatches == len(torch.empty(batch, 0).chunk(chunks))


@pytest.mark.parametrize(
    ("device", "devices", "places"),
    [
        ("cpu", 1, ["cpu"] * 4),
        ("cuda", 1, ["cuda:0"] * 4),
        ("cuda", 2, ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]),
        ("cuda", 3, ["cuda:0", "cuda:0", "cuda:1", "cuda:2"]),
        ("cuda", 4, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
    ],
)
def test_neighbours_share_a_device_where_there_are_too_few(device, devices, places):
    assert cell(partitions=4, balance="7-7-7-8", device=device, devices=devices).partition_devices() == places


@pytest.mark.parametrize(
    ("schedule", "placement"),
    [("gpipe", (0, 1, 2, 3)), ("1f1b", (0, 1, 2, 3)), ("interleaved", (0, 1, 0, 1)), ("zb_v", (0, 1, 1, 0))],
)
def test_a_schedule_says_which_partitions_share_a_device(schedule, placement):
    made = cell(partitions=4, balance="7-7-7-8", device="cuda", devices=2, schedule=schedule)
    assert made.placement == placement
    assert len(made.torch_devices()) == made.schedule_devices == max(placement) + 1
    assert made.partition_devices() == [made.torch_devices()[rank] for rank in placement]


@pytest.mark.parametrize("schedule", TWO_PER_DEVICE)
@pytest.mark.parametrize(
    ("device", "devices", "places"),
    [("cpu", 1, ["cpu"] * 2), ("cuda", 1, ["cuda:0"] * 2), ("cuda", 2, ["cuda:0", "cuda:1"])],
)
def test_a_device_has_two_partitions(schedule, device, devices, places):
    settings = {"partitions": 4, "balance": "7-7-7-8", "schedule": schedule}
    assert cell(**settings, device=device, devices=devices).torch_devices() == places


@pytest.mark.parametrize(("gpus", "devices", "transfer"), [(1, 1, "host"), (2, 2, "direct"), (8, 2, "direct")])
def test_a_workload_takes_as_many_devices_as_its_schedule_has(gpus, devices, transfer):
    experiment = configured(ablation={"gpu": {"schedule": "zb_v"}}).experiment("ablation")
    cells = [run.cell for run in experiment.runs(Machine("cuda", gpus))]
    assert {(made.devices, made.transfer) for made in cells} == {(devices, transfer)}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("components", list(Components.factorial()), ids=lambda components: components.label)
def test_a_schedule_has_no_fork_and_join_to_switch_off(components, device):
    made = cell(variant=components.label, device=device, schedule="zb_h1")
    instead = Components.from_label(made.stand_in)
    assert instead.fork_join
    same = ("clock_cycle", "portals", "early_recompute")
    assert all(getattr(instead, name) == getattr(components, name) for name in same)
    assert instead.copy_streams == (components.copy_streams and device == "cuda")
    assert cell(**{**made.model_dump(), "variant": made.stand_in}).unsupported() == ""
    reason = made.unsupported()
    if components.fork_join:
        assert ("copy_streams needs an accelerator" in reason) == (components.copy_streams and device == "cpu")
    else:
        assert reason.startswith("fork_join must be on with a schedule")
        assert reason.endswith(f", see variant {made.stand_in}")


def test_an_ablation_of_a_schedule_repeats_what_stands_in_for_published_variants():
    settings = {"schedule": "1f1b", "repeats": 5, "other_repeats": 2}
    experiment = configured(ablation={"gpu": settings}).experiment("ablation")
    repeats = {}
    for run in experiment.runs(Machine("cuda", 4)):
        repeats.setdefault(run.cell.variant, []).append(run.repeat)
    counts = {variant: len(numbers) for variant, numbers in repeats.items()}
    # What stands in for the baseline is dep-x-x.
    assert [counts.pop(variant) for variant in ("dep-x-x", "dep-str-x", "dep-str-ptl")] == [5, 5, 5]
    for variant, count in counts.items():
        assert count == (2 if Components.from_label(variant).fork_join else 1)


@pytest.mark.parametrize("components", list(Components.factorial()), ids=lambda components: components.label)
def test_copy_streams_and_nothing_else_are_unsupported_on_a_cpu(components):
    on_cpu = cell(variant=components.label)
    if components.copy_streams:
        stand_in = Components.from_label(on_cpu.unsupported().rpartition("see variant ")[2])
        assert not stand_in.copy_streams
        assert not cell(variant=stand_in.label).unsupported()
        assert "copy_streams needs an accelerator; on cpu" in on_cpu.unsupported()
    else:
        assert on_cpu.unsupported() == ""
    assert cell(variant=components.label, device="cuda").unsupported() == ""


def test_experiments_that_ask_for_one_cell_share_its_path():
    same = {"balance": "241", "chunks": 4, "variant": "published"}
    config = configured(ablation={"gpu": same})
    ablation, sweep = (config.experiment(name).runs(Machine("cuda", 1)) for name in ("ablation", "sweep_measured"))
    shared = {run.path for run in ablation} & {run.path for run in sweep}
    assert [path.name.partition("-b128-")[0] for path in shared] == ["measured-unet-dep-str-ptl-n1-m4"]


def test_cells_that_take_turns_share_a_path():
    (path,) = {run.path for run in load_config().experiment("ablation").runs(CPU)}
    assert re.fullmatch(CELL_PATTERN, path.stem)


def test_an_unknown_experiment_gets_the_nearest_name():
    with pytest.raises(ConfigError, match=r"experiment must be one of ablation, .*, got 'ablatoin'; use 'ablation'"):
        load_config().experiment("ablatoin")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"balance": "14-14"}, "balance must sum to the 29 layers of unet, got 14-14, which sums to 28"),
        ({"balance": "10-10-9"}, "balance must have one entry per partition, 2, got 3 in 10-10-9"),
        ({"balance": "14-x"}, "balance must be positive numbers of layers, got '14-x'"),
        ({"partitions": 30, "balance": "auto"}, "partitions must be at most the 29 layers of unet, got 30"),
        ({"chunks": 0}, "chunks must be a whole number of at least 1, got 0"),
        ({"model_args": "dept=2"}, "model_args: argument of unet must be one it declares, got 'dept'; use 'depth'"),
        ({"variant": "dep-srt-ptl"}, "variant must be 'baseline' or slots like 'dep-str-ptl'"),
        ({"devices": 2}, "devices must be at most 1 for 2 partitions on cpu, got 2"),
        (
            {"schedule": "zb_v", "device": "cuda", "devices": 2},
            "devices must be at most 1 for 2 partitions on cuda, got 2",
        ),
        (
            {"schedule": "zb-v"},
            f"schedule must be one of {', '.join(SCHEDULES)}, or a CSV file, got 'zb-v'; use 'zb_v'",
        ),
        ({"backward": "autograd", "schedule": "1f1b"}, "backward must be a known key, got 'backward'"),
        ({"processes": 3, "schedule": "gpipe"}, "processes must be 1, or 2 for 2 partitions of gpipe, got 3"),
        ({"processes": 2}, "schedule must be given where there are 2 processes, got none; use gpipe, or another one"),
        ({"processes": 2}, "transfer must be direct where there are 2 processes, got host"),
        ({"hosts": 2}, "processes must be the same number on each of 2 hosts, got 1; change processes or hosts"),
        ({"hosts": 2, "device": "cuda"}, "devices must be the same number on each of 2 hosts, got 1"),
    ],
)
def test_settings_that_make_no_cell(settings, problem):
    data = {**cell().model_dump(), **settings}
    with pytest.raises(ConfigError) as caught:
        validated(MeasuredCell, data, ".".join)
    assert any(text.startswith(problem) for text in caught.value.problems), caught.value.problems


@pytest.mark.parametrize("schedule", TWO_PER_DEVICE)
def test_two_partitions_on_each_device_are_an_even_number(schedule):
    settings = {"partitions": 3, "balance": "9-10-10", "schedule": schedule}
    rule = f"partitions must be even where schedule is {schedule}, two on each device, got 3; add one, or take one away"
    with pytest.raises(ConfigError) as caught:
        validated(MeasuredCell, {**cell().model_dump(), **settings}, ".".join)
    assert list(caught.value.problems) == [rule]
