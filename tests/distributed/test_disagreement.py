"""Ranks that do not do the same all end with an error that says what differs, and on which rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_bench import Components
from gpipe_bench.distributed import PeerError, Pipe
from gpipe_bench.errors import DeviceCountError
from gpipe_bench.schedules import named_schedule
from tests.distributed.virtual import run_ranks
from tests.engine.support import Pop, Stash

X = torch.ones(8, 3)
OTHER_ORDER = [
    [("F", 0, 0), ("F", 1, 0), ("B", 0, 0), ("B", 1, 0)],
    [("F", 0, 1), ("F", 1, 1), ("B", 0, 1), ("B", 1, 1)],
    [("F", 0, 2), ("F", 1, 2), ("B", 0, 2), ("B", 1, 2)],
]


def layers(count=4):
    return [nn.Linear(3, 3) for _ in range(count)]


def with_skip():
    return [nn.Sequential(nn.Linear(3, 3), Stash()), *layers(2), nn.Sequential(Pop(), nn.Linear(3, 3))]


def with_buffer():
    found = layers()
    found[0].register_buffer("more", torch.ones(2))
    return found


def made(group, other=1, **changes):
    """A pipeline of three ranks, one of which makes another one."""
    options = {"layers": layers(), "balance": [1, 2, 1], "schedule": "1f1b", "chunks": 2}
    options |= changes if group.rank() == other else {}
    return Pipe(nn.Sequential(*options.pop("layers")), options.pop("balance"), group=group, **options)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"layers": [each.double() for each in layers()]}, "parameters"),
        ({"layers": with_skip()}, "parameters"),
        ({"schedule": OTHER_ORDER}, "schedule"),
        ({"layers": with_buffer()}, "buffers"),
        ({"layers": [nn.Bilinear(3, 3, 3), *layers(3)]}, "parameters"),
        ({"layers": [type("Own", (nn.Linear,), {})(3, 3), *layers(3)]}, "layers"),
    ],
)
def test_another_pipeline(changes, name):
    for result in run_ranks(3, lambda group: made(group, **changes)):
        assert isinstance(result, ValueError)
        assert f"{name} must be the same in all processes, got" in str(result)
        assert "on rank 0 and" in str(result)
        assert "on rank 1;" in str(result)


def test_components_without_a_switch():
    results = run_ranks(3, lambda group: made(group, components=Components(portals=False, shared=False)))
    assert [type(result) for result in results] == [PeerError, ValueError, PeerError]
    rule = "components of a distributed pipeline must be on, except for shared, got dep-str-x-clk-rec-x; switch others"
    assert all(rule in str(result) for result in results)


def test_another_number_of_partitions():
    results = run_ranks(3, lambda group: made(group, balance=[2, 2]))
    assert [type(result) for result in results] == [PeerError, DeviceCountError, PeerError]
    assert all("2 for 2 partitions, got 3" in str(result) for result in results)


def step(pipe, x=X):
    pipe.step(x, X, functional.mse_loss)


def assert_all_say(results, text, *kinds):
    assert all(isinstance(result, (ValueError, PeerError, *kinds)) for result in results), results
    assert all(text in str(result) for result in results), results


def test_another_order_of_actions_on_one_rank():
    def job(group):
        def schedule(m, n):
            return OTHER_ORDER if group.rank() == 1 else named_schedule("1f1b", m, n, n)

        step(made(group, group.rank(), schedule=schedule))

    assert_all_say(run_ranks(3, job), "the schedule must be the same in all processes, got")


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_an_input_of_another_type(schedule):
    results = run_ranks(3, lambda group: step(made(group, None, schedule=schedule), X.double()))
    assert_all_say(results, "mat1 and mat2 must have the same dtype", RuntimeError)
    assert all("rank 0 failed at F(0,0): RuntimeError" in str(result) for result in results[1:])
