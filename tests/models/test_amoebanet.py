"""AmoebaNet-D: exact published counts, the cells as printed, and what each quirk changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gpipe_bench.models.amoebanet import Cell, Quirks, amoebanet_d
from gpipe_bench.models.amoebanet_operations import FactorizedReduction, operation
from gpipe_bench.skip import Skippable


def meta_amoebanet(layers: int, channels: int) -> nn.Sequential:
    with torch.device("meta"):
        return amoebanet_d(layers, channels)


def small(quirks: Quirks | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return amoebanet_d(3, 8, classes=5, size=64, quirks=quirks)


def cell(module: nn.Sequential, name: str) -> Cell:
    found = module.get_submodule(name)
    assert isinstance(found, Cell)
    return found


# (L, D), parameters, and the balances with which the model was run (torchgpipe 0.0.7, benchmarks/amoebanetd-*).
@pytest.mark.parametrize(
    ("layers", "channels", "parameters", "balances"),
    [
        (18, 208, 81_505_540, []),
        (18, 256, 122_470_120, [[7, 17], [9, 15], [3, 4, 5, 12], [3, 6, 7, 8], [2, 2, 2, 3, 3, 4, 4, 4]]),
        (18, 416, 319_024_120, [[24]]),
        (18, 544, 542_734_840, [[16, 8]]),
        (36, 544, 1_055_832_376, [[16, 12, 7, 7]]),
        (72, 512, 1_844_858_344, [[23, 16, 11, 6, 6, 5, 5, 6]]),
    ],
)
def test_parameters_and_layers_are_exactly_the_published_ones(
    layers: int, channels: int, parameters: int, balances: list[list[int]]
) -> None:
    module = meta_amoebanet(layers, channels)

    assert sum(parameter.numel() for parameter in module.parameters()) == parameters
    assert len(module) == layers + 6
    assert all(sum(balance) == len(module) for balance in balances)


def test_a_forward_pass_takes_the_multiplications_of_the_published_size() -> None:
    module = meta_amoebanet(18, 256)
    counter = FlopCounterMode(display=False)

    with counter:
        module(torch.empty(1, 3, 224, 224, device="meta"))

    multiply_adds = counter.get_total_flops() / 2
    assert round(multiply_adds / 1e9, 2) == 15.17


def test_cells_stand_in_the_order_of_the_picture() -> None:
    names = [name for name, _ in amoebanet_d(6, 8).named_children()]

    assert names == [
        *["stem", "reduction0", "reduction1", "normal1_0", "normal1_1", "reduction2", "normal2_0", "normal2_1"],
        *["reduction3", "normal3_0", "normal3_1", "classifier"],
    ]


def test_between_cells_travels_a_tuple_of_two_tensors_and_no_skip() -> None:
    module = small()
    states: Tensor | tuple[Tensor, Tensor] = module[0](torch.rand(2, 3, 64, 64))
    shapes = []
    for layer in list(module)[1:-1]:
        newest = states[0] if isinstance(states, tuple) else states
        states = layer(states)
        assert isinstance(states, tuple)
        assert states[1] is newest
        shapes.append(tuple(states[0].shape[1:]))

    # D = 8: the stem has 2 channels; cells have 4, 8, 8, 16, 16, 32, 32; reductions give 3 states, normal cells 4.
    expected = [(12, 16), (24, 8), (32, 8), (48, 4), (64, 4), (96, 2), (128, 2)]
    assert shapes == [(channels, size, size) for channels, size in expected]
    assert not any(isinstance(layer, Skippable) for layer in module.modules())


def test_a_normal_cell_computes_the_states_of_its_genotype() -> None:
    normal = cell(small().eval(), "normal1_0")
    s1, s2 = torch.rand(2, 24, 8, 8), torch.rand(2, 12, 16, 16)

    output, passed = normal((s1, s2))

    op = normal.operations
    h0, h1 = normal.enter1(s1), normal.enter2(s2)
    h2 = op[0](h1) + op[1](h1)
    h3 = h1 + op[3](h0)
    h4 = op[4](h0) + op[5](h0)
    h5 = op[6](h2) + h2
    h6 = op[8](h1) + op[9](h5)
    torch.testing.assert_close(output, torch.cat([h0, h3, h4, h6], dim=1))
    assert passed is s1
    assert [len(operation) if isinstance(operation, nn.Sequential) else 0 for operation in op] == [
        *[3, 0],
        *[0, 4],
        *[3, 4],
        *[0, 0],
        *[0, 3],
    ]


def test_a_reduction_cell_computes_the_states_of_its_genotype() -> None:
    reduction = cell(small().eval(), "reduction2")
    s1, s2 = torch.rand(2, 32, 8, 8), torch.rand(2, 24, 8, 8)

    output, passed = reduction((s1, s2))

    op = reduction.operations
    h0, h1 = reduction.enter1(s1), reduction.enter2(s2)
    h2 = nn.functional.max_pool2d(h0, 2) + op[1](h0)
    h3 = h2 + op[3](h1)
    h4 = op[4](h2) + op[5](h2)
    h5 = h3 + nn.functional.max_pool2d(h1, 2)
    h6 = op[8](h2) + op[9](h3)
    torch.testing.assert_close(output, torch.cat([h4, h5, h6], dim=1))
    assert output.shape == (2, 48, 4, 4)
    assert passed is s1


def test_bottlenecked_operations_work_on_a_quarter_of_the_channels() -> None:
    def convolutions(name: str, stride: int) -> list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
        modules = operation(name, 16, stride, max3_is_average=True).modules()
        found = [module for module in modules if isinstance(module, nn.Conv2d)]
        assert all(module.bias is None for module in found)
        return [(module.in_channels, module.out_channels, module.kernel_size, module.stride) for module in found]

    assert convolutions("3x3", 2) == [(16, 4, (1, 1), (1, 1)), (4, 4, (3, 3), (2, 2)), (4, 16, (1, 1), (1, 1))]
    assert convolutions("1x7_7x1", 2) == [
        (16, 4, (1, 1), (1, 1)),
        (4, 4, (1, 7), (1, 2)),
        (4, 4, (7, 1), (2, 1)),
        (4, 16, (1, 1), (1, 1)),
    ]


@pytest.mark.parametrize("name", ["none", "avg3", "max3", "max2", "1x1", "3x3", "1x7_7x1"])
@pytest.mark.parametrize("average", [True, False])
def test_every_operation_halves_the_image_at_stride_2(name: str, average: bool) -> None:
    halving = operation(name, 8, 2, max3_is_average=average)

    assert halving(torch.rand(2, 8, 6, 6)).shape == (2, 8, 3, 3)


def test_a_factorized_reduction_sees_pixels_of_both_diagonals() -> None:
    reduction = FactorizedReduction(1, 2).eval()
    nn.init.ones_(reduction.conv.weight)
    nn.init.ones_(reduction.offset_conv.weight)
    image = torch.arange(1.0, 17.0).reshape(1, 1, 4, 4)

    even, odd = reduction(image)[0] * (1 + reduction.norm.eps) ** 0.5

    torch.testing.assert_close(even, torch.tensor([[1.0, 3.0], [9.0, 11.0]]))
    torch.testing.assert_close(odd, torch.tensor([[6.0, 8.0], [14.0, 16.0]]))


def test_quirk_the_published_max_pool_takes_the_average_without_padding() -> None:
    image = torch.arange(1.0, 5.0).reshape(1, 1, 2, 2)

    average = operation("max3", 1, 1, max3_is_average=True)(image)
    maximum = operation("max3", 1, 1, max3_is_average=False)(image)

    assert average.flatten().tolist() == [2.5] * 4
    assert maximum.flatten().tolist() == [4.0] * 4


def test_quirk_a_normal_cell_gives_states_0346_or_as_printed_456() -> None:
    assert cell(small(), "normal1_0").concat == (0, 3, 4, 6)
    assert cell(small(Quirks(concat_0346=False)), "normal1_0").concat == (4, 5, 6)
    assert small(Quirks(concat_0346=False))(torch.rand(2, 3, 64, 64)).shape == (2, 5)


def test_quirk_the_stem_is_blind_to_what_relu_removes_from_the_image() -> None:
    black, negative = torch.zeros(2, 3, 64, 64), torch.full((2, 3, 64, 64), -1.0)
    published, without = small().eval(), small(Quirks(stem_relu=False)).eval()

    assert torch.equal(published[0](black), published[0](negative))
    assert not torch.equal(without[0](black), without[0](negative))


def test_a_small_instance_trains_on_the_cpu() -> None:
    torch.manual_seed(0)
    module = small()

    output = module(torch.rand(2, 3, 64, 64))
    torch.autograd.backward(nn.functional.cross_entropy(output, torch.tensor([1, 2])))

    assert output.shape == (2, 5)
    assert output.isfinite().all()
    assert [name for name, each in module.named_parameters() if each.grad is None or not each.grad.any()] == []


def test_a_forward_pass_changes_no_input_in_place() -> None:
    module = small()
    image = torch.rand(2, 3, 64, 64) - 0.5
    kept = image.clone()
    states = module[:3](image)
    copies = [state.clone() for state in states]

    module[3:](states)

    assert torch.equal(image, kept)
    torch.testing.assert_close(list(states), copies, rtol=0, atol=0)
