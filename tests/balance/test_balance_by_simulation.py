"""Balance by the simulator: exactly optimal for the times on a profile, and never worse than the even split."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from gpipe_bench.balance import balance_by_simulation, layer_simulated_times
from gpipe_bench.errors import BalanceError, ConfigError
from gpipe_bench.simulator import Model, simulate
from gpipe_bench.skip import pop, skippable, stash

UNET = Model("unet", {"depth": 2, "B": 1, "C": 4, "size": 16})


def heavy_at_the_end() -> tuple[nn.Sequential, torch.Tensor]:
    with torch.device("meta"):
        kernels = [1, 3, 1, 1, 3, 1, 9, 9]
        layers = [nn.Conv2d(64, 64, size, padding=size // 2) for size in kernels]
        return nn.Sequential(*layers), torch.empty(8, 64, 56, 56)


def largest(times: list[float], balance: tuple[int, ...] | list[int]) -> float:
    ends = list(itertools.accumulate(balance))
    return max(sum(times[end - size : end]) for size, end in zip(balance, ends, strict=True))


def splits(layers: int, n: int) -> list[tuple[int, ...]]:
    cuts = itertools.combinations(range(1, layers), n - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *cut, layers))) for cut in cuts]


@pytest.mark.parametrize("profile", ["p40", "h100"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_no_split_has_a_faster_slowest_partition(n: int, profile: str) -> None:
    module, sample = heavy_at_the_end()
    options = {"profile": profile, "chunks": 4, "checkpoint": "always"}

    times = layer_simulated_times(module, sample, **options)
    balance = balance_by_simulation(n, module, sample, **options)

    best = min(largest(times, split) for split in splits(len(module), n))
    assert largest(times, balance) == pytest.approx(best, rel=1e-12)
    even = [len(module) // n + (j < len(module) % n) for j in range(n)]
    assert largest(times, balance) <= largest(times, even) * (1 + 1e-12)


def test_the_simulated_step_is_faster_than_with_the_even_split() -> None:
    module, sample = heavy_at_the_end()
    # On an H100 the host would bound both.
    options = {"batch_size": 64, "chunks": 8, "profile": "v100"}

    balance = balance_by_simulation(4, module, sample, **options)

    steps = [simulate(module, sample=sample, balance=split, **options).step_time_ms for split in (balance, [2] * 4)]
    assert steps[0] < 0.7 * steps[1]


def test_recomputation_counts_for_as_many_microbatches_as_are_recomputed() -> None:
    module, sample = heavy_at_the_end()

    never, most, always = (
        sum(layer_simulated_times(module, sample, chunks=4, checkpoint=mode))
        for mode in ("never", "except_last", "always")
    )

    assert most - never == pytest.approx(0.75 * (always - never))
    assert always > never > 0


def test_a_model_of_the_suite_by_name(tmp_path) -> None:
    times = layer_simulated_times(UNET, batch_size=8, chunks=2, cache=tmp_path)

    assert sum(balance_by_simulation(3, UNET, batch_size=8, chunks=2, cache=tmp_path)) == len(times)
    assert list(tmp_path.iterdir())


def test_skips_are_no_obstacle() -> None:
    @skippable(stash=["skip"])
    class Enter(nn.Module):
        def forward(self, x):
            yield stash("skip", x)
            return x

    @skippable(pop=["skip"])
    class Leave(nn.Module):
        def forward(self, x):
            skip = yield pop("skip")
            return x + skip

    with torch.device("meta"):
        module = nn.Sequential(Enter(), nn.Linear(512, 512), nn.Linear(512, 512), Leave())

    assert balance_by_simulation(2, module, torch.empty(4096, 512, device="meta")) == [2, 2]


def test_frozen_layers_have_less_to_do() -> None:
    module, sample = heavy_at_the_end()
    before = layer_simulated_times(module, sample)
    module[-1].requires_grad_(False)

    assert layer_simulated_times(module, sample)[-1] < before[-1]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"n": 9}, BalanceError, "got 9 partitions for 8 layers"),
        ({"checkpoint": "some"}, ValueError, "checkpoint must be one of always, except_last, never, got 'some'"),
        ({"profile": "h10"}, ConfigError, "h10"),
        ({"sample": None}, TypeError, "sample must be a Tensor or a tuple of Tensors, got NoneType"),
        ({"module": UNET}, ValueError, "must come with batch_size and no sample"),
        ({"chunks": 0}, ValueError, "chunks must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_input(arguments, error, message) -> None:
    module, sample = heavy_at_the_end()

    with pytest.raises(error, match=message):
        balance_by_simulation(**{"n": 2, "module": module, "sample": sample, **arguments})
