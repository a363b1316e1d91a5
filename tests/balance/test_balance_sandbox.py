"""Profiling leaves the model as it was, whatever its layers do, and says which layer failed."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from gpipe_bench.balance import balance_by_size, balance_by_time, layer_sizes, layer_times
from gpipe_bench.balance.layers import stages
from gpipe_bench.errors import SkipLayoutError, SkipUsageError, UnsupportedError
from gpipe_bench.models.table import MODELS
from gpipe_bench.skip import Namespace, Skippable, pop, skippable, stash
from tests.conformance.cases import CASES

Profile = Callable[..., list[int]]
PROFILES = [pytest.param(partial(balance_by_time, timeout=0), id="time"), pytest.param(balance_by_size, id="size")]
every_profile = pytest.mark.parametrize("profile", PROFILES)


class Pair(NamedTuple):
    first: str
    second: Tensor | None


def convnet() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Sequential(nn.ReLU(inplace=True)))


@every_profile
def test_the_model_is_left_as_it_was(profile: Profile) -> None:
    module = convnet()
    batch = torch.rand(2, 3, 8, 8)
    module(batch).sum().backward()
    module[1].eval()
    state = copy.deepcopy(module.state_dict())
    gradients = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    identities = [id(tensor) for tensor in module.state_dict(keep_vars=True).values()]
    flags = [layer.training for layer in module.modules()]

    profile(2, module, batch)

    torch.testing.assert_close(module.state_dict(), state, rtol=0, atol=0)
    torch.testing.assert_close([p.grad for p in module.parameters()], gradients, rtol=0, atol=0)
    assert [id(tensor) for tensor in module.state_dict(keep_vars=True).values()] == identities
    assert [layer.training for layer in module.modules()] == flags


@every_profile
def test_random_state_is_left_as_it_was(profile: Profile) -> None:
    module = convnet()
    built = torch.get_rng_state()
    profile(2, module, torch.zeros(2, 3, 8, 8))
    assert torch.equal(torch.get_rng_state(), built)


@every_profile
def test_a_sample_that_the_first_layer_changes_in_place_is_left_as_it_was(profile: Profile) -> None:
    batch = torch.full((2, 3), -1.0)

    profile(1, nn.Sequential(nn.ReLU(inplace=True)), batch)

    assert torch.equal(batch, torch.full((2, 3), -1.0))


@every_profile
def test_layers_run_in_training_mode_and_with_gradients(profile: Profile) -> None:
    class Demanding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert self.training
            assert torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
            return x

    module = nn.Sequential(Demanding(), nn.Linear(2, 2)).eval()

    with torch.inference_mode():
        assert profile(2, module, torch.rand(1, 2)) == [1, 1]
    assert not module.training
    assert not module[0].training


@every_profile
def test_parts_that_a_training_model_keeps_in_eval_mode_stay_so(profile: Profile) -> None:
    class Frozen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert not self.training
            return x

    module = nn.Sequential(Frozen(), nn.Linear(2, 2))
    module[0].eval()

    assert profile(1, module, torch.rand(1, 2)) == [2]


@skippable(stash=["near", "far", "none"])
class Enter(nn.Module, Skippable):
    def forward(self, x: Tensor) -> Any:
        yield stash("near", x * 2)
        yield stash("far", x * 3)
        yield stash("none", None)
        return x


@skippable(pop=["near"])
class Near(nn.Module, Skippable):
    def forward(self, x: Tensor) -> Any:
        near = yield pop("near")
        return x + near.relu_()


@skippable(pop=["far", "none"], stash=["own"])
class Far(nn.Module, Skippable):
    def forward(self, x: Tensor) -> Any:
        far = yield pop("far")
        nothing = yield pop("none")
        assert nothing is None
        yield stash("own", x)
        return x * far


@skippable(pop=["own"])
class Own(nn.Module, Skippable):
    def forward(self, x: Tensor) -> Any:
        own = yield pop("own")
        return x - own


def test_skippable_layers_can_be_timed_over_many_rounds() -> None:
    ns = Namespace()
    module = nn.Sequential(
        nn.Linear(4, 4), Enter().isolate(ns), Near().isolate(ns), Far().isolate(ns, only=["far", "none"])
    )
    module.append(Own())

    times = layer_times(module, torch.rand(3, 4), timeout=0.02)

    assert len(times) == 5
    assert sum(times) > 0


def test_a_stashed_skip_counts_where_it_was_made() -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), Enter(), nn.Identity(), Near(), Far(), Own())
    size = 4 * 3 * 4

    sizes = layer_sizes(module, torch.rand(3, 4), param_scale=0)

    # Near's sum is kept by Far's product; Far gives what Own passes on, and Own's result stays for the loss.
    assert sizes == [size, 2 * size, 0, size, 0, size]


def test_a_skip_is_freed_when_the_layer_that_popped_it_is_done() -> None:
    skips: dict[str, weakref.ref[torch.UntypedStorage]] = {}
    alive: dict[str, list[bool]] = {"near": [], "far": []}

    for stage in stages(nn.Sequential(Enter(), Near(), Far(), Own()), torch.rand(3, 4), torch.device("cpu")):
        stage.forward()
        skips |= {name: _storage_of(value) for (_, name), value in stage.stashed.items() if value is not None}
        for name, seen in alive.items():
            seen.append(skips[name]() is not None)

    assert alive == {"near": [True, True, False, False], "far": [True, True, True, False]}


def _storage_of(tensor: Tensor) -> weakref.ref[torch.UntypedStorage]:
    return weakref.ref(tensor.untyped_storage())


@every_profile
def test_nested_skippable_layers_are_profiled(profile: Profile) -> None:
    module = nn.Sequential(nn.Sequential(nn.Linear(2, 2), Enter()), nn.Sequential(Near(), nn.Sequential(Far(), Own())))

    assert profile(2, module, torch.rand(1, 2)) == [1, 1]


@every_profile
def test_skips_that_do_not_match_are_refused(profile: Profile) -> None:
    with pytest.raises(SkipLayoutError, match="no earlier layer stashes"):
        profile(1, nn.Sequential(Near()), torch.rand(1, 2))


@every_profile
def test_a_layer_that_breaks_its_declaration_is_named(profile: Profile) -> None:
    @skippable(stash=["near"])
    class Liar(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(SkipUsageError) as caught:
        profile(1, nn.Sequential(nn.ReLU(), Liar(), Near()), torch.rand(1, 2))
    assert caught.value.__notes__ == ["while profiling a copy of layer 1 (Liar)"]


@every_profile
def test_integer_inputs_and_tuples_are_carried_through(profile: Profile) -> None:
    class Embed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 4)

        def forward(self, tokens: Tensor, *_: Any) -> Any:
            return tokens, {"x": [self.embedding(tokens)]}, Pair("text", None)

    class Score(nn.Module):
        def forward(self, values: tuple[Tensor, dict[str, list[Tensor]], Pair]) -> Tensor:
            tokens, embedded, pair = values
            assert pair == Pair("text", None)
            assert not tokens.requires_grad
            assert embedded["x"][0].requires_grad
            return embedded["x"][0].mean(dim=-1) + tokens

    class First(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            assert isinstance(pair, tuple)
            return pair[0] + pair[1]

    module = nn.Sequential(First(), Embed(), Score())

    assert sum(profile(2, module, (torch.tensor([[1], [2]]), torch.tensor([[3], [4]])))) == 3


@every_profile
@pytest.mark.parametrize("name", MODELS)
def test_every_model_of_the_table_is_profiled(profile: Profile, name: str) -> None:
    spec = MODELS[name]
    arguments = CASES[name].arguments
    module = spec.build(**arguments)
    batch, _ = spec.make_batch(2, arguments)

    balance = profile(4, module, batch)

    assert [len(balance), sum(balance)] == [4, len(module)]


@every_profile
@pytest.mark.parametrize("module", [nn.Linear(1, 1), [nn.Linear(1, 1)]])
def test_only_a_sequential_is_taken(profile: Profile, module: Any) -> None:
    with pytest.raises(TypeError, match=r"module must be an nn.Sequential, got (Linear|list)"):
        profile(1, module, torch.rand(1, 1))


@every_profile
@pytest.mark.parametrize("sample", [[torch.rand(1)], (), (torch.rand(1), 2), None])
def test_only_tensors_are_taken_as_a_sample(profile: Profile, sample: Any) -> None:
    with pytest.raises(TypeError, match="sample must be a Tensor or a tuple of Tensors, got"):
        profile(1, nn.Sequential(nn.ReLU()), sample)


@every_profile
def test_a_device_that_is_not_there_is_refused(profile: Profile) -> None:
    with pytest.raises(UnsupportedError, match="device must be one that this machine has, got 'cuda:99'"):
        profile(1, nn.Sequential(nn.ReLU()), torch.rand(1), device="cuda:99")


def test_a_layer_that_fails_backward_is_named() -> None:
    class _Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ArithmeticError("no gradient here")

    class Fail(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return _Fail.apply(x)  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped

    with pytest.raises(ArithmeticError) as caught:
        layer_times(nn.Sequential(nn.Linear(1, 1), Fail()), torch.rand(1, 1))
    assert caught.value.__notes__ == ["while profiling a copy of layer 1 (Fail)"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, found none")
@every_profile
def test_a_model_on_the_host_is_profiled_on_a_gpu(profile: Profile) -> None:
    module = convnet()
    torch.cuda.manual_seed(3)
    before = torch.cuda.get_rng_state()

    balance = profile(2, module, torch.rand(2, 3, 8, 8), device="cuda")

    assert sum(balance) == 4
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}
    assert torch.equal(torch.cuda.get_rng_state(), before)
