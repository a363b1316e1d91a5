"""What a step with a schedule refuses, and schedules of one's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gpipe_bench import GPipe
from gpipe_bench.errors import ScheduleError
from gpipe_bench.schedules import Schedule, check, named_schedule, with_recomputation
from tests.engine.steps import mean_loss, samples, scheduled, step, targets
from tests.engine.support import MODES, Flags, Mix, assert_same


def chain(n: int = 4) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(*(Mix() for _ in range(n))).double()


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_a_call_in_grad_mode_is_refused_where_backward_passes_come_between(schedule):
    pipe = scheduled(chain(), [1] * 4, schedule, chunks=3)
    with pytest.raises(ScheduleError, match=rf"for pipe\(x\), got {schedule}; call pipe.step"):
        pipe(samples(7, 3))
    with torch.no_grad():
        pipe(samples(7, 3))


@pytest.mark.parametrize("schedule", [None, "1f1b"])
@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda output, target: output.sum(1), r"got a tensor of shape \[[37]\]"),
        (lambda output, target: 3.0, "got 3.0"),
        (lambda output, target: None, "got None"),
    ],
    ids=["rows", "number", "nothing"],
)
def test_a_loss_that_is_not_one_number(loss, got, schedule):
    pipe = scheduled(chain(), [1] * 4, schedule, chunks=3)
    with pytest.raises(TypeError, match=f"loss must give one number in a tensor, {got}"):
        pipe.step(samples(7, 3), targets(7), loss)
    with pytest.raises(TypeError, match=r"loss must be a function of \(output, target\), got 'mse'; pass one"):
        pipe.step(samples(7, 3), targets(7), "mse")
    with pytest.raises(TypeError, match="input must be a tensor or a tuple of tensors, got list"):
        pipe.step([1], targets(1), loss)
    assert_same(step(pipe, samples(7, 3), targets(7)), step(chain(), samples(7, 3), targets(7)))


def test_a_target_with_a_graph_is_refused():
    pipe = scheduled(chain(), [1] * 4, "1f1b", chunks=3)
    weight = torch.ones(7, dtype=torch.float64, requires_grad=True)
    for target in (targets(7) * weight, {"a": (targets(7) * weight,)}):
        with pytest.raises(
            ValueError, match=r"target must have no graph .* pass target.detach\(\), or leave out the schedule"
        ):
            pipe.step(samples(7, 3), target, mean_loss)
    with torch.no_grad():
        pipe.step(samples(7, 3), targets(7) * weight, mean_loss)
    assert weight.grad is None


@pytest.mark.parametrize("schedule", [None, "gpipe"])
def test_a_pipeline_without_layers_has_nothing_to_train(schedule):
    pipe = GPipe(nn.Sequential(), [], devices=[], schedule=schedule)
    with pytest.raises(ValueError, match="pipe must have a layer to train"):
        pipe.step(samples(7, 3), targets(7), mean_loss)


REFUSED = {
    "schedule must be one of gpipe, 1f1b,": ({"schedule": "zigzag"}, ScheduleError),
    "two partitions for each device": ({"schedule": "zb_v", "balance": [1, 1, 2], "devices": 2}, ScheduleError),
    "same number of partitions for": ({"schedule": "interleaved", "balance": [1, 1, 2], "devices": 2}, ScheduleError),
}  # fmt: skip
NONE = [3, [("F", 0)], [[("F", 0)]]]
FUNCTIONS = [lambda m, n: None, lambda m: [], lambda m, n: "1f1b", lambda m, n: [["F"]]]


def refused(error, message, balance=(1, 1, 1, 1), devices=4, **options):
    with pytest.raises(error, match=message):
        GPipe(chain(), balance, devices=["cpu"] * devices, **options)


def test_schedules_that_do_not_exist():
    for message, (options, error) in REFUSED.items():
        refused(error, message, **options)
    for schedule in NONE:
        refused(TypeError, r"schedule must be one of gpipe, 1f1b, .* got ", schedule=schedule)
    for schedule in FUNCTIONS:
        refused(TypeError, r"must be a Schedule, or a function of \(m, n\) .*, got <function", schedule=schedule)


# --- schedules of one's own ------------------------------------------------------------------------------------------


def one_by_one(m: int, n: int) -> Schedule:
    """Each micro-batch forward and backward before the next one; all partitions on one device."""
    return Schedule.of(
        [
            [
                action
                for i in range(m)
                for action in (*(("F", i, j) for j in range(n)), *(("B", i, j) for j in range(n)[::-1]))
            ]
        ]
    )


OWN = {
    "list": lambda: [[("F", 0, 0), ("F", 1, 0), ("B", 0, 0), ("B", 1, 0)],
                     [("F", 0, 1), ("B", 0, 1), ("F", 1, 1), ("B", 1, 1)]],
    "mixed": lambda: [[("F", 1, 0), ("F", 0, 0), ("I", 0, 0), ("B", 1, 0), ("W", 0, 0)],
                      [("F", 1, 1), ("F", 0, 1), ("B", 0, 1), ("I", 1, 1), ("W", 1, 1)]],
    "with R": lambda: [[("F", 0, 0), ("F", 1, 0), ("R", 1, 0), ("B", 0, 0), ("B", 1, 0)],
                       [("F", 0, 1), ("R", 0, 1), ("B", 0, 1), ("F", 1, 1), ("B", 1, 1)]],
    "schedule": lambda: named_schedule("zb_h1", 2, 2, 2),
    "schedule with R": lambda: with_recomputation(named_schedule("1f1b", 2, 2, 2), 2),
    "function": lambda: (lambda m, n: named_schedule("1f1b", m, n, n)),
    "function for one device": lambda: one_by_one,
}  # fmt: skip


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("workers", ["always", "never"])
def test_a_schedule_of_ones_own(own, checkpoint, workers):
    plain = chain(2)
    devices = ["cpu"] if own == "function for one device" else ["cpu"] * 2
    pipe = GPipe(
        copy.deepcopy(plain),
        [1, 1],
        devices=devices,
        schedule=OWN[own](),
        chunks=2,
        checkpoint=checkpoint,
        workers=workers,
    )
    x, target = samples(5, 3), targets(5)
    assert_same(step(pipe, x, target), step(plain, x, target))


def test_r_in_a_schedule_checkpoints_where_the_mode_does_not():
    layers = [Flags(), Flags()]
    pipe = GPipe(
        nn.Sequential(*layers), [1, 1], devices=["cpu"] * 2, schedule=OWN["with R"](), chunks=2, checkpoint="never"
    )
    pipe.step(torch.ones(2, 3), torch.ones(2), mean_loss)
    again = [[seen for seen in layer.seen if seen == (False, True)] for layer in layers]
    assert [len(seen) for seen in again] == [1, 1]


def test_a_function_is_asked_for_each_number_of_microbatches():
    asked = []

    def schedule(m, n):
        asked.append((m, n))
        return named_schedule("1f1b", m, n, n)

    pipe = scheduled(chain(2), [1, 1], schedule, chunks=4)
    asked.clear()
    for rows in (8, 8, 3):
        pipe.step(samples(rows, 3), targets(rows), mean_loss)
    assert asked == [(4, 2), (3, 2)]


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_list_is_for_one_number_of_microbatches(chunks):
    pipe = scheduled(chain(2), [1, 1], OWN["list"](), chunks=chunks)
    wanted = (
        f"schedule must be for {chunks} micro-batches and 2 partitions, got one for 2 micro-batches and 2 partitions"
    )
    with pytest.raises(ScheduleError, match=wanted):
        pipe.step(samples(6, 3), targets(6), mean_loss)
    pipe.chunks = 2
    pipe.step(samples(6, 3), targets(6), mean_loss)


def test_a_schedule_for_other_partitions():
    with pytest.raises(ScheduleError, match=r"3 partitions, got one for .*2 partitions"):
        scheduled(chain(3), [1, 1, 1], OWN["list"](), chunks=2).step(samples(6, 3), targets(6), mean_loss)


def test_a_schedule_that_cannot_end():
    rows = [[("F", 0, 0), ("B", 0, 0), ("F", 1, 0), ("B", 1, 0)], [("F", 1, 1), ("B", 1, 1), ("F", 0, 1), ("B", 0, 1)]]
    pipe = scheduled(chain(2), [1, 1], rows, chunks=2)
    with pytest.raises(ScheduleError, match="must not wait for each other, got a deadlock"):
        pipe.step(samples(6, 3), targets(6), mean_loss)


# --- losses, targets, actions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", [("F", 0), (0, 0, "F"), "F00", ("F", "0", "0"), ("F", False, False), 7])
def test_something_that_is_no_action_is_named(action):
    with pytest.raises(TypeError, match=r"an action must be \(kind, micro-batch, partition\), got .*; write one as"):
        check([[action]])


def test_a_function_may_give_lists():
    given = one_by_one(4, 4)
    pipe = GPipe(
        chain(), [1] * 4, devices=["cpu"] * len(given.devices), chunks=4, schedule=lambda m, n: one_by_one(m, n).devices
    )
    same = GPipe(chain(), [1] * 4, devices=["cpu"] * len(given.devices), chunks=4, schedule=given)
    same.load_state_dict(pipe.state_dict())
    assert torch.equal(pipe.step(samples(8, 3), targets(8), mean_loss), same.step(samples(8, 3), targets(8), mean_loss))
