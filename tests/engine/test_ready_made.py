"""Ready-made micro-batches: a step gives the bits of a loop over them with the plain module."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_bench import GPipe, MicroBatches, NoChunk, Pipe, PipeSequential
from gpipe_bench.distributed import Pipe as DistributedPipe
from tests.distributed.virtual import results_of
from tests.engine.steps import ALL, DOUBLE, backward_orders, scheduled
from tests.engine.support import MODES

LENGTHS = ([3, 2], [4], [1, 1, 4])
"""Of the sequences that are packed into each micro-batch."""
SIZES = [sum(lengths) for lengths in LENGTHS]
N = 4


class Packed(nn.Module):
    """((T, 3), ends of the sequences) -> the same; a token sees the mean of its own sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, value):
        tokens, ends = value
        starts = [0, *ends.tolist()]
        parts = [tokens[begin:end] for begin, end in zip(starts, ends.tolist(), strict=False)]
        means = torch.cat([part.mean(0, keepdim=True).expand_as(part) for part in parts])
        return torch.tanh(self.linear(tokens)) + means, ends


class Tokens(nn.Module):
    def forward(self, value):
        return value[0]


def packed(*extra):
    torch.manual_seed(3)
    return nn.Sequential(*(Packed() for _ in range(N - 1)), nn.Sequential(Packed(), *extra, Tokens())).double()


def batch():
    torch.manual_seed(4)
    tokens = [torch.randn(sum(lengths), 3, dtype=torch.float64).requires_grad_() for lengths in LENGTHS]
    inputs = [(each, torch.tensor(lengths).cumsum(0)) for each, lengths in zip(tokens, LENGTHS, strict=True)]
    return inputs, [torch.randn(size, 3, dtype=torch.float64) for size in SIZES]


def looped(plain, inputs, targets, schedule, loss=functional.mse_loss):
    """Loss and gradients of a loop with the plain module, in which each partition has the order of the schedule."""
    found, values, outputs = [], [], []
    for x, target, size in zip(inputs, targets, SIZES, strict=True):
        plain.zero_grad()
        outputs.append(plain(x))
        value = loss(outputs[-1], target) * (size / sum(SIZES))
        value.backward()
        values.append(value.detach())
        found.append([{name: each.grad for name, each in part.named_parameters()} for part in plain])
    sums = {}
    for j, order in enumerate(backward_orders(schedule, len(inputs), N)):
        for i in order:
            for name, grad in found[i][j].items():
                key = f"{j}.{name}"
                sums[key] = sums[key] + grad if key in sums else grad.clone()
    return torch.stack(values).sum(), sums, outputs


def assert_bits(found, expected):
    (loss, grads, outputs), (loss_there, grads_there, outputs_there) = found, expected
    assert torch.equal(loss, loss_there)
    assert grads.keys() == grads_there.keys()
    assert [name for name, grad in grads_there.items() if not torch.equal(grads[name], grad)] == []
    assert isinstance(outputs, list)
    assert all(torch.equal(one, other) for one, other in zip(outputs, outputs_there, strict=True))


def stepped(pipe, inputs, targets, loss=functional.mse_loss):
    value, outputs = pipe.step(MicroBatches(inputs), MicroBatches(targets), loss, return_output=True)
    return value, {name: each.grad for name, each in pipe.named_parameters()}, outputs


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", ALL)
def test_a_step_gives_the_bits_of_a_loop(schedule, checkpoint):
    inputs, targets = batch()
    pipe = scheduled(packed(), [1] * N, schedule, chunks=2, checkpoint=checkpoint)
    found = stepped(pipe, inputs, targets)
    arrived = [x.grad for x, _ in inputs]
    inputs, targets = batch()
    assert_bits(found, looped(packed(), inputs, targets, schedule))
    assert all(torch.equal(grad, x.grad) for grad, (x, _) in zip(arrived, inputs, strict=True))


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", ALL[1:])
def test_processes_give_the_bits_of_a_loop(schedule, checkpoint):
    inputs, targets = batch()
    expected = looped(packed(), inputs, targets, schedule)
    size, layers = N // 2 if schedule in DOUBLE else N, packed()

    def job(group):
        pipe = DistributedPipe(
            copy.deepcopy(layers), [1] * N, schedule=schedule, group=group, chunks=2, checkpoint=checkpoint
        )
        x = MicroBatches(inputs) if group.rank() == 0 else None
        target = MicroBatches(targets) if pipe.rank == pipe._pipeline.ranks[-1] else None
        value, output = pipe.step(x, target, functional.mse_loss, return_output=True)
        with torch.no_grad():
            evaluated = pipe(x)
        return value, {name: each.grad for name, each in pipe.named_parameters()}, output, evaluated

    results = results_of(size, job)
    grads = {name: grad for _, own, _, _ in results for name, grad in own.items()}
    ((outputs, evaluated),) = [(each[2], each[3]) for each in results if each[2] is not None]
    assert all(torch.equal(one, other) for one, other in zip(evaluated, outputs, strict=True))
    assert all(torch.equal(value, expected[0]) for value, *_ in results)
    assert_bits((results[0][0], grads, outputs), expected)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", [None, "gpipe"])
def test_the_loss_may_be_the_callers(schedule, checkpoint):
    inputs, targets = batch()
    pipe, plain = scheduled(packed(), [1] * N, schedule, checkpoint=checkpoint), packed()
    for outputs in (pipe(MicroBatches(inputs)), [plain(each) for each in inputs]):
        sum((output * target).sum() for output, target in zip(outputs, targets, strict=True)).backward()
    for one, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("schedule", [None, "1f1b"])
@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 2, 1], dtype=torch.float64)])
def test_a_mean_over_labels_is_that_of_all_labels(schedule, weights):
    """The plain module sees all tokens at once, of which the last micro-batch ignores all but one."""
    inputs, _ = batch()
    targets = [torch.tensor([0, 2, -100, 1, 1]), torch.tensor([2, 2, 0, 1]), torch.tensor([-100] * 5 + [0])]
    loss = nn.CrossEntropyLoss(weight=weights)
    value, grads, _ = stepped(scheduled(packed(), [1] * N, schedule), inputs, targets, loss)
    plain = packed()
    expected = loss(torch.cat([plain(each) for each in inputs]), torch.cat(targets))
    expected.backward()
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(grads, {name: each.grad for name, each in plain.named_parameters()})


@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_the_caller_may_weigh_microbatches_by_their_targets(schedule):
    inputs, targets = batch()
    plain = packed()
    for x, target, share in zip(inputs, targets, (0.25, 0, 0.75), strict=True):
        (functional.mse_loss(plain(x), target) * share).backward()
    pipe = scheduled(packed(), [1] * N, schedule)
    weighted = [{"y": target, "weight": weight} for target, weight in zip(targets, (1, 0, 3), strict=True)]

    def loss(output, target):
        return functional.mse_loss(output, target["y"])

    pipe.step(MicroBatches(inputs), MicroBatches(weighted), loss, reduction=lambda target: target["weight"])
    for one, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, mask, *, scale=1.0, bias=None):
        return self.linear(x) * mask * scale + (0 if bias is None else bias), mask


class Last(nn.Module):
    def forward(self, x, mask):
        return {"sum": x.sum(), "mask": mask}


@pytest.mark.parametrize("schedule", [None, "gpipe", "1f1b"])
@pytest.mark.parametrize("checkpoint", MODES)
def test_a_pipe_takes_inputs_and_keywords_of_each_microbatch(schedule, checkpoint):
    torch.manual_seed(5)
    plain = PipeSequential(Masked(), Masked(), Last())
    pipe = Pipe(copy.deepcopy(nn.Sequential(*plain)), balance=[1, 1, 1], schedule=schedule, checkpoint=checkpoint)
    xs, masks, bias = [torch.rand(2, 3), torch.rand(5, 3)], [torch.rand(3), torch.rand(1)], torch.rand(1)
    scales = [2.0, 0.5]
    keywords = {"scale": MicroBatches(scales), "bias": NoChunk(bias)}
    found, outputs = pipe.step(
        (MicroBatches(xs), MicroBatches(masks)), None, lambda output, _: output["sum"],
        return_output=True, reduction="sum", **keywords,
    )  # fmt: skip
    expected = [plain(x, mask, scale=s, bias=bias) for x, mask, s in zip(xs, masks, scales, strict=True)]
    sum(each["sum"] for each in expected).backward()
    torch.testing.assert_close(outputs, [{k: v.detach() for k, v in each.items()} for each in expected])
    torch.testing.assert_close(found, sum(each["sum"] for each in expected).detach())
    for one, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    with torch.no_grad():
        again = pipe(MicroBatches(xs), MicroBatches(masks), **keywords).local_value()
    torch.testing.assert_close(again, outputs)


@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_running_statistics_wait_for_the_end_of_the_batch(schedule):
    xs = [torch.rand(size, 3, dtype=torch.float64) for size in (2, 5, 3)]
    plain = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)).double()
    pipe = scheduled(copy.deepcopy(plain), [1, 1], schedule, deferred_batch_norm=True, checkpoint="always")
    pipe.step(MicroBatches(xs), MicroBatches([x * 2 for x in xs]), functional.mse_loss)
    plain(torch.cat(xs))
    torch.testing.assert_close(dict(pipe.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_masks_are_drawn_as_for_a_batch_that_is_cut(schedule):
    torch.manual_seed(6)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Dropout()) for _ in range(3)))
    x = torch.rand(6, 3)
    found = []
    for given, target in ((x, x), (MicroBatches([*x.split(2)]), MicroBatches([*x.split(2)]))):
        pipe = scheduled(copy.deepcopy(layers), [1] * 3, schedule, chunks=3, checkpoint="always")
        torch.manual_seed(7)
        pipe.step(given, target, functional.mse_loss)
        found.append([each.grad for each in pipe.parameters()])
    torch.testing.assert_close(*found)


def test_one_tensor_in_several_microbatches_stays_as_it_is():
    """The first layer writes to its input."""
    shared = torch.rand(2, 3)
    before = shared.clone()
    pipe = GPipe(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3)), [1, 1], devices=["cpu"] * 2, schedule="1f1b")
    pipe.step(MicroBatches([shared - 0.0, shared, shared]), MicroBatches([shared] * 3), functional.mse_loss)
    assert torch.equal(shared, before)


X = torch.rand(4, 3)


def gpipe(schedule="1f1b"):
    return scheduled(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], schedule, chunks=2)


def masked():
    return Pipe(nn.Sequential(Masked(), Last()), balance=[1, 1])


RULE = "ready-made micro-batches must be given for every argument that would be cut, the same number for each, got "
REFUSED = {
    "a tensor": (lambda: MicroBatches(X), TypeError, "MicroBatches must be given a list .*, got Tensor; pass"),
    "none": (lambda: MicroBatches([]), ValueError, "MicroBatches must hold at least one micro-batch, got an empty"),
    "a whole target": (
        lambda: gpipe().step(MicroBatches([X, X]), X, functional.mse_loss),
        ValueError,
        f"{RULE}2 for the input, a batch for the target; wrap",
    ),
    "a whole input": (
        lambda: gpipe(None).step(X, MicroBatches([X, X]), functional.mse_loss),
        ValueError,
        f"{RULE}a batch for the input, 2 for the target; wrap",
    ),
    "other counts": (
        lambda: gpipe(None).step(MicroBatches([X, X]), MicroBatches([X] * 3), functional.mse_loss),
        ValueError,
        f"{RULE}2 for the input, 3 for the target; wrap",
    ),
    "arguments of other counts": (
        lambda: masked()(MicroBatches([X, X]), mask=MicroBatches([X] * 3)),
        ValueError,
        f"{RULE}2 for input 0, 3 for input mask; wrap",
    ),
    "an argument that is cut": (
        lambda: masked()(MicroBatches([X, X]), X),
        ValueError,
        f"{RULE}2 for input 0, a batch for input 1; wrap",
    ),
    "no tensor": (
        lambda: masked()(MicroBatches(["text", X]), 3),
        ValueError,
        "micro-batch 0 must hold a tensor with a row per sample, got str, int; pass what the first layer takes",
    ),
    "something else": (
        lambda: gpipe()(MicroBatches([X, [X]])),
        TypeError,
        "input must be a tensor or a tuple of tensors, got list; pass only tensors",
    ),
    "another device": (
        lambda: gpipe()(MicroBatches([X, X.to("meta")])),
        ValueError,
        "input of micro-batch 1 must be on the first partition's device cpu, got meta; move it",
    ),
    "a target with a graph": (
        lambda: gpipe().step(
            MicroBatches([X]), MicroBatches([{"y": X.clone().requires_grad_() * 2}]), functional.mse_loss
        ),
        ValueError,
        "target must have no graph where a schedule",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()


def test_a_pipeline_without_layers_hands_on_the_list():
    assert GPipe(nn.Sequential(), [], devices=[])(MicroBatches([X, X])) == [X, X]
