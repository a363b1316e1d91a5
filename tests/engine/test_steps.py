"""``pipe.step``: what it gives, for both pipelines, and what is particular to zero-bubble schedules."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from gpipe_bench import NoChunk, Pipe
from gpipe_bench.schedules import SCHEDULES
from tests.engine.steps import ALL, DOUBLE, SPLIT, mean_loss, samples, scheduled, step, targets
from tests.engine.support import MODES, Affine, Flags, Mix, Watch, assert_same, grid

every_schedule = pytest.mark.parametrize("schedule", ALL)
every_mode = pytest.mark.parametrize("checkpoint", MODES)
both_workers = pytest.mark.parametrize("workers", ["always", "never"])


def chain(n: int = 4) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(*(Mix() for _ in range(n))).double()


# --- what it gives ---------------------------------------------------------------------------------------------------


@every_schedule
@every_mode
def test_the_loss_is_a_number_without_a_graph_and_the_output_has_none_either(schedule, checkpoint):
    pipe = scheduled(chain(), [1] * 4, schedule, chunks=3, checkpoint=checkpoint)
    loss = pipe.step(samples(7, 3), targets(7), mean_loss)
    again, output = pipe.step(samples(7, 3), targets(7), mean_loss, return_output=True)
    assert (loss.shape, loss.requires_grad, output.requires_grad) == ((), False, False)
    assert torch.equal(loss, again)
    torch.testing.assert_close(output, chain()(samples(7, 3)).detach())


@every_schedule
def test_gradients_accumulate_over_steps(schedule):
    plain = chain()
    pipe = scheduled(copy.deepcopy(plain), [1] * 4, schedule, chunks=3)
    for rows in (7, 4, 7):
        found, expected = (step(model, samples(rows, 3), targets(rows), zero=False) for model in (pipe, plain))
        assert_same(found, expected)


@every_schedule
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_where_grad_mode_is_off_nothing_runs_backward(schedule, mode):
    plain = chain()
    pipe = scheduled(copy.deepcopy(plain), [1] * 4, schedule, chunks=3)
    with mode():
        loss, output = pipe.step(samples(7, 3).detach(), targets(7), mean_loss, return_output=True)
        expected = plain(samples(7, 3).detach())
        torch.testing.assert_close((loss, output), (mean_loss(expected, targets(7)), expected))
    assert all(parameter.grad is None for parameter in pipe.parameters())


@every_schedule
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_where_grad_mode_is_off_a_pipeline_can_be_called(schedule, mode):
    plain = chain()
    pipe = scheduled(copy.deepcopy(plain), [1] * 4, schedule, chunks=3)
    with mode():
        torch.testing.assert_close(pipe(samples(7, 3)), plain(samples(7, 3)))


@every_schedule
def test_evaluation_checkpoints_nothing_and_trains_all_the_same(schedule):
    plain = nn.Sequential(Flags(), Flags(), nn.Dropout(0.5), Flags()).double().eval()
    pipe = scheduled(copy.deepcopy(plain), [1] * 4, schedule, chunks=3, checkpoint="always").eval()
    assert_same(step(pipe, samples(7, 3), targets(7)), step(plain, samples(7, 3), targets(7)))
    assert pipe[0].seen == [(False, False)] * 3


@every_schedule
def test_the_batch_may_come_from_layers_before(schedule):
    """A tensor that is no leaf: its gradient goes on."""
    before = nn.Linear(3, 3).double()
    plain = chain()
    pipe = scheduled(copy.deepcopy(plain), [1] * 4, schedule, chunks=3)
    pipe.step(before(samples(7, 3)), targets(7), mean_loss)
    found = before.weight.grad.clone()
    before.zero_grad()
    mean_loss(plain(before(samples(7, 3))), targets(7)).backward()
    torch.testing.assert_close(found, before.weight.grad)


@every_schedule
@both_workers
def test_a_loss_may_have_parameters_of_its_own(schedule, workers):
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1).double()

        def forward(self, output, target):
            return (self.linear(output).squeeze(1) - target).square().mean()

    torch.manual_seed(3)
    head = Head()
    twin, plain = copy.deepcopy(head), chain()
    pipe = scheduled(copy.deepcopy(plain), [1] * 4, schedule, chunks=3, workers=workers)
    assert_same(step(pipe, samples(7, 3), targets(7), head), step(plain, samples(7, 3), targets(7), twin))
    torch.testing.assert_close([p.grad for p in head.parameters()], [p.grad for p in twin.parameters()])


@every_schedule
@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (nn.functional.mse_loss, torch.ones(7, 3, dtype=torch.float64)),
        (nn.functional.cross_entropy, torch.arange(7) % 3),
        (lambda output, target: (output - target["a"] * target["b"][0]).abs().mean(),
         {"a": torch.ones(7, 3), "b": (torch.full((7, 1), 2.0), None)}),
        (lambda output, _: output.square().mean().reshape(1), None),
    ],
    ids=["tensor", "classes", "dict", "none"],
)  # fmt: skip
def test_targets_of_all_kinds(loss, target, schedule):
    plain = chain()
    pipe = scheduled(copy.deepcopy(plain), [1] * 4, schedule, chunks=3)
    x = samples(7, 3)
    found = pipe.step(x, target, loss)
    expected = loss(plain(x.detach()), target)
    expected.sum().backward()
    torch.testing.assert_close(found, expected.detach().reshape(()))
    torch.testing.assert_close([p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()])


@every_schedule
@every_mode
@both_workers
def test_a_loss_may_write_to_the_output(schedule, checkpoint, workers):
    """What wrote the output keeps nothing of it, as in the plain module, which raises an error else."""

    def loss(output, target):
        output.mul_(2)
        return mean_loss(output, target)

    torch.manual_seed(4)
    plain = nn.Sequential(Mix(), Mix(), Mix(), Affine()).double()
    pipe = scheduled(copy.deepcopy(plain), [1] * 4, schedule, chunks=3, checkpoint=checkpoint, workers=workers)
    assert_same(step(pipe, samples(7, 3), targets(7), loss), step(plain, samples(7, 3), targets(7), loss))


@every_schedule
def test_targets_may_be_trained_themselves(schedule):
    plain, leaf = chain(), torch.ones(7, 3, dtype=torch.float64, requires_grad=True)
    scheduled(copy.deepcopy(plain), [1] * 4, schedule, chunks=3).step(samples(7, 3), leaf, nn.functional.mse_loss)
    found, leaf.grad = leaf.grad, None
    nn.functional.mse_loss(plain(samples(7, 3)), leaf).backward()
    torch.testing.assert_close(found, leaf.grad)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_loss_is_computed_for_each_microbatch_beside_other_tasks(schedule):
    """In 1F1B and later ones the first backward pass comes before the last forward pass."""
    order = []

    class Last(Mix):
        def forward(self, x):
            order.append("F")
            return super().forward(x)

    def loss(output, target):
        order.append("L")
        return mean_loss(output, target)

    layers = nn.Sequential(Mix(), Mix(), Mix(), Last())
    scheduled(layers.double(), [1] * 4, schedule, chunks=6, checkpoint="never").step(samples(6, 3), targets(6), loss)
    assert order == ["F", "L"] * 6


# --- Pipe ------------------------------------------------------------------------------------------------------------


class Gate(nn.Module):
    """Three inputs, of which the last is not split."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = Mix()

    def forward(self, x, gate, whole):
        assert whole.shape == (2, 3)
        return self.mix(x) * gate, gate


class Close(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = Mix()

    def forward(self, x, gate):
        return self.mix(x) + gate


@pytest.mark.parametrize("schedule", ALL)
@every_mode
def test_pipe_takes_several_inputs(schedule, checkpoint):
    torch.manual_seed(4)
    layers = [Gate(), Close(), Mix(), Mix()]
    plain = [copy.deepcopy(layer).double() for layer in layers]
    pipe = Pipe(nn.Sequential(*layers).double(), 3, checkpoint, balance=[1] * 4, schedule=schedule)
    x, gate = samples(7, 3), samples(7, 1, requires_grad=False)
    loss, output = pipe.step(
        (x, gate, NoChunk(torch.zeros(2, 3))), targets(7), mean_loss, return_output=True
    )  # fmt: skip
    found = x.grad.clone()
    x.grad = None
    expected = plain[3](plain[2](plain[1](*plain[0](x, gate, torch.zeros(2, 3)))))
    total = mean_loss(expected, targets(7))
    total.backward()
    torch.testing.assert_close((loss, output, found), (total.detach(), expected.detach(), x.grad))
    for layer, other in zip(pipe, plain, strict=True):
        torch.testing.assert_close([p.grad for p in layer.parameters()], [p.grad for p in other.parameters()])


def test_pipe_takes_inputs_by_name():
    pipe = Pipe(nn.Sequential(Gate(), Close()).double(), 3, balance=[1, 1], schedule="1f1b")
    x, gate, whole = samples(7, 3), samples(7, 1), NoChunk(torch.zeros(2, 3))
    expected = pipe.step((x, gate, whole), targets(7), mean_loss)
    assert torch.equal(pipe.step(x, targets(7), mean_loss, gate=gate, whole=whole), expected)
    assert torch.equal(pipe.step((), targets(7), mean_loss, x=x, gate=gate, whole=whole), expected)


def test_pipe_takes_one_input_as_it_is():
    plain = chain()
    pipe = Pipe(copy.deepcopy(plain), 3, balance=[1] * 4, schedule="1f1b")
    loss = pipe.step(samples(7, 3), targets(7), mean_loss)
    torch.testing.assert_close(loss, mean_loss(plain(samples(7, 3)), targets(7)).detach())


# --- zero bubble -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
@every_mode
@both_workers
def test_a_checkpointed_forward_pass_runs_exactly_twice(schedule, checkpoint, workers):
    layers = [Flags() for _ in range(4)]
    pipe = scheduled(nn.Sequential(*layers), [1] * 4, schedule, chunks=4, checkpoint=checkpoint, workers=workers)
    pipe.step(torch.ones(4, 3), torch.ones(4), mean_loss)
    again = {"always": 4, "except_last": 3, "never": 0}[checkpoint]
    for layer in layers:
        assert sorted(layer.seen) == sorted(
            [(True, False)] * again + [(False, False)] * (4 - again) + [(False, True)] * again
        )


@pytest.mark.parametrize("schedule", SPLIT)
@every_mode
def test_hooks_of_weights_run_once_for_each_microbatch(schedule, checkpoint):
    seen = []
    plain = chain()
    pipe = scheduled(copy.deepcopy(plain), [1] * 4, schedule, chunks=3, checkpoint=checkpoint)
    pipe[1].linear.weight.register_hook(lambda grad: seen.append(grad.clone()))
    step(pipe, samples(7, 3), targets(7))
    expected = step(plain, samples(7, 3), targets(7)).gradients["1.linear.weight"]
    assert len(seen) == 3
    torch.testing.assert_close(sum(seen), expected)


@pytest.mark.parametrize("schedule", SPLIT)
@every_mode
def test_an_observer_sees_both_halves_of_each_backward_pass_once(schedule, checkpoint):
    pipe = scheduled(chain(), [1] * 4, schedule, chunks=3, checkpoint=checkpoint, transfer="host")
    with pipe.observe(watch := Watch()):
        pipe.step(samples(7, 3), targets(7), mean_loss)
    recomputed = {"always": 3, "except_last": 2, "never": 0}[checkpoint]
    assert watch.names("FRIW") == sorted(
        [*grid("F", range(3), range(4)), *grid("R", range(recomputed), range(4)), *grid("I", range(3), range(4)),
         *grid("W", range(3), range(4))]
    )  # fmt: skip
    # the turning point of a V is within a device
    crossed = [1, 3] if schedule in DOUBLE else [1, 2, 3]
    assert watch.names("Cc") == sorted([*grid("C", range(3), crossed), *grid("c", range(3), crossed)])
    assert {seen.finished for seen in watch.seen} == {1}


class Product(torch.autograd.Function):
    """x times w, as a node made in Python."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum(0)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x):
        return Product.apply(x, self.weight).tanh()


@pytest.mark.parametrize("schedule", SPLIT)
@every_mode
def test_weights_of_functions_made_in_python(schedule, checkpoint):
    plain = nn.Sequential(*(Scale() for _ in range(4))).double()
    pipe = scheduled(copy.deepcopy(plain), [1] * 4, schedule, chunks=3, checkpoint=checkpoint)
    assert_same(*(step(model, samples(7, 3), targets(7)) for model in (pipe, plain)))


@pytest.mark.parametrize("schedule", SPLIT)
def test_weights_wait_for_w(schedule):
    """Until the action W(i, j), no weight of partition j has a gradient of micro-batch i."""
    pipe = scheduled(chain(), [1] * 4, schedule, chunks=3, checkpoint="never", workers="never")
    counts = [0] * 4
    for j, layer in enumerate(pipe):
        layer.linear.weight.register_hook(lambda _, j=j: counts.__setitem__(j, counts[j] + 1))

    class Counts(Watch):
        def start(self, task):
            seen = super().start(task)
            if task.kind == "backward_weights":
                before.append((task.partition, counts[task.partition]))
            return seen

        def finish(self, token, nbytes):
            super().finish(token, nbytes)
            if token.task.kind == "backward_weights":
                after.append((token.task.partition, counts[token.task.partition]))

    before, after = [], []
    with pipe.observe(Counts()):
        pipe.step(samples(7, 3), targets(7), mean_loss)
    for j in range(4):
        assert [count for partition, count in before if partition == j] == [0, 1, 2]
        assert [count for partition, count in after if partition == j] == [1, 2, 3]


@pytest.mark.parametrize("schedule", DOUBLE)
def test_with_two_partitions_per_device_one_thread_runs_both(schedule):
    threads: list[set[str]] = [set() for _ in range(4)]

    class Where(Mix):
        def __init__(self, j: int) -> None:
            super().__init__()
            self.j = j

        def forward(self, x: Tensor) -> Tensor:
            threads[self.j].add(threading.current_thread().name)
            return super().forward(x)

    pipe = scheduled(nn.Sequential(*(Where(j) for j in range(4))).double(), [1] * 4, schedule, chunks=3)
    pipe.step(samples(6, 3), targets(6), mean_loss)
    other = 2 if schedule in ("interleaved", "looped_bfs") else 3
    assert [len(names) for names in threads] == [1] * 4
    assert threads[0] == threads[other]
    assert len(set.union(*threads)) == 2


@pytest.mark.parametrize("schedule", [*SCHEDULES])
def test_how_often_a_checkpoint_within_a_layer_runs_its_layers(schedule):
    """PyTorch keeps what it recomputed for one call of autograd: B and I are one, W one per level of weights."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
            self.runs = 0

        def run(self, x: Tensor) -> Tensor:
            self.runs += 1
            return self.layers(x)

        def forward(self, x: Tensor) -> Tensor:
            return torch_checkpoint(self.run, x, use_reentrant=False)

    inner = Checkpointed()
    layers = nn.Sequential(Mix(), inner, Mix(), Mix()).double()
    pipe = scheduled(layers, [1] * 4, schedule, chunks=3, checkpoint="never", workers="never")
    pipe.step(samples(6, 3), targets(6), mean_loss)
    forward, inputs, weights = 1, 1, 2
    assert inner.runs == 3 * (forward + inputs + weights * (schedule in SPLIT))
