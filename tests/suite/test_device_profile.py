"""A profile of the CPU, as small as it can be: all parts but the queue of a GPU."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import yaml
from typer.testing import CliRunner

from gpipe_bench.cli import application
from gpipe_bench.errors import ConfigError
from gpipe_bench.machine.constants import CONSTANTS, Constant
from gpipe_bench.machine.profile import load_profile, parse_profile
from gpipe_bench.measure import queued
from gpipe_bench.measure.cases import CASES, Bench, Case
from gpipe_bench.measure.host_rates import TINY, loss
from gpipe_bench.simulator.api import Model, simulate, step_launches
from gpipe_bench.suite.running import device_profile
from gpipe_bench.suite.running.device_profile import REPEATS, measure_profile


def too_large(bench):
    if bench.device.type == "meta":
        return lambda: bench.tensor(1).add_(1.0)
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB.\nmore")


@pytest.fixture(scope="module")
def measured():
    small = [case for case in CASES if "strided" not in case.constants]
    return measure_profile("cpu", "mine", shrink=4096, cases=[*small, Case("huge", ("strided",), too_large)])


def test_it_is_a_profile_that_simulates(measured, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(measured.text)
    profile = load_profile(path)
    assert profile == parse_profile(yaml.safe_load(measured.text))
    step = simulate(Model("unet", {"depth": 2, "B": 1, "C": 4, "size": 16}), balance=[29], batch_size=2, profile=path)
    assert step.status == "ok"


def test_every_constant_says_how_it_was_had(measured):
    kernels = measured.profile.kernels
    assert set(kernels) == set(CONSTANTS)
    assert {kernels[name].origin for name in ("launch_us", "parameter_us", "lock", "memory")} == {"measured"}
    assert all((constant.spread is None) == (constant.origin != "measured") for constant in kernels.values())
    assert measured.profile.sources["kernels"].startswith("measured on ")


def test_a_case_that_does_not_run_is_said_and_its_constant_stays_assumed(measured):
    assert measured.failures == {"huge": "CUDA out of memory. Tried to allocate 80 GiB."}
    assert measured.profile.kernels["strided"].origin == "assumed"
    assert "huge" not in measured.errors


def test_an_unknown_device_has_the_peaks_that_it_reached(measured):
    assert set(measured.profile.peak_tflops) == {"float32", "float64"}
    assert set(measured.profile.matrix_tflops) == {"float16", "bfloat16", "tensorfloat32"}


MEMORY = [case for case in CASES if "memory" in case.constants]
H100 = load_profile("h100")


def failing(*_):
    raise RuntimeError("CUDA error: not here\nmore")


def quick(monkeypatch, **parts):
    """A device whose measurements take no time; only the case of the bandwidth runs."""
    quickly = {"device_seconds": lambda *_: [0.1] * REPEATS, "step_seconds": lambda *_: [0.1] * REPEATS}
    quickly |= {"update_seconds": lambda *_: [1e-5] * REPEATS}
    quickly |= {"thread_slowdowns": lambda *_: [1.0] * REPEATS, "link_rate": lambda *_: (1.0, 1.0)}
    for name, part in (quickly | parts).items():
        monkeypatch.setattr(device_profile, name, part)
    return measure_profile("cpu", "mine", shrink=4096, cases=MEMORY)


def test_links_that_cannot_be_measured_are_assumed_and_named(monkeypatch):
    cpu = torch.device("cpu")
    found = quick(monkeypatch, link_rate=failing, ways=lambda _: {key: [(cpu, cpu)] for key in ("host", "within")})
    assert found.failures == dict.fromkeys(("link host", "link within"), "CUDA error: not here")
    for way, link in (("host", "pcie"), ("within", "nvlink")):
        assert found.profile.links[way].gb_per_s == H100.links[link].gb_per_s
        assert f"{way}: assumed, {link} of profile h100" in found.profile.sources["links"]


def test_constants_of_the_host_that_cannot_be_measured_are_assumed_and_named(monkeypatch):
    found = quick(monkeypatch, step_seconds=failing, thread_slowdowns=failing)
    assert found.failures == dict.fromkeys(("launch_us", "lock"), "CUDA error: not here")
    assert found.profile.kernels["launch_us"].origin == "assumed"
    assert "lock" not in found.profile.kernels


def test_a_launch_takes_what_updates_leave_of_tiny_steps(monkeypatch):
    """From such steps the constants of the host that took them come back."""
    launch_us, parameter_us = 12, 7

    def step_seconds(name, *_):
        make, shape = TINY[name]
        with torch.device("meta"):
            net, data = make(), torch.empty(shape)
        parameters = len([*net.parameters()])
        return [(step_launches(net, data, loss) * launch_us + parameters * parameter_us) / 1e6] * REPEATS

    found = quick(monkeypatch, step_seconds=step_seconds, update_seconds=lambda *_: [parameter_us / 1e6] * REPEATS)
    kernels = found.profile.kernels
    assert (kernels["launch_us"].value, kernels["parameter_us"].value) == (launch_us, parameter_us)
    assert {kernels[name].origin for name in ("launch_us", "parameter_us")} == {"measured"}


@pytest.mark.parametrize("failing_one", ["step_seconds", "update_seconds"])
def test_neither_is_measured_without_the_other(monkeypatch, failing_one):
    found = quick(monkeypatch, **{failing_one: failing})
    assert found.failures == {"launch_us": "CUDA error: not here"}
    assert {found.profile.kernels[name].origin for name in ("launch_us", "parameter_us")} == {"assumed"}


@pytest.mark.parametrize("hidden", [(), ("memory",)])
def test_shares_are_measured_if_all_constants_are_that_they_come_from(hidden):
    constants = {
        name: Constant(value=constant.value, origin="assumed" if name in hidden else "measured")
        for name, constant in H100.kernels.items()
    }
    profile = device_profile._profile(H100.settings, constants)
    assert profile.efficiency.origin == ("assumed" if hidden else "measured")


@pytest.mark.parametrize(
    ("model", "memory_gib", "multiprocessors", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", 79.2, 132, "h100"),
        ("Tesla P40", 22.4, 30, "p40"),
        ("NVIDIA H100 PCIe", 79.2, 114, None),
        ("NVIDIA H100 NVL", 93.1, 132, None),
        ("NVIDIA A100-SXM4-40GB", 39.4, 108, None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 39.3, 60, None),
    ],
)
def test_a_data_sheet_is_that_of_the_very_device(model, memory_gib, multiprocessors, profile):
    found = device_profile._with_data_sheet(model, memory_gib, multiprocessors)
    assert (found and found.name) == profile


def peaks_without(monkeypatch, dtype):
    peaks = {name: (1, failing if name == dtype else lambda _: None) for name in ("float32", "float64", "bfloat16")}
    return quick(monkeypatch, peak_cases=lambda _: peaks)


def test_a_type_whose_product_fails_has_no_peak(monkeypatch):
    found = peaks_without(monkeypatch, "bfloat16")
    assert set(found.profile.peak_tflops) == {"float32", "float64"}
    assert found.profile.matrix_tflops == {}
    assert found.failures == {"peak of bfloat16": "CUDA error: not here"}


def test_without_any_peak_or_bandwidth_there_is_no_profile(monkeypatch):
    with pytest.raises(ConfigError, match="got peak of float32: CUDA error: not here; free its memory"):
        peaks_without(monkeypatch, "float32")
    with pytest.raises(ConfigError, match="got leaky_relu of 150 MB: CUDA error: not here; peak of"):
        quick(monkeypatch, device_seconds=failing)


@pytest.mark.parametrize(("capability", "half"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)])
def test_halves_are_of_the_type_that_the_device_is_made_for(monkeypatch, capability, half):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert device_profile._half(torch.device("cuda", 0)) == half


@pytest.mark.parametrize("constant", ["norm_backward", "layer_norm_backward"])
def test_the_backward_pass_of_a_norm_gives_the_gradients_of_its_weights(constant):
    (case,) = (case for case in CASES if case.constants == (constant,))
    assert len(case.prepare(Bench(torch.device("cpu"), shrink=4096))()) == 3


class SleepingDevice:
    """Sleeps for so many cycles; each call that is queued takes the host 100."""

    def __init__(self):
        self.asleep = self.sleeps = self.calls = 0

    def between(self, run, device, calls, cycles):
        self.asleep = cycles
        for _ in range(calls):
            run()
            self.asleep -= 100
        return 2.0 * calls, self.asleep > 0


def test_a_measurement_counts_only_if_the_device_slept_until_all_was_queued(monkeypatch):
    device, cycles = SleepingDevice(), []

    def between(run, target, calls, slept):
        cycles.append((calls, slept))
        return device.between(run, target, calls, slept)

    monkeypatch.setattr(queued, "_CYCLES", 50)
    monkeypatch.setattr(queued, "_between_events", between)
    found = queued.device_seconds(lambda: None, torch.device("cuda"), REPEATS)
    assert found == [0.002] * REPEATS
    assert cycles == [(1, 50), (1, 100), (1, 200), *[(1, 200)] * REPEATS]


def test_a_device_that_never_sleeps_long_enough_is_an_error(monkeypatch):
    monkeypatch.setattr(queued, "_between_events", lambda *_: (1.0, False))
    with pytest.raises(RuntimeError, match="the device must sleep until all work is queued"):
        queued.device_seconds(lambda: None, torch.device("cuda"), 1)


def test_constants_whose_repeats_are_far_apart_are_named(measured, monkeypatch, tmp_path):
    constant = Constant(value=2, origin="measured", spread=0.9)
    profile = measured.profile.model_copy(update={"kernels": {**measured.profile.kernels, "start_us": constant}})
    monkeypatch.setattr(device_profile, "measure_profile", lambda *_: replace(measured, profile=profile))
    answer = CliRunner().invoke(application(), ["profile", "--device", "cpu", "--out", str(tmp_path / "mine.yaml")])
    assert answer.exit_code == 0
    assert re.search(r"note: .*\bstart_us\b.*: repeats are far apart; measure again", answer.stderr)
