"""What a pipeline with a schedule refuses, schedules of one's own, and exceptions in a step."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from gpipe_bench import GPipe
from gpipe_bench.errors import ScheduleError
from gpipe_bench.schedules import SCHEDULES, Schedule, check, named_schedule, with_recomputation
from tests.engine.steps import ALL, mean_loss, samples, scheduled, step, targets
from tests.engine.support import MODES, Flags, Mix, assert_same, numbered

every_schedule = pytest.mark.parametrize("schedule", ALL)
every_mode = pytest.mark.parametrize("checkpoint", MODES)
both_workers = pytest.mark.parametrize("workers", ["always", "never"])


def chain(n: int = 4) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(*(Mix() for _ in range(n))).double()


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in ("gpipe", "looped_bfs")])
def test_a_call_in_grad_mode_is_refused_where_backward_passes_come_between(schedule):
    pipe = scheduled(chain(), [1] * 4, schedule, chunks=3)
    with pytest.raises(ScheduleError, match=rf"for pipe\(x\), got {schedule}; call pipe.step"):
        pipe(samples(7, 3))
    with torch.no_grad():
        pipe(samples(7, 3))


def test_with_gpipe_a_call_and_a_backward_pass_do_what_a_step_does():
    plain = chain()
    pipe = scheduled(copy.deepcopy(plain), [1] * 4, "gpipe", chunks=3)
    for model in (plain, pipe):
        mean_loss(model(samples(7, 3)), targets(7)).backward()
    torch.testing.assert_close([p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("schedule", ALL)
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
    assert_same(step(pipe, samples(7, 3), targets(7)), step(chain(), samples(7, 3), targets(7)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_target_of_another_batch_size(schedule):
    pipe = scheduled(chain(), [1] * 4, schedule, chunks=3)
    with pytest.raises(
        ValueError, match="target must have the input's batch size 7, got a tensor of 6; pass one batch"
    ):
        pipe.step(samples(7, 3), targets(6), mean_loss)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_target_with_a_graph_is_refused(schedule):
    pipe = scheduled(chain(), [1] * 4, schedule, chunks=3)
    weight = torch.ones(7, dtype=torch.float64, requires_grad=True)
    for target in (targets(7) * weight, {"a": (targets(7) * weight,)}):
        with pytest.raises(
            ValueError, match=r"target must have no graph .* pass target.detach\(\), or leave out schedule"
        ):
            pipe.step(samples(7, 3), target, mean_loss)
    with torch.no_grad():
        pipe.step(samples(7, 3), targets(7) * weight, mean_loss)
    assert weight.grad is None


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_inputs_are_checked_as_in_a_call(schedule):
    pipe = scheduled(chain(), [1] * 4, schedule, chunks=3)
    with pytest.raises(TypeError, match="input must be a tensor or a tuple of tensors, got list"):
        pipe.step([1], targets(1), mean_loss)
    with pytest.raises(ValueError, match="tensors of an input must agree in dimension 0"):
        pipe.step((samples(7, 3), samples(6, 3)), targets(7), mean_loss)


@pytest.mark.parametrize("schedule", [None, "gpipe"])
def test_a_pipeline_without_layers_has_nothing_to_train(schedule):
    pipe = GPipe(nn.Sequential(), [], devices=[], schedule=schedule)
    with pytest.raises(ValueError, match="pipe must have a layer to train"):
        pipe.step(samples(7, 3), targets(7), mean_loss)


@pytest.mark.parametrize(
    ("balance", "devices", "schedule", "message"),
    [
        ([1] * 4, 4, "zigzag", "schedule must be one of gpipe, 1f1b,"),
        ([1] * 3, 2, "zb_v", "must have two partitions for each device"),
        ([1] * 3, 2, "interleaved", "must have the same number of partitions for each device"),
    ],
)
def test_a_schedule_that_does_not_exist(balance, devices, schedule, message):
    with pytest.raises(ScheduleError, match=message):
        GPipe(chain(len(balance)), balance, devices=["cpu"] * devices, schedule=schedule)


def test_a_schedule_contradicts_autograd():
    with pytest.raises(ValueError, match="backward must be 'scheduled' with a schedule, got 'autograd'"):
        GPipe(chain(), [1] * 4, devices=["cpu"] * 4, schedule="1f1b", backward="autograd")


@pytest.mark.parametrize("schedule", [3, [("F", 0)], [[("F", 0)]]])
def test_something_that_is_no_schedule(schedule):
    with pytest.raises(TypeError, match=r"schedule must be one of gpipe, 1f1b, .* got "):
        GPipe(chain(), [1] * 4, devices=["cpu"] * 4, schedule=schedule)


@pytest.mark.parametrize("schedule", [lambda m, n: None, lambda m: [], lambda m, n: "1f1b", lambda m, n: [["F"]]])
def test_a_function_that_gives_no_schedule(schedule):
    with pytest.raises(TypeError, match=r"schedule must be a Schedule, or a function of \(m, n\) .*, got <function"):
        GPipe(chain(), [1] * 4, devices=["cpu"] * 4, schedule=schedule)


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
@every_mode
@both_workers
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


# --- exceptions ------------------------------------------------------------------------------------------------------


class BoomError(Exception):
    """Raised by layers here."""


class Armed(nn.Module):
    """Raises in a phase of micro-batch 1: ``F``, ``R``, or ``B``, which is the gradient of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.phase = ""

    def check(self, phase: str, i: int) -> None:
        if (phase, i) == (self.phase, 1):
            raise BoomError(phase)

    def forward(self, x):
        i = int(x.detach().flatten()[0])
        self.check("F", i)
        if self.phase == "R" and x.requires_grad and torch.is_grad_enabled():
            self.check("R", i)
        y = x * self.weight
        if y.requires_grad:
            y.register_hook(lambda grad: self.check("B", i))
        return y


@every_schedule
@every_mode
@both_workers
@pytest.mark.parametrize("phase", ["F", "B", "loss"])
def test_an_exception_surfaces_and_the_next_step_is_right(schedule, checkpoint, workers, phase):
    layers = nn.Sequential(*(Armed() for _ in range(4)))
    pipe = scheduled(layers, [1] * 4, schedule, chunks=4, checkpoint=checkpoint, workers=workers)
    armed = phase

    def loss(output, target):
        if armed == "loss" and int(output.detach().flatten()[0]) in (0, 1):
            raise BoomError("loss")
        return output.sum() / len(output) + target.sum() * 0

    for j in range(4) if phase != "loss" else range(1):
        layers[j].phase = phase
        with pytest.raises(BoomError, match=phase):
            pipe.step(numbered(4), torch.ones(4), loss)
        layers[j].phase = ""
        pipe.zero_grad()
    armed = ""
    pipe.step(numbered(4), torch.ones(4), loss)
    assert [float(layer.weight.grad) for layer in layers] == [(0 + 1 + 2 + 3) / 4] * 4
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gpipe-worker")]


@every_schedule
def test_after_a_failed_step_gradients_have_to_be_zeroed(schedule):
    """Micro-batches that were done before the exception have added theirs."""
    plain = chain()
    pipe = scheduled(copy.deepcopy(plain), [1] * 4, schedule, chunks=3)
    calls = []

    def loss(output, target):
        calls.append(len(output))
        if len(calls) == 3 or len(output) == 7:
            raise BoomError("loss")
        return mean_loss(output, target)

    with pytest.raises(BoomError, match="loss"):
        pipe.step(samples(7, 3), targets(7), loss)
    assert_same(step(pipe, samples(7, 3), targets(7)), step(plain, samples(7, 3), targets(7)))


@every_schedule
@both_workers
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_an_exception_in_a_recomputation(schedule, checkpoint, workers):
    layers = nn.Sequential(*(Armed() for _ in range(4)))
    pipe = scheduled(layers, [1] * 4, schedule, chunks=4, checkpoint=checkpoint, workers=workers)
    for layer in layers:
        layer.phase = "R"
        with pytest.raises(BoomError, match="R"):
            pipe.step(
                numbered(4).requires_grad_(), torch.ones(4), lambda output, target: output.mean() + target.mean() * 0
            )
        layer.phase = ""
        pipe.zero_grad()
    pipe.step(numbered(4), torch.ones(4), lambda output, target: output.mean() + target.mean() * 0)
    assert [float(layer.weight.grad) for layer in layers] == [(0 + 1 + 2 + 3) / 4] * 4


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "looped_bfs"])
@both_workers
def test_of_several_exceptions_the_first_of_the_order_surfaces(schedule, workers):
    """Partition 3 fails in micro-batch 0, which comes first in the order, whenever partition 0 may have failed."""

    class Fails(Mix):
        def __init__(self, at: int, text: str) -> None:
            super().__init__()
            self.at, self.text = at, text

        def forward(self, x):
            if int(x[0, 0]) == self.at:
                raise BoomError(self.text)
            return x

    first, last = Fails(5, "later"), Fails(0, "first")
    pipe = scheduled(
        nn.Sequential(first, nn.Identity(), nn.Identity(), last), [1] * 4, schedule, chunks=6, workers=workers
    )
    for _ in range(5):
        with pytest.raises(BoomError, match="first"):
            pipe.step(numbered(6) + torch.zeros(3), torch.ones(6), mean_loss)


# --- losses, targets, actions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_a_loss_must_be_a_function(schedule):
    pipe = GPipe(chain(), [1] * 4, devices=["cpu"] * 4, chunks=4, schedule=schedule)
    with pytest.raises(TypeError, match=r"loss must be a function of \(output, target\), got 'mse'; pass one"):
        pipe.step(torch.ones(8, 4), torch.ones(8, 4), "mse")


def test_a_target_of_another_batch_size_without_a_schedule():
    pipe = GPipe(chain(), [1] * 4, devices=["cpu"] * 4, chunks=4)
    with pytest.raises(ValueError, match="target must have the input's batch size 8, got a tensor of 3"):
        pipe.step(samples(8, 3), targets(3), mean_loss)


@pytest.mark.parametrize("action", [("F", 0), (0, 0, "F"), "F00", ("F", "0", "0"), ("F", False, False), 7])
def test_something_that_is_no_action_is_named(action):
    with pytest.raises(TypeError, match=r"an action must be \(kind, micro-batch, partition\), got .*; write one as"):
        check([[action]])


def test_a_function_may_give_lists():
    given = one_by_one(4, 4)
    pipe = GPipe(chain(), [1] * 4, devices=["cpu"] * 4, chunks=4, schedule=lambda m, n: one_by_one(m, n).devices)
    same = GPipe(chain(), [1] * 4, devices=["cpu"] * 4, chunks=4, schedule=given)
    same.load_state_dict(pipe.state_dict())
    assert torch.equal(pipe.step(samples(8, 3), targets(8), mean_loss), same.step(samples(8, 3), targets(8), mean_loss))
