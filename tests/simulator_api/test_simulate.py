"""What a simulation says of a step: times, shares, memory, events, rows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

import gpipe_bench.machine.profile
from gpipe_bench.components import PUBLISHED, Components
from gpipe_bench.machine.profile import load_profile
from gpipe_bench.results.rows import Row
from gpipe_bench.results.timeline import COMPUTE_KINDS
from gpipe_bench.simulator import Model, simulate
from gpipe_bench.step.result import gib_texts
from tests.simulator_api.layers import linear

UNET = Model("unet", {"depth": 2, "B": 2, "C": 64, "size": 128})
BALANCE = [18, 15, 16]
SHARES = ("compute", "recompute", "copy", "bubble", "imbalance")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


@pytest.fixture
def unet(cache):
    def run(**options):
        return simulate(UNET, **{"balance": BALANCE, "batch_size": 32, "chunks": 4, "cache": cache} | options)

    return run


@pytest.mark.parametrize("variant", [*PUBLISHED, "x-x-x-x-x"])
def test_shares_of_a_device_add_up_to_one(unet, variant):
    step = unet(components=Components.from_label(variant))
    assert [use.device for use in step.devices] == [0, 1, 2]
    for use in step.devices:
        assert sum(getattr(use, f"{name}_fraction") for name in SHARES) == pytest.approx(1)
        assert use.compute_fraction + use.recompute_fraction <= use.utilization_fraction <= 1


def test_times_of_a_step(unet):
    step = unet()
    computations = [event for event in step.events if event.kind in COMPUTE_KINDS]
    assert step.throughput_samples_per_s == pytest.approx(32 / step.step_time_ms * 1e3)
    assert min(event.start_us for event in computations) >= 0
    assert max(event.end_us for event in step.events) == pytest.approx(step.step_time_ms * 1e3)
    kinds = Counter(event.kind for event in computations)
    assert kinds == {"forward": 12, "backward": 12, "recompute": 9}


def test_a_step_alone_begins_and_ends_with_idle_devices(unet):
    alone, following = unet(steps=1), unet(steps=3)
    assert len(alone.events) == len(following.events)
    assert alone.step_time_ms > max(event.end_us for event in alone.events) / 1e3, "the update belongs to the step"
    assert following.step_time_ms == pytest.approx(unet(steps=2).step_time_ms, rel=0.02)


def test_more_work_takes_longer_and_more_memory(unet):
    small, large = unet(batch_size=32), unet(batch_size=64)
    assert large.step_time_ms > 1.5 * small.step_time_ms
    assert large.peak_allocated_gib > 1.3 * small.peak_allocated_gib
    assert unet(checkpoint="never").peak_allocated_gib > small.peak_allocated_gib
    assert unet(checkpoint="always").step_time_ms > unet(checkpoint="never").step_time_ms


def test_microbatches_are_those_that_the_batch_gives(unet):
    step = unet(batch_size=10, chunks=4)
    assert step.microbatches == 4
    assert unet(batch_size=9, chunks=4).microbatches == 3
    assert max(event.microbatch for event in step.events) == 3


def test_a_faster_device_is_faster(unet):
    assert unet(profile="h100").step_time_ms < unet(profile="v100").step_time_ms < unet(profile="p40").step_time_ms


def test_partitions_may_share_devices(unet):
    step = unet(devices=[0, 0, 1], transfer="host")
    assert [use.device for use in step.devices] == [0, 1]
    assert step.row().device_count == 2
    assert {event.device for event in step.events} == {"cuda:0", "cuda:1"}
    assert step.step_time_ms > unet(transfer="host").step_time_ms


def test_only_devices_with_a_partition_count(unet):
    step = unet(devices=[0, 4, 5])
    assert [use.device for use in step.devices] == [0, 4, 5]
    assert step.utilization_fraction == pytest.approx(sum(use.utilization_fraction for use in step.devices) / 3)


def test_without_memory(unet):
    step = unet(memory=False)
    assert (step.peak_allocated_gib, step.peak_reserved_gib, step.devices[0].peak_live_gib) == (None, None, None)
    assert step.step_time_ms == unet().step_time_ms


def test_a_step_that_does_not_fit(unet):
    profile = load_profile("p40")
    small = profile.model_copy(update={"memory_gib": profile.context_gib + 0.02})
    step = unet(profile=small)
    assert (step.status, step.throughput_samples_per_s, step.devices, step.events) == ("oom", None, (), [])
    assert step.shortage.capacity_gib == pytest.approx(0.02)
    assert step.shortage.needed_gib > 0.02
    assert step.reason.startswith(f"device {step.shortage.device} needs 0.")
    row = step.row()
    assert (row.status, row.reason, row.peak_reserved_gib) == ("oom", step.reason, None)


def test_tensors_of_many_tebibytes_do_not_fit(unet):
    step = unet(batch_size=10**8, chunks=1)
    assert step.status == "oom"
    assert step.shortage.tensors_gib > 2**12


def of_memory(gib):
    profile = load_profile("p40")
    return profile.model_copy(update={"memory_gib": profile.context_gib + gib})


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("cut", [[49], [24, 25]])
def test_what_does_not_fit_needs_what_its_tensors_take(unet, checkpoint, cut):
    whole = unet(balance=cut, chunks=2, steps=1, checkpoint=checkpoint)
    small = of_memory(whole.devices[0].peak_live_gib / 2)
    shortage = unet(balance=cut, chunks=2, checkpoint=checkpoint, profile=small).shortage
    assert shortage.needed_gib == whole.devices[shortage.device].peak_live_gib


def test_where_tensors_fit_and_segments_do_not_it_needs_what_a_larger_device_would_hold(unet):
    options = {"balance": [49], "batch_size": 1, "chunks": 1}
    whole = unet(**options, steps=1)
    shortage = unet(**options, profile=of_memory(whole.devices[0].peak_live_gib + 2**-20)).shortage
    assert shortage.needed_gib == whole.peak_reserved_gib
    needed, tensors = f"{shortage.needed_gib:.2f}", f"{shortage.tensors_gib:.2f}"
    assert shortage.first_step
    assert shortage.text.startswith(f"device 0 needs {needed} GiB of allocator segments for {tensors} GiB of tensors")


def two_layers(cache, **options):
    """Two layers, whose parameters take much more memory than what passes between them."""
    layers = nn.Sequential(*(nn.Linear(2**10, 2**10, bias=False, device="meta") for _ in range(2)))
    sample = torch.empty(1, 2**10, device="meta")
    return simulate(layers, **{"balance": [2], "batch_size": 2**12, "sample": sample, "cache": cache, **options})


def test_where_the_first_step_fits_the_steps_after_it_are_named(cache):
    first, later = (two_layers(cache, optimizer="adam", steps=steps).devices[0].peak_live_gib for steps in (1, 2))
    step = two_layers(cache, optimizer="adam", profile=of_memory((first + later) / 2))
    assert step.status == "oom"
    assert not step.shortage.first_step
    assert first < step.shortage.capacity_gib < step.shortage.needed_gib == later
    assert step.shortage.state_gib == 2 * 2 * 2**20 * 4 / 2**30  # two numbers of 4 B for each parameter
    assert re.fullmatch(
        r"device 0 needs 0\.\d+ GiB in the steps after the first, with 0\.02 GiB of optimizer state, "
        r"and has 0\.\d+ GiB; use smaller micro-batches, more partitions or more checkpoints",
        step.reason,
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adam", None])
@pytest.mark.parametrize("options", [{}, {"balance": [1, 1]}, {"balance": [1, 1], "devices": [1, 1]}, {"chunks": 8}])
def test_a_device_always_needs_more_than_it_has(cache, optimizer, options):
    options = {"optimizer": optimizer, **options}
    reserved = max(use.peak_reserved_gib for use in two_layers(cache, **options).devices)
    outcomes = [two_layers(cache, **options, profile=of_memory(reserved * part / 16)) for part in range(6, 17)]
    assert [outcome.status for outcome in outcomes[:1] + outcomes[-1:]] == ["oom", "ok"]
    for outcome in outcomes:
        if outcome.shortage is not None:
            needed, capacity = re.findall(r"(?:needs|has) ([0-9.]+) GiB", outcome.reason)
            assert outcome.shortage.needed_gib > outcome.shortage.capacity_gib
            assert float(needed) > float(capacity)


def test_sizes_are_written_so_that_they_differ():
    assert gib_texts(23.14, 22.0) == ("23.1 GiB", "22.0 GiB")
    assert gib_texts(22.001, 22.0) == ("22.001 GiB", "22.000 GiB")
    assert gib_texts(21.991, 21.978, 2) == ("21.99 GiB", "21.98 GiB")


def test_the_row_says_all(unet):
    row = unet(components=Components.from_label("dep-str-x"), flavour="published").row(experiment="e", repeat=0)
    assert isinstance(row, Row)
    said = {name for name, value in row.to_dict().items() if value not in (None, "")}
    unsaid = set(Row.columns()) - said
    assert unsaid == {
        "run_as",
        "autograd",
        "sweep_kind",
        "seed",
        "reason",
        "source",
        "cuda",
        "driver",
        "python",
        "commit",
        "dirty",
        "config_sha256",
        "started_utc",
        "cell",
        "clock_error_us",
    }
    assert (row.evidence, row.profile, row.device, row.device_count) == ("simulated", "p40", "cuda Tesla P40", 3)
    assert (row.model_args[:12], row.balance, row.flavour) == ("depth=2;B=2;", "18-15-16", "published")


def test_the_same_again_is_bit_identical(unet, tmp_path):
    first, second = unet(), unet(cache=tmp_path)
    assert first == second
    assert first.events == second.events


def test_results_hang_on_no_hash(unet, cache):
    """Another process, with another seed of hashes, gives every digit again."""
    here = unet()
    call = f"simulate({UNET!r}, balance={BALANCE}, batch_size=32, chunks=4, cache={str(cache)!r})"
    program = (
        f"from gpipe_bench.simulator import Model, simulate\nstep = {call}\nprint((step.step_time_ms, step.devices))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.strip() == repr((here.step_time_ms, here.devices))


def test_a_profile_of_ones_own_needs_no_code(unet, tmp_path):
    path = tmp_path / "mine.yaml"
    text = (gpipe_bench.machine.profile.PROFILES / "p40.yaml").read_text(encoding="utf-8")
    path.write_text(text.replace("name: p40", "name: mine").replace("gb_per_s: 346", "gb_per_s: 692"))
    step = unet(profile=path)
    assert step.row().profile == "mine"
    assert step.step_time_ms < unet().step_time_ms
    assert unet(profile=str(path)) == step


def test_a_closed_form_of_one_device():
    """One layer, one device, no update: a product of n x n matrices forward, two backward but for the first layer."""
    profile = load_profile("p40")
    width, batch = 2048, 4096
    module = nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))
    step = simulate(
        module, balance=[2], batch_size=batch, sample=torch.empty(1, width), optimizer=None, steps=1, profile=profile
    )
    flop = 2 * width * width * batch
    expected_ms = 5 * flop / (profile.efficiency.other_conv_matmul * profile.peak_tflops["float32"] * 1e9)
    assert step.step_time_ms == pytest.approx(expected_ms, rel=0.05)


def test_names_of_the_package():
    types = ["DeviceUse", "MeasuredLayer", "Model", "Step"]
    assert sorted(gpipe_bench.simulator.__all__) == [*types, "read_layers", "simulate", "write_layers"]
    assert callable(gpipe_bench.simulator.simulate)


def test_devices_beyond_a_socket_have_slower_links():
    module = nn.Sequential(linear(), linear())
    options = {"balance": [1, 1], "batch_size": 64, "sample": torch.empty(1, 4096, 16)}
    near, far = (simulate(module, devices=devices, **options) for devices in ([0, 1], [3, 4]))
    lengths = [
        next(event.end_us - event.start_us for event in step.events if event.kind == "copy") for step in (near, far)
    ]
    assert lengths[1] > 1.5 * lengths[0]


def test_settings_do_not_leak_between_rows(unet):
    step = unet()
    assert step.row(variant="x").variant == "x"
    assert step.row().variant == "dep-str-ptl"
    assert replace(step, status="ok").row() == step.row()


def test_a_model_with_stored_traces_needs_no_pytorch(tmp_path):
    arguments = "Model('vit', {'L': 1, 'D': 32, 'heads': 2}), balance=[2, 2], batch_size=4, chunks=2, cache=sys.argv[1]"
    program = (
        "import sys; from gpipe_bench.simulator import Model, simulate; "
        f"found = simulate({arguments}); print(found.status, 'torch' in sys.modules, found.settings['torch'])"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    release = torch.__version__.partition("+")[0]
    assert printed == [f"ok True {release}\n", f"ok False {release}\n"]
