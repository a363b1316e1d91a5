"""Random numbers of layers: the same in the recomputation and in the next run, the plain module's if possible."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack

from gpipe_bench import Components, GPipe, is_recomputing
from gpipe_bench.schedules.cycles import clock_cycles, microbatch_major
from tests.engine.support import MODES, SOME, label, numbered

SIZE = 32


class Drop(nn.Module):
    """Dropout that keeps the masks of micro-batch i, of the first pass and of the recomputation.

    Its input carries i in column 0; two draws are made, and between them it meets the other task of its cycle, so that
    tasks that run at the same time really take turns in drawing.
    """

    def __init__(self, meet: threading.Barrier | None = None, turns: range = range(0), *, on: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))
        self.dropout = nn.Dropout(0.5)
        self.meet, self.turns, self.on = meet, turns, on
        self.first: dict[int, list[Tensor]] = {}
        self.again: dict[int, list[Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        i = int(x[0, 0])
        if not self.on:
            return x * self.weight
        ones = torch.ones(x.size(0), SIZE)
        mask = self.dropout(ones)
        if self.meet is not None and i in self.turns and not is_recomputing():
            self.meet.wait(timeout=30)
        mask = mask + 10 * self.dropout(ones)
        (self.again if is_recomputing() else self.first).setdefault(i, []).append(mask)
        # column 0 stays the number of the micro-batch
        mask = torch.cat([torch.ones(x.size(0), 1), mask[:, 1:]], 1)
        return x * self.weight * mask


def batch(m: int) -> Tensor:
    return numbered(m, 2) + torch.zeros(SIZE)


def two_partitions(either, m=4, *, interleaved=True, **options):
    """Partition 0 in micro-batch i and partition 1 in i - 1 meet."""
    components = options.get("components") or Components()
    meet = threading.Barrier(2) if interleaved and components.clock_cycle else None
    layers = Drop(meet, range(1, m)), Drop(meet, range(m - 1))
    return either(nn.Sequential(*layers), [1, 1], chunks=m, **options)


def step(pipe: nn.Module, m: int = 4) -> Tensor:
    pipe.zero_grad()
    output = pipe(batch(m))
    output.square().sum().backward()
    return output.detach()


@pytest.mark.parametrize("components", SOME, ids=label)
def test_recomputed_masks_are_those_of_the_first_pass(either, components):
    pipe = two_partitions(either, components=components, checkpoint="always")
    for _ in range(3):
        step(pipe)
    for layer in pipe:
        assert sorted(layer.first) == sorted(layer.again) == [0, 1, 2, 3]
        assert all(len(masks) == 3 for masks in layer.first.values())
        for i in layer.first:
            assert all(map(torch.equal, layer.first[i], layer.again[i]))


def masks(pipe) -> list[Tensor]:
    return [mask for layer in pipe for i in range(4) for mask in layer.first[i]]


def test_a_run_from_the_same_seed_draws_the_same_and_from_another_something_else(either):
    runs = []
    for seed in (11, 11, 12):
        torch.manual_seed(seed)
        pipe = two_partitions(either)
        for _ in range(3):
            step(pipe)
        runs.append(masks(pipe))
    assert all(map(torch.equal, *runs[:2]))
    assert not any(map(torch.equal, *runs[1:]))


def test_every_task_and_every_batch_draws_its_own(either):
    pipe = two_partitions(either)
    for _ in range(3):
        step(pipe)
    drawn = {tuple(mask.flatten().tolist()) for mask in masks(pipe)}
    assert len(drawn) == 2 * 4 * 3


def test_evaluation_between_batches_does_not_spoil_the_masks(either):
    pipe = two_partitions(either, checkpoint="always")
    step(pipe)
    with torch.no_grad():
        pipe.eval()(batch(4))
    pipe.train()
    step(pipe)
    for layer in pipe:
        for i in range(4):
            recomputed = layer.again[i]
            assert torch.equal(layer.first[i][-1], recomputed[-1])


def test_two_forward_passes_before_their_backward_passes_keep_their_masks(either):
    pipe = two_partitions(either, checkpoint="always")
    step(pipe)
    losses = [pipe(batch(4)).square().sum() for _ in range(2)]
    losses[1].backward()
    losses[0].backward()
    for layer in pipe:
        for i in range(4):
            _, second, third = layer.first[i]
            _, of_third, of_second = layer.again[i]
            assert torch.equal(second, of_second)
            assert torch.equal(third, of_third)


class Noise(nn.Module):
    """Draws, and trains nothing: its tasks are no checkpoints."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :1], x[:, 1:] + torch.rand_like(x[:, 1:])], 1)


@pytest.mark.parametrize("components", [Components(), Components(clock_cycle=False)], ids=label)
def test_draws_of_a_partition_that_trains_nothing_do_not_matter(either, components):
    pipe = either(nn.Sequential(Noise(), Drop()), [1, 1], chunks=4, components=components, checkpoint="always")
    for _ in range(2):
        step(pipe)
        for i in range(4):
            assert all(map(torch.equal, pipe[1].first[i], pipe[1].again[i]))
        pipe[1].first.clear()
        pipe[1].again.clear()


@pytest.mark.parametrize(
    ("balance", "components"), [([2], Components()), ([1, 1], Components(clock_cycle=False))], ids=["one", "two"]
)
def test_draws_between_tasks_do_not_matter(either, balance, components):
    """Of an observer, and of a hook on what a checkpoint saves."""

    class Drawing:
        def start(self, task):
            return torch.rand(1)

        def finish(self, token, nbytes):
            torch.rand(1)

    def packed(tensor):
        torch.rand(1)
        return tensor

    layers = nn.Sequential(Drop(), Drop())
    pipe = either(layers, balance, chunks=3, components=components, checkpoint="always", workers="never")
    with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
        loss = pipe(batch(3)).square().sum()
    loss.backward()
    with pipe.observe(Drawing()):
        step(pipe, 3)
    for layer in layers:
        for i in range(3):
            assert len(layer.first[i]) == len(layer.again[i]) == 2
            assert all(map(torch.equal, layer.first[i], layer.again[i]))


# --- the plain module's numbers ----------------------------------------------------------------------------------


def plain_masks(pieces: list[Tensor], order: Iterable[tuple[int, int]]) -> Tensor:
    """What the layers make of the pieces, task (i, j) by task (i, j)."""
    layers = [Drop(), Drop()]
    torch.manual_seed(5)
    values = list(pieces)
    for i, j in order:
        values[i] = layers[j](values[i])
    return torch.cat(values)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize(
    ("m", "balance", "components"),
    [
        (1, [1, 1], Components()),
        (4, [2], Components()),
        (4, [1, 1], Components(clock_cycle=False)),
    ],
    ids=["one microbatch", "one partition", "no clock-cycle"],
)
def test_tasks_that_run_one_by_one_draw_what_the_plain_module_draws(either, m, balance, components, checkpoint):
    """In its order, which is that of micro-batches, or with a schedule and several partitions in the schedule's."""
    layers = [Drop(), Drop()]
    pipe = either(nn.Sequential(*layers), balance, chunks=m, components=components, checkpoint=checkpoint)
    cycles = clock_cycles if either.keywords["schedule"] and len(balance) > 1 else microbatch_major
    expected = plain_masks(list(batch(m).chunk(m)), [task for cycle in cycles(m, 2) for task in cycle])
    torch.manual_seed(5)
    torch.testing.assert_close(pipe(batch(m)), expected)


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_recomputation_leaves_the_default_generator_where_it_was(either, checkpoint):
    pipe = either(nn.Sequential(Drop(), Drop()), [2], chunks=2, checkpoint=checkpoint)
    output = pipe(batch(2))
    before = torch.get_rng_state()
    output.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_with_randomness_moves_the_default_generator_on(either):
    pipe = two_partitions(either)
    step(pipe)
    before = torch.get_rng_state()
    step(pipe)
    assert not torch.equal(torch.get_rng_state(), before)


# --- layers that draw only later ---------------------------------------------------------------------------------


def conditional(either, checkpoint: str):
    pipe = two_partitions(either, interleaved=False, checkpoint=checkpoint)
    pipe[1].on = False
    step(pipe)
    pipe[1].on = True
    return pipe


def test_the_same_layer_may_stop_drawing(either):
    pipe = two_partitions(either, interleaved=False, checkpoint="always")
    step(pipe)
    pipe[0].on = False
    step(pipe)
    pipe[0].on = True
    step(pipe)
    assert torch.equal(pipe[0].first[2][-1], pipe[0].again[2][-1])


class Attention(nn.Module):
    """Attention, with and without dropout; keeps whether a mode of PyTorch watched its operators."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout, self.watched = nn.Linear(8, 8), dropout, False

    def forward(self, x: Tensor) -> Tensor:
        self.watched = bool(_len_torch_dispatch_stack())
        x = self.linear(x).unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=self.dropout).squeeze(1)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_draws_for_its_dropout_alone(dropout):
    """Operators that draw are watched in every task, which costs time; the others in the first one of a batch."""
    layers = [Attention(dropout), Attention(dropout)]
    pipe = GPipe(nn.Sequential(*layers), balance=[1, 1], devices=["cpu"] * 2, chunks=2)
    for _ in range(2):
        pipe(torch.rand(4, 3, 8)).sum().backward()
    assert [layer.watched for layer in layers] == [dropout > 0] * 2


def test_draws_of_the_program_between_forward_and_backward_do_not_matter(either):
    pipe = two_partitions(either, checkpoint="always")
    loss = pipe(batch(4)).square().sum()
    torch.rand(5)
    loss.backward()
    assert all(torch.equal(layer.first[i][0], layer.again[i][0]) for layer in pipe for i in range(4))


@pytest.mark.parametrize("components", [Components(), Components(clock_cycle=False)], ids=label)
def test_a_copied_pipeline_draws_as_the_original(either, components):
    pipe = two_partitions(either, interleaved=False, components=components)
    torch.manual_seed(3)
    expected = step(copy.deepcopy(pipe))
    torch.manual_seed(3)
    torch.testing.assert_close(step(pipe), expected)


def test_a_default_device_that_is_not_the_cpu_leaves_the_masks_alone():
    runs = []
    for device in (None, "meta"):
        torch.manual_seed(0)
        pipe = GPipe(nn.Sequential(nn.Dropout(), nn.Identity()), [1, 1], devices=["cpu"] * 2, chunks=4)
        torch.set_default_device(device)
        runs.append([pipe(torch.ones(8, SIZE, device="cpu")) for _ in range(3)])
        torch.set_default_device(None)
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    assert len({tuple(mask.flatten().tolist()) for mask in runs[1]}) == 3
