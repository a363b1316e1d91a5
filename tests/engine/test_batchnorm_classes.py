"""Deferred batch normalisation of classes that derive from PyTorch's: statistics are those of the plain class."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from gpipe_bench.engine.batchnorm import convert_deferred_batch_norm
from gpipe_bench.errors import UnsupportedError
from gpipe_bench.models.vision import original
from tests.engine.support import MODES, on_cpu

SHAPES = {1: (8, 2), 2: (8, 2, 2, 3), 3: (8, 2, 2, 1, 2)}


def batch(dimensions: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPES[dimensions], generator=generator, dtype=torch.float64) * 3 + 1


class Derived(nn.BatchNorm2d):
    """Adds nothing."""


class WithActivation(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: a copy of PyTorch's forward, and an activation."""

    def __init__(self, num_features: int, **options) -> None:
        super().__init__(num_features, **options)
        self.act = nn.ReLU(inplace=True)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        share = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats:
            self.num_batches_tracked = self.num_batches_tracked + 1
            if self.momentum is None:
                share = 1.0 / float(self.num_batches_tracked)
        mean, var = self.running_mean, self.running_var
        if self.training and not self.track_running_stats:
            mean = var = None
        training = self.training or mean is None
        return self.act(F.batch_norm(x, mean, var, self.weight, self.bias, training, share, self.eps))


class LastDimension(nn.BatchNorm1d):
    """Takes (N, ..., C), keywords, and a share of its own."""

    def forward(self, *, values):
        flat = values.movedim(1, -1).flatten(0, -2)
        assert self.running_mean.dtype == flat.dtype
        found = F.batch_norm(
            flat, self.running_mean, self.running_var, weight=self.weight, bias=self.bias, training=self.training,
            momentum=0.25,
        )  # fmt: skip
        if self.training:
            self.num_batches_tracked.add_(1)
        return found.view_as(values.movedim(1, -1)).movedim(-1, 1)


class Keyword(nn.Module):
    def __init__(self, num_features: int, **options) -> None:
        super().__init__()
        self.norm = LastDimension(num_features, **options)

    def forward(self, x):
        return self.norm(values=x)


OPTIONS = [{}, {"momentum": None}, {"momentum": 0.5, "affine": False}]
CASES = [
    *((kind, options) for kind in (nn.BatchNorm2d, Derived, WithActivation) for options in OPTIONS),
    (Keyword, {}),
    (Keyword, {"momentum": None}),
]


def assert_trains_like_the_plain_one(make, x, checkpoint, schedule=None, steps: int = 2) -> None:
    """The same running statistics over several steps of unequal micro-batches, and the same result in evaluation."""
    torch.manual_seed(1)
    plain = nn.Sequential(make(), nn.Identity()).double()
    pipe = on_cpu(copy.deepcopy(plain), [1, 1], chunks=3, checkpoint=checkpoint, schedule=schedule,
                  deferred_batch_norm=True)  # fmt: skip
    for step in range(steps):
        pipe.step(x + step, x, nn.functional.mse_loss)
        plain(x + step)
    torch.testing.assert_close(dict(pipe.named_buffers()), dict(plain.named_buffers()), rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(pipe.eval()(x), plain.eval()(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_running_statistics_are_those_of_the_plain_class(kind, options, checkpoint):
    assert_trains_like_the_plain_one(lambda: kind(2, **options), batch(), checkpoint)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_schedules_defer_derived_classes(schedule):
    assert_trains_like_the_plain_one(lambda: WithActivation(2), batch(), "always", schedule)


def test_a_class_without_running_statistics_normalises_each_microbatch():
    layer = WithActivation(2, track_running_stats=False).double()
    expected = torch.cat([copy.deepcopy(layer)(piece) for piece in batch().chunk(3)])
    pipe = on_cpu(nn.Sequential(layer), [1], chunks=3, checkpoint="always", deferred_batch_norm=True)
    torch.testing.assert_close(pipe(batch()), expected)


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_lazy_layers_are_deferred_when_they_have_seen_their_first_input(dimensions):
    kind = getattr(nn, f"LazyBatchNorm{dimensions}d")
    x = batch(dimensions).float()
    plain, module = nn.Sequential(kind()), nn.Sequential(kind())
    convert_deferred_batch_norm(module)
    module(x)
    plain(x)
    assert isinstance(module[0], type(plain[0]))
    pipe = on_cpu(module, [1], chunks=3, checkpoint="always", deferred_batch_norm=True)
    pipe(x + 1).sum().backward()
    plain(x + 1)
    torch.testing.assert_close(dict(pipe.named_buffers()), dict(plain.named_buffers()))


def test_a_pipeline_of_a_lazy_layer_counts_its_first_batch_once():
    pipe = on_cpu(nn.Sequential(nn.LazyBatchNorm2d(), nn.Identity()), [1, 1], chunks=3, deferred_batch_norm=True)
    pipe(batch().float()).sum().backward()
    plain = nn.BatchNorm2d(2)
    plain(batch().float())
    torch.testing.assert_close(dict(pipe[0].named_buffers()), dict(plain.named_buffers()))


def test_attributes_that_a_forward_sets_stay():
    pipe = on_cpu(nn.Sequential(WithActivation(2)).double(), [1], chunks=3, checkpoint="never",
                  deferred_batch_norm=True)  # fmt: skip
    pipe(batch())
    assert pipe[0].calls == 3


def test_derived_classes_keep_their_type_hooks_and_names():
    seen, layer = [], WithActivation(2)
    layer.register_forward_hook(lambda *_: seen.append("hook"))
    module = convert_deferred_batch_norm(nn.Sequential(layer))
    module(batch().float())
    assert isinstance(module[0], WithActivation)
    assert list(module.state_dict()) == list(nn.Sequential(layer).state_dict())
    assert (seen, module[0].calls) == (["hook"], 1)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_and_pickles_of_derived_classes_are_deferred(clone):
    pipe = on_cpu(nn.Sequential(WithActivation(2)).double(), [1], chunks=3, deferred_batch_norm=True)
    copied = clone(pipe)
    copied(batch())
    assert type(copied[0]) is type(pipe[0])
    assert (int(copied[0].num_batches_tracked), int(pipe[0].num_batches_tracked)) == (1, 0)


def test_the_batch_normalisation_of_timm_is_deferred():
    kinds = {
        type(layer).__name__: type(layer) for layer in original("timm/test_efficientnet", size=32, classes=10).modules()
    }
    assert_trains_like_the_plain_one(lambda: kinds["BatchNormAct2d"](2), batch(), "always")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch 2.11 counts the batches of a compiled layer itself")
def test_compiled_layers_are_deferred():
    plain = nn.Sequential(nn.Conv2d(2, 2, 1), WithActivation(2)).double()
    module = convert_deferred_batch_norm(copy.deepcopy(plain))
    pipe = on_cpu(
        nn.Sequential(torch.compile(module, backend="eager")), [1], chunks=3, checkpoint="always",
        deferred_batch_norm=True,
    )  # fmt: skip
    pipe(batch()).sum().backward()
    plain(batch())
    torch.testing.assert_close(dict(module.named_buffers()), dict(plain.named_buffers()))


class OwnFormula(nn.BatchNorm2d):
    """Updates its running statistics itself."""

    def forward(self, x):
        self.running_mean.lerp_(x.mean((0, 2, 3)), self.momentum)
        return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_class_with_a_formula_of_its_own_is_refused(checkpoint):
    pipe = on_cpu(nn.Sequential(OwnFormula(2)).double(), [1], chunks=3, checkpoint=checkpoint, deferred_batch_norm=True)
    message = r"in F.batch_norm alone, got lerp_ in the forward of OwnFormula; call F.batch"
    with pytest.raises(UnsupportedError, match=message):
        pipe(batch())


class Operator(nn.BatchNorm2d):
    def forward(self, x):
        return x - 0.9 * self.running_mean[None, :, None, None]


def test_a_formula_with_operators_is_refused_in_the_same_words():
    pipe = on_cpu(nn.Sequential(Operator(2)).double(), [1], chunks=3, deferred_batch_norm=True)
    with pytest.raises(UnsupportedError, match=r"must use its running statistics in F\.batch_norm alone"):
        pipe(batch())


def compiled_in_place():
    layer = nn.BatchNorm2d(2)
    layer.compile()
    return layer


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # the compiler's own
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.InstanceNorm2d(2, track_running_stats=True), "running statistics must be those of nn.BatchNorm1d"),
        (lambda: torch.compile(nn.BatchNorm2d(2)), r"got a BatchNorm2d that is, in '1\.0'; compile a layer around it"),
        (compiled_in_place, r"got a BatchNorm2d that is, in '1\.0'; compile a layer around it"),
    ],
    ids=["instances", "compiled", "compiled-in-place"],
)
def test_other_statistics_are_refused_by_name(make, message):
    layers = nn.Sequential(nn.Identity(), nn.Sequential(make()))
    with pytest.raises(TypeError, match=message):
        on_cpu(layers, [2], deferred_batch_norm=True)


def test_synchronised_layers_are_refused_by_name():
    layers = nn.Sequential(nn.Identity(), nn.Sequential(nn.SyncBatchNorm(2)))
    with pytest.raises(TypeError, match=r"got a SyncBatchNorm in '1\.0'; use nn.BatchNorm2d there, or deferred_batch"):
        on_cpu(layers, [2], deferred_batch_norm=True)


def test_statistics_in_half_precision_are_gathered_in_single():
    plain = nn.BatchNorm2d(2, momentum=1.0).bfloat16()
    pipe = on_cpu(nn.Sequential(copy.deepcopy(plain)), [1], chunks=7, deferred_batch_norm=True)
    pipe(batch().bfloat16())
    plain(batch().bfloat16())
    torch.testing.assert_close(pipe[0].running_var, plain.running_var, rtol=0.02, atol=0)
