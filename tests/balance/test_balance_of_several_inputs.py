"""Whatever Pipe runs can be profiled: several inputs, tuples between layers, values that are not split."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_bench import NoChunk, Pipe, PipeSequential, WithDevice
from gpipe_bench.balance import balance_by_simulation, balance_by_size, balance_by_time, layer_sizes, layer_times
from gpipe_bench.skip import Skippable, pop, skippable, stash

Profile = Callable[..., list[int]]
PROFILES = [pytest.param(partial(balance_by_time, timeout=0), id="time"), pytest.param(balance_by_size, id="size")]
every_profile = pytest.mark.parametrize("profile", PROFILES)
FLOAT = 4


class Twin(nn.Module):
    """x -> (2x, 3x)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x, 3 * x


class Add(nn.Module):
    """(a, b) -> a + b."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


class Masked(nn.Module):
    """(x, mask, factor) -> (x * mask * factor, factor)."""

    def forward(self, x: Tensor, mask: Tensor | None = None, factor: int = 1) -> tuple[Tensor, int]:
        return (x if mask is None else x * mask) * factor, factor


class First(nn.Module):
    """(x, factor) -> x."""

    def forward(self, x: Tensor, factor: int) -> Tensor:
        assert factor == 7
        return x


class Listed(nn.Module):
    """(x, offsets) -> x plus each of a list of tensors."""

    def forward(self, x: Tensor, offsets: list[Tensor]) -> Tensor:
        return x + sum(offset.sum() for offset in offsets)


@skippable(stash=["sum"])
class Enter(nn.Module, Skippable):
    """(a, b) -> (a, b); stashes the sum."""

    def forward(self, a: Tensor, b: Tensor) -> Any:
        yield stash("sum", a + b)
        return a, b


@skippable(pop=["sum"])
class Leave(nn.Module, Skippable):
    """(a, b) -> a * b + sum."""

    def forward(self, a: Tensor, b: Tensor) -> Any:
        total = yield pop("sum")
        return a * b + total


X, MASK = torch.rand(6, 3, requires_grad=True), torch.rand(3)

CASES: dict[str, tuple[Callable[[], nn.Sequential], Any]] = {
    "tuple between layers": (lambda: nn.Sequential(Twin(), Add()), X),
    "several inputs": (lambda: nn.Sequential(Add(), nn.Linear(3, 2)), (X, X)),
    "a PipeSequential": (lambda: PipeSequential(Masked(), Masked()), (X, NoChunk(MASK), 7)),
    "not split": (lambda: nn.Sequential(Masked(), First()), (X, NoChunk(MASK), 7)),
    "nothing in a place": (lambda: nn.Sequential(Masked(), First()), (X, None, 7)),
    "a list": (lambda: nn.Sequential(Listed(), nn.ReLU()), (X, [MASK, MASK])),
    "one in a tuple": (lambda: PipeSequential(nn.ReLU(), Twin()), (X,)),
    "nested": (lambda: nn.Sequential(nn.Sequential(Twin(), Add()), nn.Sequential(Twin())), X),
    "on a device": (lambda: nn.Sequential(WithDevice(Twin(), "cpu"), WithDevice(Add(), "cpu")), X),
    "skips": (lambda: nn.Sequential(Enter(), Leave()), (X, X)),
}


@every_profile
@pytest.mark.parametrize("name", CASES)
def test_what_pipe_runs_is_profiled(profile: Profile, name: str) -> None:
    build, sample = CASES[name]
    Pipe(build(), chunks=2)(*(sample if isinstance(sample, tuple) else (sample,)))

    assert profile(2, build(), sample) == [1, 1]


def test_layers_see_what_pipe_hands_to_them() -> None:
    seen: list[Any] = []

    class Seeing(nn.Module):
        def forward(self, *inputs: Any) -> Any:
            seen.append(inputs)
            return inputs

    layer_sizes(PipeSequential(Seeing(), Seeing()), (X, NoChunk(MASK), "text", 2 * X), chunks=3)

    for inputs in seen:
        assert [tuple(value.shape) for value in inputs if isinstance(value, Tensor)] == [(2, 3), (3,), (2, 3)]
        assert inputs[2] == "text"
        assert inputs[0].requires_grad
        assert not inputs[1].requires_grad
    assert len(seen) == 2


def test_times_are_those_of_the_whole_sample() -> None:
    shapes: list[tuple[int, ...]] = []

    class Seeing(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            shapes.extend([tuple(x.shape), tuple(mask.shape)])
            return x

    layer_times(nn.Sequential(Seeing()), (X, NoChunk(MASK)), timeout=0)

    assert set(shapes) == {(6, 3), (3,)}


def test_bytes_of_several_inputs_are_counted() -> None:
    sizes = layer_sizes(nn.Sequential(Masked(), First(), nn.Sigmoid()), (X, NoChunk(MASK), 7), chunks=2)

    # First passes on what Masked has made, of three samples; Sigmoid keeps its own result.
    assert sizes == [FLOAT * 3 * 3, 0, FLOAT * 3 * 3]


@every_profile
@pytest.mark.parametrize("sample", [(1, None), NoChunk(MASK), [X, X], (), (NoChunk(MASK), [X])])
def test_a_sample_needs_a_tensor_to_split(profile: Profile, sample: Any) -> None:
    with pytest.raises(TypeError, match="sample must be a Tensor, or a tuple of inputs with at least one Tensor"):
        profile(1, nn.Sequential(Add()), sample)


def test_tensors_must_give_equally_many_microbatches() -> None:
    with pytest.raises(ValueError, match="inputs must give equally many micro-batches, got sizes"):
        balance_by_size(1, nn.Sequential(Add()), (X, X[:1]), chunks=2)


def test_a_scalar_is_wrapped() -> None:
    module = PipeSequential(Masked())
    scalar = torch.tensor(2.0)
    with pytest.raises(ValueError, match="got a scalar; add the dimension, or wrap the tensor in NoChunk"):
        balance_by_size(1, module, (X, scalar))
    assert balance_by_size(1, module, (X, NoChunk(scalar))) == [1]


def test_a_plain_sequential_hands_a_tuple_on_as_one_input() -> None:
    class Pair(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor], *others: Any) -> tuple[Tensor, Tensor]:
            assert isinstance(pair, tuple)
            assert others == ()
            return pair

    assert balance_by_size(2, nn.Sequential(Pair(), Pair()), (X, X)) == [1, 1]


def test_a_forward_without_a_signature_takes_one_input() -> None:
    layer = nn.Module()
    layer.forward = torch.relu

    assert balance_by_size(1, nn.Sequential(layer), X) == [1]


def test_a_simulation_takes_tensors_only() -> None:
    with pytest.raises(TypeError, match="sample must be a Tensor or a tuple of Tensors, got Tensor, NoChunk"):
        balance_by_simulation(1, PipeSequential(Masked()), (X, NoChunk(MASK)))
    with pytest.raises(TypeError, match="module must have layers of one input to be simulated"):
        balance_by_simulation(2, nn.Sequential(Twin(), Add()), X)
