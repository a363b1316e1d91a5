"""What else holds on several devices: exceptions, random numbers, several losses, autocast, evaluation, batch norm."""

from __future__ import annotations

import copy
import time
from contextlib import ExitStack

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from gpipe_bench import Components, GPipe, is_recomputing
from gpipe_bench.emulator.races import find_races
from gpipe_bench.emulator.recording import recording
from gpipe_bench.schedules import SCHEDULES
from gpipe_bench.schedules.cycles import CHECKPOINT_MODES
from tests.emulator.inside.pipelines import (
    WIDTH,
    Case,
    Mix,
    batch,
    mean_score,
    model,
    score,
    step,
    targets,
)

PLACES = ["virtual:0", "virtual:1", "virtual:2"]
LABELS = ["dep-str-ptl", "baseline", "dep-str-ptl-x-x"]
# (label, schedule, what runs the backward pass)
EXECUTORS = [
    *((label, None, "backward") for label in LABELS),
    ("dep-str-ptl", "gpipe", "backward"),
    ("dep-x-x", "1f1b", "step"),
    ("dep-str-ptl", "zb_h1", "step"),
]


def pipe_of(*layers, m=3, checkpoint="always", label="dep-str-ptl", **options):
    """One layer per device."""
    components = Components.from_label(label)
    devices = PLACES[: len(layers)]
    module = nn.Sequential(*layers).double()
    return GPipe(
        module, [1] * len(layers), devices=devices, chunks=m, checkpoint=checkpoint, components=components, **options
    )


def train(pipe, x, through="backward"):
    """Run a step with a loss that sums up all outputs."""
    if through == "step":
        # The mean over a micro-batch, of sums over everything else, times the batch size.
        pipe.step(x, torch.ones(len(x), 1, device=pipe.devices[-1]), lambda y, _: y.flatten(1).sum(1).mean() * len(x))
    else:
        pipe(x).sum().backward()


class Masked(nn.Module):
    """Dropout that keeps the masks it has used: by recomputation or not, in order."""

    def __init__(self):
        super().__init__()
        self.masks = {False: [], True: []}

    def forward(self, x):
        mask = nn.functional.dropout(torch.ones_like(x), 0.5)
        self.masks[is_recomputing()].append((int(x.detach()[0, 0] // 10), mask.cpu()))
        return x * mask + x.detach() * (1 - mask)


@pytest.mark.parametrize(("label", "schedule", "through"), EXECUTORS)
@pytest.mark.parametrize("transfer", ["direct", "host"])
def test_recomputation_reproduces_dropout_masks(label, schedule, through, transfer):
    layers = [Masked() for _ in range(3)]
    pipe = pipe_of(*layers, m=4, label=label, transfer=transfer, schedule=schedule)
    x = (10.0 * torch.arange(1, 5).double()).repeat_interleave(8 * 2).reshape(8, 8).to(PLACES[0])
    for _ in range(3):
        train(pipe, x.clone().requires_grad_(), through)
    for layer in layers:
        first, again = layer.masks[False], layer.masks[True]
        assert len(first) == len(again) == 12
        for number in range(3):
            masks = dict(first[4 * number : 4 * number + 4])
            for microbatch, mask in again[4 * number : 4 * number + 4]:
                assert torch.equal(mask, masks[microbatch])
        # Devices start from one seed, so only the masks of one device must differ.
        assert len({tuple(mask.flatten().tolist()) for _, mask in first}) == 12


class MaskedByHost(nn.Module):
    """Two masks from the CPU's generator, with time in between for others to draw from it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.masks = {False: {}, True: {}}

    def forward(self, x):
        first = torch.rand(x.shape) < 0.5
        time.sleep(0.003)
        mask = first + (torch.rand(x.shape) < 0.5).double()
        self.masks[is_recomputing()][int(x.detach()[0, 0] // 10)] = mask
        return x * self.weight * (1 + 1e-9 * mask.to(x.device))


@pytest.mark.parametrize(
    ("label", "schedule", "through"), [*EXECUTORS, *((label, None, "backward") for label in ("dep-x-x", "x-x-x-x-x"))]
)
def test_devices_that_draw_from_the_generator_of_the_cpu_recompute_their_own_masks(label, schedule, through):
    pipe = pipe_of(MaskedByHost(), MaskedByHost(), MaskedByHost(), m=4, label=label, schedule=schedule)
    x = (10.0 * torch.arange(1, 5).double()).repeat_interleave(8).reshape(4, 8).to(PLACES[0])
    train(pipe, x, through)
    for layer in pipe:
        assert len(layer.masks[True]) == 4
        for i, mask in layer.masks[False].items():
            assert torch.equal(layer.masks[True][i], mask)


@pytest.mark.parametrize(("schedule", "through"), [(None, "backward"), ("gpipe", "backward"), ("1f1b", "step")])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_equal_seeds_give_equal_dropout(checkpoint, schedule, through):
    def gradients(mode):
        torch.manual_seed(1)
        layers = [nn.Sequential(Mix(), nn.Dropout()) for _ in range(3)]
        pipe = pipe_of(*layers, checkpoint=mode, schedule=schedule)
        results = []
        for _ in range(2):
            torch.manual_seed(2)
            results.append(step(pipe, batch(6, PLACES[0]), through).gradients)
        return results[1]

    torch.testing.assert_close(gradients(checkpoint), gradients("never"))


class Late(nn.Module):
    """Weighted dropout, and on demand a mask from the CPU: from ones on, gradient and output must be equal."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.dropout = nn.Dropout(0.5)
        self.host = False

    def forward(self, x):
        y = self.dropout(x * self.weight)
        return y * torch.rand(64, dtype=torch.float64).to(y.device) if self.host else y


def gradient_is_output(pipe):
    x = torch.ones(8, 64, dtype=torch.float64, device=PLACES[0]).requires_grad_()
    output = pipe(x)
    output.sum().backward()
    return torch.equal(x.grad.cpu(), output.cpu())


@pytest.mark.parametrize("schedule", [None, "gpipe"])
@pytest.mark.parametrize("label", LABELS)
def test_dropout_that_begins_in_a_later_batch(label, schedule):
    pipe = pipe_of(Late(), Late(), m=4, label=label, schedule=schedule)
    for layer in pipe:
        layer.dropout.eval()
    assert gradient_is_output(pipe)
    for layer in pipe:
        layer.dropout.train()
    assert gradient_is_output(pipe)
    assert gradient_is_output(pipe)


@pytest.mark.parametrize("schedule", [None, "gpipe"])
def test_dropout_of_a_device_beside_numbers_of_the_cpu_that_begin_later(schedule):
    pipe = pipe_of(Late(), Late(), m=4, schedule=schedule)
    assert gradient_is_output(pipe)
    for layer in pipe:
        layer.host = True
    assert gradient_is_output(pipe)
    assert gradient_is_output(pipe)


@pytest.mark.parametrize("schedule", [None, "gpipe"])
def test_a_backward_pass_that_a_device_calls_within_its_own(schedule):
    layers = [Mix() for _ in range(3)]
    plain = nn.Sequential(*copy.deepcopy(layers)).double()
    pipe = pipe_of(*layers, m=4, schedule=schedule)
    score(plain(batch(8))).backward()
    # The outer recomputation runs backward in the thread of the first device, which is needed for tasks too.
    outer = torch.utils.checkpoint.checkpoint(pipe, batch(8, PLACES[0]).requires_grad_(), use_reentrant=True)
    score(outer).backward()
    found = [parameter.grad.cpu() for parameter in pipe.parameters()]
    torch.testing.assert_close(found, [parameter.grad for parameter in plain.parameters()])


class Split(nn.Module):
    """x -> (sin x, x^2)."""

    def forward(self, x):
        return x.sin(), x.square()


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize(("label", "schedule"), [*((label, None) for label in LABELS), ("dep-str-ptl", "gpipe")])
def test_several_losses(checkpoint, label, schedule):
    def losses(network, x):
        one, two = network(x)
        return one.sum(), (two * 2).mean()

    blocks = [Mix(), Mix(), nn.Sequential(Mix(), Split())]
    plain = nn.Sequential(*copy.deepcopy(blocks)).double()
    pipe = pipe_of(*blocks, checkpoint=checkpoint, label=label, schedule=schedule)
    torch.autograd.backward(losses(plain, batch(7)))
    with recording() as trace:
        torch.autograd.backward(losses(pipe, batch(7, PLACES[0])))
    for one, other in zip(plain.parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(other.grad.cpu(), one.grad)
    assert find_races(trace.records) == []


@pytest.mark.parametrize("schedule", [None, "gpipe", "zb_h1"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_loss_of_one_output_only(which, schedule):
    blocks = [Mix(), nn.Sequential(Mix(), Split()), nn.Identity()]
    plain = nn.Sequential(*copy.deepcopy(blocks)).double()
    pipe = pipe_of(*blocks, schedule=schedule)
    plain(batch(7))[which].mean().backward()
    with recording() as trace:
        if schedule == "zb_h1":
            pipe.step(batch(7, PLACES[0]), None, lambda output, _: output[which].mean())
        else:
            pipe(batch(7, PLACES[0]))[which].mean().backward()
    assert find_races(trace.records) == []
    for one, other in zip(plain.parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(other.grad.cpu(), one.grad)


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("schedule", [None, "gpipe", "1f1b"])
def test_autocast_reaches_every_device(schedule, checkpoint, transfer):
    seen = []

    class Spy(nn.Module):
        def forward(self, x):
            seen.append((x.device.index, x.dtype))
            return x

    def loss(output, _):
        seen.append((2, torch.mm(output, output.T).dtype))
        return output.float().mean()

    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), Spy()) for _ in range(3)]
    options = {"devices": PLACES, "chunks": 2, "checkpoint": checkpoint, "transfer": transfer}
    pipe = GPipe(nn.Sequential(*blocks), [1, 1, 1], schedule=schedule, **options)
    x = batch(4, PLACES[0]).float()
    with torch.autocast("virtual", dtype=torch.bfloat16):
        if schedule == "1f1b":
            _, output = pipe.step(x, None, loss, return_output=True)
        else:
            output = pipe(x)
    if schedule != "1f1b":
        output.float().sum().backward()
    assert output.dtype == torch.bfloat16
    assert set(seen) == {(j, torch.bfloat16) for j in range(3)}
    assert all(parameter.grad.dtype == torch.float32 for parameter in pipe.parameters())


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_checkpointed(mode, transfer, schedule):
    pipe = Case((0, 1, 0), 3, Components(), "always", "mixed", transfer, schedule).pipe()
    plain = model("mixed")
    with mode(), recording() as trace:
        output = pipe(batch(7, PLACES[0]))
        loss = pipe.step(batch(7, PLACES[0]), targets(pipe, 7), mean_score) * 1
        expected = plain(batch(7))
    assert not output.requires_grad
    torch.testing.assert_close(output.cpu(), expected)
    torch.testing.assert_close(loss.cpu(), score(expected))
    assert find_races(trace.records) == []


@pytest.mark.parametrize(("schedule", "through"), [(None, "backward"), ("gpipe", "backward"), ("1f1b", "step")])
def test_deferred_batch_norm(schedule, through):
    def block():
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    torch.manual_seed(3)
    blocks = [block() for _ in range(3)]
    plain = nn.Sequential(*copy.deepcopy(blocks)).double()
    pipe = pipe_of(*blocks, checkpoint="except_last", deferred_batch_norm=True, schedule=schedule)
    with recording() as trace:
        train(pipe, batch(9, PLACES[0]), through)
    assert find_races(trace.records) == []
    plain(batch(9))
    first = pipe[0][1]
    torch.testing.assert_close(first.running_mean.cpu(), plain[0][1].running_mean)
    torch.testing.assert_close(first.running_var.cpu(), plain[0][1].running_var)
    assert [int(layer[1].num_batches_tracked) for layer in pipe] == [1, 1, 1]


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("schedule", [None, "gpipe"])
@pytest.mark.parametrize("first", [0, 1])
def test_gradients_are_safe_to_use_while_the_graph_of_another_pipeline_lives(first, schedule, checkpoint):
    """Autograd makes the caller wait for the streams of leaves only; none may belong to the other pipeline."""
    options = {"chunks": 3, "checkpoint": checkpoint, "transfer": "host", "schedule": schedule}
    pipes = [GPipe(model("none"), [4, 4], devices=PLACES[:1] * 2, **options) for _ in range(2)]
    x = batch(6, PLACES[0])
    with recording() as trace:
        losses = [score(pipe(x)) for pipe in pipes]
        for index in (first, 1 - first):
            losses[index].backward()
            for parameter in pipes[index].parameters():
                parameter.grad.mul_(0.5)
    assert find_races(trace.records) == []


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("schedule", [None, "gpipe"])
@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("places", [PLACES, PLACES[:1] * 3], ids=["three devices", "one device"])
def test_gradients_may_be_read_on_the_streams_that_called_backward(places, transfer, schedule, checkpoint):
    options = {"chunks": 3, "checkpoint": checkpoint, "transfer": transfer, "schedule": schedule}
    pipe = GPipe(model("nested"), [3, 3, 2], devices=places, **options)
    x = batch(6, PLACES[0]).requires_grad_()
    with recording() as trace, ExitStack() as stack:
        loss = score(pipe(x))
        for device in dict.fromkeys(pipe.devices):
            stream = torch.Stream(device)
            stream.wait_stream(torch.accelerator.current_stream(device))
            stack.enter_context(stream)
        loss.backward()
        for tensor in (x, *pipe.parameters()):
            tensor.grad * 1
    assert find_races(trace.records) == []


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("places", [PLACES, PLACES[:1] * 3], ids=["three devices", "one device"])
def test_a_second_backward_pass_through_the_graph_of_the_paper(places, label, checkpoint):
    options = {"chunks": 3, "checkpoint": checkpoint, "components": Components.from_label(label), "transfer": "host"}
    pipe = GPipe(model("nested"), [3, 3, 2], devices=places, **options)
    with recording() as trace:
        loss = score(pipe(batch(6, PLACES[0])))
        loss.backward(retain_graph=True)
        once = [parameter.grad.clone() for parameter in pipe.parameters()]
        loss.backward()
        twice = [parameter.grad * 1 for parameter in pipe.parameters()]
    assert find_races(trace.records) == []
    torch.testing.assert_close([gradient.cpu() for gradient in twice], [2 * gradient.cpu() for gradient in once])
