"""Random models of layers with side effects: all that a layer's code sees and leaves is what it is in the plain module.

Their functions write to gradients, add to ``main_grad`` and free what they kept; their hooks scale gradients and call
autograd; they draw random numbers, and hand on outputs that nobody uses. The plain module takes one micro-batch after
another. The ledger says that user code ran as often, on the same numbers.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import Tensor, nn

from gpipe_bench import Components
from tests.cover import EVERY_CASE
from tests.engine.random_layers import DRAWING, KINDS, SKIPS, UNUSED, WIDTH, Ledger, first, random_model
from tests.engine.steps import ALL, DOUBLE, scheduled
from tests.engine.support import FACTORIAL, MODES

MODELS = int(os.environ.get("RANDOM_MODELS", "1"))
"""Models of each kind for each schedule and checkpoint mode."""
MIXED = int(os.environ.get("RANDOM_MIXED_MODELS", "2"))
"""Models of several kinds, likewise."""
CALLED = (None, "gpipe", "looped_bfs")
"""Executors whose pipelines may be called."""
STEPS = 2

# PyTorch's own, where a layer with a full backward hook gets no gradient.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")


@dataclass
class Found:
    """What two training steps gave."""

    ledger: Ledger
    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


def squares(output: Any, target: Tensor) -> Tensor:
    return (first(output) - target).square().sum()


def trained(
    model: nn.Module,
    ledger: Ledger,
    batch: Tensor,
    target: Tensor,
    step: Callable[..., Tensor],
    evaluate: Callable[[nn.Module, Tensor], Any] | None,
) -> Found:
    """Two steps, of which the second adds to the gradients of the first; then ``evaluate`` in both modes."""
    batch = batch.detach().clone().requires_grad_(batch.requires_grad)
    found = Found(ledger)
    for ledger.step in range(STEPS):
        found.losses.append(step(model, batch, target).detach())
    named = dict(model.named_parameters())
    found.gradients = {name: parameter.grad for name, parameter in named.items()} | {"the batch": batch.grad}
    found.gradients |= {f"main_grad of {name}": each.main_grad for name, each in named.items()
                        if hasattr(each, "main_grad")}  # fmt: skip
    for module in model.modules():
        for each in getattr(module, "kept", ()):
            module.note("retained", each.grad)
    for training in (False, True) if evaluate else ():
        ledger.step += 1
        with torch.no_grad():
            evaluate(model.train(training), batch)
    return found


def assert_same(found: Found, expected: Found, *, recomputed: int, sums: int) -> None:
    """Bit for bit.

    Args:
        found: of a pipeline.
        expected: of the plain module.
        recomputed: how many micro-batches are recomputed in all.
        sums: how many micro-batches autograd adds up before it calls the hooks of a parameter.
    """
    for value in expected.gradients.values():
        assert value is None or (value.equal(value.round()) and value.abs().max() < 2**53), "numbers are not exact"
    seen, wanted = (each.ledger.events(parameters=False) for each in (found, expected))
    assert seen == wanted, f"too often: {seen - wanted}\nnot seen: {wanted - seen}"
    seen, wanted = (each.ledger.events(parameters=True) for each in (found, expected))
    assert seen == Counter({event: count // sums for event, count in wanted.items()})
    assert found.losses == expected.losses
    for name, gradient in expected.gradients.items():
        there = found.gradients[name]
        if gradient is None:
            assert there is None or not there.any(), name
        else:
            assert there is not None and there.equal(gradient), f"{name}: {there} for {gradient}"  # noqa: PT018
    again, before = (found.ledger.forwards(again=again) for again in (True, False))
    assert again <= before
    # Where nothing needs a gradient nothing is recomputed.
    assert {sum(count for event, count in again.items() if event[1] == layer) for _, layer, *_ in before} <= {
        0,
        recomputed,
    }


@dataclass(frozen=True)
class Case:
    """A model and how it is trained, drawn from a seed."""

    kinds: tuple[str, ...]
    schedule: str | None
    checkpoint: str
    number: int

    def __post_init__(self) -> None:
        seed = crc32(f"{self}".encode())
        draw = random.Random(seed)
        self.__dict__.update(
            seed=seed,
            rows=draw.choice([1, 2, 3]),
            chunks=draw.choice([1, 2, 3, 4, 5]),
            of_batch=draw.random() < 0.5,
            called=self.schedule in CALLED and draw.random() < 0.5,
            options={
                "workers": draw.choice(["always", "never"]),
                "transfer": draw.choice(["direct", "host"]),
                "components": draw.choice([Components(), draw.choice(FACTORIAL)]),
            },
        )

    @property
    def is_one_graph(self) -> bool:
        """Whether autograd has one graph of all micro-batches, where it treats some layers as the docs say."""
        never = self.checkpoint == "never" or (self.checkpoint == "except_last" and self.chunks == 1)
        return self.schedule is None and never

    @property
    def draws(self) -> bool:
        """Whether layers draw random numbers; such a model is evaluated after the training."""
        return not set(DRAWING).isdisjoint(self.kinds)

    def model(self, ledger: Ledger) -> nn.Sequential:
        kinds = [kind for kind in self.kinds if not (self.is_one_graph and kind in UNUSED)]
        return random_model(kinds, self.seed, self.rows, ledger)

    def balance(self, count: int) -> list[int]:
        draw = random.Random(self.seed)
        partitions = 4 if self.schedule in DOUBLE else draw.choice([1, 2, 2, 3, 4])
        cuts = sorted(draw.sample(range(1, count), partitions - 1))
        return [end - start for start, end in zip([0, *cuts], [*cuts, count], strict=True)]

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        shape = 2, self.rows * self.chunks, WIDTH
        x, target = torch.randint(-8, 9, shape, generator=generator).double()
        return x.requires_grad_(self.of_batch), target

    def alone(self, model: nn.Module, ledger: Ledger) -> Found:
        """A plain module, for one micro-batch after another."""

        def step(model: nn.Module, batch: Tensor, target: Tensor) -> Tensor:
            total = torch.zeros((), dtype=batch.dtype)
            for start in range(0, len(batch), self.rows):
                loss = squares(model(batch[start : start + self.rows]), target[start : start + self.rows])
                total += loss.detach()
                if loss.requires_grad:
                    loss.backward()
            return total

        def evaluate(model: nn.Module, batch: Tensor) -> None:
            for x in batch.split(self.rows):
                model(x)

        return trained(model, ledger, *self.batch(), step, evaluate if self.draws else None)

    def piped(self) -> Found:
        """A pipeline of threads."""

        def step(pipe: nn.Module, batch: Tensor, target: Tensor) -> Tensor:
            if not self.called:
                return pipe.step(batch, target, squares, reduction="sum")
            loss = squares(pipe(batch), target)
            if loss.requires_grad:
                loss.backward()
            return loss

        ledger = Ledger()
        model = self.model(ledger)
        pipe = scheduled(model, self.balance(len(model)), self.schedule, chunks=self.chunks,
                         checkpoint=self.checkpoint, **self.options)  # fmt: skip
        torch.manual_seed(self.seed + 1)
        return trained(pipe, ledger, *self.batch(), step, nn.Module.__call__ if self.draws else None)

    def compare(self, found: Found, expected: Found) -> None:
        recomputed = {"always": self.chunks, "except_last": self.chunks - 1, "never": 0}[self.checkpoint]
        sums = self.chunks if self.is_one_graph else 1
        assert_same(found, expected, recomputed=STEPS * recomputed, sums=sums)

    def check(self, found: Found) -> None:
        """Compare with the plain module, which takes the masks that were drawn."""
        ledger = Ledger(found.ledger.masks)
        self.compare(found, self.alone(self.model(ledger), ledger))


def check(case: Case) -> None:
    try:
        found = case.piped()
        case.check(found)
        if case.draws:
            assert case.piped().ledger.masks == found.ledger.masks, "the same seed gave other masks"
    except Exception as error:
        error.add_note(f"in {case} with {case.options}")
        raise


@pytest.mark.parametrize("kind", [*KINDS, *SKIPS])
def test_a_kind_in_all_schedules_and_modes(kind):
    """Every pair of kind, schedule and mode."""
    for place, schedule in enumerate(ALL, crc32(kind.encode())):
        for checkpoint in MODES if EVERY_CASE else [MODES[place % 3]]:
            for number in range(MODELS):
                check(Case((kind,), schedule, checkpoint, number))


@pytest.mark.parametrize("schedule", ALL)
def test_several_kinds(schedule):
    for checkpoint in MODES:
        for number in range(MIXED):
            draw = random.Random(crc32(f"{schedule} {checkpoint} {number}".encode()))
            kinds = draw.sample([*KINDS, *SKIPS], draw.randint(2, 5))
            check(Case(tuple(kinds), schedule, checkpoint, number))
