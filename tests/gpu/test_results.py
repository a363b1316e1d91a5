"""On one accelerator: whatever is switched, a pipeline gives what the plain module gives."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gpipe_bench import GPipe
from tests.engine.support import (
    FACTORIAL,
    MODES,
    SOME,
    Do,
    Embed,
    Mix,
    Narrow,
    assert_same,
    label,
    score,
    train_step,
)
from tests.gpu.support import LATE_BALANCE, assert_same_elsewhere, late_batch, late_model, occupy, placed

pytestmark = pytest.mark.gpu

every_combination = pytest.mark.parametrize("components", FACTORIAL, ids=label)
some_combinations = pytest.mark.parametrize("components", SOME, ids=label)


@pytest.fixture(scope="module")
def expected(accelerators):
    """What the plain module gives."""
    plain = late_model().to(accelerators[0])
    return train_step(plain, late_batch(accelerators[0]))


@pytest.fixture(scope="module")
def of_the_cpu():
    """The same, computed by the CPU."""
    return train_step(late_model(), late_batch(torch.device("cpu")))


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("checkpoint", MODES)
@every_combination
def test_four_partitions(devices, of_the_cpu, components, checkpoint, transfer):
    """Three steps without a synchronisation between them, by layers that finish late; two devices take turns."""
    options = {"components": components, "checkpoint": checkpoint, "transfer": transfer}
    pipe = placed(late_model(), LATE_BALANCE, devices, chunks=4, **options)
    outcomes = [train_step(pipe, late_batch(devices[0])) for _ in range(3)]
    for outcome in outcomes:
        assert_same_elsewhere(outcome, of_the_cpu)


@pytest.mark.multigpu
@pytest.mark.parametrize("checkpoint", MODES)
@every_combination
def test_as_many_partitions_as_devices(accelerators, of_the_cpu, components, checkpoint):
    devices = accelerators[:4]
    balance = {2: [4, 4], 3: [2, 2, 4], 4: [2, 2, 2, 2]}[len(devices)]
    pipe = GPipe(late_model(), balance, devices=devices, chunks=4, components=components, checkpoint=checkpoint)
    outcomes = [train_step(pipe, late_batch(devices[0])) for _ in range(3)]
    for outcome in outcomes:
        assert_same_elsewhere(outcome, of_the_cpu)


@pytest.mark.parametrize("transfer", ["direct", "host"])
def test_the_caller_may_use_a_stream_of_its_own(device, expected, transfer):
    pipe = placed(late_model(), LATE_BALANCE, [device], chunks=4, transfer=transfer)
    stream = torch.Stream(device)
    default = torch.accelerator.current_stream(device)
    torch.accelerator.set_stream(stream)
    try:
        outcome = train_step(pipe, late_batch(device))
        assert torch.accelerator.current_stream(device) == stream
        assert_same(outcome, expected)
    finally:
        torch.accelerator.set_stream(default)
    default.wait_stream(stream)


@pytest.mark.parametrize("transfer", ["direct", "host"])
def test_an_optimizer_step_right_after_the_backward_pass(device, transfer):
    """Parameters are written on the caller's stream while the pipeline's streams may still be at work."""
    plain = late_model().to(device)
    pipe = placed(copy.deepcopy(plain), LATE_BALANCE, [device], chunks=4, transfer=transfer)
    for model in (plain, pipe):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):
            train_step(model, late_batch(device))
            optimizer.step()
    torch.testing.assert_close(dict(pipe.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("checkpoint", MODES)
def test_two_pipelines_with_living_graphs(device, expected, checkpoint):
    """Whose gradients are read right after the backward pass of one of them."""
    pipes = [
        placed(late_model(), LATE_BALANCE, [device], chunks=4, checkpoint=checkpoint, transfer="host") for _ in range(2)
    ]
    # the input needs no gradient, which would be what the caller waits for
    losses = [score(pipe(late_batch(device).detach())) for pipe in pipes]
    for loss, pipe in zip(reversed(losses), reversed(pipes), strict=True):
        loss.backward()
        found = {name: parameter.grad * 1 for name, parameter in pipe.named_parameters()}
        torch.testing.assert_close(found, expected.gradients)


def test_the_input_may_be_overwritten_right_after_the_step(device):
    pipe = placed(late_model(), LATE_BALANCE, [device], chunks=4, transfer="host", checkpoint="always")
    expected = train_step(pipe, late_batch(device)).gradients
    expected = {name: gradient.clone() for name, gradient in expected.items()}
    pipe.zero_grad()
    x = late_batch(device).detach()
    score(pipe(x)).backward()
    x.fill_(1e6)
    torch.testing.assert_close({name: parameter.grad for name, parameter in pipe.named_parameters()}, expected)


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("where", [("cpu", "gpu"), ("gpu", "cpu"), ("gpu", "cpu", "gpu")], ids="-".join)
@some_combinations
def test_partitions_on_accelerator_and_cpu(device, components, where, transfer):
    torch.manual_seed(3)
    plain = nn.Sequential(*(Mix() for _ in where)).double()
    devices = [torch.device("cpu") if name == "cpu" else device for name in where]
    pipe = placed(copy.deepcopy(plain), [1] * len(where), devices, chunks=3, components=components, transfer=transfer)
    x = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)
    found, wanted = train_step(pipe, x.to(devices[0])), train_step(plain, x)
    assert_same_elsewhere(found, wanted)


@some_combinations
def test_deferred_batch_norm(device, components):
    plain = nn.Sequential(nn.BatchNorm2d(2), nn.ReLU()).to(device)
    pipe = placed(
        copy.deepcopy(plain), [1, 1], [device], chunks=3, deferred_batch_norm=True, components=components,
        transfer="host", checkpoint="always",
    )  # fmt: skip
    for seed in range(2):
        x = torch.randn(7, 2, 4, 4, generator=torch.Generator().manual_seed(seed)).to(device)
        occupy(device)
        pipe(x).sum().backward()
        plain(x)
    torch.testing.assert_close(dict(pipe.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("checkpoint", MODES)
def test_integers_first_and_values_that_are_no_tensors(devices, checkpoint, transfer):
    torch.manual_seed(3)
    layers = [
        Embed(),
        Do(lambda value: (value[0], value[1].tanh(), None)),
        Do(lambda value: value[1] * (1 + value[0]).unsqueeze(1) if value[2] is None else None),
        nn.Sequential(Mix(), Narrow()),
    ]
    plain = nn.Sequential(*layers).double()
    options = {"checkpoint": checkpoint, "transfer": transfer}
    pipe = placed(copy.deepcopy(plain), [1] * 4, devices, chunks=3, **options)
    x = torch.arange(5)
    assert_same_elsewhere(train_step(pipe, x.to(devices[0])), train_step(plain, x))


@every_combination
def test_a_small_unet(device, components):
    from gpipe_bench.models.unet import unet

    torch.manual_seed(0)
    plain = unet(depth=2, blocks=1, channels=4, dropout=0.0).double().to(device)
    x = torch.randn(5, 3, 16, 16, dtype=torch.float64, device=device)
    size = len(plain) // 4
    pipe = placed(
        copy.deepcopy(plain), [size, size, size, len(plain) - 3 * size], [device],
        chunks=3, components=components, transfer="host",
    )  # fmt: skip
    assert_same(train_step(pipe, x), train_step(plain, x))


def test_evaluation_and_inference(device):
    plain = late_model().to(device).eval()
    pipe = placed(copy.deepcopy(plain), LATE_BALANCE, [device], chunks=4, transfer="host").eval()
    with torch.inference_mode():
        torch.testing.assert_close(pipe(late_batch(device)), plain(late_batch(device)))


# --- places --------------------------------------------------------------------------------------------------------


def test_a_device_without_index_is_the_current_one(device):
    pipe = GPipe(nn.Sequential(Mix()), [1], devices=[device.type])
    assert pipe.devices == [device]
    assert pipe[0].linear.weight.device == device


def test_by_default_the_devices_are_all_of_cuda(device):
    if device.type != "cuda":
        pytest.skip(f"needs CUDA, got {device.type}")
    assert GPipe(nn.Sequential(Mix()), [1]).devices == [device]


def test_an_input_elsewhere_is_refused(device):
    pipe = placed(nn.Sequential(Mix()), [1], [device])
    with pytest.raises(ValueError, match=f"must be on the first partition's device {device}, got cpu"):
        pipe(torch.zeros(2, 3))


# --- failures ------------------------------------------------------------------------------------------------------


class Hungry(nn.Module):
    """Asks for more memory than there is, once."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.phase = phase

    def ask(self, x):
        if self.phase == "done":
            return
        self.phase = "done"
        torch.empty(1 << 46, dtype=torch.uint8, device=x.device)

    def forward(self, x):
        y = x * 1
        if self.phase == "forward":
            self.ask(x)
        elif y.requires_grad:
            y.register_hook(self.ask)
        return y


@pytest.mark.parametrize("phase", ["forward", "backward"])
@some_combinations
def test_out_of_memory_surfaces_and_the_next_step_works(device, components, phase):
    torch.manual_seed(3)
    plain = nn.Sequential(Mix(), Mix()).double().to(device)
    pipe = placed(
        nn.Sequential(copy.deepcopy(plain[0]), nn.Sequential(Hungry(phase), copy.deepcopy(plain[1]))), [1, 1], [device],
        chunks=3, components=components, transfer="host",
    )  # fmt: skip
    x = torch.linspace(-1, 1, 15, dtype=torch.float64, device=device).view(5, 3)
    with pytest.raises(torch.OutOfMemoryError):
        train_step(pipe, x)
    found, wanted = train_step(pipe, x), train_step(plain, x)
    torch.testing.assert_close(list(found.gradients.values()), list(wanted.gradients.values()))
