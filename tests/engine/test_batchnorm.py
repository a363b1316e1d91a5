"""Deferred batch normalisation: one update of the running statistics per batch, as the plain module makes it."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe_bench import Components
from gpipe_bench.engine.batchnorm import DeferredBatchNorm, convert_deferred_batch_norm, deferring
from gpipe_bench.engine.context import ExecutionContext
from gpipe_bench.schedules import SCHEDULES
from tests.engine.steps import scheduled
from tests.engine.support import FACTORIAL, MODES, Do, on_cpu


def images(size: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(size, 2, 2, 2, generator=torch.Generator().manual_seed(seed)) * 3 + 1


class Twins(nn.Module):
    """Two batch normalisations that see the same input, one of them deep inside."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.left = nn.BatchNorm2d(2, **options)
        self.inner = nn.Sequential(nn.Identity(), nn.ModuleDict({"right": nn.BatchNorm2d(2, eps=1e-3, **options)}))

    def forward(self, x):
        return self.left(x) + self.inner[1]["right"](x)


def statistics(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def deferred(plain: nn.Sequential, chunks: int = 4, **options):
    balance = [1] * len(plain)
    return on_cpu(copy.deepcopy(plain), balance, chunks=chunks, deferred_batch_norm=True, **options)


def assert_equal_statistics(pipe: nn.Module, plain: nn.Module) -> None:
    torch.testing.assert_close(statistics(pipe), statistics(plain), rtol=1e-5, atol=1e-6)


def train(pipe, x: Tensor) -> None:
    pipe.step(x, None, lambda output, _: output.pow(3).sum(), reduction="sum")


@settings(max_examples=100)
@given(
    size=st.integers(1, 9),
    chunks=st.integers(1, 5),
    schedule=st.sampled_from([None, None, *SCHEDULES]),
    checkpoint=st.sampled_from(MODES),
    workers=st.sampled_from(["always", "never"]),
    components=st.sampled_from(FACTORIAL),
    momentum=st.sampled_from([None, 0.1, 0.5]),
    steps=st.integers(1, 3),
)
def test_running_statistics_equal_those_of_the_whole_batch(size, chunks, schedule, momentum, steps, **options):
    plain = nn.Sequential(Twins(momentum=momentum), *(nn.Identity() for _ in range(3)))
    pipe = scheduled(copy.deepcopy(plain), [1] * 4, schedule, chunks=chunks, deferred_batch_norm=True, **options)
    for step in range(steps):
        train(pipe, images(size, step))
        plain(images(size, step))
    assert_equal_statistics(pipe, plain)


@pytest.mark.parametrize(("checkpoint", "updates"), [("never", 4), ("except_last", 7), ("always", 8)])
@pytest.mark.parametrize("schedule", [None, "1f1b", "zb_v"])
@pytest.mark.parametrize("is_deferred", [False, True])
def test_gradients_are_those_of_the_microbatches(is_deferred, schedule, checkpoint, updates):
    """Without deferral every pass of every micro-batch counts, with it one batch."""
    layers = [nn.BatchNorm2d(2), nn.Tanh(), nn.BatchNorm2d(2), nn.Tanh()]
    plain = nn.Sequential(*layers).double()
    options = {"checkpoint": checkpoint, "deferred_batch_norm": is_deferred}
    pipe = scheduled(copy.deepcopy(plain), [1] * 4, schedule, chunks=4, **options)
    train(pipe, images().double())
    sum(plain(piece).pow(3).sum() for piece in images().double().chunk(4)).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(pipe.get_parameter(name).grad, parameter.grad)
    assert {int(pipe[j].num_batches_tracked) for j in (0, 2)} == {1 if is_deferred else updates}
    if not is_deferred and checkpoint == "never":
        assert_equal_statistics(pipe, plain)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("momentum", [None, 0.1])
@pytest.mark.parametrize("size", [8, 7, 1])
def test_a_layer_called_twice_is_updated_twice(size, momentum, checkpoint):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(2, momentum=momentum)

        def forward(self, x):
            return self.norm(x * 5 + 2) + self.norm(x)

    plain = nn.Sequential(Twice(), nn.Identity())
    pipe = deferred(plain, checkpoint=checkpoint)
    for step in range(2):
        pipe(images(size, step)).sum().backward()
        plain(images(size, step))
    assert_equal_statistics(pipe, plain)


def test_each_microbatch_is_normalised_by_its_own_statistics():
    plain = nn.Sequential(nn.BatchNorm2d(2))
    expected = torch.cat([plain(piece) for piece in images().chunk(4)])
    torch.testing.assert_close(deferred(plain)(images()), expected)


def test_a_recomputation_beside_a_forward_pass_is_not_gathered():
    """A backward pass in another thread may recompute one batch while the next is gathered."""
    plain, layer = nn.BatchNorm2d(2), convert_deferred_batch_norm(nn.BatchNorm2d(2))
    with deferring([layer], 1):
        layer(images(seed=1))
        with ExecutionContext.capture([torch.device("cpu")]).applied(recomputing=True):
            layer(images(seed=2))
    plain(images(seed=1))
    assert_equal_statistics(layer, plain)


def test_evaluation_uses_the_running_statistics():
    plain = nn.Sequential(Twins())
    pipe = deferred(plain)
    pipe(images())
    plain(images())
    torch.testing.assert_close(pipe.eval()(images(seed=1)), plain.eval()(images(seed=1)))
    assert_equal_statistics(pipe, plain)


def test_a_training_pass_without_gradients_counts_too():
    plain = nn.Sequential(Twins())
    pipe = deferred(plain)
    with torch.no_grad():
        pipe(images())
        plain(images())
    assert_equal_statistics(pipe, plain)


def test_a_layer_kept_in_training_mode_counts_in_evaluation_too():
    plain = nn.Sequential(nn.BatchNorm2d(2), nn.Identity())
    pipe = deferred(plain)
    for model in (plain, pipe):
        model.eval()
        model[0].train()
        model(images())
    assert_equal_statistics(pipe, plain)


def test_a_frozen_layer_keeps_its_statistics_in_training():
    pipe = deferred(nn.Sequential(Twins()))
    pipe[0].left.eval()
    pipe(images()).sum().backward()
    assert pipe[0].left.num_batches_tracked == 0
    assert pipe[0].inner[1]["right"].num_batches_tracked == 1


def test_an_aborted_batch_leaves_no_trace():
    def fuse(x):
        if x.max() > 50:
            raise ValueError("too hot")
        return x

    plain = nn.Sequential(nn.BatchNorm2d(2), nn.Identity())
    pipe = deferred(nn.Sequential(copy.deepcopy(plain[0]), Do(fuse)))
    poisoned = images()
    poisoned[6:] = 1e6
    pipe[0].weight.data.mul_(100)
    with pytest.raises(ValueError, match="too hot"):
        pipe(poisoned)
    pipe[0].weight.data.div_(100)
    pipe(images(seed=1))
    plain(images(seed=1))
    assert_equal_statistics(pipe, plain)


def test_a_large_mean_does_not_cancel_a_small_variance():
    x = 4096 + torch.randn(8, 2, 4, 4, generator=torch.Generator().manual_seed(0)) * 0.05
    pipe = deferred(nn.Sequential(nn.BatchNorm2d(2, momentum=1.0)))
    pipe(x)
    torch.testing.assert_close(pipe[0].running_var, x.double().var((0, 2, 3)).float(), rtol=1e-2, atol=0)


def test_two_forward_passes_before_their_backward_passes_count_twice():
    plain = nn.Sequential(nn.BatchNorm2d(2))
    pipe = deferred(plain, checkpoint="always")
    losses = [pipe(images(seed=seed)).pow(2).sum() for seed in range(2)]
    for loss in losses:
        loss.backward()
    for seed in range(2):
        plain(images(seed=seed))
    assert_equal_statistics(pipe, plain)


@pytest.mark.parametrize("options", [{"track_running_stats": False}, {"affine": False}])
def test_options_of_the_plain_layer_are_kept(options):
    plain = nn.Sequential(nn.BatchNorm2d(2, **options))
    pipe = deferred(plain, checkpoint="always", components=Components(early_recompute=False))
    expected = torch.cat([copy.deepcopy(plain)(piece) for piece in images().chunk(4)])
    torch.testing.assert_close(pipe(images().requires_grad_()), expected)
    plain(images())
    assert_equal_statistics(pipe, plain)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_all_kinds_are_converted_in_place_with_their_parameters(kind):
    module = nn.Sequential(nn.Sequential(kind(2)))
    before = dict(module.state_dict(keep_vars=True))
    convert_deferred_batch_norm(module)
    assert isinstance(module[0][0], DeferredBatchNorm)
    assert isinstance(module[0][0], kind)
    assert all(value is before[name] for name, value in module.state_dict(keep_vars=True).items())


def test_a_layer_used_in_two_places_is_converted_in_both():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = nn.BatchNorm2d(2)

        def forward(self, x):
            return self.second(self.first(x))

    shared = convert_deferred_batch_norm(Shared())
    assert shared.first is shared.second
    assert isinstance(shared.first, DeferredBatchNorm)


def test_a_converted_layer_outside_a_pipeline_is_the_plain_one():
    plain = nn.Sequential(nn.BatchNorm2d(2), nn.BatchNorm2d(2))
    converted = convert_deferred_batch_norm(copy.deepcopy(plain))
    torch.testing.assert_close(converted(images()), plain(images()))
    assert_equal_statistics(converted, plain)
