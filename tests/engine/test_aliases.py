"""Tensors that leave a partition twice: handing them on is fine, writing to one behind a boundary is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpipe_bench import Components, NoChunk, Pipe
from gpipe_bench.engine.microbatch import aliased_values
from gpipe_bench.skip import pop, skippable, stash
from tests.engine.steps import mean_loss, samples, scheduled, step, targets
from tests.engine.support import MODES, Affine, assert_same, label, on_cpu, train_step

REFUSED = (
    "a tensor that enters or leaves a partition twice must not be written to behind the boundary, got an in-place "
    "operation in partition"
)


class Do(nn.Module):
    """A layer of one function."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value):
        return self.function(value)


@skippable(stash=["same"])
class Keep(nn.Module):
    """Stashes what it passes on."""

    def forward(self, x):
        yield stash("same", x)
        return x


@skippable(pop=["same"])
class Add(nn.Module):
    def forward(self, x):
        skip = yield pop("same")
        return x + skip


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.cat([x, x * 2], 1)
    return both[:, :3], both[:, 3:]


def overlapping(x: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.cat([x, x * 2], 1)
    return both[:, :3], both[:, 2:5]


def rows_of_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """Every second column each: memory that interleaves and does not overlap."""
    both = torch.stack([x, x * 2], 2)
    return both[..., 0], both[..., 1]


def plain_mean(output, _):
    return output.sin().mean()


def write_first(values):
    return values[0].mul_(0.5), values[1]


def write_second(values):
    return values[0], values[1].mul_(0.5)


def total(values):
    return values[0] * 2 + values[1].sin()


def cut(before: list[nn.Module], *behind: nn.Module) -> tuple[nn.Sequential, list[int]]:
    layers = [
        Affine(),
        *before,
        *behind,
        Do(lambda value: total(value) if isinstance(value, tuple) else value),
        Affine(),
    ]
    return nn.Sequential(*layers), [1 + len(before), len(behind) + 2]


REFUSED_CASES = {
    "a skip, then ReLU in place": lambda: cut([Keep()], nn.ReLU(inplace=True), Affine(), Add()),
    "a skip written to where it is popped": lambda: cut([Keep()], Do(lambda x: x * 2), Do(lambda x: x), Add2()),
    "one twice, the first written to": lambda: cut([Do(lambda x: (x, x))], Do(write_first)),
    "one twice, the second written to": lambda: cut([Do(lambda x: (x, x))], Do(write_second)),
    "a view": lambda: cut([Do(lambda x: (x, x.view(-1, 3)))], Do(write_first)),
    "a detached one": lambda: cut([Do(lambda x: (x, x.detach()))], Do(write_first)),
    "overlapping parts": lambda: cut([Do(overlapping)], Do(write_first)),
}
RIGHT_CASES = {
    "a skip, popped before": lambda: cut([Keep()], Add(), nn.ReLU(inplace=True)),
    "a clone": lambda: cut([Do(lambda x: (x, x))], Do(lambda values: (values[0].clone().mul_(0.5), values[1]))),
    "a clone before": lambda: cut([Do(lambda x: (x, x.clone()))], Do(write_first)),
    "halves": lambda: cut([Do(halves)], Do(write_first)),
    "interleaved": lambda: cut([Do(rows_of_columns)], Do(write_second)),
    "nothing written to": lambda: cut([Do(lambda x: (x, x))], Do(lambda values: values)),
    "another written to": lambda: cut(
        [Do(lambda x: (x, x, x * 2))], Do(lambda values: (values[0] + values[2].mul_(0.5), values[1]))
    ),
    "written to before the cut": lambda: cut([Do(lambda x: (x, x)), Do(write_first)], Do(lambda values: values)),
    "a dict": lambda: cut([Do(lambda x: {"a": x, "b": x})], Do(lambda values: (values["a"] * 2, values["b"]))),
}


@skippable(pop=["same"])
class Add2(nn.Module):
    """Writes to what it pops."""

    def forward(self, x):
        skip = yield pop("same")
        return x + skip.mul_(0.5)


every_way = [
    pytest.mark.parametrize(("workers", "transfer"), [("always", "direct"), ("never", "direct"), ("always", "host")]),
    pytest.mark.parametrize("checkpoint", MODES),
    pytest.mark.parametrize("schedule", [None, "1f1b", "zb_v"]),
]


def in_every_way(test):
    for mark in every_way:
        test = mark(test)
    return test


@in_every_way
def test_a_write_behind_the_boundary_is_refused(schedule, checkpoint, transfer, workers):
    for make in REFUSED_CASES.values():
        torch.manual_seed(0)
        layers, balance = make()
        pipe = scheduled(
            layers.double(), balance, schedule, chunks=3, checkpoint=checkpoint, transfer=transfer, workers=workers
        )
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"{REFUSED} 1"):
                pipe.step(samples(7, 3, requires_grad=False), targets(7), mean_loss)


@in_every_way
def test_everything_else_gives_what_the_plain_module_gives(schedule, checkpoint, transfer, workers):
    for make in RIGHT_CASES.values():
        torch.manual_seed(0)
        plain, balance = make()
        pipe = scheduled(
            copy.deepcopy(plain).double(), balance, schedule,
            chunks=3, checkpoint=checkpoint, transfer=transfer, workers=workers,
        )  # fmt: skip
        x, target = samples(7, 3, requires_grad=False), targets(7)
        expected = step(plain.double(), x, target)
        for _ in range(2):
            assert_same(step(pipe, x, target), expected)


TWICE = {"itself": lambda x: (x, x), "a view": lambda x: (x, x.view(-1, 3)), "rows": lambda x: (x[:-1], x[1:])}


@in_every_way
def test_a_write_to_a_batch_of_one_tensor_twice_is_refused(schedule, checkpoint, transfer, workers):
    options = {"chunks": 3, "checkpoint": checkpoint, "transfer": transfer, "workers": workers}
    for twice in TWICE.values():
        layers = nn.Sequential(Do(write_second), Do(total), Affine(), Affine()).double()
        pipe = scheduled(layers, [2, 2], schedule, **options)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"{REFUSED} 0"):
                pipe.step(twice(samples(8, 3, requires_grad=False)), None, plain_mean)


@in_every_way
def test_a_batch_of_one_tensor_twice_that_is_only_read(schedule, checkpoint, transfer, workers):
    options = {"chunks": 3, "checkpoint": checkpoint, "transfer": transfer, "workers": workers}
    for twice in TWICE.values():
        plain = nn.Sequential(Do(lambda values: values), Do(total), Affine(), Affine()).double()
        pipe = scheduled(copy.deepcopy(plain), [2, 2], schedule, **options)
        values = twice(samples(8, 3, requires_grad=False))
        plain_mean(plain(values), None).backward()
        for _ in range(2):
            pipe.zero_grad()
            pipe.step(values, None, plain_mean)
            torch.testing.assert_close([p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("second", [lambda x: x, NoChunk, lambda x: [x]], ids=["itself", "whole", "in a list"])
def test_a_write_to_one_of_two_equal_arguments_is_refused(second):
    class Writes(nn.Module):
        def forward(self, x, _):
            return x.mul_(0.5)

    x = torch.ones(6, 3)
    with pytest.raises(RuntimeError, match=f"{REFUSED} 0"):
        Pipe(nn.Sequential(Writes(), Affine()), chunks=3, balance=[1, 1])(x, second(x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", REFUSED_CASES)
def test_also_without_gradients(case, training, mode):
    """The output would depend on where the model is cut."""
    layers, balance = REFUSED_CASES[case]()
    pipe = on_cpu(layers, balance, chunks=3).train(training)
    # tensors of inference mode count no writes; PyTorch refuses them by itself
    message = "Inplace update to inference tensor" if mode is torch.inference_mode else REFUSED
    with mode(), pytest.raises(RuntimeError, match=message):
        pipe(torch.ones(6, 3))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("backward", ["autograd", "scheduled"])
@pytest.mark.parametrize("case", RIGHT_CASES)
def test_everything_else_is_right_without_gradients_too(case, backward, mode):
    torch.manual_seed(0)
    plain, balance = RIGHT_CASES[case]()
    pipe = on_cpu(copy.deepcopy(plain), balance, chunks=3, backward=backward)
    with mode():
        for _ in range(2):
            torch.testing.assert_close(pipe(torch.ones(6, 3)), plain(torch.ones(6, 3)))


@pytest.mark.parametrize("portals", [True, False])
@pytest.mark.parametrize("backward", ["autograd", "scheduled"])
@pytest.mark.parametrize("checkpoint", MODES)
def test_a_write_two_boundaries_later(checkpoint, backward, portals):
    """The tensor passes a partition that hands it on as it is, while the skip goes past it."""
    layers = nn.Sequential(Affine(), Keep(), nn.Identity(), nn.ReLU(inplace=True), Add(), Affine())
    components = Components(portals=portals)
    pipe = on_cpu(layers, [2, 1, 3], chunks=3, checkpoint=checkpoint, backward=backward, components=components)
    with pytest.raises(RuntimeError, match=f"{REFUSED} 2"):
        pipe(torch.ones(6, 3))


@pytest.mark.parametrize("components", [Components(), Components(portals=False)], ids=label)
@pytest.mark.parametrize("backward", ["autograd", "scheduled"])
@pytest.mark.parametrize("checkpoint", MODES)
def test_a_skip_that_is_the_tensor_itself_past_other_partitions(checkpoint, backward, components):
    """Partition 1 writes to something of its own, partition 2 to what it has made itself: neither is refused."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        Affine(), Keep(), Affine(), nn.ReLU(inplace=True), Affine(), nn.ReLU(inplace=True), Affine(), Add(), Affine()
    ).double()
    pipe = on_cpu(
        copy.deepcopy(plain), [2, 3, 1, 3], chunks=3, checkpoint=checkpoint, backward=backward, components=components
    )
    x = samples(7, 3, requires_grad=False)
    for _ in range(2):
        assert_same(train_step(pipe, x), train_step(plain, x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("backward", ["autograd", "scheduled"])
def test_a_write_beside_such_a_skip_without_gradients(backward, mode):
    torch.manual_seed(0)
    plain = nn.Sequential(Affine(), Keep(), Affine(), Affine(), nn.ReLU(inplace=True), Add(), Affine()).double()
    pipe = on_cpu(copy.deepcopy(plain), [2, 1, 1, 3], chunks=3, backward=backward)
    x = samples(7, 3, requires_grad=False)
    with mode():
        for _ in range(2):
            torch.testing.assert_close(pipe(x), plain(x))


def test_after_a_refusal_the_pipeline_works():
    class Writes(nn.Module):
        on = True

        def forward(self, values):
            return values[0].mul_(0.5) if self.on else values[0] * 0.5

    torch.manual_seed(0)
    plain = nn.Sequential(Affine(), Do(lambda x: (x, x)), Writes(), Affine()).double()
    plain[2].on = False
    pipe = on_cpu(copy.deepcopy(plain), [2, 2], chunks=3)
    pipe[2].on = True
    with pytest.raises(RuntimeError, match=REFUSED):
        pipe(samples(7, 3))
    pipe[2].on = False
    assert_same(train_step(pipe, samples(7, 3)), train_step(plain, samples(7, 3)))


# --- which tensors share memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        (lambda x: [x, x], {0, 1}),
        (lambda x: [x, 3, x.view(-1), None, x + 1], {0, 2}),
        (lambda x: [x[:2], x[2:]], set()),
        (lambda x: [x[:3], x[2:]], {0, 1}),
        (lambda x: [x[:, :2], x[:, 2:]], set()),
        (lambda x: [x[:, :2], x[:, 1:]], {0, 1}),
        (lambda x: [x.t(), x[:, 3]], {0, 1}),
        (lambda x: [x[0].expand(5, 4), x[1:]], set()),
        (lambda x: [x[:0], x], set()),
        (lambda x: [x.to_sparse(), x], set()),
        (lambda x: [torch.view_as_complex(x.view(-1, 2)), x[0]], {0, 1}),
    ],
)
def test_which_outputs_share_memory(outputs, expected):
    assert aliased_values(outputs(torch.zeros(4, 4)), []) == expected


def test_an_output_that_shares_memory_with_something_on_another_way():
    x = torch.zeros(4, 4)
    assert aliased_values([x[0], x + 1, x[1:]], [x[1]]) == {2}
