"""What else holds on several devices: exceptions, random numbers, several losses, autocast, evaluation, batch norm."""

from __future__ import annotations

import copy
import time

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from gpipe_bench import Components, GPipe, is_recomputing
from gpipe_bench.errors import RandomnessError
from gpipe_bench.schedule import CHECKPOINT_MODES
from tests.virtual_devices.bed.races import find_races
from tests.virtual_devices.bed.trace import recording
from tests.virtual_devices.inside.pipelines import WIDTH, BoomError, Case, Fuse, Mix, batch, model, score, step

PLACES = ["virtual:0", "virtual:1", "virtual:2"]
LABELS = ["dep-str-ptl", "baseline", "dep-str-ptl-x-x"]


def pipe_of(*layers, m=3, checkpoint="always", label="dep-str-ptl", **options):
    """One layer per device."""
    components = Components.from_label(label)
    devices = PLACES[: len(layers)]
    module = nn.Sequential(*layers).double()
    return GPipe(
        module, [1] * len(layers), devices=devices, chunks=m, checkpoint=checkpoint, components=components, **options
    )


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("where", ["forward", "recompute", "backward"])
def test_an_exception_surfaces_and_the_next_step_works(where, label, transfer):
    fuse = Fuse(where, 1)
    blocks = [Mix(), nn.Sequential(Mix(), fuse), Mix()]
    plain = nn.Sequential(*copy.deepcopy(blocks)).double()
    plain[1][1].armed = False
    pipe = pipe_of(*blocks, label=label, transfer=transfer)
    x = batch(7, PLACES[0])
    with recording() as trace, pytest.raises(BoomError, match=where):
        score(pipe(x.requires_grad_())).backward()
    assert find_races(trace.records) == []
    fuse.armed = False
    found, expected = step(pipe, x), step(plain, batch(7))
    torch.testing.assert_close(found.gradients, expected.gradients)
    assert found.races == []


class Masked(nn.Module):
    """Dropout that keeps the masks it has used: by recomputation or not, in order."""

    def __init__(self):
        super().__init__()
        self.masks = {False: [], True: []}

    def forward(self, x):
        mask = nn.functional.dropout(torch.ones_like(x), 0.5)
        self.masks[is_recomputing()].append((int(x.detach()[0, 0] // 10), mask.cpu()))
        return x * mask + x.detach() * (1 - mask)


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("transfer", ["direct", "host"])
def test_recomputation_reproduces_dropout_masks(label, transfer):
    layers = [Masked() for _ in range(3)]
    pipe = pipe_of(*layers, m=4, label=label, transfer=transfer)
    x = (10.0 * torch.arange(1, 5).double()).repeat_interleave(8 * 2).reshape(8, 8).to(PLACES[0])
    for _ in range(3):
        pipe(x.clone().requires_grad_()).sum().backward()
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


@pytest.mark.parametrize("label", ["dep-str-ptl", "dep-str-ptl-x-rec", "x-x-x-x-x"])
def test_devices_that_draw_from_the_generator_of_the_cpu_recompute_their_own_masks(label):
    pipe = pipe_of(MaskedByHost(), MaskedByHost(), MaskedByHost(), m=4, label=label)
    x = (10.0 * torch.arange(1, 5).double()).repeat_interleave(8).reshape(4, 8).to(PLACES[0])
    pipe(x).sum().backward()
    for layer in pipe:
        assert len(layer.masks[True]) == 4
        for i, mask in layer.masks[False].items():
            assert torch.equal(layer.masks[True][i], mask)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_equal_seeds_give_equal_dropout(checkpoint):
    def gradients(mode):
        torch.manual_seed(1)
        pipe = pipe_of(*(nn.Sequential(Mix(), nn.Dropout()) for _ in range(3)), checkpoint=mode)
        results = []
        for _ in range(2):
            torch.manual_seed(2)
            results.append(step(pipe, batch(6, PLACES[0])).gradients)
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


@pytest.mark.parametrize("backward", ["autograd", "scheduled"])
@pytest.mark.parametrize("label", LABELS)
def test_dropout_that_begins_in_a_later_batch(label, backward):
    pipe = pipe_of(Late(), Late(), m=4, label=label, backward=backward)
    for layer in pipe:
        layer.dropout.eval()
    assert gradient_is_output(pipe)
    for layer in pipe:
        layer.dropout.train()
    assert gradient_is_output(pipe)
    assert gradient_is_output(pipe)


@pytest.mark.parametrize("backward", ["autograd", "scheduled"])
def test_dropout_of_a_device_beside_numbers_of_the_cpu_that_begin_later(backward):
    pipe = pipe_of(Late(), Late(), m=4, backward=backward)
    assert gradient_is_output(pipe)
    for layer in pipe:
        layer.host = True
    with pytest.raises(RandomnessError, match="run the batch again"):
        gradient_is_output(pipe)
    assert gradient_is_output(pipe)
    assert gradient_is_output(pipe)


@pytest.mark.parametrize("backward", ["autograd", "scheduled"])
def test_a_backward_pass_that_a_device_calls_within_its_own(backward):
    layers = [Mix() for _ in range(3)]
    plain = nn.Sequential(*copy.deepcopy(layers)).double()
    pipe = pipe_of(*layers, m=4, backward=backward)
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
@pytest.mark.parametrize("label", LABELS)
def test_several_losses(checkpoint, label):
    def losses(network, x):
        one, two = network(x)
        return one.sum(), (two * 2).mean()

    blocks = [Mix(), Mix(), nn.Sequential(Mix(), Split())]
    plain = nn.Sequential(*copy.deepcopy(blocks)).double()
    pipe = pipe_of(*blocks, checkpoint=checkpoint, label=label)
    torch.autograd.backward(losses(plain, batch(7)))
    with recording() as trace:
        torch.autograd.backward(losses(pipe, batch(7, PLACES[0])))
    for one, other in zip(plain.parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(other.grad.cpu(), one.grad)
    assert find_races(trace.records) == []


@pytest.mark.parametrize("which", [0, 1])
def test_a_loss_of_one_output_only(which):
    blocks = [Mix(), nn.Sequential(Mix(), Split()), nn.Identity()]
    plain = nn.Sequential(*copy.deepcopy(blocks)).double()
    pipe = pipe_of(*blocks)
    plain(batch(7))[which].sum().backward()
    pipe(batch(7, PLACES[0]))[which].sum().backward()
    for one, other in zip(plain.parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(other.grad.cpu(), one.grad)


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_autocast_reaches_every_device(checkpoint, transfer):
    seen = []

    class Spy(nn.Module):
        def forward(self, x):
            seen.append((x.device.index, x.dtype))
            return x

    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), Spy()) for _ in range(3)]
    options = {"devices": PLACES, "chunks": 2, "checkpoint": checkpoint, "transfer": transfer}
    pipe = GPipe(nn.Sequential(*blocks), [1, 1, 1], **options)
    x = batch(4, PLACES[0]).float()
    with torch.autocast("virtual", dtype=torch.bfloat16):
        output = pipe(x)
    output.float().sum().backward()
    assert output.dtype == torch.bfloat16
    assert set(seen) == {(j, torch.bfloat16) for j in range(3)}
    assert all(parameter.grad.dtype == torch.float32 for parameter in pipe.parameters())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_checkpointed(mode):
    pipe = Case((0, 1, 2), 3, Components(), "always", "mixed", "direct").pipe()
    plain = model("mixed")
    with mode(), recording() as trace:
        output = pipe(batch(7, PLACES[0]))
        expected = plain(batch(7))
    assert not output.requires_grad
    torch.testing.assert_close(output.cpu(), expected)
    assert find_races(trace.records) == []


def test_deferred_batch_norm():
    def block():
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    torch.manual_seed(3)
    blocks = [block() for _ in range(3)]
    plain = nn.Sequential(*copy.deepcopy(blocks)).double()
    pipe = pipe_of(*blocks, checkpoint="except_last", deferred_batch_norm=True)
    with recording() as trace:
        pipe(batch(9, PLACES[0])).sum().backward()
    assert find_races(trace.records) == []
    plain(batch(9))
    first = pipe[0][1]
    torch.testing.assert_close(first.running_mean.cpu(), plain[0][1].running_mean)
    torch.testing.assert_close(first.running_var.cpu(), plain[0][1].running_var)
    assert [int(layer[1].num_batches_tracked) for layer in pipe] == [1, 1, 1]


def test_two_steps_without_synchronisation_between_them():
    pipe = Case((0, 1, 2), 3, Components(), "except_last", "nested", "direct").pipe()
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    x = batch(6, PLACES[0])
    with recording() as trace:
        for _ in range(3):
            optimizer.zero_grad()
            score(pipe(x)).backward()
            optimizer.step()
    assert find_races(trace.records) == []


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("first", [0, 1])
def test_gradients_are_safe_to_use_while_the_graph_of_another_pipeline_lives(checkpoint, first):
    """Autograd makes the caller wait for the streams of leaves only; none may belong to the other pipeline."""
    pipes = [
        GPipe(model("none"), [4, 4], devices=PLACES[:1] * 2, chunks=3, checkpoint=checkpoint, transfer="host")
        for _ in range(2)
    ]
    x = batch(6, PLACES[0])
    with recording() as trace:
        losses = [score(pipe(x)) for pipe in pipes]
        for index in (first, 1 - first):
            losses[index].backward()
            for parameter in pipes[index].parameters():
                parameter.grad.mul_(0.5)
    assert find_races(trace.records) == []
