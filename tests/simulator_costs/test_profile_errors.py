"""Mistakes in a hardware profile: none hides another, and each names what was meant."""

from __future__ import annotations

import pytest
import yaml

from gpipe_bench.errors import ConfigError
from gpipe_bench.machine.profile import PROFILES, is_of_device, load_profile, parse_profile

P40 = yaml.safe_load((PROFILES / "p40.yaml").read_text(encoding="utf-8"))


def problems(data):
    with pytest.raises(ConfigError) as caught:
        parse_profile(data, "mine.yaml")
    return list(caught.value.problems)


def test_a_link_that_does_not_exist_is_named_beside_other_mistakes():
    links = sorted(P40["links"])
    wrong = f"{links[0]}x"
    found = problems(P40 | {"queue_depth": 0, "topology": P40["topology"] | {"host": wrong}})
    assert len(found) == 2
    assert found[0].startswith("mine.yaml: queue_depth")
    assert found[1] == f"mine.yaml: topology.host must name one of links, got '{wrong}'; use '{links[0]}'"


@pytest.mark.parametrize(
    ("change", "name", "hint"),
    [
        ({"memory_gb": 22}, "memory_gb", "use 'memory_gib'"),
        ({"topology": P40["topology"] | {"groupsize": 4}}, "topology.groupsize", "use 'group_size'"),
        ({"links": P40["links"] | {"new": {"gb_per_s": 1, "latency_us": 1, "latency": 2}}}, "links.new.latency",
         "use 'latency_us'"),
        ({"zzz": 1}, "zzz", "remove it"),
    ],
)  # fmt: skip
def test_an_unknown_setting_names_the_nearest_one(change, name, hint):
    (found,) = problems(P40 | change)
    assert found == f"mine.yaml: {name} must be a setting of a profile, got an unknown one; {hint}"


@pytest.mark.parametrize(("name", "meant"), [("p4O", "p40"), ("h1OO", "h100"), ("A1O0", "a100"), ("H20O", "h200")])
def test_a_name_with_letters_for_digits(name, meant):
    with pytest.raises(ConfigError, match=f"got '{name}'; use '{meant}'"):
        load_profile(name)


def test_a_path_that_is_no_file(tmp_path):
    with pytest.raises(ConfigError, match=r"or a YAML file, got '.*none\.yaml'; check the name, or the path$"):
        load_profile(tmp_path / "none.yaml")


def changed(section, **values):
    return P40 | {section: P40.get(section, {}) | values}


@pytest.mark.parametrize("share", ["matmul", "other_conv_matmul", "memory_bound"])
def test_no_device_does_more_than_its_peak(share):
    assert parse_profile(changed("efficiency", **{share: 1.0}))
    (found,) = problems(changed("efficiency", **{share: 65}))
    assert found == f"mine.yaml: efficiency.{share} must be at most 1, got 65; write a share, not percent"


@pytest.mark.parametrize("share", ["conv3x3_stride1", "spatial_conv"])
def test_fast_convolutions_do_more_than_the_peak_but_not_any_number(share):
    assert parse_profile(changed("efficiency", **{share: 4.0}))
    (found,) = problems(changed("efficiency", **{share: 4.1}))
    assert found == f"mine.yaml: efficiency.{share} must be at most 4, got 4.1; write a share, not percent"


@pytest.mark.parametrize("table", ["peak_tflops", "matrix_tflops"])
def test_a_peak_in_flops(table):
    (found,) = problems(changed(table, float32=19.5e12))
    assert found == f"mine.yaml: {table}.float32 must be at most 100000, got 1.95e+13; write 10^12 FLOP per second"


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (P40 | {"bandwidth_gb_per_s": 346 * 10**9}, "bandwidth_gb_per_s"),
        (changed("links", new={"gb_per_s": 346 * 10**9, "latency_us": 1}), "links.new.gb_per_s"),
    ],
)
def test_a_bandwidth_in_bytes(data, name):
    (found,) = problems(data)
    assert found == f"mine.yaml: {name} must be at most 100000, got 3.46e+11; write 10^9 bytes per second"


@pytest.mark.parametrize(
    ("table", "dtype", "hint"),
    [
        ("matrix_tflops", "flaot16", "use 'float16'"),
        ("matrix_tflops", "bf16", "use 'bfloat16'"),
        ("peak_tflops", "zzz", "use one of bfloat16, float16, float32, float64"),
    ],
)
def test_a_type_that_is_not_known_names_the_nearest_one(table, dtype, hint):
    (found,) = problems(changed(table, **{dtype: 10.0}))
    assert found == f"mine.yaml: {table}.{dtype} must be the rate of a known type, got '{dtype}'; {hint}"


def test_rates_are_checked_beside_other_mistakes():
    found = problems(P40 | {"queue_depth": 0, "peak_tflops": {"float32": -1.0}, "matrix_tflops": {"fp16": 1.0}})
    assert ["queue_depth" in line or "positive" in line or "fp16" in line for line in found] == [True] * 3


def test_a_topology_without_links():
    found = problems(P40 | {"links": {}})
    assert len(found) == 3
    assert found[0].endswith(f"got '{P40['topology']['within']}'; links is empty, add it there")


@pytest.mark.parametrize(
    ("measured", "device", "same"),
    [
        ("cuda NVIDIA A100-SXM4-80GB", "A100 SXM 80 GB", True),
        ("cuda NVIDIA H100 80GB HBM3", "H100 SXM 80 GB", True),
        ("cuda Tesla P100-PCIE-16GB", "Tesla P100 PCIe 16 GB", True),
        ("cuda NVIDIA GeForce RTX 4090", "RTX 4090", True),
        ("cuda NVIDIA GeForce RTX 3090", "RTX 4090", False),
        ("cuda NVIDIA H200 80GB", "H100 SXM 80 GB", False),
        ("cpu Intel(R) Xeon(R) Processor", "Tesla P40", False),
        ("cuda anything", "My accelerator, 80 GB", False),
        ("", "Tesla P40", False),
    ],
)
def test_names_of_the_same_device(measured, device, same):
    assert is_of_device(measured, device) == same
