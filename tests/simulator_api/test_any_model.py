"""Models of any layers, on every profile: they are simulated, with exactly the products that PyTorch counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as map_over
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

from gpipe_bench.machine.profile import profile_names
from gpipe_bench.simulator import simulate
from gpipe_bench.simulator.tracing.model_trace import Tracer
from gpipe_bench.simulator.workloads.sources import module_source
from tests.simulator_api import layers
from tests.simulator_api.layers import WIDTH, Function, image, linear, sequence, words


def _transformer(**options) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True, **options)


def _convolutions() -> list[nn.Module]:
    return [
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(8, 4, 2, 2),
        nn.GroupNorm(2, 4),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Dropout2d(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    ]


def _masked(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(x.shape[1], x.shape[1], device=x.device).triu(1).bool()
    return (x @ x.transpose(1, 2)).masked_fill(mask, -torch.inf).softmax(-1) @ x


def _without_gradient(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        middle = x.mean()
    return x - middle


MODELS = {
    "attention": (lambda: [linear(), layers.Attention(causal=False), layers.Attention(causal=True)], sequence),
    "multi-head attention": (lambda: [linear(), layers.MultiheadAttention()], sequence),
    "transformer": (lambda: [linear(), _transformer(), _transformer(norm_first=True)], sequence),
    "lstm": (lambda: [linear(), layers.Recurrent(nn.LSTM, num_layers=2, dropout=0.1)], sequence),
    "gru": (lambda: [linear(), layers.Recurrent(nn.GRU)], sequence),
    "lstm with its state": (lambda: [linear(), nn.LSTM(WIDTH, WIDTH, batch_first=True)], sequence),
    "embedding": (lambda: [nn.Embedding(50, WIDTH), linear()], words),
    "convolutions": (_convolutions, image),
    "three dimensions": (lambda: [nn.Unflatten(1, (3, 1)), nn.Conv3d(3, 4, (1, 3, 3)), nn.Flatten()], image),
    "tuples": (lambda: [linear(), layers.Split(), layers.Merge(), linear()], sequence),
    "dictionaries": (lambda: [linear(), layers.Named(), layers.Unnamed(), linear()], sequence),
    "weight norm": (lambda: [parametrizations.weight_norm(linear()), linear()], sequence),
    "spectral norm": (lambda: [parametrizations.spectral_norm(linear()), linear()], sequence),
    "frozen": (lambda: [linear().requires_grad_(False), linear()], sequence),
    "no parameters": (lambda: [nn.ReLU(), nn.Identity()], sequence),
    "cut gradient": (lambda: [linear(), Function(torch.Tensor.detach), linear()], sequence),
    "part without gradient": (lambda: [linear(), Function(_without_gradient)], sequence),
    "mask": (lambda: [linear(), Function(_masked)], sequence),
    "choice": (lambda: [linear(), Function(lambda x: x.topk(4)[0].sort(-1)[0])], sequence),
    "fourier": (lambda: [linear(), Function(lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1), dim=1))], sequence),
    "einsum": (lambda: [linear(), Function(lambda x: torch.einsum("btd,bsd->bts", x, x))], sequence),
    "in place": (lambda: [linear(), Function(lambda x: (2 * x).add_(1).relu_())], sequence),
    "bfloat16": (lambda: [linear().bfloat16(), linear().bfloat16()], lambda: sequence().bfloat16()),
    "double": (lambda: [linear().double(), linear().double()], lambda: sequence().double()),
}


@pytest.fixture(params=MODELS)
def model(request):
    make, sample = MODELS[request.param]
    return nn.Sequential(*make()), sample()


def test_a_step_is_simulated(model):
    module, sample = model
    step = simulate(module, balance=[1, len(module) - 1], batch_size=8, chunks=4, sample=sample)
    assert step.status == "ok"
    assert step.microbatches == 4
    assert step.throughput_samples_per_s == pytest.approx(8000 / step.step_time_ms)
    assert {(event.microbatch, event.partition) for event in step.events if event.kind == "forward"} == {
        (i, j) for i in range(4) for j in range(2)
    }
    assert all(use.peak_reserved_gib >= use.peak_allocated_gib >= use.peak_live_gib > 0 for use in step.devices)


def test_products_are_those_that_pytorch_counts(model):
    module, sample = model
    kinds = Tracer(module, sample).trace(4).layers
    counter = FlopCounterMode(display=False)
    x = torch.empty((4, *sample.shape[1:]), dtype=sample.dtype, device="meta")
    with counter:
        module.to("meta")(x)
    # PyTorch counts what a causal mask hides, too: of 8 x 8 pairs all but 36.
    hidden = sum(4 * 4 * WIDTH * (layers.LENGTH**2 - 36) for layer in module if getattr(layer, "causal", False))
    assert (
        sum(kernel.whole.flop for kind in kinds for kernel in kind.kernels("forward"))
        == counter.get_total_flops() - hidden
    )


@pytest.mark.parametrize("profile", profile_names())
def test_every_profile_takes_every_kind_of_kernel(profile):
    for make, sample in (MODELS["convolutions"], MODELS["transformer"], MODELS["lstm"]):
        module = nn.Sequential(*make())
        step = simulate(module, balance=[len(module)], batch_size=4, sample=sample(), profile=profile)
        assert step.status == "ok"
        assert step.row().profile == profile


def test_skips_cross_partitions():
    module = nn.Sequential(layers.Stash(), linear(), layers.Pop(), linear())
    step = simulate(module, balance=[1, 1, 2], batch_size=4, chunks=2, sample=sequence())
    hops = [event for event in step.events if event.kind == "portal"]
    assert [(event.microbatch, event.device, event.partition) for event in hops] == [(0, "cuda:0", 2), (1, "cuda:0", 2)]
    assert {event.bytes for event in hops} == {2 * layers.LENGTH * WIDTH * 4}


def test_several_inputs():
    module = nn.Sequential(layers.Merge(), linear())
    sample = sequence(), torch.empty(1, WIDTH)
    assert simulate(module, balance=[1, 1], batch_size=4, chunks=2, sample=sample).status == "ok"


def test_the_model_is_left_as_it_was():
    module = nn.Sequential(linear(), nn.BatchNorm1d(layers.LENGTH), linear()).train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    simulate(module, balance=[1, 2], batch_size=4, chunks=2, sample=torch.rand(4, layers.LENGTH, WIDTH))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_tensors_that_a_layer_holds_as_plain_attributes():
    module = nn.Sequential(linear(), layers.Scaled())
    assert simulate(module, balance=[1, 1], batch_size=4, sample=sequence()).status == "ok"


def test_no_values_are_copied_to_trace_a_model():
    """A model on the meta device and one with values take the same; a large one is never copied."""
    module = nn.Sequential(linear(), linear())
    twin = nn.Sequential(linear(), linear()).to("meta")
    options = {"balance": [1, 1], "batch_size": 4, "chunks": 2, "sample": sequence()}
    assert simulate(module, **options) == simulate(twin, **options)


class GhostBatchNorm(nn.Module):
    """Normalises parts of 16 samples each."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.norm(part) for part in x.split(16)])


@pytest.mark.parametrize("samples", [16, 32, 256, 5000])
def test_kernels_that_step_with_the_batch(samples):
    def launches(parts):
        layers_ = nn.Sequential(nn.Linear(WIDTH, WIDTH), GhostBatchNorm())
        source = module_source(layers_, torch.empty(1, WIDTH))
        return sum(step.launches for step in source.layers(parts)[1].kernels("forward"))

    # Two of each part's norm, one of its count of batches, and the concatenation.
    assert launches(samples) == 3 * -(-samples // 16) + 1


class Maps(nn.Module):
    def forward(self, x):
        return map_over(torch.sin, x)


@pytest.mark.filterwarnings("ignore")  # the compiler that PyTorch calls for it warns of PyTorch's own code
def test_a_higher_order_operator_is_traced_by_the_operators_in_it():
    sample = torch.empty(4, 8, device="meta")
    layers = nn.Sequential(nn.Linear(8, 8, device="meta"), Maps(), nn.Linear(8, 8, device="meta"))
    step = simulate(layers, balance=[1, 2], batch_size=4, chunks=2, sample=sample)
    assert step.status == "ok"
