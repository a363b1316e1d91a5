"""U-Net: exact published counts, the skips of the published ablation, and the layers' details."""

from __future__ import annotations

import copy
import itertools
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gpipe_bench.models.unet import PopConcat, Stash, unet
from gpipe_bench.skip import verify_skippables
from gpipe_bench.skip.layout import inspect_skip_layout
from gpipe_bench.skip.namespace import SkipKey
from gpipe_bench.skip.tracker import LocalTracker, use_tracker

FLOAT = 4
# torchgpipe's ablation: balance of four partitions, 128 samples in 8 micro-batches.
ABLATION_BALANCE = [34, 76, 70, 61]


def meta_unet(depth: int = 5, blocks: int = 5, channels: int = 64) -> nn.Sequential:
    with torch.device("meta"):
        return unet(depth, blocks, channels)


def ablation_partitions() -> list[nn.Sequential]:
    layers = list(meta_unet())
    ends = list(itertools.accumulate(ABLATION_BALANCE))
    return [nn.Sequential(*layers[end - size : end]) for end, size in zip(ends, ABLATION_BALANCE, strict=True)]


# (B, C), parameters, and the balances with which the model was run (torchgpipe 0.0.7, benchmarks/unet-*).
@pytest.mark.parametrize(
    ("blocks", "channels", "parameters", "balances"),
    [
        (5, 64, 232_687_328, [[241], [104, 137], [30, 66, 84, 61], [16, 27, 31, 44, 22, 57, 27, 17], ABLATION_BALANCE]),
        (6, 72, 362_157_516, []),
        (11, 128, 2_213_834_176, [[505]]),
        (24, 128, 4_993_859_008, [[526, 551]]),
        (24, 160, 7_802_903_600, [[472, 54, 36, 515]]),
        (48, 160, 15_822_206_000, [[800, 140, 62, 36, 36, 36, 36, 987]]),
    ],
)
def test_parameters_and_layers_are_exactly_the_published_ones(
    blocks: int, channels: int, parameters: int, balances: list[list[int]]
) -> None:
    module = meta_unet(5, blocks, channels)

    assert sum(parameter.numel() for parameter in module.parameters()) == parameters
    assert len(module) == 44 * blocks + 21
    assert all(sum(balance) == len(module) for balance in balances)


def test_a_forward_pass_takes_the_multiplications_of_the_published_size() -> None:
    module = meta_unet()
    counter = FlopCounterMode(display=False)

    with counter:
        module(torch.empty(1, 3, 192, 192, device="meta"))

    multiply_adds = counter.get_total_flops() / 2
    assert round(multiply_adds / 1e9, 2) == 48.99


def test_skips_cross_the_partitions_of_the_ablation_as_published() -> None:
    layout = inspect_skip_layout(ablation_partitions())

    assert list(layout.routes.values()) == [(0, 3), (1, 3), (1, 2), (1, 2), (1, 2)]


def test_bytes_at_the_boundaries_of_the_ablation_are_the_published_ones() -> None:
    partitions = ablation_partitions()
    layout = inspect_skip_layout(partitions)
    skips: dict[SkipKey, int] = {}
    mains: list[int] = []

    class Weigh(LocalTracker):
        def save(self, key: SkipKey, value: Tensor | None) -> None:
            skips[key] = cast("Tensor", value).nbytes
            super().save(key, value)

    x = torch.empty(16, 3, 192, 192, device="meta")
    with use_tracker(Weigh()):
        for partition in partitions:
            x = partition(x)
            mains.append(x.nbytes)

    def megabytes(values: list[int]) -> list[float]:
        return [round(value / 1e6, 2) for value in values]

    riding = [layout.at(j, range(4), portals=False, shared=True).outgoing for j in range(3)]
    as_tuple = [sum(skips[copy.key] for copy in copies) for copies in riding]
    assert megabytes(list(skips.values())) == [150.99, 75.5, 37.75, 18.87, 9.44]
    assert megabytes(mains[:3]) == [75.5, 2.36, 18.87]
    assert megabytes(as_tuple) == [150.99, 292.55, 226.49]
    assert megabytes([sum(skips.values())]) == [292.55]


def test_a_block_is_convolution_dropout_instance_norm_and_leaky_relu() -> None:
    conv, dropout, norm, relu = list(unet(1, 1, 2))[:4]

    assert isinstance(conv, nn.Conv2d)
    assert (conv.kernel_size, conv.stride, conv.padding, conv.bias) == ((3, 3), (1, 1), (1, 1), None)
    assert isinstance(dropout, nn.Dropout2d)
    assert (dropout.p, dropout.inplace) == (0.1, False)
    assert isinstance(norm, nn.InstanceNorm2d)
    assert (norm.affine, norm.track_running_stats) == (False, False)
    assert isinstance(relu, nn.LeakyReLU)
    assert (relu.negative_slope, relu.inplace) == (0.01, False)


def test_the_layers_are_flat_and_in_the_order_of_the_picture() -> None:
    block = ["Conv2d", "Dropout2d", "InstanceNorm2d", "LeakyReLU"]

    kinds = [type(layer).__name__ for layer in unet(2, 2, 2)]

    encoder, decoder = [*block * 2, "Stash", "MaxPool2d"], ["Upsample", "PopConcat", *block * 2]
    assert kinds == [*encoder * 2, *block * 2, *decoder * 2, "Conv2d"]


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        (1, [(3, 4), (4, 8), (8, 8), (16, 4), (8, 2), (2, 1)]),
        (2, [(3, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 8), (16, 4), (4, 4), (8, 2), (2, 2), (2, 1)]),
    ],
)
def test_convolutions_widen_and_narrow_as_defined(blocks: int, expected: list[tuple[int, int]]) -> None:
    convolutions = [layer for layer in unet(2, blocks, 4) if isinstance(layer, nn.Conv2d)]

    assert [(layer.in_channels, layer.out_channels) for layer in convolutions] == expected


def test_dropout_drops_whole_channels_in_training_only() -> None:
    torch.manual_seed(0)
    dropout = unet(1, 1, 2, dropout=0.5)[1]
    ones = torch.ones(8, 16, 3, 3)

    kept = dropout(ones)
    dropout.eval()

    per_channel = kept.flatten(2)
    assert {0.0, 2.0} == set(kept.unique().tolist())
    assert torch.equal(per_channel.amin(dim=2), per_channel.amax(dim=2))
    assert torch.equal(dropout(ones), ones)


@pytest.mark.parametrize(("depth", "blocks", "size"), [(1, 1, 4), (2, 3, 8), (5, 1, 64)])
def test_a_small_instance_trains_on_the_cpu(depth: int, blocks: int, size: int) -> None:
    module = unet(depth, blocks, 2, in_channels=4, out_channels=3)
    verify_skippables(module)

    output = module(torch.rand(2, 4, size, size))
    torch.autograd.backward(output.sum())

    assert output.shape == (2, 3, size, size)
    assert output.isfinite().all()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in module.parameters())


def test_each_decoder_pops_what_the_encoder_of_its_size_stashed_and_puts_it_first() -> None:
    module = unet(2, 1, 2).eval()
    stashed: list[Tensor] = []
    popped: list[tuple[Tensor, Tensor]] = []
    for layer in module:
        if isinstance(layer, Stash):
            layer.register_forward_hook(lambda _, inputs, __: stashed.append(inputs[0]))
        if isinstance(layer, PopConcat):
            layer.register_forward_hook(lambda _, inputs, output: popped.append((inputs[0], output)))

    module(torch.rand(1, 3, 8, 8))

    for skip, (x, concatenated) in zip(stashed, reversed(popped), strict=True):
        assert torch.equal(concatenated, torch.cat([skip, x], dim=1))


def test_skips_of_two_models_and_of_a_copy_stay_apart_and_whole() -> None:
    module = unet(2, 1, 2)
    twin = copy.deepcopy(module)
    keys = inspect_skip_layout([module]).routes.keys()

    assert keys == inspect_skip_layout([twin]).routes.keys()
    assert not keys & inspect_skip_layout([unet(2, 1, 2)]).routes.keys()
    assert twin.eval()(torch.ones(1, 3, 8, 8)).equal(module.eval()(torch.ones(1, 3, 8, 8)))
