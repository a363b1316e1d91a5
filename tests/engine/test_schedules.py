"""Every schedule trains like the plain module, whatever the layers are and whoever runs the tasks."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from gpipe_bench import is_recomputing
from tests.cover import cover
from tests.engine.steps import ALL, mean_loss, samples, scheduled, step, targets
from tests.engine.support import (
    MODES,
    Affine,
    Embed,
    InPlace,
    Mix,
    Narrow,
    Tag,
    Widen,
    assert_same,
    crossing_model,
    skip_pair,
)

every_schedule = pytest.mark.parametrize("schedule", ALL)
every_mode = pytest.mark.parametrize("checkpoint", MODES)
both_workers = pytest.mark.parametrize("workers", ["always", "never"])


# --- models that are hard to cut -----------------------------------------------------------------------------------


@every_schedule
@every_mode
@pytest.mark.parametrize(("workers", "transfer"), [("always", "direct"), ("never", "direct"), ("always", "host")])
def test_a_model_with_crossing_skips(schedule, checkpoint, workers, transfer):
    """Uneven micro-batches of 3, 3 and 1 rows; then fewer micro-batches than partitions; then one."""
    plain = crossing_model()
    pipe = scheduled(
        copy.deepcopy(plain), [2, 2, 2, 1], schedule,
        chunks=3, checkpoint=checkpoint, workers=workers, transfer=transfer,
    )  # fmt: skip
    for rows in (7, 2, 1):
        x, target = samples(rows, 3), targets(rows)
        assert_same(step(pipe, x, target), step(plain, x, target))


@every_schedule
@every_mode
@both_workers
def test_a_small_unet(schedule, checkpoint, workers):
    from gpipe_bench.models.unet import unet

    torch.manual_seed(0)
    plain = unet(depth=2, blocks=1, channels=2, dropout=0.0).double()
    pipe = scheduled(
        copy.deepcopy(plain), [5, 8, 4, 12], schedule,
        chunks=3, checkpoint=checkpoint, workers=workers, transfer="host",
    )  # fmt: skip
    x, target = samples(5, 3, 8, 8), targets(5)
    assert_same(step(pipe, x, target), step(plain, x, target))


class Note(nn.Module):
    """x -> (x, a dict, None, a text)."""

    def forward(self, x):
        return x * 2, {"factor": 3, "shift": x.detach().mean(1, keepdim=True)}, None, "text"


class Read(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = Mix()

    def forward(self, values):
        x, note, nothing, text = values
        assert (nothing, text) == (None, "text")
        return self.mix(x) * note["factor"] + note["shift"]


class Same(nn.Module):
    """Uses one weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(torch.tanh(self.linear(x)))


class Derived(nn.Module):
    """Computes its weight from two others, and uses it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.direction, self.length = nn.Parameter(torch.eye(3) + 0.1), nn.Parameter(torch.ones(3))

    def forward(self, x):
        weight = self.direction.sin() * self.length
        return torch.tanh(x @ weight) @ weight


class Constant(nn.Module):
    """Gives something that does not depend on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 3))

    def forward(self, x):
        return self.weight.sin().expand(x.size(0), 3) * 1


class Beside(nn.Module):
    """Gives beside its result two values that do not depend on its input but on the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3) + 0.1)

    def forward(self, x):
        weight = self.weight.sin()
        rows = torch.ones(x.size(0), 3, dtype=x.dtype)
        return x @ weight, rows @ weight.cos(), rows @ weight


class Hooked(nn.Module):
    """Changes the gradients of its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Mix(), Mix()

    def forward(self, x):
        x = self.changed(x * 1, 2.0)
        hidden = self.changed(self.one(x), -3.0)
        return self.changed(self.other(hidden), 0.5)

    @staticmethod
    def changed(x: Tensor, factor: float) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad * factor)
        return x


class Normed(nn.Module):
    """Has weights that nothing uses, one that is a scalar, and a layer of PyTorch's with several."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rest = nn.LayerNorm(3), nn.Linear(2, 2)
        self.cell = nn.GRUCell(3, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.cell(self.norm(x)) * self.scale


class TwoPaths(nn.Module):
    """Its input reaches the output by two ways with weights, and past all weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return x + torch.tanh(self.one(x)) * self.other(x)


LAYERS = {
    "tuples": lambda: [Mix(), Widen(), nn.Sequential(Tag(), Mix()), nn.Sequential(Widen(), Narrow(), Mix())],
    "values that are no tensors": lambda: [Mix(), Note(), Read(), Mix()],
    "in place": lambda: [Affine(), InPlace(), nn.Sequential(Affine(), nn.ReLU(inplace=True)), Affine()],
    "in place at the batch": lambda: [
        nn.Sequential(InPlace(), Affine()), Affine(), nn.Sequential(InPlace(), Mix()), Mix(),
    ],
    "one weight twice": lambda: [Same(), Same(), Derived(), Derived()],
    "no input used": lambda: [Mix(), Constant(), Mix(), Mix()],
    "no input used at the end": lambda: [Mix(), Mix(), Mix(), Constant()],
    "values beside": lambda: [Beside(), Mix(), nn.Sequential(Narrow(), Beside()), nn.Sequential(Mix(), Narrow())],
    "hooks": lambda: [Hooked(), Mix(), Hooked(), nn.Sequential(Hooked(), Hooked())],
    "no weights": lambda: [nn.Tanh(), Mix(), nn.Identity(), nn.Tanh()],
    "weights of all kinds": lambda: [Normed(), Normed(), TwoPaths(), TwoPaths()],
    "skips": lambda: [
        nn.Sequential(Mix(), (pair := skip_pair())[0]), Mix(), (none := skip_pair(nothing=True))[0],
        nn.Sequential(pair[1], none[1], Mix()),
    ],
    "weights that are parametrised": lambda: [
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)).eval(),
        Mix(), nn.Linear(3, 3, bias=False),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "schedule", "checkpoint", "workers"),
    cover(product(LAYERS, ALL, MODES, ["always", "never"]), together=3),
)
def test_layers_of_all_kinds(layers, schedule, checkpoint, workers):
    torch.manual_seed(4)
    plain = nn.Sequential(*LAYERS[layers]()).double()
    pipe = scheduled(copy.deepcopy(plain), [1, 1, 1, 1], schedule, chunks=3, checkpoint=checkpoint, workers=workers)
    # PyTorch refuses to write to a leaf that requires a gradient
    requires_grad = workers == "always" and layers != "in place at the batch"
    x, target = samples(7, 3, requires_grad=requires_grad), targets(7)
    for _ in range(2):
        assert_same(step(pipe, x, target), step(plain, x, target))


@every_schedule
@every_mode
@both_workers
def test_tokens_first(schedule, checkpoint, workers):
    """A batch that can have no gradient."""
    torch.manual_seed(4)
    plain = nn.Sequential(Embed(), Mix(), Widen(), Narrow()).double()
    pipe = scheduled(copy.deepcopy(plain), [1, 1, 1, 1], schedule, chunks=3, checkpoint=checkpoint, workers=workers)
    x, target = torch.arange(7) % 5, targets(7)
    assert_same(step(pipe, x, target), step(plain, x, target))


FROZEN = {"first": [0], "middle": [1], "first two": [0, 1], "last": [3], "all but last": [0, 1, 2], "all": [0, 1, 2, 3]}
WHERE = [*((name, False) for name in FROZEN), ("first", True), ("all", True)]


@every_schedule
@every_mode
@pytest.mark.parametrize(("frozen", "requires_grad"), WHERE)
def test_frozen_layers(frozen, requires_grad, schedule, checkpoint):
    torch.manual_seed(4)
    (out, back), (near, near_end) = skip_pair(), skip_pair()
    plain = nn.Sequential(
        nn.Sequential(Mix(), out), nn.Sequential(Mix(), near), Mix(), nn.Sequential(back, near_end, Mix())
    )
    for index in FROZEN[frozen]:
        plain[index].requires_grad_(requires_grad=False)
    plain.double()
    pipe = scheduled(copy.deepcopy(plain), [1, 1, 1, 1], schedule, chunks=3, checkpoint=checkpoint)
    x, target = samples(7, 3, requires_grad=requires_grad), targets(7)
    found, expected = step(pipe, x, target), step(plain, x, target)
    assert_same(found, expected)
    assert all(found.gradients[name] is None for name, value in pipe.named_parameters() if not value.requires_grad)


@every_schedule
def test_a_partition_without_anything_to_learn_is_not_recomputed(schedule):
    layers = nn.Sequential(*(Mix() for _ in range(4))).double()
    layers[0].requires_grad_(requires_grad=False)
    passes = []
    layers[0].register_forward_hook(lambda *_: passes.append(is_recomputing()))
    pipe = scheduled(layers, [1, 1, 1, 1], schedule, chunks=3, checkpoint="always")
    step(pipe, samples(7, 3, requires_grad=False), targets(7))
    assert passes == [False] * 3


# --- running statistics, random numbers, modes --------------------------------------------------------------------


def with_batch_norm() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(Mix(), nn.BatchNorm1d(3), nn.Sequential(Mix(), nn.BatchNorm1d(3)), Mix()).double()


@every_schedule
@every_mode
@both_workers
def test_deferred_running_statistics_are_those_of_the_batch(schedule, checkpoint, workers):
    plain = with_batch_norm()
    pipe = scheduled(
        copy.deepcopy(plain), [1, 1, 1, 1], schedule,
        chunks=3, checkpoint=checkpoint, workers=workers, deferred_batch_norm=True,
    )  # fmt: skip
    for _ in range(2):
        pipe.step(samples(8, 3), targets(8), mean_loss)
    # the second layer of its kind gets what the first one makes of a micro-batch, not of the batch
    x = plain[0](samples(8, 3))
    plain[1](x), plain[1](x)
    for name, value in plain[1].named_buffers():
        torch.testing.assert_close(pipe[1].get_buffer(name), value)
    assert int(pipe[2][1].num_batches_tracked) == 2


@every_schedule
@every_mode
@both_workers
def test_running_statistics_count_every_pass_of_every_microbatch(schedule, checkpoint, workers):
    plain = with_batch_norm()
    pipe = scheduled(copy.deepcopy(plain), [1, 1, 1, 1], schedule, chunks=3, checkpoint=checkpoint, workers=workers)
    found = step(pipe, samples(8, 3), target := targets(8))
    pieces = zip(samples(8, 3).detach().chunk(3), target.chunk(3), strict=True)
    losses = [mean_loss(plain(x), y) * len(y) / len(target) for x, y in pieces]
    sum(losses).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found.gradients[name], parameter.grad)
    recomputed = {"always": 3, "except_last": 2, "never": 0}[checkpoint]
    assert int(pipe[1].num_batches_tracked) == 3 + recomputed
    if not recomputed:
        torch.testing.assert_close(dict(pipe.named_buffers()), dict(plain.named_buffers()))


class Drop(nn.Module):
    """Dropout that keeps its masks; column 0 of its input is the number of the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.first: dict[int, list[Tensor]] = {}
        self.again: dict[int, list[Tensor]] = {}

    def forward(self, x):
        mask = nn.functional.dropout(torch.ones(x.size(0), 16), 0.5)
        (self.again if is_recomputing() else self.first).setdefault(int(x[0, 0]), []).append(mask)
        return x * self.weight * torch.cat([torch.ones_like(mask[:, :1]), mask[:, 1:]], 1)


@every_schedule
@every_mode
@both_workers
def test_masks_of_a_recomputation_are_those_of_the_first_pass(schedule, checkpoint, workers):
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        pipe = scheduled(
            nn.Sequential(*(Drop() for _ in range(4))),
            [1] * 4,
            schedule,
            chunks=3,
            checkpoint=checkpoint,
            workers=workers,
        )
        x = torch.arange(3.0).repeat_interleave(2).unsqueeze(1) + torch.zeros(16)
        for _ in range(2):
            pipe.step(x, torch.ones(6), lambda output, target: (output.square().mean(1) * target).mean())
        runs.append([layer.first for layer in pipe])
        recomputed = {"always": 3, "except_last": 2, "never": 0}[checkpoint]
        for layer in pipe:
            assert sorted(layer.first) == [0, 1, 2]
            assert sorted(layer.again) == list(range(recomputed))
            assert all(len(masks) == 2 for masks in layer.first.values())
            for i, masks in layer.again.items():
                assert all(map(torch.equal, masks, layer.first[i]))
    for one, other in zip(*runs, strict=True):
        assert all(torch.equal(a, b) for i in one for a, b in zip(one[i], other[i], strict=True))


@every_schedule
@every_mode
@both_workers
def test_autocast(schedule, checkpoint, workers):
    torch.manual_seed(4)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    pipe = scheduled(copy.deepcopy(plain), [1] * 4, schedule, chunks=3, checkpoint=checkpoint, workers=workers)
    seen = set()
    for layer in pipe:
        layer[0].register_forward_hook(lambda _layer, _given, output: seen.add(output.dtype))
    x, target = samples(7, 16).float(), targets(7).float()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = step(pipe, x, target), step(plain, x, target)
    assert seen == {torch.bfloat16}
    torch.testing.assert_close(found.output, expected.output, rtol=0.02, atol=0.02)
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=0.05, atol=0.05)
