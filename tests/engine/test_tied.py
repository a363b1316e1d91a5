"""Tied weights: one parameter in several partitions, with the names, states and hooks that the plain module gives it.

The bits of its gradient: each device of the schedule sums what its tasks give, in their order, and the sums of the
devices are added up, that of the last partition first.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from gpipe_bench import MicroBatches, WithDevice
from gpipe_bench.engine.placed import placed_partitions
from gpipe_bench.schedules import named_schedule
from tests.engine.steps import ALL, DOUBLE, backward_orders, scheduled
from tests.engine.support import MODES, on_cpu

N, M, WORDS, WIDTH = 4, 3, 10, 6
WHERE = (0, 2, 3)
"""Partitions that have the tied weight."""
LAYERS = ("embedding", "body", "side", "head")
BATCH = torch.arange(12) % WORDS
TARGETS = (torch.arange(12) * 3) % WORDS
cross_entropy = nn.CrossEntropyLoss(reduction="sum")


class Side(nn.Module):
    """Predicts words, and adds their scores to what comes."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.decoder, self.norm = nn.Linear(width, WORDS, bias=False), nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(x + self.decoder(x)[..., :WIDTH])


def untied():
    """Four layers with names, of which three have the same values, each in a parameter of its own."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for name, layer in zip(
        LAYERS,
        (nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), Side(), nn.Linear(WIDTH, WORDS)),
        strict=True,
    ):
        model.add_module(name, layer)
    with torch.no_grad():
        model.side.decoder.weight.copy_(model.embedding.weight)
        model.head.weight.copy_(model.embedding.weight)
    return model.double()


def tied():
    model = untied()
    model.side.decoder.weight = model.head.weight = model.embedding.weight
    return model


def ready(value):
    return MicroBatches([*value.chunk(M)])


def in_devices(schedule):
    """For each device of a schedule its (i, j), in the order in which they give gradients of weights."""
    if schedule is None:
        return [[(i, j) for i in reversed(range(M))] for j in range(N)]
    lists = named_schedule(schedule, M, N, N // 2 if schedule in DOUBLE else N).devices
    return [[(i, j) for kind, i, j in actions if kind in "BW"] for actions in lists]


def summed(grads):
    total = grads[0].clone()
    for grad in grads[1:]:
        total += grad
    return total


def expected(schedule):
    """Losses and gradients, from each micro-batch and each use of the weight by itself."""
    losses, grads = [], []
    for x, target in zip(BATCH.chunk(M), TARGETS.chunk(M), strict=True):
        model = untied()
        loss = cross_entropy(model(x), target)
        loss.backward()
        losses.append(loss.detach())
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    names = {0: "embedding.weight", 2: "side.decoder.weight", 3: "head.weight"}
    found = {}
    for j, order in enumerate(backward_orders(schedule, M, N)):
        for name in grads[0]:
            if name.startswith(LAYERS[j]) and name not in names.values():
                found[name] = summed([grads[i][name] for i in order])
    sums = {}
    for tasks in in_devices(schedule):
        own = [(i, j) for i, j in tasks if j in WHERE]
        if own:
            sums[max(j for _, j in own)] = summed([grads[i][names[j]] for i, j in own])
    found["embedding.weight"] = summed([sums[j] for j in sorted(sums, reverse=True)])
    return torch.stack(losses).sum(), found


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", ALL)
def test_the_bits_of_gradients(schedule, checkpoint):
    pipe = scheduled(tied(), [1] * N, schedule, checkpoint=checkpoint)
    loss = pipe.step(ready(BATCH), ready(TARGETS), cross_entropy)
    there, grads = expected(schedule)
    assert torch.equal(loss, there)
    found = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    assert found.keys() == grads.keys()
    assert [name for name in grads if not torch.equal(found[name], grads[name])] == []
    plain = tied()
    cross_entropy(plain(BATCH), TARGETS).backward()
    torch.testing.assert_close(found, {name: parameter.grad for name, parameter in plain.named_parameters()})


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", ALL)
def test_where_sums_are_exact_the_bits_are_those_of_the_plain_module(schedule, checkpoint):
    """All numbers are whole: no order of additions changes a bit."""
    model = nn.Sequential(
        nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WORDS, bias=False)
    )
    for parameter in model.parameters():
        parameter.data.random_(-3, 4, generator=torch.Generator().manual_seed(parameter.numel()))
    model[3].weight = model[0].weight
    plain = copy.deepcopy(model)
    pipe = scheduled(model, [1] * N, schedule, chunks=M, checkpoint=checkpoint)

    def loss(output, target):
        return (output * target[:, None]).sum()

    for _ in range(2):  # gradients of both steps add up
        value = pipe.step(BATCH, TARGETS, loss, reduction="sum")
        there = loss(plain(BATCH), TARGETS)
        there.backward()
        assert torch.equal(value, there.detach())
    for (name, parameter), other in zip(pipe.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad), name


class Twice(nn.Linear):
    """Predicts words from what it predicts."""

    def forward(self, x):
        return super().forward(super().forward(x)[..., :WIDTH])


def used_twice(model):
    weight = model.head.weight
    model.head = Twice(WIDTH, WORDS).double()
    model.head.weight = weight


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", [None, "gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "side", nn.Tanh()),
        lambda model: None,  # three uses
        used_twice,
    ],
)
def test_a_single_microbatch_whose_devices_use_it_once_has_the_bits_of_the_plain_module(change, schedule, checkpoint):
    """The device with the last partition that has it may use it several times."""
    model = tied()
    change(model)
    plain = copy.deepcopy(model)
    scheduled(model, [1] * N, schedule, checkpoint=checkpoint).step(BATCH, TARGETS, cross_entropy)
    cross_entropy(plain(BATCH), TARGETS).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", [None, "gpipe", "1f1b", "zb_v"])
def test_hooks_run_as_often_as_in_the_plain_module(schedule, checkpoint):
    """Once per step, with the whole gradient; an optimizer may step in one."""
    seen = {}
    models = {"plain": tied(), "pipe": scheduled(tied(), [1] * N, schedule, chunks=M, checkpoint=checkpoint)}
    for kind, model in models.items():
        calls = seen[kind] = []
        weight = model[0].weight
        weight.register_hook(lambda grad, calls=calls: calls.append(grad.clone()))

        def update(parameter, calls=calls):
            calls.append(parameter.grad.clone())
            parameter.data -= 0.1 * parameter.grad
            parameter.grad = None

        weight.register_post_accumulate_grad_hook(update)
        for _ in range(2):
            if kind == "plain" or schedule == "gpipe":
                cross_entropy(model(BATCH), TARGETS).backward()
            else:
                model.step(BATCH, TARGETS, cross_entropy)
    assert len(seen["pipe"]) == len(seen["plain"]) == 4
    torch.testing.assert_close(seen["pipe"], seen["plain"])
    torch.testing.assert_close(models["pipe"].state_dict(), models["plain"].state_dict())


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("schedule", [None, "1f1b", "interleaved", "zb_v"])
def test_an_optimizer_knows_one_parameter(schedule, set_to_none):
    plain, pipe = tied(), scheduled(tied(), [1] * N, schedule, chunks=M)
    norms = []
    for model in (plain, pipe):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            if model is pipe:
                model.step(BATCH, TARGETS, cross_entropy)
            else:
                cross_entropy(model(BATCH), TARGETS).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
        assert len(optimizer.state_dict()["state"]) == len([*plain.parameters()])
    torch.testing.assert_close(norms[:3], norms[3:])
    torch.testing.assert_close(pipe.state_dict(), plain.state_dict())
    assert pipe[0].weight is pipe[2].decoder.weight is pipe[3].weight


@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_a_scaler_scales_it_once(schedule):
    plain, pipe = tied(), scheduled(tied(), [1] * N, schedule, chunks=M)
    for model in (plain, pipe):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for factor in (1.0, torch.inf, 1.0):  # the second step is skipped

            def loss(output, target, factor=factor, scaler=scaler):
                return scaler.scale(cross_entropy(output, target) * factor)

            if model is pipe:
                model.step(BATCH, TARGETS, loss, reduction="sum")
            else:
                loss(model(BATCH), TARGETS).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 512
    torch.testing.assert_close(pipe.state_dict(), plain.state_dict())


def test_names_and_states_are_those_of_the_plain_module():
    plain, pipe = tied(), on_cpu(tied(), [1] * N)
    for names in ("state_dict", "named_parameters"):
        assert [name for name, _ in dict(getattr(pipe, names)()).items()] == [*dict(getattr(plain, names)())]
    changed = {name: torch.full_like(value, 0.5) for name, value in plain.state_dict().items()}
    pipe.load_state_dict(changed)
    assert pipe[0].weight is pipe[3].weight
    torch.testing.assert_close(pipe.state_dict(), changed)
    torch.testing.assert_close(nn.Sequential(*pipe)(BATCH), pipe(BATCH))


@pytest.mark.parametrize("schedule", [None, "zb_v"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_a_copy_of_a_pipeline_is_tied(copied, schedule):
    pipe = scheduled(tied(), [1] * N, schedule, chunks=M)
    pipe.step(BATCH, TARGETS, cross_entropy)
    other = copied(pipe)
    other.zero_grad()
    other.step(BATCH, TARGETS, cross_entropy)
    assert other[0].weight is other[3].weight is not pipe[0].weight
    assert torch.equal(other[0].weight.grad, pipe[0].weight.grad)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", [None, "1f1b", "zb_v"])
def test_a_frozen_one_gets_no_gradient(schedule, checkpoint):
    plain, pipe = tied(), scheduled(tied(), [1] * N, schedule, chunks=M, checkpoint=checkpoint)
    for model in (plain, pipe):
        model[0].weight.requires_grad_(requires_grad=False)
    cross_entropy(plain(BATCH), TARGETS).backward()
    pipe.step(BATCH, TARGETS, cross_entropy)
    assert pipe[0].weight.grad is None
    torch.testing.assert_close(pipe[1].weight.grad, plain[1].weight.grad)


@pytest.mark.parametrize("schedule", [None, "gpipe"])
@pytest.mark.parametrize("checkpoint", MODES)
def test_weights_may_be_tied_and_untied_between_batches(schedule, checkpoint):
    plain, pipe = untied(), scheduled(untied(), [1] * N, schedule, chunks=M, checkpoint=checkpoint)

    def check():
        for model in (plain, pipe):
            model.zero_grad()
            cross_entropy(model(BATCH), TARGETS).backward()
        grads = [{name: each.grad for name, each in model.named_parameters()} for model in (plain, pipe)]
        torch.testing.assert_close(grads[1], grads[0])

    check()
    for model in (plain, pipe):
        model.head.weight = model.embedding.weight
    check()
    for model in (plain, pipe):
        model.head = nn.Linear(WIDTH, WORDS).double()
        model.head.load_state_dict(plain.head.state_dict())
        model.head.weight = model.side.decoder.weight
    check()
    for model in (plain, pipe):
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    check()


@pytest.fixture
def _new_parameters():
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


@pytest.mark.usefixtures("_new_parameters")
def test_it_stays_tied_where_moving_a_module_makes_new_parameters():
    model = tied()
    before = model[0].weight
    pipe = on_cpu(model, [1] * N)
    assert pipe[3].weight is pipe[2].decoder.weight is pipe[0].weight is not before


def test_a_pipe_places_a_tied_layer_by_what_else_it_has_or_where_the_layer_before_it_runs():
    embedding = nn.Embedding(WORDS, WIDTH)
    head, other = nn.Linear(WIDTH, WORDS, bias=False), nn.Linear(WIDTH, WORDS, device="meta")
    head.weight = other.weight = embedding.weight
    body = nn.Linear(WIDTH, WIDTH, device="meta")
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert placed_partitions(nn.Sequential(embedding, nn.ReLU(), head)) == ([3], [cpu])
    assert placed_partitions(nn.Sequential(embedding, body, head)) == ([1, 2], [cpu, meta])
    assert placed_partitions(nn.Sequential(embedding, other)) == ([1, 1], [cpu, meta])
    assert placed_partitions(nn.Sequential(embedding, WithDevice(head, "meta"))) == ([1, 1], [cpu, meta])


@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_a_sparse_gradient_and_a_dense_one(schedule):
    model = tied()
    model.embedding.sparse = True
    plain, pipe = copy.deepcopy(model), scheduled(model, [1] * N, schedule, chunks=M)
    cross_entropy(plain(BATCH), TARGETS).backward()
    pipe.step(BATCH, TARGETS, cross_entropy)
    torch.testing.assert_close(pipe[0].weight.grad, plain[0].weight.grad)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("schedule", [None, "1f1b", "zb_h1"])
def test_a_checkpoint_of_pytorch_in_a_layer(schedule, reentrant):
    class Inner(nn.Linear):
        def forward(self, x):
            return torch_checkpoint(super().forward, x, use_reentrant=reentrant)

    model = tied()
    weight = model.head.weight
    model.head = Inner(WIDTH, WORDS).double()
    model.head.weight = weight
    plain, pipe = copy.deepcopy(model), scheduled(model, [1] * N, schedule, chunks=M, checkpoint="never")
    cross_entropy(plain(BATCH), TARGETS).backward()
    pipe.step(BATCH, TARGETS, cross_entropy)
    torch.testing.assert_close(pipe[0].weight.grad, plain[0].weight.grad)


def test_derivatives_of_derivatives():
    plain, pipe = tied(), on_cpu(tied(), [1] * N, chunks=M, checkpoint="never")
    found = []
    for model in (plain, pipe):
        parameters = [*model.parameters()]
        first = torch.autograd.grad(cross_entropy(model(BATCH), TARGETS), parameters, create_graph=True)
        found.append((first, torch.autograd.grad(sum(grad.square().sum() for grad in first), parameters)))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("schedule", [None, "gpipe"])
def test_a_hook_may_run_another_batch_while_copies_are_in_the_place_of_the_weight(schedule, checkpoint):
    plain, pipe = tied(), scheduled(tied(), [1] * N, schedule, chunks=M, checkpoint=checkpoint, workers="never")
    evaluated = []

    def again(*_):
        if len(evaluated) < 1:
            evaluated.append(None)
            with torch.enable_grad():
                evaluated[0] = cross_entropy(pipe(BATCH), TARGETS)

    pipe.head.register_full_backward_pre_hook(again)
    cross_entropy(pipe(BATCH), TARGETS).backward()
    evaluated[0].backward()
    for _ in range(2):
        cross_entropy(plain(BATCH), TARGETS).backward()
    grads = [{name: each.grad for name, each in model.named_parameters()} for model in (plain, pipe)]
    torch.testing.assert_close(grads[1], grads[0])
    assert pipe[3].weight is pipe[0].weight


def test_after_an_error_the_weight_is_in_its_place():
    pipe = on_cpu(tied(), [1] * N, chunks=M, schedule="1f1b")
    with pytest.raises(IndexError):
        pipe.step(torch.full_like(BATCH, WORDS), TARGETS, cross_entropy)
    with pytest.raises(IndexError):
        pipe.step(BATCH, torch.full_like(TARGETS, WORDS), cross_entropy)
    assert pipe[3].weight is pipe[0].weight is pipe[2].decoder.weight
    pipe.zero_grad()
    pipe.step(BATCH, TARGETS, cross_entropy)
    plain = tied()
    cross_entropy(plain(BATCH), TARGETS).backward()
    torch.testing.assert_close(pipe[0].weight.grad, plain[0].weight.grad)


def test_without_gradients_nothing_is_copied():
    model, seen = tied(), []
    model.head.register_forward_hook(lambda layer, *_: seen.append(layer.weight is model.embedding.weight))
    pipe = on_cpu(model, [1] * N, chunks=1, schedule="1f1b")
    with torch.no_grad():
        torch.testing.assert_close(pipe(BATCH), tied()(BATCH))
    with torch.inference_mode():
        pipe(BATCH)
    assert seen == [True, True]


def test_a_module_in_two_layers_is_refused():
    inner = nn.Linear(3, 3)
    layers = nn.Sequential(nn.Sequential(inner), nn.Sequential(nn.ReLU(), inner))
    message = (
        "a module with parameters must belong to one child, got '1' of child '1' shared with child '0'; give each "
        "child a module of its own, and let these share the parameter, as in head.weight = embedding.weight"
    )
    with pytest.raises(ValueError, match=message):
        on_cpu(layers, [1, 1])
