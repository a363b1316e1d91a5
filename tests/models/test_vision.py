"""Networks of torchvision and timm as chains of layers: the same operations, weights, logits and gradients."""

from __future__ import annotations

import copy
import importlib
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from gpipe_bench import GPipe, Pipe, is_recomputing
from gpipe_bench.balance import balance_by_size
from gpipe_bench.errors import ConfigError
from gpipe_bench.models.chain import chain_of, from_original, to_original
from gpipe_bench.models.table import MODELS, model_spec, parse_arguments
from gpipe_bench.models.vision import cut_network, original
from gpipe_bench.models.vision_packages import load_timm
from gpipe_bench.skip import verify_skippables
from tests.cover import EVERY_CASE

# Size of the images, and the least number of layers that a good cut gives.
NETWORKS = {
    "torchvision/resnet18": (32, 15),
    "torchvision/resnet101": (32, 90),
    "timm/vit_tiny_patch16_224": (32, 36),
    "timm/convnext_atto": (32, 24),
    "timm/efficientnet_b0": (32, 32),
    "timm/ghostnet_050": (32, 24),
    "small nasnet": (64, 18),
}
# The kinds of another network are those of a smaller one here.
if not EVERY_CASE:
    del NETWORKS["torchvision/resnet101"]
# Not for every test.
LARGE = ("torchvision/resnet101", "small nasnet")
SMALL = [name for name in NETWORKS if name not in LARGE]


def pipelines() -> list[tuple[str, int, str]]:
    """Every pair of network, partitions and mode, without all of their combinations."""
    modes = ("always", "never")
    every = [(name, n, mode) for name in NETWORKS for n in (1, 2, 4) for mode in modes]
    places = {name: k for k, name in enumerate(NETWORKS)}
    return [(name, n, mode) for name, n, mode in every if EVERY_CASE or mode == modes[(places[name] + n // 2) % 2]]


def small_nasnet() -> nn.Module:
    """The cells and skips of timm's NASNet-A with few channels; up to its first reduction, unless all are asked for."""
    load_timm()
    nasnet = importlib.import_module("timm.models.nasnet")
    network: nn.Module = nasnet.NASNetALarge(num_classes=5, stem_size=8, num_features=96)
    if not EVERY_CASE:
        for name in network.layer_names[network.layer_names.index("reduction_cell_0") :]:
            setattr(network, name, None)
        network.last_linear = nn.Linear(24, 5)
    return network


@cache
def made(name: str) -> tuple[nn.Module, nn.Sequential]:
    """The network of the library in double precision, and a chain with the same weights of its own."""
    size = NETWORKS[name][0]
    torch.manual_seed(0)
    if name == "small nasnet":
        plain = small_nasnet()
        return plain.double(), cut_network(copy.deepcopy(plain), size).double()
    plain = original(name, size=size, classes=5)
    torch.manual_seed(0)
    chain = MODELS[name].build(size=size, classes=5)
    return plain.double(), chain.double()


def fresh(name: str) -> tuple[nn.Module, nn.Sequential]:
    return copy.deepcopy(made(name))


def batch(name: str, samples: int = 4) -> Tensor:
    size = NETWORKS[name][0]
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


@pytest.mark.parametrize("name", NETWORKS)
def test_a_chain_is_fine_grained_and_sound(name: str) -> None:
    _, chain = made(name)

    verify_skippables(chain)

    assert len(chain) >= NETWORKS[name][1]
    if name in MODELS:
        arguments = parse_arguments(name, f"size={NETWORKS[name][0]};classes=5")
        assert MODELS[name].layers(arguments) == len(chain)


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_are_those_of_the_library_and_go_both_ways(name: str) -> None:
    plain, chain = made(name)

    there = to_original(chain.state_dict())

    torch.testing.assert_close(there, dict(plain.state_dict()), rtol=0, atol=0)
    assert from_original(chain, there).keys() == chain.state_dict().keys()
    plain.load_state_dict(there)
    chain.load_state_dict(from_original(chain, plain.state_dict()))


def test_trained_weights_go_from_a_pipeline_into_another_copy_of_the_network() -> None:
    name, size = "timm/test_resnet", 32
    plain, other = (original(name, size=size, classes=5) for _ in range(2))
    pipe = Pipe(cut_network(plain, size), 2, deferred_batch_norm=True)
    images = torch.rand(4, 3, size, size)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    pipe(images).local_value().square().sum().backward()
    optimizer.step()
    other.load_state_dict(to_original(pipe.state_dict()))
    expected = pipe.eval()(images).local_value()
    for network in (plain, other):  # the first shares its weights
        torch.testing.assert_close(network.eval()(images), expected)
    fresh = Pipe(cut_network(original(name, size=size, classes=5), size))
    fresh.load_state_dict(from_original(fresh, other.state_dict()))
    torch.testing.assert_close(fresh.eval()(images).local_value(), expected)


@cache
def step_of_the_plain_network(name: str) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Logits and gradients in evaluation mode, where nothing is random and no statistics are gathered."""
    plain, _ = made(name)
    logits = plain.eval()(batch(name))
    plain.zero_grad()
    logits.square().mean().backward()
    return logits.detach(), gradients(plain)


@pytest.mark.parametrize(("name", "n", "checkpoint"), pipelines())
def test_logits_and_gradients_equal_those_of_the_plain_network(name: str, n: int, checkpoint: str) -> None:
    expected, expected_gradients = step_of_the_plain_network(name)
    _, chain = made(name)
    chain.train()
    for layer in chain.modules():
        # Checkpoints are for training; what else differs in training is switched off layer by layer.
        layer.training = layer is chain
    pipe = GPipe(chain, even(len(chain), n), devices=["cpu"] * n, chunks=2, checkpoint=checkpoint)

    passes: list[bool] = []
    hook = chain[0].register_forward_hook(lambda *_: passes.append(is_recomputing()))
    pipe.zero_grad()
    logits = pipe(batch(name))
    logits.square().mean().backward()
    hook.remove()

    assert sorted(passes) == [False] * 2 + [True] * (2 if checkpoint == "always" else 0)
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(to_original(gradients(chain)), expected_gradients, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("n", [1, 4] if EVERY_CASE else [4])
def test_training_mode_equals_the_plain_network(name: str, n: int) -> None:
    # One micro-batch: batch norms see the whole batch, random numbers come in the plain order.
    plain, chain = fresh(name)
    plain.train()
    chain.train()
    pipe = GPipe(chain, even(len(chain), n), devices=["cpu"] * n, chunks=1, checkpoint="never")

    assert_one_step_equal(plain, chain, batch(name), pipe)

    torch.testing.assert_close(to_original(dict(chain.named_buffers())), dict(plain.named_buffers()))


def test_skips_of_nasnet_cells_cross_partitions() -> None:
    _, chain = made("small nasnet")
    pipe = GPipe(copy.deepcopy(chain), even(len(chain), 4), devices=["cpu"] * 4)

    assert any(source != target for source, target in pipe.skip_layout.routes.values())


def test_dropout_of_the_network_itself_follows_the_mode() -> None:
    plain, chain = fresh("timm/ghostnet_050")
    dropouts = [step for layer in chain for step in layer._program.steps if step.call is nn.functional.dropout]

    assert len(dropouts) == 1
    for training in (True, False):
        results = []
        for model in (plain, chain):
            model.train(training)
            torch.manual_seed(5)
            results.append([model(batch("timm/ghostnet_050")) for _ in range(2)])
        torch.testing.assert_close(results[0], results[1])
        assert torch.equal(*results[0]) is not training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["timm/test_vit", "timm/test_resnet"])
def test_a_network_of_another_dtype_is_cut_as_it_is(name: str, dtype: torch.dtype) -> None:
    plain = original(name, size=32, classes=5).to(dtype).eval()
    x = torch.rand(2, 3, 32, 32).to(dtype)
    assert torch.equal(cut_network(copy.deepcopy(plain), 32).eval()(x), plain(x))


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


class Tied(nn.Module):
    """Has two names for its first layer, and for the weight of its last."""

    def __init__(self) -> None:
        super().__init__()
        self.alias, self.second, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.first = self.alias
        self.weight = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).relu()).relu())


def test_a_parameter_of_several_names_is_in_one_layer() -> None:
    module = Tied()
    chain = chain_of(module, (2, 4))
    assert len(chain) == 3
    assert to_original(chain.state_dict()).keys() == module.state_dict().keys()
    pipe = GPipe(chain, [1, 1, 1], devices=["cpu"] * 3, chunks=2)
    x = torch.rand(4, 4)
    torch.testing.assert_close(pipe(x), module(x))


def test_a_layer_that_holds_most_of_the_weights_is_named() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 50), nn.Linear(50, 5))
    warning = "^Sequential: one of the 3 layers, 2, holds 95 % of the weights; no balance can divide it$"
    with pytest.warns(UserWarning, match=warning):
        cut_network(network, 8)


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
        ("timm/nope", " models of timm, such as 'timm/"),
    ],
)
def test_an_unknown_name_is_one_error_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arguments(name, "")
    assert len(caught.value.problems) == 1
    assert hint in str(caught.value)


def test_the_table_lists_its_own_models_and_finds_those_of_libraries() -> None:
    assert not any("/" in name for name in MODELS)
    assert "timm/vit_tiny_patch16_224" in MODELS
    assert "keras/x" not in MODELS
    assert parse_arguments("timm/vit_tiny_patch16_224", "classes=7") == {"size": 224, "classes": 7}
