"""The law of a profile's constants, worked out by hand, and their checks."""

from __future__ import annotations

from typing import get_args

import pytest

from gpipe_bench.errors import ConfigError
from gpipe_bench.kernels.cost import duration_ns
from gpipe_bench.kernels.kernel import ACCUMULATE, Kernel, Part, Whole
from gpipe_bench.kernels.law import part_ns
from gpipe_bench.machine.constants import CONSTANTS, Unit
from gpipe_bench.machine.hardware import HardwareMachine
from gpipe_bench.machine.profile import load_profile, parse_profile, profile_names
from gpipe_bench.simulator.workloads.blocks import total

H200 = load_profile("h200")
PLAIN = H200.model_copy(update={"kernels": None})
C = H200.constants
MIB = 2**20


def kernel(*found: Part, dtype: str = "float32") -> Kernel:
    return Kernel("op", dtype, 1, Whole("memory_bound", MIB, MIB), found)


@pytest.mark.parametrize(
    ("part", "work_ns"),
    [
        (Part("stream", 10**9), 1e9 / (C["memory"] * 4800)),
        (Part("strided", 8, 10**9), 1e9 / C["strided"]),
        (Part("product", 8, 10**15), 1e15 / (C["product_float32"] * 66.9e12) * 1e9),
        (Part("convolution", 8, 10**15), 1e15 / (C["convolution_float32"] * 494.7e12) * 1e9),
        (Part("product_unaligned", 8, 10**15), 1e15 / (C["product_float32"] * 66.9e12) * 1e9),
        (Part("depthwise", 8, 10**15), 1e15 / (C["depthwise"] * 66.9e12) * 1e9),
        (Part("norm", 8, 10**9, 64), 1e9 / (C["norm"] * 64) + 64 * C["plane_ns"]),
        (Part("norm", 8, 10**9, 1000), 1e9 / (C["norm"] * 264) + 1000 * C["plane_ns"]),
    ],
)
def test_a_part_takes_its_start_and_the_longer_of_bytes_and_work(part, work_ns):
    library = part.kind.startswith(("product", "convolution"))
    start = 1000 * C["library_start_us" if library else "start_us"]
    assert part_ns(part, "float32", H200) == pytest.approx(start + work_ns)


def test_convolutions_without_tf32_have_a_share_of_the_ordinary_units_and_transpose_nothing():
    ordinary = H200.adapted(tf32=False)
    expected = 7000 + 1e15 / (C["convolution_no_tf32"] * 66.9e12) * 1e9
    for kind in ("convolution", "weight_gradient"):
        assert part_ns(Part(kind, 8, 10**15), "float32", ordinary) == pytest.approx(expected)
        assert part_ns(Part(kind, 8, 10**15), "bfloat16", ordinary) == part_ns(Part(kind, 8, 10**15), "bfloat16", H200)
    assert part_ns(Part("transposes", 8, 10**9), "float32", ordinary) == 0


def test_halves_have_shares_of_their_own():
    part = Part("product_unaligned", 8, 10**15)
    assert part_ns(part, "bfloat16", H200) == pytest.approx(7000 + 1e15 / (C["product_unaligned"] * 989.4e12) * 1e9)


def test_a_kernel_is_the_sum_of_its_parts():
    one, two = Part("stream", MIB), Part("strided", MIB, MIB)
    sides = sum(duration_ns(kernel(part), H200) for part in (one, two))
    assert duration_ns(kernel(one, two), H200) == pytest.approx(sides, abs=1)


def test_a_total_says_what_adds_to_gradients():
    added = total([kernel(Part(ACCUMULATE, MIB)), kernel(Part("stream", MIB))], H200)
    assert (added.duration_ns, added.launches) == (2 * added.adding_ns, 2 * added.adding_launches)
    assert added.adding_launches == 1


def test_a_profile_without_constants_takes_bytes_and_floor_whatever_the_parts_are():
    added = kernel(Part(ACCUMULATE, MIB))
    assert duration_ns(added, PLAIN) == duration_ns(added._replace(parts=None), PLAIN) == 2000


def test_the_host_is_as_slow_as_the_constants_say():
    assert HardwareMachine(H200).launch_ns == 28200
    for profile in (H200, PLAIN):
        assert HardwareMachine(profile.adapted(launch_us=4.5)).launch_ns == 4500


def test_one_thread_launches_for_a_device_and_threads_that_share_a_lock_take_turns():
    machine = HardwareMachine(H200)
    assert machine.host_ns({0: 2, 1: 3}) == 3 * 28200
    machine.lock_permille = 1000
    assert machine.host_ns({0: 2, 1: 3}) == 5 * 28200
    assert machine.host_ns({}) == 0


def test_products_take_tf32_where_it_is_asked_for():
    part = Part("product", 8, 10**15)
    assert part_ns(part, "float32", H200.adapted(tf32=True)) < 0.2 * part_ns(part, "float32", H200)
    assert H200.adapted() is H200
    assert load_profile("p40").adapted(tf32=True) == load_profile("p40")


def test_each_constant_says_its_unit_and_the_case_that_measures_it():
    assert {fact.unit for fact in CONSTANTS.values()} == set(get_args(Unit))
    assert all(fact.text and fact.case for fact in CONSTANTS.values())
    assert {name for name in profile_names() if load_profile(name).kernels} >= {"h100", "h200"}


def test_a_section_from_before_attention_knew_dropout_and_length_lacks_these_constants():
    old = {name: constant for name, constant in H200.kernels.items() if "no_dropout" not in name}
    with pytest.raises(ConfigError) as caught:
        parse_profile({**PLAIN.model_dump(), "kernels": {name: one.model_dump() for name, one in old.items()}})
    missing = [name for name in CONSTANTS if "no_dropout" in name]
    assert len(missing) == 8
    assert list(caught.value.problems) == [
        f"profile: kernels.{name} must be given, got nothing; add it" for name in missing
    ]


def test_a_section_names_every_problem():
    section = {name: {"value": 1, "origin": "assumed"} for name in CONSTANTS if name != "strided"}
    section |= {"memory": {"value": 92, "origin": "measured"}, "stride": {"value": 1, "origin": "measured"}}
    with pytest.raises(ConfigError) as caught:
        parse_profile({**PLAIN.model_dump(), "kernels": section})
    text = str(caught.value)
    assert "kernels.strided must be given, got nothing; add it" in text
    assert "kernels.memory must be at most 1, got 92; write a share, not percent" in text
    assert "kernels.stride must be a constant of the law, got an unknown one; use 'strided'" in text
