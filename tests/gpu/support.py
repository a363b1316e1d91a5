"""Models for tests on accelerators, and layers that keep a stream busy so that a missing wait shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench import GPipe, is_recomputing
from tests.engine.support import Mix, Outcome, skip_pair

BUSY = 1024
"""Columns of the matrix that :func:`occupy` multiplies; a few milliseconds on a current GPU."""


def occupy(device: torch.device, rounds: int = 10) -> None:
    """Queue work on the current stream of ``device`` that runs long after the host has gone on."""
    if device.type == "cpu":
        return
    matrix = torch.zeros(BUSY, BUSY, device=device)
    for _ in range(rounds):
        matrix = matrix @ matrix


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        occupy(x.device)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        occupy(grad.device)
        return grad * 1


class Late(nn.Module):
    """Gives its result, and its gradient, late: whoever does not wait for them reads what was there before."""

    def forward(self, x: Tensor) -> Tensor:
        return _Late.apply(x)


def late_model() -> nn.Sequential:
    """Eight layers, two for each of four partitions; skips from 0 to 3, from 1 to 2, and one that stays in 0."""
    torch.manual_seed(3)
    (far, far_end), (near, near_end), (inside, inside_end) = (skip_pair() for _ in range(3))
    return nn.Sequential(
        nn.Sequential(inside, Mix(), far), nn.Sequential(Late(), inside_end),
        nn.Sequential(Mix(), near), Late(),
        nn.Sequential(Mix(), near_end), Late(),
        nn.Sequential(Mix(), far_end), nn.Sequential(Late(), Mix()),
    ).double()  # fmt: skip


LATE_BALANCE = [2, 2, 2, 2]


def late_batch(device: torch.device, size: int = 7) -> Tensor:
    """A batch that its stream writes late, just before it is used."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(size, 3, generator=generator, dtype=torch.float64).to(device)
    occupy(device)
    return (values * 1).requires_grad_()


def assert_same_elsewhere(found: Outcome, expected: Outcome) -> None:
    """As the CPU's, wherever the parts are."""
    torch.testing.assert_close(found.output.cpu(), expected.output)
    torch.testing.assert_close(found.loss.cpu(), expected.loss)
    if expected.input_gradients[0] is not None:
        torch.testing.assert_close(found.input_gradients[0].cpu(), expected.input_gradients[0])
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name].cpu(), gradient)


def placed(module: nn.Sequential, balance: Sequence[int], devices: Sequence[torch.device], **options: Any) -> GPipe:
    """A pipeline on devices that are used in turn."""
    return GPipe(module, balance, devices=[devices[j % len(devices)] for j in range(len(balance))], **options)


class Streams(nn.Module):
    """Notes the current stream of its device in first pass, recomputation and backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen: dict[str, set[int]] = {"first": set(), "again": set(), "backward": set()}

    def note(self, kind: str, device: torch.device) -> None:
        self.seen[kind].add(torch.accelerator.current_stream(device).stream_id)

    def forward(self, x: Tensor) -> Tensor:
        self.note("again" if is_recomputing() else "first", x.device)
        y = x * self.weight
        if y.requires_grad:
            y.register_hook(lambda grad: self.note("backward", grad.device))
        return y
