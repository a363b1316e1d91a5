"""The law of profiles without constants, worked out by hand."""

from __future__ import annotations

import yaml

from gpipe_bench.kernels.cost import duration_ns, scratch_bytes
from gpipe_bench.kernels.kernel import Kernel, Whole
from gpipe_bench.machine.profile import PROFILES, parse_profile
from gpipe_bench.simulator.workloads.blocks import total
from gpipe_bench.simulator.workloads.workload import Kernels

P40 = yaml.safe_load((PROFILES / "p40.yaml").read_text(encoding="utf-8"))


def kernel(kind: str, flop: int = 0, moved: int = 0, *, scratch: int = 0, dtype: str = "float32", launches: int = 1):
    return Kernel("op", dtype, launches, Whole(kind, moved, 0, flop, scratch))


def exact():
    """A device of 10 TFLOP/s and 100 GB/s with round efficiencies."""
    efficiency = {"conv3x3_stride1": 2.0, "other_conv_matmul": 0.5, "memory_bound": 0.8, "origin": "assumed"}
    changes = {"peak_tflops": {"float32": 10.0}, "bandwidth_gb_per_s": 100, "efficiency": efficiency}
    return parse_profile(P40 | changes | {"kernel_floor_us": 3})


def test_a_roofline():
    profile = exact()
    assert duration_ns(kernel("memory_bound", moved=8_000_000), profile) == 100_000
    assert duration_ns(kernel("other_conv_matmul", 10**9), profile) == 200_000
    assert duration_ns(kernel("conv3x3_stride1", 10**9), profile) == 50_000
    assert duration_ns(kernel("conv3x3_stride1", 10**9, 8_000_000), profile) == 100_000, "bound by its bytes"
    assert duration_ns(kernel("memory_bound", moved=8, launches=2), profile) == 6_000, (
        "no kernel is shorter than the floor"
    )


def test_wide_filters_are_as_matrix_products_unless_the_profile_says_more():
    profile, wide = exact(), kernel("spatial_conv", 10**9)
    assert duration_ns(wide, profile) == duration_ns(kernel("other_conv_matmul", 10**9), profile)
    slower = profile.efficiency.model_copy(update={"spatial_conv": 0.1})
    assert duration_ns(wide, profile.model_copy(update={"efficiency": slower})) == 1_000_000


def test_matrix_products_may_have_a_share_of_their_own():
    share = exact().efficiency.model_copy(update={"matmul": 0.25, "spatial_conv": 0.1})
    profile = exact().model_copy(update={"efficiency": share})
    assert duration_ns(kernel("matmul", 10**9), profile) == 400_000
    assert duration_ns(kernel("matmul", 10**9), exact()) == 200_000
    assert duration_ns(kernel("other_conv_matmul", 10**9), profile) == 200_000


def test_winograd_transforms_before_and_after_its_products():
    """8 MB moved take 100 us, 4 MB of scratch 50 us: written by the transforms, then read by the products or back."""
    assert duration_ns(kernel("conv3x3_stride1", 10**8, 8_000_000, scratch=4_000_000), exact()) == 200_000
    many_products = kernel("conv3x3_stride1", 2 * 10**9, 8_000_000, scratch=4_000_000)
    assert duration_ns(many_products, exact()) == 250_000
    without = exact().model_copy(update={"winograd": False})
    assert duration_ns(many_products, without) == 100_000


def test_matrix_units_compute_convolutions_directly():
    """Winograd's share and scratch memory are those of ordinary units; half precision runs on matrix units."""
    device = exact().model_copy(update={"matrix_tflops": {"float16": 100.0}})
    product = kernel("conv3x3_stride1", 10**9, 8_000_000, scratch=4_000_000)
    half, more = (
        kernel("conv3x3_stride1", flop, 8_000_000, scratch=4_000_000, dtype="float16") for flop in (10**10, 10**11)
    )
    assert (device.uses_winograd("float32"), device.uses_winograd("float16")) == (True, False)
    assert (scratch_bytes(product, device), scratch_bytes(half, device)) == (4_000_000, 0)
    assert duration_ns(product, device) == duration_ns(product, exact())
    assert duration_ns(half, device) == 200_000, "0.5 of 100 TFLOP/s"
    wide = device.efficiency.model_copy(update={"spatial_conv": 2.0})
    assert duration_ns(more, device.model_copy(update={"efficiency": wide})) == 1_000_000


def test_kernels_add_up():
    work = [kernel("memory_bound", moved=8_000_000), kernel("other_conv_matmul", 10**9)]
    assert total(work, exact()) == Kernels(300_000, 2, ends_ns=(100_000, 300_000))
