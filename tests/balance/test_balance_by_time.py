"""Balance by time, on a clock that only the layers advance."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_bench.balance import balance_by_time, by_time, layer_times, layers, measure_layers
from gpipe_bench.errors import BalanceError, UnsupportedError
from gpipe_bench.skip import Skippable, pop, skippable, stash


class Clock:
    """Seconds that pass only when a layer says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.runs: list[float] = []

    def perf_counter(self) -> float:
        return self.now


clock = Clock()


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        clock.now += 2 * ctx.seconds
        return gradient, None


class Work(nn.Module):
    """Takes ``seconds`` forward and twice that backward; its first run takes ``first`` more."""

    def __init__(self, seconds: float, first: float = 0.0) -> None:
        super().__init__()
        self.seconds, self.first = seconds, first

    def forward(self, x: Tensor) -> Tensor:
        clock.now += self.seconds + self.first
        clock.runs.append(self.seconds)
        self.first = 0.0
        worked: Tensor = _Work.apply(x, self.seconds)  # type: ignore[no-untyped-call]  # PyTorch leaves it untyped
        return worked


@pytest.fixture(autouse=True)
def _layers_advance_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock.now, clock.runs = 0.0, []
    monkeypatch.setattr(by_time, "time", SimpleNamespace(perf_counter=clock.perf_counter))


def sample() -> Tensor:
    return torch.zeros(1, requires_grad=True)


def test_a_layer_costs_its_forward_and_its_backward_pass() -> None:
    module = nn.Sequential(Work(1), Work(4), Work(2))

    assert layer_times(module, sample()) == [3, 12, 6]


def test_the_gradients_of_stashed_and_popped_skips_are_part_of_the_cost() -> None:
    @skippable(stash=["skip"])
    class Enter(Work, Skippable):
        def forward(self, x: Tensor) -> Any:
            yield stash("skip", super().forward(x))
            return x

    @skippable(pop=["skip"])
    class Leave(Work, Skippable):
        def forward(self, x: Tensor) -> Any:
            skip = yield pop("skip")
            return x.detach() + super().forward(skip)

    assert layer_times(nn.Sequential(Enter(1), Leave(4)), sample()) == [3, 12]


def test_an_input_without_gradient_needs_no_backward_pass() -> None:
    module = nn.Sequential(Work(1), Work(4))

    assert layer_times(module, torch.zeros(1)) == [1, 4]


def test_the_first_run_of_a_layer_is_not_counted() -> None:
    module = nn.Sequential(Work(1, first=100), Work(1, first=50))

    assert layer_times(module, sample(), timeout=1000) == [3, 3]


@pytest.fixture
def _own_nodes_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node that the profiler puts before an input takes 35 seconds in each backward pass."""

    def slow(_ctx: Any, _gradient: Tensor) -> tuple[None, None]:
        clock.now += 35
        return None, None

    monkeypatch.setattr(layers._Enter, "backward", staticmethod(slow))


@pytest.mark.usefixtures("_own_nodes_take_time")
def test_the_nodes_of_the_profiler_are_not_counted() -> None:
    @skippable(stash=["skip"])
    class Enter(Work, Skippable):
        def forward(self, x: Tensor) -> Any:
            yield stash("skip", super().forward(x))
            return x

    @skippable(pop=["skip"])
    class Leave(Work, Skippable):
        def forward(self, x: Tensor) -> Any:
            skip = yield pop("skip")
            return x + super().forward(skip)

    module = nn.Sequential(Work(1), nn.Identity(), Enter(2), nn.Identity(), Leave(4))

    assert layer_times(module, sample()) == [3, 0, 6, 0, 12]


@pytest.mark.usefixtures("_own_nodes_take_time")
def test_cheap_layers_do_not_outweigh_costly_ones() -> None:
    module = nn.Sequential(Work(100), Work(100), *(nn.Identity() for _ in range(12)))

    assert balance_by_time(2, module, sample()) == [1, 13]


def test_what_the_profiler_does_itself_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_reading() -> float:
        clock.now += 5
        return clock.now

    monkeypatch.setattr(by_time, "time", SimpleNamespace(perf_counter=slow_reading))

    assert layer_times(nn.Sequential(Work(1), nn.Identity()), sample(), timeout=100) == [3, 0]


def test_a_layer_never_costs_less_than_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Disturbance(layers._Idle):
        def forward(self, *inputs: object) -> tuple[object, ...]:
            clock.now += 10
            return super().forward(*inputs)

    monkeypatch.setattr(layers, "_Idle", Disturbance)

    assert layer_times(nn.Sequential(Work(1), Work(4)), sample()) == [0, 2]


def test_the_balance_is_optimal_for_the_times() -> None:
    seconds = [1, 1, 1, 1, 1, 1, 1, 10]

    assert balance_by_time(3, nn.Sequential(*map(Work, seconds)), sample()) == [4, 3, 1]
    assert balance_by_time(3, nn.Sequential(*map(Work, reversed(seconds))), sample()) == [1, 4, 3]


def test_every_layer_is_timed_however_short_the_timeout() -> None:
    module = nn.Sequential(Work(1), Work(2), Work(4))

    assert layer_times(module, sample(), timeout=0) == [3, 6, 12]
    assert clock.runs == [1, 1, 2, 2, 4, 4]


def test_rounds_over_all_layers_go_on_until_the_timeout() -> None:
    module = nn.Sequential(Work(1), Work(1))

    layer_times(module, sample(), timeout=13)

    # A visit is one run to warm up and three timed ones, of 3 s each: after 12 s the second layer has its turn, whose
    # runs end at 15 and 18 s; 13 s have then passed.
    assert len(clock.runs) == 4 + 2


def test_a_round_in_which_the_timeout_passes_ends_there() -> None:
    module = nn.Sequential(Work(1), Work(2))

    layer_times(module, sample(), timeout=37)

    # The first round takes 12 + 24 s; in the second the first layer passes the deadline after two runs.
    assert clock.runs == [1, 1, 1, 1, 2, 2, 2, 2, 1, 1]


def test_bursts_of_other_work_do_not_decide() -> None:
    class Disturbed(Work):
        def forward(self, x: Tensor) -> Tensor:
            clock.now += 1000 if len(clock.runs) == 1 else 0
            return super().forward(x)

    assert layer_times(nn.Sequential(Disturbed(1), Work(2)), sample(), timeout=2000) == [3, 6]


class Weighted(Work):
    """Takes ``weights`` more for the gradient of its weight."""

    def __init__(self, seconds: float, weights: float) -> None:
        super().__init__(seconds)
        self.weight, self.weights = nn.Parameter(torch.zeros(1)), weights

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = _Work.apply(self.weight, self.weights / 2)  # type: ignore[no-untyped-call]  # likewise
        return super().forward(x) + branch


def times_ms(*modules: nn.Module, x: Tensor, **options: float) -> list[tuple[float, float, float | None]]:
    measured = measure_layers(nn.Sequential(*modules), x, **options)
    return [(layer.forward_ms, layer.backward_ms, layer.backward_weights_ms) for layer in measured]


@pytest.mark.usefixtures("_own_nodes_take_time")
def test_the_part_of_the_weights_is_what_a_pass_for_the_inputs_alone_does_not_take() -> None:
    modules = Weighted(1, 5), Work(4), Weighted(3, 0)

    assert times_ms(*modules, x=sample(), timeout=0) == [(1000, 7000, 5000), (4000, 8000, 0), (3000, 6000, 0)]


def test_where_inputs_need_no_gradient_all_of_the_backward_pass_is_for_weights() -> None:
    modules = Work(2), Weighted(1, 5), Weighted(1, 5)

    expected = [(2000, 0, 0), (1000, 5000, 5000), (1000, 7000, 5000)]
    assert times_ms(*modules, x=torch.zeros(1), timeout=300) == expected


def test_skips_are_refused_before_anything_is_timed() -> None:
    @skippable(stash=["skip"])
    class Enter(Work, Skippable):
        def forward(self, x: Tensor) -> Any:
            yield stash("skip", x)
            return super().forward(x)

    @skippable(pop=["skip"])
    class Leave(Work, Skippable):
        def forward(self, x: Tensor) -> Any:
            skip = yield pop("skip")
            return skip + super().forward(x)

    with pytest.raises(UnsupportedError, match=r"without skips .*, got one in layer 1; simulate the module itself"):
        measure_layers(nn.Sequential(Work(1), Enter(2), Leave(4)), sample(), timeout=1000)
    assert len(clock.runs) < 10


def test_partitions_are_checked_before_anything_runs() -> None:
    with pytest.raises(BalanceError, match="got 3 partitions for 2 layers"):
        balance_by_time(3, nn.Sequential(Work(1), Work(1)), sample())
    assert clock.runs == []


@pytest.mark.parametrize("timeout", [-1.0, math.nan, math.inf])
def test_the_timeout_must_be_a_number_of_seconds(timeout: float) -> None:
    with pytest.raises(ValueError, match=f"timeout must be a finite number of seconds, at least 0, got {timeout}"):
        balance_by_time(1, nn.Sequential(Work(1)), sample(), timeout=timeout)


def test_a_device_without_computation_is_refused() -> None:
    with pytest.raises(ValueError, match="device must be one that computes, got meta"):
        balance_by_time(1, nn.Sequential(Work(1)), sample(), device="meta")
