"""A pipeline gives the output, loss and gradients of the plain module: models of all kinds, in every executor."""

from __future__ import annotations

import copy
import random
from itertools import product

import pytest
import torch
from torch import nn

from gpipe_bench import Components, GPipe
from tests.cover import EVERY_CASE, cover
from tests.engine.shared_models import CASES
from tests.engine.steps import ALL, DOUBLE, SPLIT, WAYS, mean_loss, samples, scheduled, step, targets
from tests.engine.support import (
    FACTORIAL,
    MODES,
    Affine,
    Flags,
    Mix,
    assert_same,
    crossing_model,
    label,
    on_cpu,
    skip_pair,
)

FAMILIES = {
    "autograd": WAYS[:2],
    "whole": [way for way in WAYS[2:] if way[0] not in SPLIT],
    "split": [way for way in WAYS if way[0] in SPLIT],
}
every_mode = pytest.mark.parametrize("checkpoint", MODES)
each_family = pytest.mark.parametrize(("schedule", "called"), [*WAYS[:3], ("1f1b", False), ("zb_v", False)])


# --- models of all kinds --------------------------------------------------------------------------------------------


def model(case: str) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(*CASES[case].layers()).double()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(
    ("case", "family", "checkpoint"),
    cover((name, family, mode) for name, case in CASES.items() for family in FAMILIES for mode in case.modes),
)
def test_models_of_all_kinds(case, family, checkpoint):
    draw = random.Random(f"{case}, {family}, {checkpoint}")
    schedule, called = draw.choice(FAMILIES[family])
    options = {
        "checkpoint": checkpoint,
        "workers": draw.choice(["always", "always", "never"]),
        "transfer": draw.choice(["direct", "host"]),
        "components": draw.choice([Components(), draw.choice(FACTORIAL)]),
    }
    print(schedule, "called" if called else "step", options)
    plain = model(case)
    pipe = scheduled(copy.deepcopy(plain), [1] * 4, schedule, chunks=3, **options)
    for needs in (True, False, True):
        x = CASES[case].batch(needs)
        expected = step(plain, x, targets(7), CASES[case].loss)
        found = step(pipe, x, targets(7), CASES[case].loss, called=called)
        assert_same(found, expected)
        torch.testing.assert_close(found.batch, x, rtol=0, atol=0)
    for name, parameter in pipe.named_parameters():
        assert parameter.requires_grad or parameter.grad is None, name


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("case", CASES)
def test_models_of_all_kinds_without_gradients(case, mode):
    plain = model(case)
    options = {"chunks": 3, "checkpoint": CASES[case].modes[0]}
    pipes = [scheduled(copy.deepcopy(plain), [1] * 4, schedule, **options) for schedule in (None, "gpipe", "zb_v")]
    x = CASES[case].batch(False)
    with mode():
        expected = plain(copy.deepcopy(x))
        for pipe, _ in product(pipes, range(2)):
            torch.testing.assert_close(pipe(x), expected)
    torch.testing.assert_close(x, CASES[case].batch(False), rtol=0, atol=0)
    # what a pipeline has learnt of its layers holds for training, too
    found, expected = (step(each, x, targets(7), CASES[case].loss, called=True) for each in (pipes[0], plain))
    assert_same(found, expected)
    torch.testing.assert_close(found.batch, x, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("schedule", [None, "zb_h1"])
@pytest.mark.parametrize("case", CASES)
def test_models_of_all_kinds_in_one_partition(case, schedule):
    plain = model(case)
    for checkpoint in CASES[case].modes:
        pipe = on_cpu(model(case), [4], chunks=3, checkpoint=checkpoint, schedule=schedule)
        for x in (CASES[case].batch(True), CASES[case].batch(False)):
            expected = step(plain, x, targets(7), CASES[case].loss)
            found = step(pipe, x, targets(7), CASES[case].loss, called=schedule is None)
            assert_same(found, expected)
            torch.testing.assert_close(found.batch, x, rtol=0, atol=0)


# --- every executor -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "checkpoint", "workers", "transfer"),
    cover(product(WAYS, MODES, ["always", "never"], ["direct", "host"])),
)
def test_every_schedule(way, checkpoint, workers, transfer):
    """Crossing skips, and uneven micro-batches of 3, 3 and 1 rows; then fewer than partitions; then one."""
    (schedule, called), plain = way, crossing_model()
    options = {"chunks": 3, "checkpoint": checkpoint, "workers": workers, "transfer": transfer}
    pipe = scheduled(copy.deepcopy(plain), [2, 2, 2, 1], schedule, **options)
    for rows in (7, 2, 1):
        x, target = samples(rows, 3), targets(rows)
        assert_same(step(pipe, x, target, called=called), step(plain, x, target))


@pytest.mark.parametrize("components", FACTORIAL, ids=label)
@pytest.mark.parametrize("schedule", [None, "gpipe"])
@every_mode
def test_every_combination_of_components(components, checkpoint, schedule):
    plain, x = crossing_model(), samples(7, 3)
    expected = step(plain, x, targets(7))
    for transfer in ("direct", "host"):
        pipe = scheduled(
            copy.deepcopy(plain), [2, 2, 3], schedule,
            chunks=3, checkpoint=checkpoint, components=components, transfer=transfer,
        )  # fmt: skip
        assert_same(step(pipe, x, targets(7), called=True), expected)


def grid() -> list[tuple[str | None, str, str, int, int]]:
    sizes = product(ALL, MODES, ("always", "never"), range(1, 9), range(1, 9))
    return [case for case in sizes if case[0] not in DOUBLE or case[4] % 2 == 0]


@pytest.mark.parametrize(("schedule", "checkpoint", "workers", "m", "n"), grid() if EVERY_CASE else grid()[::61])
def test_every_number_of_microbatches_and_partitions(schedule, checkpoint, workers, m, n):
    torch.manual_seed(4)
    out, back = skip_pair()
    members = [Mix() for _ in range(8)]
    plain = nn.Sequential(nn.Sequential(out, members[0]), *members[1:7], nn.Sequential(members[7], back)).double()
    balance = [8 // n + (j < 8 % n) for j in range(n)]
    pipe = scheduled(copy.deepcopy(plain), balance, schedule, chunks=m, checkpoint=checkpoint, workers=workers)
    x, target = samples(2 * m - 1, 3), targets(2 * m - 1)
    assert_same(step(pipe, x, target), step(plain, x, target))


@pytest.mark.parametrize("per_device", [1, 2, 4])
@every_mode
def test_interleaved_with_any_number_of_partitions_per_device(checkpoint, per_device):
    plain = crossing_model().append(Mix().double())
    balance = [8 // (2 * per_device)] * (2 * per_device)
    options = {"devices": ["cpu"] * 2, "chunks": 3, "checkpoint": checkpoint, "schedule": "interleaved"}
    pipe = GPipe(copy.deepcopy(plain), balance, **options)
    assert_same(step(pipe, samples(7, 3), targets(7)), step(plain, samples(7, 3), targets(7)))


# --- what a step gives ----------------------------------------------------------------------------------------------


def chain() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(*(Mix() for _ in range(4))).double()


def chained(plain: nn.Sequential, schedule: str | None, **options) -> GPipe:
    return scheduled(copy.deepcopy(plain), [1] * 4, schedule, chunks=3, **options)


@pytest.mark.parametrize("schedule", ALL)
def test_the_loss_is_a_number_without_a_graph_and_the_output_has_none_either(schedule):
    pipe = chained(chain(), schedule)
    loss = pipe.step(samples(7, 3), targets(7), mean_loss)
    again, output = pipe.step(samples(7, 3), targets(7), mean_loss, return_output=True)
    assert (loss.shape, loss.requires_grad, output.requires_grad) == ((), False, False)
    assert torch.equal(loss, again)


@each_family
@every_mode
def test_gradients_accumulate_over_batches_of_any_size(schedule, called, checkpoint):
    plain = chain()
    pipe = chained(plain, schedule, checkpoint=checkpoint)
    for rows in (7, 4, 7, 0, 1):
        x, target = samples(rows, 3), targets(rows)
        assert_same(step(pipe, x, target, zero=False, called=called), step(plain, x, target, zero=False))


@pytest.mark.parametrize("schedule", ALL)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_where_grad_mode_is_off_nothing_runs_backward(schedule, mode):
    plain = chain()
    pipe = chained(plain, schedule)
    with mode():
        loss, output = pipe.step(samples(7, 3).detach(), targets(7), mean_loss, return_output=True)
        expected = plain(samples(7, 3).detach())
        torch.testing.assert_close((loss, output), (mean_loss(expected, targets(7)), expected))
    assert all(parameter.grad is None for parameter in pipe.parameters())


@each_family
def test_evaluation_checkpoints_nothing_and_trains_all_the_same(schedule, called):
    plain = nn.Sequential(Flags(), Flags(), nn.Dropout(0.5), Flags()).double().eval()
    pipe = chained(plain, schedule, checkpoint="always").eval()
    assert_same(step(pipe, samples(7, 3), targets(7), called=called), step(plain, samples(7, 3), targets(7)))
    assert pipe[0].seen == [(False, False)] * 3


@each_family
@every_mode
def test_layers_around_a_pipeline(schedule, called, checkpoint):
    """The batch is no leaf, and the loss has parameters of its own."""
    torch.manual_seed(3)
    before, head, plain = nn.Linear(3, 3).double(), nn.Linear(3, 1).double(), chain()
    pipe, found = chained(plain, schedule, checkpoint=checkpoint), []

    def loss(output, target):
        return (head(output).squeeze(1) - target).square().mean()

    for each in (pipe, plain):
        before.zero_grad()
        head.zero_grad()
        if each is pipe and not called:
            pipe.step(before(samples(7, 3)), targets(7), loss)
        else:
            loss(each(before(samples(7, 3))), targets(7)).backward()
        found.append([p.grad for layer in (before, each, head) for p in layer.parameters()])
    torch.testing.assert_close(*found)


@each_family
@every_mode
def test_a_loss_may_write_to_the_output(schedule, called, checkpoint):
    """What wrote the output keeps nothing of it, as in the plain module, which raises an error else."""

    def loss(output, target):
        output.mul_(2)
        return mean_loss(output, target)

    plain = chain()
    plain[3] = Affine().double()
    pipe = chained(plain, schedule, checkpoint=checkpoint)
    found = step(pipe, samples(7, 3), targets(7), loss, called=called)
    assert_same(found, step(plain, samples(7, 3), targets(7), loss))


@each_family
def test_targets_may_be_trained_themselves(schedule, called):
    plain, leaf = chain(), torch.ones(7, 3, dtype=torch.float64, requires_grad=True)
    step(chained(plain, schedule), samples(7, 3), leaf, nn.functional.mse_loss, called=called)
    found, leaf.grad = leaf.grad, None
    nn.functional.mse_loss(plain(samples(7, 3)), leaf).backward()
    torch.testing.assert_close(found, leaf.grad)
