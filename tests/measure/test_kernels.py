"""The kernels of a profile: their classes, and their operation counts against PyTorch's own counter."""

from collections import Counter

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gpipe_bench.measure.kernels import KERNEL_CLASSES, kernel_cases
from gpipe_bench.measure.links import link_cases

META = list(kernel_cases(torch.device("meta")))
CPU = list(kernel_cases(torch.device("cpu")))


def identify(case):
    return f"{case.name} {case.direction}"


def test_every_class_has_cases_and_every_case_a_name_of_its_own():
    assert {case.kernel_class for case in CPU} == set(KERNEL_CLASSES)
    assert max(Counter(identify(case) for case in CPU).values()) == 1


def test_only_3x3_convolutions_of_stride_1_are_in_the_first_class():
    for case in CPU:
        assert (case.kernel_class == "conv3x3_stride1") == case.name.startswith("conv2d 3x3 stride 1")


@pytest.mark.parametrize("case", [case for case in META if case.flop], ids=identify)
def test_operations_are_those_that_pytorch_counts(case):
    run = case.prepare()
    with FlopCounterMode(display=False) as counter:
        run()
    assert case.flop == counter.get_total_flops()


@pytest.mark.parametrize("case", [case for case in META if case.kernel_class == "memory_bound"], ids=identify)
def test_what_is_bound_by_memory_counts_no_operations(case):
    assert case.flop == 0
    assert case.direction == "forward"


@pytest.mark.parametrize(
    ("start", "reads", "writes"),
    [("leaky_relu", 1, 1), ("instance_norm", 1, 1), ("upsample", 1, 4), ("cat", 2, 2), ("add", 2, 1)],
)
def test_bytes_are_operands_and_result(start, reads, writes):
    (case,) = (case for case in META if case.name.startswith(start))
    unit = 4 * 16 * 64 * 192 * 192
    assert case.nbytes == unit * (reads + writes)
    result = case.prepare()()
    assert result.numel() * result.element_size() == unit * writes


def test_bytes_of_a_convolution_forward_are_input_weight_and_output():
    (case,) = (case for case in META if case.name.endswith("16x64x192x192 to 64") and case.direction == "forward")
    assert case.nbytes == 4 * (2 * 16 * 64 * 192 * 192 + 64 * 64 * 9)


@pytest.mark.parametrize("case", [case for case in CPU if case.kernel_class == "memory_bound"], ids=identify)
def test_every_operation_runs_on_its_own(case):
    # a late binding in the list of operations would make all of them the last one
    result = case.prepare()()
    factor = {"max_pool2d": 0.25, "upsample": 4, "cat": 2}.get(case.name.split()[0], 1)
    assert result.numel() == 2 * 64 * 192 * 192 * factor


def test_links_of_the_cpu_are_within_it():
    cases = list(link_cases(torch.device("cpu")))
    assert {(case.link, case.source, case.target, case.memory) for case in cases} == {
        ("within_device", "cpu", "cpu", "")
    }
    assert [case.nbytes for case in cases] == [2**20, 2**26]


def test_links_of_an_accelerator_go_everywhere_both_ways(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    cases = [case for case in link_cases(torch.device("cuda", 1)) if case.nbytes == 2**20]
    assert {(case.source, case.target, case.memory) for case in cases} == {
        ("cuda:1", "cuda:1", ""),
        ("cpu", "cuda:1", "pinned"),
        ("cpu", "cuda:1", "pageable"),
        ("cuda:1", "cpu", "pinned"),
        ("cuda:1", "cpu", "pageable"),
        ("cuda:1", "cuda:0", ""),
        ("cuda:0", "cuda:1", ""),
    }


def test_a_link_moves_what_it_says():
    case = next(link_cases(torch.device("cpu")))
    moved = case.prepare()()
    assert moved.numel() * moved.element_size() == case.nbytes
