"""Networks of torchvision and timm as chains of layers: the same operations, weights, logits and gradients."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from gpipe_bench import GPipe
from gpipe_bench.balance import balance_by_size
from gpipe_bench.errors import ConfigError
from gpipe_bench.skip import verify_skippables
from models.chain import chain_of, from_original, to_original
from models.table import MODELS, model_spec, parse_arguments
from models.vision import original

torch.set_num_threads(1)

# Small variants at small sizes, and the least number of layers that a good cut gives.
SMALL = {
    "torchvision/resnet18": (32, 15),
    "timm/vit_tiny_patch16_224": (32, 36),
    "timm/convnext_atto": (32, 24),
    "timm/efficientnet_b0": (32, 32),
    "timm/pnasnet5large": (96, 36),
}
FAST = [name for name in SMALL if "pnasnet" not in name]


@cache
def made(name: str) -> tuple[nn.Module, nn.Sequential]:
    """The network of the library in double precision, and a chain with the same weights of its own."""
    size = SMALL[name][0]
    torch.manual_seed(0)
    plain = original(name, size=size, classes=5)
    torch.manual_seed(0)
    chain = MODELS[name].build(size=size, classes=5)
    return plain.double(), chain.double()


def fresh(name: str) -> tuple[nn.Module, nn.Sequential]:
    return copy.deepcopy(made(name))


def batch(name: str, samples: int = 4) -> Tensor:
    size = SMALL[name][0]
    return torch.rand(samples, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def even(layers: int, n: int) -> list[int]:
    return [layers // n + (j < layers % n) for j in range(n)]


def assert_one_step_equal(plain: nn.Module, chain: nn.Sequential, x: Tensor, pipe: GPipe) -> None:
    microbatches = x.chunk(pipe.chunks)
    torch.manual_seed(3)
    expected = torch.cat([plain(part) for part in microbatches])
    expected.square().mean().backward()
    torch.manual_seed(3)
    result = pipe(x)
    result.square().mean().backward()

    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(to_original(gradients(chain)), gradients(plain), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", SMALL)
def test_a_chain_is_fine_grained_and_sound(name: str) -> None:
    _, chain = made(name)

    verify_skippables(chain)

    assert len(chain) >= SMALL[name][1]
    assert MODELS[name].layers(parse_arguments(name, f"size={SMALL[name][0]};classes=5")) == len(chain)


@pytest.mark.parametrize("name", SMALL)
def test_weights_are_those_of_the_library_and_go_both_ways(name: str) -> None:
    plain, chain = made(name)

    there = to_original(chain.state_dict())

    torch.testing.assert_close(there, dict(plain.state_dict()), rtol=0, atol=0)
    assert from_original(chain, there).keys() == chain.state_dict().keys()
    plain.load_state_dict(there)
    chain.load_state_dict(from_original(chain, plain.state_dict()))


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_evaluation_mode_trains_as_the_plain_network(name: str, n: int, checkpoint: str) -> None:
    plain, chain = fresh(name)
    plain.eval()
    chain.eval()
    pipe = GPipe(chain, even(len(chain), n), devices=["cpu"] * n, chunks=2, checkpoint=checkpoint)

    assert_one_step_equal(plain, chain, batch(name), pipe)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("n", [1, 4])
def test_training_mode_equals_the_plain_network(name: str, n: int) -> None:
    # One micro-batch: batch norms see the whole batch, random numbers come in the plain order.
    plain, chain = fresh(name)
    plain.train()
    chain.train()
    pipe = GPipe(chain, even(len(chain), n), devices=["cpu"] * n, chunks=1, checkpoint="never")

    assert_one_step_equal(plain, chain, batch(name), pipe)

    torch.testing.assert_close(to_original(dict(chain.named_buffers())), dict(plain.named_buffers()))


def test_nasnet_style_cells_cross_partitions() -> None:
    name = "timm/pnasnet5large"
    plain, chain = fresh(name)
    plain.eval()
    chain.eval()
    pipe = GPipe(chain, even(len(chain), 4), devices=["cpu"] * 4, chunks=2, checkpoint="always")

    assert any(layer.pops() for layer in chain)
    assert_one_step_equal(plain, chain, batch(name, 2), pipe)


def test_resnet101_has_the_published_parameters_and_layers_enough() -> None:
    spec = model_spec("torchvision/resnet101")
    with torch.device("meta"):
        chain = spec.build()

    assert sum(parameter.numel() for parameter in chain.parameters()) == 44_549_160
    assert len(chain) > 90
    assert sum(balance_by_size(8, chain, torch.empty(2, 3, 224, 224, device="meta"))) == len(chain)


class Shared(nn.Module):
    """Uses one layer twice, writes in place, and has a weight that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.twice(self.twice(y).relu())
        z += y
        return self.last(z.relu_()) + z


def test_a_module_of_ones_own_is_cut_where_it_may_be() -> None:
    module = Shared()
    x = torch.rand(3, 4)

    chain = chain_of(module, (2, 4))

    torch.testing.assert_close(chain(x), module(x))
    assert to_original(chain.state_dict()).keys() == module.state_dict().keys()
    assert len(chain) > 1
    assert sum(any(".twice." in key for key in layer.state_dict(prefix="l.")) for layer in chain) == 1


class Undecided(nn.Module):
    """A forward that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if x.sum() > 0 else -x


def test_a_forward_that_depends_on_values_is_refused() -> None:
    from gpipe_bench.errors import UnsupportedError

    with pytest.raises(UnsupportedError, match="Undecided must have a forward"):
        chain_of(Undecided(), (2, 4))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("timm/vit_base_patch16_22", "use 'timm/vit_base_patch16_224'"),
        ("torchvision/resnet1O1", "use 'torchvision/resnet101'"),
    ],
)
def test_an_unknown_name_is_one_error_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arguments(name, "")
    assert len(caught.value.problems) == 1
    assert hint in str(caught.value)


def test_the_table_lists_its_own_models_and_finds_those_of_libraries() -> None:
    assert list(MODELS) == ["unet", "amoebanet-d"]
    assert "timm/vit_tiny_patch16_224" in MODELS
    assert "keras/x" not in MODELS
    assert parse_arguments("timm/vit_tiny_patch16_224", "classes=7") == {"size": 224, "classes": 7}
