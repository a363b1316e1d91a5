"""Tensors that leave a partition twice: writing to one behind a boundary is refused; the rest is in models.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gpipe_bench import Components, NoChunk, Pipe
from gpipe_bench.autograd import microbatch
from gpipe_bench.autograd.microbatch import aliased_values
from gpipe_bench.skip import pop, skippable
from tests.engine.models import in_turn
from tests.engine.shared_models import Add, Keep, total, twice, write_first, write_second
from tests.engine.steps import mean_loss, samples, scheduled, step, targets
from tests.engine.support import MODES, Affine, Do, assert_same, on_cpu

REFUSED = (
    "a tensor that enters or leaves a partition twice must not be written to behind the boundary, got an in-place "
    "operation in partition"
)


def overlapping(x: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.cat([x, x * 2], 1)
    return both[:, :3], both[:, 2:5]


@skippable(pop=["same"])
class AddWritten(nn.Module):
    """Writes to what it pops."""

    def forward(self, x):
        skip = yield pop("same")
        return x + skip.mul_(0.5)


CASES = {
    "a skip, then ReLU in place": lambda: [Keep(), in_turn(nn.ReLU(inplace=True), Affine(), Add())],
    "a skip written to where it is popped": lambda: [Keep(), in_turn(Do(lambda x: x * 2), AddWritten())],
    "one twice, the first written to": lambda: [Do(twice), in_turn(Do(write_first), Do(total))],
    "one twice, the second written to": lambda: [Do(twice), in_turn(Do(write_second), Do(total))],
    "a view": lambda: [Do(lambda x: (x, x.view(-1, 3))), in_turn(Do(write_first), Do(total))],
    "a detached one": lambda: [Do(lambda x: (x, x.detach())), in_turn(Do(write_first), Do(total))],
    "overlapping parts": lambda: [Do(overlapping), in_turn(Do(write_first), Do(total))],
}
BATCHES = {
    "itself": lambda: twice(samples(7, 3).detach()),
    "a view": lambda: ((x := samples(7, 3).detach()), x.view(-1, 3)),
    "rows": lambda: ((x := samples(8, 3).detach())[:-1], x[1:]),
}


def layers(case: str) -> nn.Sequential:
    torch.manual_seed(0)
    before, behind = CASES[case]()
    return in_turn(in_turn(Affine(), before), in_turn(behind, Affine())).double()


@pytest.mark.parametrize(("workers", "transfer"), [("always", "direct"), ("never", "host")])
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", [None, "1f1b", "zb_v"])
def test_a_write_behind_the_boundary_is_refused(schedule, checkpoint, transfer, workers):
    options = {"chunks": 3, "checkpoint": checkpoint, "transfer": transfer, "workers": workers}
    for case in CASES:
        pipe = scheduled(layers(case), [1, 1], schedule, **options)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"{REFUSED} 1"):
                pipe.step(samples(7, 3, requires_grad=False), targets(7), mean_loss)
    for batch in BATCHES.values():
        first = in_turn(Do(write_second), Do(total))
        pipe = scheduled(in_turn(first, Affine()).double(), [1, 1], schedule, **options)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"{REFUSED} 0"):
                pipe.step(batch(), targets(7), mean_loss)


@pytest.mark.parametrize("second", [lambda x: x, NoChunk, lambda x: [x]], ids=["itself", "whole", "in a list"])
def test_a_write_to_one_of_two_equal_arguments_is_refused(second):
    class Writes(nn.Module):
        def forward(self, x, _):
            return x.mul_(0.5)

    x = torch.ones(6, 3)
    with pytest.raises(RuntimeError, match=f"{REFUSED} 0"):
        Pipe(nn.Sequential(Writes(), Affine()), chunks=3, balance=[1, 1])(x, second(x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_also_without_gradients(case, training, mode):
    """The output would depend on where the model is cut."""
    pipe = on_cpu(layers(case), [1, 1], chunks=3).train(training)
    # tensors of inference mode count no writes; PyTorch refuses them by itself
    message = "Inplace update to inference tensor" if mode is torch.inference_mode else REFUSED
    with mode(), pytest.raises(RuntimeError, match=message):
        pipe(samples(6, 3))


@pytest.mark.parametrize("portals", [True, False])
@pytest.mark.parametrize("schedule", [None, "gpipe"])
@pytest.mark.parametrize("checkpoint", MODES)
def test_a_write_two_boundaries_later(checkpoint, schedule, portals):
    """The tensor passes a partition that hands it on as it is, while the skip goes past it."""
    model = nn.Sequential(Affine(), Keep(), nn.Identity(), nn.ReLU(inplace=True), Add(), Affine())
    components = Components(portals=portals)
    pipe = on_cpu(model, [2, 1, 3], chunks=3, checkpoint=checkpoint, schedule=schedule, components=components)
    with pytest.raises(RuntimeError, match=f"{REFUSED} 2"):
        pipe(torch.ones(6, 3))


def test_after_a_refusal_the_pipeline_works():
    writes = Do(write_first)
    pipe = on_cpu(in_turn(Affine(), Do(twice), in_turn(writes, Do(total)), Affine()).double(), [2, 2], chunks=3)
    with pytest.raises(RuntimeError, match=REFUSED):
        pipe(samples(7, 3))
    writes.function = lambda values: (values[0] * 0.5, values[1])
    found = step(pipe, samples(7, 3), targets(7), called=True)
    assert_same(found, step(nn.Sequential(*pipe), samples(7, 3), targets(7)))


# --- which tensors share memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        (lambda x: [x, x], {0, 1}),
        (lambda x: [x, 3, x.view(-1), None, x + 1], {0, 2}),
        (lambda x: [x[:2], x[2:]], set()),
        (lambda x: [x[:3], x[2:]], {0, 1}),
        (lambda x: [x[:, :2], x[:, 2:]], set()),
        (lambda x: [x[:, :2], x[:, 1:]], {0, 1}),
        (lambda x: [x.t(), x[:, 3]], {0, 1}),
        (lambda x: [x[0].expand(5, 4), x[1:]], set()),
        (lambda x: [x[:0], x], set()),
        (lambda x: [x.to_sparse(), x], set()),
        (lambda x: [torch.view_as_complex(x.view(-1, 2)), x[0]], {0, 1}),
    ],
)
def test_which_outputs_share_memory(outputs, expected):
    assert aliased_values(outputs(torch.zeros(4, 4)), []) == expected


def test_an_output_that_shares_memory_with_something_on_another_way():
    x = torch.zeros(4, 4)
    assert aliased_values([x[0], x + 1, x[1:]], [x[1]]) == {2}


def test_tensors_with_a_memory_of_their_own_are_not_compared(monkeypatch):
    """A hundred skips would be thousands of pairs."""
    pairs = []
    overlap = microbatch._overlap
    monkeypatch.setattr(microbatch, "_overlap", lambda *pair: pairs.append(pair) or overlap(*pair))
    x = torch.zeros(4)
    values = [*(torch.zeros(3) for _ in range(100)), x[:2], x[1:], x[3:]]
    assert aliased_values(values, [torch.zeros(2) for _ in range(100)]) == {100, 101, 102}
    assert len(pairs) <= 6
