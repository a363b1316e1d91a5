"""Which layers have running statistics that are deferred, and which are refused by name."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from gpipe_bench.engine.batchnorm import DeferredBatchNorm, convert_deferred_batch_norm
from gpipe_bench.models.vision import original
from tests.engine.support import MODES, on_cpu

OPTIONS = [{}, {"momentum": None}, {"momentum": 0.5, "affine": False}]
SHAPES = {1: (8, 2), 2: (8, 2, 2, 3), 3: (8, 2, 2, 1, 2)}


def batch(dimensions: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPES[dimensions], generator=generator, dtype=torch.float64) * 3 + 1


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("dimensions", SHAPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_running_statistics_are_those_of_the_plain_class(options, dimensions, checkpoint):
    """Over several steps of unequal micro-batches, and the same result in evaluation."""
    plain = nn.Sequential(getattr(nn, f"BatchNorm{dimensions}d")(2, **options), nn.Identity()).double()
    pipe = on_cpu(copy.deepcopy(plain), [1, 1], chunks=3, checkpoint=checkpoint, deferred_batch_norm=True)
    x = batch(dimensions)
    for step in range(2):
        pipe.step(x + step, x, nn.functional.mse_loss)
        plain(x + step)
    torch.testing.assert_close(dict(pipe.named_buffers()), dict(plain.named_buffers()), rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(pipe.eval()(x), plain.eval()(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_and_pickles_are_deferred(clone):
    pipe = on_cpu(nn.Sequential(nn.BatchNorm2d(2)).double(), [1], chunks=3, deferred_batch_norm=True)
    copied = clone(pipe)
    copied(batch())
    assert type(copied[0]) is type(pipe[0])
    assert (int(copied[0].num_batches_tracked), int(pipe[0].num_batches_tracked)) == (1, 0)


def test_hooks_and_names_stay():
    seen, layer = [], nn.BatchNorm2d(2)
    names = list(layer.state_dict())
    layer.register_forward_hook(lambda *_: seen.append("hook"))
    convert_deferred_batch_norm(nn.Sequential(layer))(batch().float())
    assert isinstance(layer, DeferredBatchNorm)
    assert isinstance(layer, nn.BatchNorm2d)
    assert (list(layer.state_dict()), seen) == (names, ["hook"])


def test_a_wrong_number_of_dimensions_raises_the_error_of_the_plain_class():
    pipe = on_cpu(nn.Sequential(nn.BatchNorm2d(2)).double(), [1], chunks=2, deferred_batch_norm=True)
    with pytest.raises(ValueError, match="expected 4D input"):
        pipe(batch(1))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch 2.11 counts the batches of a compiled layer itself")
def test_layers_within_a_compiled_one_are_deferred():
    plain = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)).double()
    module = convert_deferred_batch_norm(copy.deepcopy(plain))
    pipe = on_cpu(
        nn.Sequential(torch.compile(module, backend="eager")), [1], chunks=3, checkpoint="always",
        deferred_batch_norm=True,
    )  # fmt: skip
    pipe(batch()).sum().backward()
    plain(batch())
    torch.testing.assert_close(dict(module.named_buffers()), dict(plain.named_buffers()))


class Derived(nn.BatchNorm2d):
    """A forward of its own might do anything with the statistics."""


def compiled_in_place():
    layer = nn.BatchNorm2d(2)
    layer.compile()
    return layer


def of_timm():
    layers = original("timm/test_efficientnet", size=32, classes=10).modules()
    return next(layer for layer in layers if type(layer).__name__ == "BatchNormAct2d")


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # the compiler's own
@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda: Derived(2), "a Derived"),
        (of_timm, "a BatchNormAct2d"),
        (nn.LazyBatchNorm2d, "a LazyBatchNorm2d"),
        (lambda: nn.SyncBatchNorm(2), "a SyncBatchNorm"),
        (lambda: nn.InstanceNorm2d(2, track_running_stats=True), "a InstanceNorm2d"),
        (lambda: torch.compile(nn.BatchNorm2d(2)), "a compiled BatchNorm2d"),
        (compiled_in_place, "a compiled BatchNorm2d"),
    ],
    ids=["derived", "timm", "lazy", "synchronised", "instances", "compiled", "compiled-in-place"],
)
def test_other_statistics_are_refused_by_name(make, got):
    layers = nn.Sequential(nn.Identity(), nn.Sequential(make()))
    rule = "running statistics must be those of nn.BatchNorm1d to 3d to be deferred"
    with pytest.raises(TypeError, match=rf"{rule}, got {got} in '1\.0'; use one of these, compile a layer around it"):
        on_cpu(layers, [2], deferred_batch_norm=True)


@pytest.mark.parametrize("make", [lambda: nn.InstanceNorm2d(2), lambda: Derived(2, track_running_stats=False)])
def test_layers_without_running_statistics_stay_as_they_are(make):
    layer = make().double()
    expected = torch.cat([layer(piece) for piece in batch().chunk(3)])
    pipe = on_cpu(nn.Sequential(layer), [1], chunks=3, checkpoint="always", deferred_batch_norm=True)
    torch.testing.assert_close(pipe(batch()), expected)


def test_statistics_in_half_precision_are_gathered_in_single():
    plain = nn.BatchNorm2d(2, momentum=1.0).bfloat16()
    pipe = on_cpu(nn.Sequential(copy.deepcopy(plain)), [1], chunks=7, deferred_batch_norm=True)
    pipe(batch().bfloat16())
    plain(batch().bfloat16())
    torch.testing.assert_close(pipe[0].running_var, plain.running_var, rtol=0.02, atol=0)
