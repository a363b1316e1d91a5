"""Profiles are data: complete, checked, with all that is wrong at once."""

from __future__ import annotations

import os

import pytest
import yaml

from gpipe_bench.errors import ConfigError
from gpipe_bench.machine.profile import PROFILES, HardwareMachine, load_profile, parse_profile, profile_names
from gpipe_bench.simulator.workloads.workload import HOST

P40 = yaml.safe_load((PROFILES / "p40.yaml").read_text(encoding="utf-8"))


def test_the_profiles_of_the_package():
    assert set(profile_names()) == {"p40", "p100", "v100", "a100", "h100", "h200"}
    for name in profile_names():
        profile = load_profile(name)
        assert profile.name == name
        assert {"peak_tflops", "bandwidth_gb_per_s", "memory_gib", "links", "topology", "efficiency"} <= set(
            profile.sources
        )


def test_a_file_that_changes_is_read_anew_however_soon(tmp_path):
    path = tmp_path / "mine.yaml"
    for bandwidth in (100, 200):
        path.write_text(yaml.safe_dump({**P40, "name": "mine", "bandwidth_gb_per_s": bandwidth}))
        os.utime(path, ns=(0, 0))
        assert load_profile(path).bandwidth_gb_per_s == bandwidth


def test_memory_for_tensors_on_a_p40():
    assert load_profile("p40").capacity_bytes / 2**30 == pytest.approx(21.98)


def test_a_profile_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(P40 | {"name": "mine", "bandwidth_gb_per_s": 500}), encoding="utf-8")
    assert load_profile(path).bandwidth_gb_per_s == 500


def test_all_problems_are_named_at_once():
    broken = {key: value for key, value in P40.items() if key != "queue_depth"}
    broken |= {"memory_gib": -1, "peek_tflops": 1, "efficiency": P40["efficiency"] | {"memory_bound": 0}}
    with pytest.raises(ConfigError) as caught:
        parse_profile(broken)
    problems = "\n".join(caught.value.problems)
    assert all(name in problems for name in ("queue_depth", "memory_gib", "peek_tflops", "efficiency.memory_bound"))
    assert len(caught.value.problems) == 4


def test_names_that_lead_nowhere():
    broken = P40 | {"topology": P40["topology"] | {"within": "warp", "host": "pci"}, "peak_tflops": {"float16": 1.0}}
    with pytest.raises(ConfigError) as caught:
        parse_profile(broken)
    assert ["within" in line or "host" in line or "float32" in line for line in caught.value.problems] == [True] * 3


@pytest.mark.parametrize("name", ["p4", "no/such.yaml"])
def test_no_such_profile(name):
    with pytest.raises(ConfigError, match="p40"):
        load_profile(name)


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "7"])
def test_files_that_hold_no_profile(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError):
        load_profile(path)


def test_copies_depend_on_the_sockets():
    machine = HardwareMachine(load_profile("p40"))
    assert machine.copy_ns(0, 3, 11 * 10**6) == machine.copy_ns(3, 0, 11 * 10**6) == 1_010_000
    assert machine.copy_ns(3, 4, 6 * 10**6) == 1_015_000
    assert machine.copy_ns(HOST, 5, 0) == 10_000
    assert machine.copy_ns(2, 2, 10**6) < machine.copy_ns(2, 3, 10**6)


def test_transfers_between_sockets_share_a_bus_in_each_direction():
    machine = HardwareMachine(load_profile("p40"))
    assert machine.buses(0, 7) == machine.buses(3, 4) != machine.buses(4, 3)
    assert machine.buses(0, 7)
    assert [machine.buses(0, 3), machine.buses(4, 7), machine.buses(HOST, 5)] == [()] * 3


def test_convolutions_use_tf32_where_there_is_one_and_products_do_not():
    a100 = load_profile("a100")
    assert a100.peak_flop_per_s("convolution", "float32") == 156e12
    assert a100.peak_flop_per_s("matmul", "float32") == 19.5e12
    assert a100.peak_flop_per_s("matmul", "bfloat16") == 312e12
    assert load_profile("v100").peak_flop_per_s("convolution", "float32") == 15.7e12


@pytest.mark.parametrize("name", profile_names())
def test_rates_of_other_types(name):
    profile = load_profile(name)
    single = profile.peak_tflops["float32"] * 1e12
    assert profile.peak_flop_per_s("matmul", "float16") >= single
    assert profile.peak_flop_per_s("matmul", "complex64") == profile.peak_flop_per_s("matmul", "float32")
    assert profile.peak_flop_per_s("matmul", "complex128") == profile.peak_flop_per_s("matmul", "float64")
    assert profile.peak_flop_per_s("convolution", "float64") <= single / 1.9


def test_a_profile_that_does_not_know_float64():
    profile = load_profile("p40").model_copy(update={"name": "mine", "peak_tflops": {"float32": 10.0}})
    assert profile.peak_flop_per_s("matmul", "bfloat16") == 10e12
    with pytest.raises(ConfigError, match="profile mine: peak_tflops must have float64"):
        profile.peak_flop_per_s("matmul", "float64")
