"""Tied weights across processes: one gradient, the same in each process that has the weight, with the bits of one."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from gpipe_bench.distributed import Pipe
from gpipe_bench.errors import PeerError
from gpipe_bench.schedules import SCHEDULES
from tests.distributed.ranks import run_processes
from tests.distributed.virtual import results_of, run_ranks
from tests.engine.steps import DOUBLE, scheduled
from tests.engine.support import MODES
from tests.engine.test_tied import BATCH, TARGETS, WIDTH, WORDS, cross_entropy, tied

N, M = 4, 3
NAMES = ("embedding.weight", "side.decoder.weight", "head.weight")


def ranks_of(schedule):
    return N // 2 if schedule in DOUBLE else N


def trained(pipe, count=2, **options):
    """Losses, gradients, norms and weights of some steps."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01, weight_decay=0.1)
    losses, norms = [], []
    for _ in range(count):
        optimizer.zero_grad(**options)
        losses.append(pipe.step(BATCH, TARGETS, cross_entropy))
        clip = getattr(pipe, "clip_grad_norm_", lambda size: nn.utils.clip_grad_norm_(pipe.parameters(), size))
        norms.append(clip(0.5))
        optimizer.step()
    named = dict(pipe.named_parameters(remove_duplicate=False))
    return losses, norms, {name: (each.grad, each.detach()) for name, each in named.items()}


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_steps_have_the_bits_of_one_process(schedule, checkpoint):
    model = tied()
    losses, norms, weights = trained(
        scheduled(copy.deepcopy(model), [1] * N, schedule, chunks=M, checkpoint=checkpoint)
    )

    def job(group):
        own = copy.deepcopy(model)
        pipe = Pipe(own, [1] * N, schedule=schedule, group=group, chunks=M, checkpoint=checkpoint)
        return trained(pipe)

    found = results_of(ranks_of(schedule), job)
    assert all(torch.equal(one, other) for each, _, _ in found for one, other in zip(each, losses, strict=True))
    assert all(torch.equal(one, other) for _, each, _ in found for one, other in zip(each, norms, strict=True))
    seen = [(name, pair) for _, _, each in found for name, pair in each.items()]
    assert {name for name, _ in seen} == {*weights}
    for name, (grad, value) in seen:
        assert torch.equal(grad, weights[name][0]), name
        assert torch.equal(value, weights[name][1]), name


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_hooks_run_once_for_each_step_in_each_process(schedule):
    model = tied()

    def job(group):
        pipe, calls = Pipe(copy.deepcopy(model), [1] * N, schedule=schedule, group=group, chunks=M), []
        for parameter in {each for name, each in pipe.named_parameters() if name in NAMES}:
            parameter.register_hook(lambda grad: calls.append(grad.clone()))
            parameter.register_post_accumulate_grad_hook(lambda each: calls.append(each.grad.clone()))
        pipe.step(BATCH, TARGETS, cross_entropy)
        return calls

    found = [calls for calls in results_of(ranks_of(schedule), job) if calls]
    assert [len(calls) for calls in found] == [2] * (2 if schedule == "zb_v" else 3)
    assert all(torch.equal(call, found[0][0]) for calls in found for call in calls)


class Scores(nn.Module):
    """Uses its weight for some words only: a step without these gives no gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else x.new_zeros(len(x), WORDS) + x.sum() * 0


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_process_that_gave_no_gradient_gets_that_of_the_others(sign):
    def make():
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(3, WIDTH), Scores(), nn.Linear(WORDS, WIDTH), Scores())
        layers[3].linear.weight = layers[1].linear.weight
        nn.init.constant_(layers[0].bias, -5.0)
        nn.init.constant_(layers[2].bias, 5.0 * sign)
        return layers.double()

    plain, x = make(), torch.rand(4, 3, dtype=torch.float64) * 0.01
    plain(x).square().sum().backward()
    model = make()

    def job(group):
        pipe = Pipe(copy.deepcopy(model), [1] * N, group=group, chunks=1)
        pipe.step(x, x, lambda output, _: output.square().sum(), reduction="sum")
        return {name: parameter.grad for name, parameter in pipe.named_parameters(remove_duplicate=False)}

    grads = {name: grad for each in results_of(N, job) for name, grad in each.items()}
    expected = plain[1].linear.weight.grad
    for name in ("1.linear.weight", "3.linear.weight"):
        if expected is None:
            assert grads[name] is None
        else:
            torch.testing.assert_close(grads[name], expected)


def on_meta():
    with torch.device("meta"):
        return tied()


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_weights_from_meta_are_tied_and_equal_everywhere(schedule):
    def job(group):
        def materialise(module):
            if not isinstance(module, nn.Sequential):
                getattr(module, "reset_parameters", lambda: None)()

        pipe = Pipe(on_meta(), [1] * N, schedule=schedule, group=group, materialise=materialise)
        if schedule == "zb_v" and group.rank() == 0:
            assert pipe[0].weight is pipe[1].weight
        return {name: value for name, value in pipe.state_dict().items() if name in NAMES}

    found = [value for each in results_of(ranks_of(schedule), job) for value in each.values()]
    assert len(found) == (4 if schedule == "zb_v" else 5)
    assert all(torch.equal(value, found[0]) and value.any() for value in found)


def test_processes_begin_with_the_values_of_the_first_one():
    def job(group):
        model = tied()
        nn.init.constant_(model[0].weight, group.rank() + 1.0)
        pipe = Pipe(model, [1] * N, group=group)
        return {name: float(value.mean()) for name, value in pipe.state_dict().items() if name in NAMES}

    first, *others = [each for each in results_of(N, job) if each]
    assert first == {NAMES[0]: 1.0}
    assert others == [{NAMES[0]: 1.0, name: 1.0} for name in NAMES[1:]]


def test_a_weight_has_the_name_of_the_plain_module_in_each_process():
    def job(group):
        pipe = Pipe(tied(), [2, 2], group=group)
        assert [*pipe] == [*pipe.partitions[group.rank()]]
        assert pipe[0] is pipe.partitions[group.rank()][0]
        assert len(pipe) == 2
        return [name for name, _ in pipe.named_parameters()]

    first, second = results_of(2, job)
    assert first[0] == second[0] == NAMES[0]
    assert {*first, *second} == {name for name, _ in tied().named_parameters()}


def change(parameter):
    parameter.data[0, 0] += 1


def freeze(parameter):
    parameter.requires_grad_(requires_grad=False)


@pytest.mark.parametrize(("spoil", "got"), [(change, "other values"), (freeze, "a frozen one in one of them")])
@pytest.mark.parametrize("place", [0, 2])
def test_a_weight_that_is_not_the_same_everywhere_is_noticed(place, spoil, got):
    model = tied()

    def job(group):
        pipe = Pipe(copy.deepcopy(model), [2, 2], group=group, chunks=M)
        if group.rank() == place // 2:
            spoil(dict(pipe.named_parameters())["embedding.weight"])
        pipe.step(BATCH, TARGETS, cross_entropy)

    results = run_ranks(2, job)
    rule = "a tied weight must be the same in all processes that have it"
    assert str(results[0]) == (
        f"{rule}, got {got} on ranks 0 and 1 for 'embedding.weight'; load and change it in both, and step with the "
        "same optimizer"
    )
    assert isinstance(results[1], PeerError)


# --- in processes of their own ---------------------------------------------------------------------------------------


def replicated(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    pipe = Pipe(tied(), [1] * N, chunks=M, schedule="zb_v", mesh=mesh["pipeline"], replicas=mesh["data"])
    own = slice(None, None, 2) if rank < 2 else slice(1, None, 2)
    pipe.step(BATCH[own], TARGETS[own], cross_entropy)
    return {name: parameter.grad for name, parameter in pipe.named_parameters(remove_duplicate=False)}


def test_replicas_average_the_sum(tmp_path):
    """Over gloo, where seeds have a model of it; a process has two of the places of the weight."""
    results = run_processes(4, tmp_path, replicated)
    plain = tied()
    (cross_entropy(plain(BATCH), TARGETS) / 2).backward()
    for found in results:
        for name, grad in found.items():
            torch.testing.assert_close(grad, dict(plain.named_parameters(remove_duplicate=False))[name].grad)
    tied_ones = [grad for found in results for name, grad in found.items() if name in NAMES]
    assert all(torch.equal(grad, tied_ones[0]) for grad in tied_ones)


def scaled(rank):
    """The factor after each step, and the weights: gradients are infinite in step 1, and in step 2 in one process."""
    pipe = Pipe(tied(), [2, 2], chunks=M)
    optimizer, scaler, scales = torch.optim.SGD(pipe.parameters(), lr=0.01), ShardedGradScaler("cpu", 1024.0), []
    scaler.scale(torch.ones(()))
    for number in range(4):
        factor = torch.inf if number == 1 else 1.0

        def loss(output, target, factor=factor):
            return scaler.scale(cross_entropy(output, target) * factor)

        optimizer.zero_grad()
        pipe.step(BATCH, TARGETS, loss, reduction="sum")
        if number == 2 and rank == 1:
            pipe.head.bias.grad.fill_(torch.inf)
        scaler.unscale_(optimizer)
        pipe.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, dict(pipe.named_parameters())


def test_a_sharded_scaler_skips_the_same_steps_in_all_processes(tmp_path):
    results = run_processes(2, tmp_path, scaled)
    plain = tied()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for _ in range(2):  # those that are not skipped
        optimizer.zero_grad()
        cross_entropy(plain(BATCH), TARGETS).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
    expected = dict(plain.named_parameters())
    for scales, weights in results:
        assert scales == [1024, 512, 256, 256]
        torch.testing.assert_close(weights, {name: expected[name] for name in weights})
    assert torch.equal(results[0][1][NAMES[0]], results[1][1][NAMES[0]])


OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def continued(model, folder, *, load):
    """Losses of two steps, from the state in a folder, or from the beginning, where the state goes into the folder."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    alone = not isinstance(model, Pipe)

    def state():
        return {
            "model": model.state_dict(),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=OPTIONS),
        }

    losses = []
    if load:
        found = state()
        dcp.load(found, checkpoint_id=folder, no_dist=alone)
        model.load_state_dict(found["model"])
        set_optimizer_state_dict(model, optimizer, found["optimizer"], options=OPTIONS)
    for number in range(2 if load else 3):
        optimizer.zero_grad()
        if alone:
            loss = cross_entropy(model(BATCH), TARGETS)
            loss.backward()
        else:
            loss = model.step(BATCH, TARGETS, cross_entropy)
        losses.append(loss.item())
        optimizer.step()
        if not load and number == 0:
            dcp.save(state(), checkpoint_id=folder, no_dist=alone)
    return losses[-2:]


def in_two(rank, balance, folder, load):
    return continued(Pipe(tied(), balance, chunks=M), folder, load=load)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    ("saved", "loaded"), [("plain", "[3, 1]"), ("[2, 2]", "[3, 1]"), ("[3, 1]", "plain")], ids=lambda name: name
)
def test_states_move_between_processes_of_any_balance_and_the_plain_module(saved, loaded, tmp_path):
    folder, losses = str(tmp_path / "checkpoint"), []
    for name, load in ((saved, False), (loaded, True)):
        if name == "plain":
            losses.append(continued(tied(), folder, load=load))
        else:
            own = tmp_path / name
            own.mkdir()
            first, second = run_processes(2, own, in_two, [int(name[1]), int(name[4])], folder, load)
            assert first == second
            losses.append(first)
    torch.testing.assert_close(losses[1], losses[0])
